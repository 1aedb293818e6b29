"""Text comes back exactly, and never turns into a special token."""

import copy
import json
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.data.stories import generate
from loopwise.errors import TokenizerError
from loopwise.tokenizer import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_json,
    write_tokenizer,
)

TEXTS = [document.text for document in generate("stories", 0, 0, 200)]


def trained() -> BPETokenizer:
    return BPETokenizer.train(TEXTS, vocab_size=512)


BPE = trained()
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
SPELLED = [END_OF_TEXT, "<|bos|>", "<|eos|>", f"a{END_OF_TEXT}b", f"{END_OF_TEXT} {END_OF_TEXT}"]


def edited(**changes: object) -> str:
    """A published tokenizer.json as someone else might write it."""
    return json.dumps(json.loads(BPE.to_json()) | changes)


def renamed_special(name: str) -> str:
    content = json.loads(BPE.to_json())
    content["added_tokens"][0]["content"] = name
    content["model"]["vocab"][name] = content["model"]["vocab"].pop(END_OF_TEXT)
    return json.dumps(content)


def fuzzed(count: int) -> list[str]:
    rng = random.Random(0)
    edges = ["", " ", "\n", "\r\n", "\x00", "\u2028", "\ufeff", "👩‍👩‍👧", "é", "e\u0301", *SPELLED]
    ranges = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]

    def piece() -> str:
        if rng.random() < 0.3:
            return rng.choice(edges)
        return chr(rng.randrange(*rng.choice(ranges)))

    return ["".join(piece() for _ in range(rng.randrange(16))) for _ in range(count)]


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    span_ids, spans = tokenizer.encode_spans(text)
    assert span_ids == ids and len(spans) == len(ids)
    for token_id, (start, end) in zip(ids, spans, strict=True):
        assert tokenizer.token_bytes(token_id) in text[start:end].encode()


@BOTH
def test_u76_a_thousand_fuzzed_strings_come_back_exactly(tokenizer: Tokenizer) -> None:
    texts = fuzzed(1000)
    for text in texts:
        check_round_trip(tokenizer, text)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@BOTH
@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_u76_any_string_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    check_round_trip(tokenizer, text)


@BOTH
@pytest.mark.parametrize("text", SPELLED)
def test_u77_a_spelled_special_token_stays_text(tokenizer: Tokenizer, text: str) -> None:
    for copied in (tokenizer, copy.deepcopy(tokenizer), tokenizer_from_json(tokenizer.to_json())):
        check_round_trip(copied, text)


@BOTH
def test_special_ids_decode_to_nothing_unless_asked(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.bos_id, *tokenizer.encode("hi"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True).startswith("<|")
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths.dtype == np.int32


@BOTH
def test_half_a_character_decodes_to_a_mark_and_a_foreign_id_is_refused(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.decode(tokenizer.encode("😀")[:1]) == "\ufffd"
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(TokenizerError, match=f"token id {token_id} is outside"):
            tokenizer.decode([token_id])


@BOTH
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="character 2 is U\\+D83D"):
        tokenizer.encode("ab\ud83d")


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert trained().to_json() == BPE.to_json()
    assert trained().fingerprint == BPE.fingerprint != ByteTokenizer().fingerprint
    assert BPE.vocab_size == 512 and BPE.bos_id == BPE.eos_id == 0
    assert len(BPE.encode("2024")) == 4, "digits stay single"
    with pytest.raises(TokenizerError, match="at least 257"):
        BPETokenizer.train(TEXTS, vocab_size=256)


@BOTH
def test_a_saved_tokenizer_loads_from_its_file_and_its_folder(tokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    for source in (path, tmp_path, str(tmp_path)):
        assert load_tokenizer(source).fingerprint == tokenizer.fingerprint
    assert load_tokenizer("byte").vocab_size == 258


def test_what_is_not_a_tokenizer_is_refused_with_the_remedy(tmp_path) -> None:
    with pytest.raises(TokenizerError, match="'nowhere'.*give 'byte', a tokenizer.json"):
        load_tokenizer("nowhere")
    path = tmp_path / "tokenizer.json"
    for text, message in (("{", "must be JSON"), ("{}", "not a tokenizer.json")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(path)


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not byte-level"):
        tokenizer_from_json(edited(decoder={"type": "Fuse"}))
    space = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    with pytest.raises(TokenizerError, match="add_prefix_space"):
        tokenizer_from_json(edited(pre_tokenizer=space))


def test_bos_and_eos_are_found_among_the_special_tokens_or_named_missing() -> None:
    with pytest.raises(TokenizerError, match="no known bos and eos.*<unk>; known: .*<s> </s>"):
        tokenizer_from_json(renamed_special("<unk>"))
    content = json.loads(renamed_special("<s>"))
    end = content["added_tokens"][0] | {"id": 512, "content": "</s>"}
    content["added_tokens"].append(end)
    tokenizer = tokenizer_from_json(json.dumps(content))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 512, 513)
    check_round_trip(tokenizer, "<s>text</s>")


def test_a_character_without_a_token_is_refused_not_dropped() -> None:
    """Some published vocabularies lack bytes, and the library leaves them out without a word."""
    content = json.loads(BPE.to_json())
    vocab = content["model"]["vocab"]
    gap = vocab.pop("\u0104")  # stands for byte 0x04
    last = max(vocab, key=vocab.__getitem__)
    vocab[last] = gap
    content["model"]["merges"] = content["model"]["merges"][:-1]
    tokenizer = tokenizer_from_json(json.dumps(content))
    check_round_trip(tokenizer, "plain \x05")
    with pytest.raises(TokenizerError, match=r"no token for the character '\\x04' \(U\+0004\)"):
        tokenizer.encode("a\x04b")


@BOTH
def test_ids_that_the_file_does_not_tell_are_said_besides(tokenizer) -> None:
    own = (tokenizer.bos_id, tokenizer.eos_id)
    told = tokenizer.with_special_ids({"bos": 5, "eos": 6})
    assert (told.bos_id, told.eos_id, told.end_ids) == (5, 6, (6, own[1]))
    turns = told.with_special_ids({"eos": [8, 7]})
    assert (turns.bos_id, turns.eos_id, turns.end_ids) == (*own, (8, 7, own[1])), "afresh"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (*own, own[1:]), "untouched"
    assert told.to_json() == tokenizer.to_json()
    assert told.encode("Tom has 3.") == tokenizer.encode("Tom has 3.")


@BOTH
def test_tokenizers_with_other_ids_have_other_fingerprints(tokenizer) -> None:
    """Token files are found by it, and they hold the ids that begin and end documents."""
    own = tokenizer.with_special_ids({"bos": tokenizer.bos_id, "eos": tokenizer.eos_id})
    assert own.fingerprint == tokenizer.fingerprint
    said = ({"bos": 5}, {"eos": 5}, {"eos": [5]}, {"bos": 5, "eos": [5]})
    prints = {tokenizer.with_special_ids(each).fingerprint for each in said}
    # A document ends otherwise with {"eos": 5} than with {"eos": [5]}.
    assert len(prints | {tokenizer.fingerprint}) == 5


@BOTH
def test_what_was_said_is_kept_in_workers_and_on_disk(tokenizer, tmp_path) -> None:
    told = tokenizer.with_special_ids({"bos": 5, "eos": [6]})
    write_tokenizer(tmp_path, told)
    for again in (pickle.loads(pickle.dumps(told)), copy.copy(told), load_tokenizer(tmp_path)):
        assert again.special_ids == told.special_ids
        assert again.fingerprint == told.fingerprint
        check_round_trip(again, SPELLED[3])
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint


@BOTH
def test_prompts_of_converted_weights_begin_as_tokenizer_json_says(tokenizer, tmp_path) -> None:
    """Here it says nothing, so with nothing; our own begin as the documents of their training."""
    assert (tokenizer.start.id, tokenizer.start.added) == (tokenizer.bos_id, True)
    training = {"special_ids": {"bos": 5}, "converted_from": {"format": "llama"}}
    told = tokenizer.told_by(training)
    write_tokenizer(tmp_path, tokenizer)
    (tmp_path / "training.json").write_text(json.dumps(training))
    for one in (told, pickle.loads(pickle.dumps(told)), copy.copy(told), load_tokenizer(tmp_path)):
        assert (one.start.id, one.start.added) == (one.bos_id, False) == (5, False)
    assert told.fingerprint == tokenizer.with_special_ids({"bos": 5}).fingerprint
    assert told.told_by({}).start == tokenizer.start, "afresh"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"bos": 512}, "bos id 512; ids are 0 to 511"),
        ({"eos": [1, -1]}, "eos id -1"),
        ({"eos": True}, "eos id True"),
        ({"pad": 3}, "says bos and eos, nothing else"),
        ([3], "says bos and eos, nothing else"),
    ],
)
def test_what_is_no_special_id_is_refused(said, message, tmp_path) -> None:
    with pytest.raises(TokenizerError, match=message):
        BPE.with_special_ids(said)
    write_tokenizer(tmp_path, BPE)
    (tmp_path / "training.json").write_text(json.dumps({"special_ids": said}))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)
