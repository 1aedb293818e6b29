"""Which documents a model was trained on, told from a few of their hashes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopwise.data.documents import Document, document_hash
from loopwise.errors import DataError

TRAINED_ON = "trained_on"  # of ``training.json``
SIZE = 4096  # hashes of 8 bytes
_DTYPE = np.dtype("<u8")


@dataclass(frozen=True)
class DocumentSketch:
    """The smallest hashes of a set of documents: all of them, where there are fewer than SIZE.

    Hashes fall as if at random, so up to the largest one kept the sketch knows every document of
    the set, and of any other text the documents whose hashes lie there are a fair sample. Sketches
    of two sets give that of both. A document is known by its very characters.

    Source: bottom-k sketches, Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches",
    PODC; for how much of one text is contained in another, Broder 1997, "On the resemblance and
    containment of documents".

    Attributes:
        smallest: ``(at most SIZE,)`` uint64, increasing.
    """

    smallest: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[Document]) -> DocumentSketch:
        hashes = np.array([int(document_hash(d), 16) for d in documents], dtype=_DTYPE)
        return cls(np.unique(hashes)[:SIZE])

    def __or__(self, other: DocumentSketch) -> DocumentSketch:
        """Of the documents of both."""
        return DocumentSketch(np.union1d(self.smallest, other.smallest)[:SIZE])

    @property
    def whole(self) -> bool:
        """Whether every document is known, and not only those of small hashes."""
        return len(self.smallest) < SIZE

    def compare(self, documents: Iterable[Document]) -> tuple[int, frozenset[str]]:
        """How many of ``documents`` can be told, and the hashes of those that are in the set."""
        told = {hashed: int(hashed, 16) for hashed in map(document_hash, documents)}
        if not self.whole:
            told = {hashed: n for hashed, n in told.items() if n <= self.smallest[-1]}
        known = set(self.smallest.tolist())
        return len(told), frozenset(hashed for hashed, n in told.items() if n in known)

    def to_json(self) -> str:
        """Base64 of the hashes, 8 bytes each, the least significant first."""
        return base64.b64encode(self.smallest.astype(_DTYPE).tobytes()).decode("ascii")

    @classmethod
    def of_training(cls, training: Mapping[str, Any]) -> DocumentSketch | None:
        """What ``training.json`` holds; None where it does not tell.

        Raises:
            DataError: it is damaged.
        """
        if TRAINED_ON not in training:
            return None
        try:
            raw = base64.b64decode(training[TRAINED_ON], validate=True)
            found = np.frombuffer(raw, dtype=_DTYPE)
        except (TypeError, ValueError, binascii.Error):
            found = np.zeros(2, dtype=_DTYPE)
        if len(found) > SIZE or (found[1:] <= found[:-1]).any():
            raise DataError(
                f"{TRAINED_ON!r} in training.json is no sketch of documents (up to {SIZE} "
                "increasing hashes of 8 bytes in base64); copy the checkpoint again"
            )
        return cls(found)
