"""Text that is shown piece by piece is the text of the whole, cut where it should be."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopwise.engine.detokenize import Detokenizer
from loopwise.errors import TokenizerError
from loopwise.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

TEXT = "Tom has a red ball. Čau světe, 東京 tower, 👨‍👩‍👧 family, naïve café — “quotes”. "
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "bpe": BPETokenizer.train([TEXT * 20], vocab_size=400),
}
both = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """Every delta, the flush last; ends at a stop, as an engine does."""
    detokenizer = Detokenizer(tokenizer, stop)
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*deltas, detokenizer.flush()]


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """By definition: add one character after the other and look at the end."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


class Pieces:
    """A tokenizer of whole strings: id i is the i-th."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.reads = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.reads += 1
        return self.pieces[token_id]


def show(*pieces: str | bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(Pieces(*pieces), stop)
    deltas = [detokenizer.push(i) for i in range(len(pieces))]
    return [*deltas, detokenizer.flush()], detokenizer.stopped


# U37: characters are whole, spaces stay, bytes that are no text do no harm.


@both
@settings(deadline=None)
@given(data=st.data())
def test_u37_deltas_add_up_to_the_full_decode_of_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.binary(max_size=40))
@example(b"\xf0\x9f\x91")
@example(b"\xff \xe2\x28\xa1 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf")
def test_u37_deltas_add_up_to_the_full_decode_of_any_bytes(raw):
    tokenizer = TOKENIZERS["byte"]
    assert "".join(stream(tokenizer, list(raw))) == tokenizer.decode(raw)


@both
@settings(deadline=None)
@given(text=st.text(max_size=30))
@example(" leading space, é, 東京, 👨‍👩‍👧")
def test_u37_no_delta_of_a_text_splits_a_character(tokenizer, text):
    deltas = stream(tokenizer, tokenizer.encode(text))
    assert "".join(deltas) == text
    assert sum(d.count("\ufffd") for d in deltas) == text.count("\ufffd")


@both
@pytest.mark.parametrize("bytes_cut", [1, 2, 3])
def test_u37_a_character_cut_by_the_token_limit_ends_as_in_the_full_decode(tokenizer, bytes_cut):
    ids = [
        b if isinstance(tokenizer, ByteTokenizer) else by_bytes(tokenizer)[b]
        for b in "a👩".encode()
    ]
    deltas = stream(tokenizer, ids[:-bytes_cut])
    assert deltas[0] == "a" and not any(deltas[1:-1]), "nothing of it is shown before the end"
    assert deltas[-1] == "\ufffd"


def by_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte to the id of the token that is this byte alone."""
    table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return {raw[0]: i for i, raw in enumerate(table) if len(raw) == 1}


def test_u37_an_invalid_byte_then_a_space_is_shown_at_once():
    assert show(b"a", b"\xff", b" ", b"b")[0] == ["a", "\ufffd", " ", "b", ""]
    assert show(b"\xc3", b" ")[0] == ["", "\ufffd ", ""]


def test_u37_a_leading_space_is_text():
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer.encode(" red ball")
    assert len(ids) < 9, "the tokenizer learned nothing"
    assert stream(tokenizer, ids)[0].startswith(" ")


@both
def test_special_tokens_have_no_text_and_leave_an_unfinished_character_alone(tokenizer):
    ids = by_bytes(tokenizer)
    first, second = (ids[b] for b in "é".encode())
    assert stream(tokenizer, [tokenizer.bos_id, first, tokenizer.eos_id, second]) == [
        *("", "", "", "é"),
        "",
    ]


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(TokenizerError, match="token id 258 is outside"):
        Detokenizer(ByteTokenizer()).push(258)


# U35: stop strings.


def test_u35_a_stop_string_over_tokens_shows_none_of_itself():
    deltas, stopped = show("xy", "zq", "wv", stop=("yzqw",))
    assert deltas == ["x", "", "", ""] and stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["abcdef"], ("zz", "de", "f", "bc"), "a"),
        (["xa", "bc"], ("bc", "abc"), "x"),
        (["xa", "bc"], ("ab", "abc"), "x"),
        (["xabcd"], ("abcd", "bc"), "xa"),  # complete first, however it is split:
        (["xab", "cd"], ("abcd", "bc"), "xa"),
        (["STOP"], ("STOP",), ""),
        (["S", "T", "O", "P"], ("STOP",), ""),
        (["aa", "ab", "!"], ("aab",), "a"),
        (["\n", "\n", "\n"], ("\n\n",), ""),
        (["a", "\n\n", "b"], ("\n\n",), "a"),
        (["x", "東", "京"], ("京",), "x東"),
    ],
)
def test_u35_the_first_stop_string_to_be_complete_cuts(pieces, stop, text):
    deltas, stopped = show(*pieces, stop=stop)
    assert "".join(deltas) == text and stopped


def test_u35_what_only_looked_like_a_stop_string_is_shown():
    deltas, stopped = show("ST", "OR", "Y S", "T", stop=("STOP",))
    assert deltas == ["", "STOR", "Y ", "", "ST"] and not stopped


def test_u35_nothing_comes_after_the_cut():
    detokenizer = Detokenizer(Pieces("a", "b", "c"), ("b",))
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.push(2)] == ["a", "", ""]
    assert detokenizer.flush() == "" and detokenizer.stopped


def test_u35_a_stop_string_of_a_replacement_mark_can_end_at_the_flush():
    deltas, stopped = show("a", b"\xc3", stop=("a\ufffd",))
    assert "".join(deltas) == "" and stopped


# Few letters, so that stop strings overlap and repeat.
letters = st.text("abé\ufffd", min_size=1, max_size=4)
stops = st.lists(letters, max_size=4).map(tuple)
raw_pieces = st.one_of(letters.map(str.encode), st.sampled_from([b"\xc3", b"\xa9", b"\xff", b""]))


@settings(deadline=None)
@given(st.lists(raw_pieces, max_size=14), stops)
def test_u35_streamed_text_is_the_full_decode_up_to_the_cut(pieces, stop):
    deltas, stopped = show(*pieces, stop=stop)
    whole = b"".join(pieces).decode(errors="replace")
    assert ("".join(deltas), stopped) == cut(whole, stop)


@settings(deadline=None)
@given(st.text("abc", max_size=20), stops, st.lists(st.integers(0, 20), max_size=6))
def test_u35_where_tokens_end_does_not_matter(text, stop, ends):
    bounds = [0, *sorted(min(e, len(text)) for e in ends), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    deltas, stopped = show(*pieces, stop=stop)
    assert ("".join(deltas), stopped) == cut(text, stop)


@both
@settings(deadline=None)
@given(data=st.data())
def test_u35_stops_hold_for_real_tokens(tokenizer, data):
    start = data.draw(st.integers(0, len(TEXT) - 2))
    stop = (TEXT[start : start + data.draw(st.integers(1, 6))],)
    assert "".join(stream(tokenizer, tokenizer.encode(TEXT), stop)) == TEXT[: TEXT.find(stop[0])]


@settings(deadline=None)
@given(st.lists(letters, max_size=14), stops)
def test_only_what_may_become_a_stop_string_is_held_back(pieces, stop):
    """Whatever waits is the beginning of a stop string: nobody waits for nothing."""
    detokenizer = Detokenizer(Pieces(*pieces), stop)
    told, seen = "", ""
    for i, piece in enumerate(pieces):
        told, seen = told + detokenizer.push(i), seen + piece
        if detokenizer.stopped:
            break
        waiting = seen.removeprefix(told)
        assert waiting == "" or any(s.startswith(waiting) and s != waiting for s in stop)


# Cost.


def test_a_token_costs_what_waits_and_not_what_was_said():
    pieces = Pieces("a", "b", "ab", b"\xff")
    detokenizer = Detokenizer(pieces, ("aaaab", "bbbba"))
    for n in range(5000):
        detokenizer.push((n * n // 7) % 3 if n % 5 else 3)
        assert len(detokenizer._waiting) <= 4
    assert pieces.reads == 5000, "each token is read once"


def test_it_needs_no_torch():
    code = "import sys, loopwise.engine.detokenize; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
