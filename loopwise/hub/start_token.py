"""Whether texts begin with a start token: asked here by the harness and transformers' tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from loopwise.tokenizer import Tokenizer

Bos = Literal["auto", "yes", "no"]


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


def start_token(
    tokenizer: Tokenizer, training: Mapping[str, Any], asked: Bos = "auto"
) -> StartToken:
    """What texts begin with: as asked, else as the tokenizer says, else as training did.

    A converted checkpoint does what its source does. There ``tokenizer.json`` alone decides, as in
    transformers 5, which looks for no ``add_bos_token`` beside one.

    Args:
        training: what ``training.json`` holds.
    """
    own = tokenizer.bos_id
    if asked != "auto":
        return StartToken(own, asked == "yes", "as asked")
    said = _said_by(tokenizer.to_json())
    if said is not None:
        return StartToken(said, True, "tokenizer.json puts it before a text")
    if "converted_from" in training:
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
