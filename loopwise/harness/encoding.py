"""Texts of evaluation requests as token ids, and the one policy on start tokens.

Text never yields a special id, so a start token can neither be forged nor come twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from loopwise.models.checkpoint import Checkpoint

Bos = Literal["auto", "yes", "no"]
Pair = tuple[list[int], list[int]]  # context and continuation


@dataclass(frozen=True, slots=True)
class StartToken:
    """Whether prompts begin with a start token.

    Attributes:
        id: of the token; it also stands for an empty context, whatever ``added`` says.
        why: for the result file.
    """

    id: int
    added: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "added": self.added, "why": self.why}


def start_token(checkpoint: Checkpoint, asked: Bos = "auto") -> StartToken:
    """What texts begin with: as asked, else as the tokenizer says, else as training did."""
    own = checkpoint.tokenizer.bos_id
    if asked != "auto":
        return StartToken(own, asked == "yes", "as asked")
    said = _said_by(checkpoint.tokenizer.to_json())
    if said is not None:
        return StartToken(said, True, "tokenizer.json puts it before a text")
    if "converted_from" in checkpoint.training:
        return StartToken(own, False, "tokenizer.json puts none before a text")
    return StartToken(own, True, "the documents of its training begin with it")


def _said_by(tokenizer_json: str) -> int | None:
    """The id that a ``tokenizer.json`` puts before a text by its post-processor, if any."""
    if not json.loads(tokenizer_json).get("post_processor"):
        return None
    inner = tokenizers.Tokenizer.from_str(tokenizer_json)
    plain = inner.encode("a", add_special_tokens=False).ids
    framed = inner.encode("a", add_special_tokens=True).ids
    return framed[0] if framed[:1] != plain[:1] else None


class Encoder:
    """Prompts, pairs and whole texts of requests as token ids."""

    def __init__(self, checkpoint: Checkpoint, bos: Bos = "auto") -> None:
        self.tokenizer = checkpoint.tokenizer
        self.start = start_token(checkpoint, bos)

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """As a model is fed them: with the start token where there is one, never empty."""
        encoded = self.tokenizer.encode_batch(texts)
        first = [self.start.id] if self.start.added else []
        return [[*first, *ids] or [self.start.id] for ids in encoded]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Contexts and their continuations.

        Both are encoded as one text and cut where the context's own tokens end, so that the cut
        falls as it would in reading; spaces at the end of a context go with the continuation. An
        empty context is the start token alone.
        """
        moved = [_move_spaces(context, continuation) for context, continuation in texts]
        wholes = self.prompts([context + continuation for context, continuation in moved])
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


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
