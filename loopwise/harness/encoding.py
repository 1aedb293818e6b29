"""Texts of evaluation requests as token ids.

Text never yields a special id, so a start token can neither be forged nor come twice; what a chat
template wrote does, where the template itself wrote it. The harness does not say whether an
evaluation is one of chats, so a prompt itself does: those that a template made begin with a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loopwise.hub.chat import MARK, ChatTexts
from loopwise.models.checkpoint import Checkpoint
from loopwise.special_ids import StartToken

Bos = Literal["auto", "yes", "no"]
Pair = tuple[list[int], list[int]]  # context and continuation


class Encoder:
    """Prompts, pairs and whole texts of requests as token ids.

    Args:
        bos: whether prompts begin with a start token, where others than the checkpoint decide.
        chat: what cuts the prompts that a chat template made.
    """

    def __init__(
        self, checkpoint: Checkpoint, bos: Bos = "auto", chat: ChatTexts | None = None
    ) -> None:
        self.tokenizer = checkpoint.tokenizer
        self.start = checkpoint.tokenizer.start
        if bos != "auto":
            self.start = StartToken(checkpoint.tokenizer.bos_id, bos == "yes", "as asked")
        self.chat = chat or ChatTexts(checkpoint.tokenizer)

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """As a model is fed them: with the start token where there is one, never empty."""
        if any(map(is_chat, texts)):
            encoded = [
                self.chat.encode(text) if is_chat(text) else self.tokenizer.encode(text)
                for text in texts
            ]
        else:
            encoded = self.tokenizer.encode_batch(texts)
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
        added = [self.chat.marked(text) if is_chat(start) else text for start, text in moved]
        wholes = self.prompts([moved[i][0] + text for i, text in enumerate(added)])
        contexts = self.prompts([context for context, _ in moved])
        alone = self.tokenizer.encode_batch([continuation for _, continuation in moved])
        pairs = []
        for (context, _), whole, given, scored in zip(moved, wholes, contexts, alone, strict=True):
            # A token over the seam would leave nothing to score; it belongs to the continuation.
            cut = min(len(given), len(whole) - 1) if scored else len(whole)
            said = context.strip(MARK)  # a template may have made nothing
            if said and cut:
                pairs.append((whole[:cut], whole[cut:]))
            else:
                pairs.append(([self.start.id], whole if said else scored))
        return pairs


def is_chat(prompt: str) -> bool:
    """Whether a chat template made it."""
    return prompt.startswith(MARK)


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
