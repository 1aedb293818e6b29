"""Where texts are cut into tokens, and which token they begin with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loopwise.harness.encoding import Bos, Encoder
from loopwise.hub.chat import MARK
from loopwise.models.checkpoint import Checkpoint
from loopwise.special_ids import StartToken
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.harness.cases import framed, loaded

CONVERTED = {"converted_from": {"format": "llama"}}
BOS = ByteTokenizer.bos_id


def start_of(checkpoint: Checkpoint, asked: Bos = "auto") -> StartToken:
    return Encoder(checkpoint, asked).start


@pytest.fixture
def checkpoint(tmp_path):
    return loaded(tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(["the dog and the cat and the dog"] * 20, 300)


def test_the_tokenizer_says_whether_texts_begin_with_a_start_token(checkpoint, bpe):
    plain = replace(checkpoint, tokenizer=bpe, training=CONVERTED)
    with_start = replace(plain, tokenizer=framed(bpe))
    assert not start_of(plain).added
    assert start_of(with_start).added
    assert start_of(with_start).id == bpe.bos_id
    assert Encoder(with_start).prompts(["the dog"])[0] == [bpe.bos_id, *bpe.encode("the dog")]
    assert Encoder(plain).prompts(["the dog"])[0] == bpe.encode("the dog")


def test_models_trained_here_begin_as_their_training_did_and_asking_wins(checkpoint):
    assert start_of(checkpoint).added
    assert not start_of(checkpoint, "no").added
    converted = replace(checkpoint, training=CONVERTED)
    assert not start_of(converted).added
    assert start_of(converted, "yes").added


def test_the_checkpoint_may_know_another_start_token_than_its_tokenizer(checkpoint):
    said = replace(checkpoint, training={**CONVERTED, "special_ids": {"bos": 65, "eos": [66]}})
    assert start_of(said).id == 65
    assert Encoder(said).pairs([("", "hi")]) == [([65], list(b"hi"))]


def test_pairs_are_cut_where_the_context_ends_and_its_spaces_go_with_the_rest(checkpoint):
    pairs = Encoder(checkpoint).pairs([("Q: a", " b"), ("Q: a  ", "b"), ("", "b"), ("  ", "b")])
    assert pairs == [
        ([BOS, *b"Q: a"], list(b" b")),
        ([BOS, *b"Q: a"], list(b"  b")),
        ([BOS], list(b"b")),
        ([BOS], list(b"  b")),
    ]


def test_an_empty_continuation_has_nothing_to_score(checkpoint):
    assert Encoder(checkpoint).pairs([("abc", "")]) == [([BOS, *b"abc"], [])]


def test_a_token_over_the_seam_is_scored(checkpoint, bpe):
    """``the`` is one token: cutting after the two of ``th`` would leave nothing to score."""
    assert len(bpe.encode("the")) == 1 < len(bpe.encode("th")) + 1
    converted = replace(checkpoint, tokenizer=bpe, training=CONVERTED)
    assert Encoder(converted).pairs([("th", "e")]) == [([bpe.bos_id], bpe.encode("the"))]
    begun = Encoder(converted, "yes").pairs([("th", "e")])
    assert begun == [([bpe.bos_id], bpe.encode("the"))]


def test_u28_exactly_one_start_token_and_first(checkpoint):
    """A text that spells the start token is text; prompt and pair begin with one all the same."""
    encoder = Encoder(checkpoint)
    for text in ("<|bos|>", "hello <|bos|> there", ""):
        assert encoder.prompts([text])[0].count(BOS) == 1
        assert encoder.prompts([text])[0][0] == BOS
        context, continuation = encoder.pairs([(text, " x")])[0]
        assert (context[0], (context + continuation).count(BOS)) == (BOS, 1)


def test_u28_a_rendered_prompt_has_one_start_token_whoever_writes_it(checkpoint):
    """Special tokens of a template are ids, its content is text, a continuation too."""
    encoder = Encoder(checkpoint)
    for rendered in ("<|bos|>hi", "hi"):
        assert encoder.prompts([MARK + rendered]) == [[BOS, *b"hi"]]
    eos = ByteTokenizer.eos_id
    content = encoder.chat.marked("say <|eos|>")
    assert encoder.prompts([f"{MARK}<|bos|>{content}<|eos|>"]) == [[BOS, *b"say <|eos|>", eos]]
    assert encoder.pairs([(f"{MARK}<|bos|>hi<|eos|>", " <|eos|>"), (MARK, "<|eos|>")]) == [
        ([BOS, *b"hi", eos], list(b" <|eos|>")),
        ([BOS], list(b"<|eos|>")),
    ]
