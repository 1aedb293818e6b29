"""Texts of evaluation requests as token ids.

Text never yields a special id, so a start token can neither be forged nor come twice; what a chat
template wrote does, where the template itself wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopwise.hub.chat import ChatTexts
from loopwise.hub.start_token import Bos, start_token
from loopwise.models.checkpoint import Checkpoint

Pair = tuple[list[int], list[int]]  # context and continuation


class Encoder:
    """Prompts, pairs and whole texts of requests as token ids.

    Attributes:
        chat: set once prompts are texts that a chat template made.
    """

    def __init__(self, checkpoint: Checkpoint, bos: Bos = "auto") -> None:
        self.tokenizer = checkpoint.tokenizer
        self.start = start_token(checkpoint.tokenizer, checkpoint.training, bos)
        self.chat: ChatTexts | None = None

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """As a model is fed them: with the start token where there is one, never empty."""
        if self.chat is None:
            encoded = self.tokenizer.encode_batch(texts)
        else:
            encoded = [self.chat.encode(text) for text in texts]
        first = [self.start.id] if self.start.added else []
        # A template may have written the start token itself.
        framed = [ids if ids[:1] == first else [*first, *ids] for ids in encoded]
        return [ids or [self.start.id] for ids in framed]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Contexts and their continuations.

        Both are encoded as one text and cut where the context's own tokens end, so that the cut
        falls as it would in reading; spaces at the end of a context go with the continuation. An
        empty context is the start token alone.
        """
        moved = [_move_spaces(context, continuation) for context, continuation in texts]
        added = [self._plain(continuation) for _, continuation in moved]
        wholes = self.prompts([moved[i][0] + text for i, text in enumerate(added)])
        contexts = self.prompts([context for context, _ in moved])
        alone = self.tokenizer.encode_batch([continuation for _, continuation in moved])
        pairs = []
        for (context, _), whole, given, scored in zip(moved, wholes, contexts, alone, strict=True):
            # A token over the seam would leave nothing to score; it belongs to the continuation.
            cut = min(len(given), len(whole) - 1) if scored else len(whole)
            if context and cut:
                pairs.append((whole[:cut], whole[cut:]))
            else:
                pairs.append(([self.start.id], whole if context else scored))
        return pairs

    def _plain(self, text: str) -> str:
        """Text to go on with what a template made, in which nothing is a special token."""
        return text if self.chat is None else self.chat.marked(text)


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
