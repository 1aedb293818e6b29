"""What kind of text a token is."""

from __future__ import annotations

import numpy as np
import pytest

from loopwise.data import generate
from loopwise.measure.token_types import TOKEN_TYPES, classify_targets
from loopwise.tokenizer import BPETokenizer, ByteTokenizer


class Words:
    """A tokenizer of given pieces, by their bytes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.vocab_size = pieces, len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def kind_of(piece: str | bytes, before: str | bytes = b" ") -> str:
    pair = [p.encode() if isinstance(p, str) else p for p in (before, piece)]
    found = classify_targets(Words(*pair), np.array([0]), np.array([1]))
    assert found.dtype == np.int8
    return TOKEN_TYPES[int(found[0])]


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        (" ", "whitespace"),
        ("\n\n", "whitespace"),
        ("\t", "whitespace"),
        (".", "punctuation"),
        (" --", "punctuation"),
        ('."', "punctuation"),
        ("$", "punctuation"),
        ("7", "digit"),
        (" 1984", "digit"),
        ("$5", "digit"),
        (" the", "function word"),
        ("The", "function word"),
        (" AND", "function word"),
        (" fox", "content word"),
        (" Zürich", "content word"),
        (" 狐", "content word"),
        (b"", "end of document"),
    ],
)
def test_pieces_after_a_space(piece, kind):
    assert kind_of(piece) == kind


@pytest.mark.parametrize(
    ("before", "piece", "kind"),
    [
        (" wal", "king", "subword continuation"),
        (" wal", "the", "subword continuation"),
        (" wal", " the", "function word"),
        (" wal", " king", "content word"),
        (" 7", "th", "content word"),
        (".", "the", "function word"),
        (" wal", "7", "digit"),
        (" wal", ".", "punctuation"),
        (" wal", "\n", "whitespace"),
        (" wal", b"", "end of document"),
        (" don", "'t", "subword continuation"),
        (b" caf", b"\xc3", "subword continuation"),
        (b"\xc3", b"\xa9", "subword continuation"),
        (b"", "the", "function word"),
    ],
)
def test_a_piece_that_goes_on_a_word_is_a_continuation(before, piece, kind):
    assert kind_of(piece, before) == kind


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_every_id_of_a_tokenizer_has_a_type(name):
    texts = [d.text for d in generate("stories", 0, 0, 20)]
    tokenizer = ByteTokenizer() if name == "byte" else BPETokenizer.train(texts, 400)
    ids = np.arange(tokenizer.vocab_size)
    kinds = classify_targets(tokenizer, np.full_like(ids, tokenizer.bos_id), ids)
    assert kinds.shape == ids.shape
    assert (kinds >= 0).all()
    assert (kinds < len(TOKEN_TYPES)).all()
    end = TOKEN_TYPES.index("end of document")
    assert kinds[tokenizer.eos_id] == kinds[tokenizer.bos_id] == end
    assert set(ids[kinds == end]) <= {tokenizer.bos_id, tokenizer.eos_id}
