"""What a corpus is made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text that a model reads from its start, seeing nothing of its neighbours.

    Attributes:
        text: the characters, not blank.
        hops: ``(start, end, hops)`` of each answer in the text: the characters ``[start, end)``
            need ``hops`` look-ups. Only generated corpora know this.
        source: where it came from, for messages.
    """

    text: str
    hops: tuple[tuple[int, int, int], ...] = ()
    source: str = ""


def document_hash(document: Document) -> str:
    """What tells documents apart when a later reading must leave some out: 16 hex digits."""
    return hashlib.sha256(document.text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]
