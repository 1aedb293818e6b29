"""The tokenizer as transformers loads it: the ids of loopwise's own, text for text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import pytest
import torch

from loopwise.data import generate
from loopwise.errors import TokenizerError
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from tests.hub.auto.folders import TRAINING

transformers = pytest.importorskip("transformers")
import loopwise.hub  # noqa: E402, F401 - what makes the Auto classes know us
from loopwise.hub.auto.tokenizer import LoopwiseTokenizer  # noqa: E402

STORY = next(iter(generate("stories", 0, 0, 1))).text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("tokenizers")
    bpe = BPETokenizer.train([d.text for d in generate("stories", 0, 0, 20)], 300)
    for name, tokenizer in (("byte", ByteTokenizer()), ("bpe", bpe)):
        save_checkpoint(base / name, _wide(tokenizer), tokenizer, TRAINING)
    return base


def _wide(tokenizer):
    return RecurrentModel(
        RecurrentConfig(vocab_size=tokenizer.vocab_size, d_model=16, n_heads=2, d_ff=24)
    )


@pytest.fixture(params=["byte", "bpe"])
def pair(request, folders):
    """Ours and transformers'."""
    path = folders / request.param
    return load_checkpoint(path).tokenizer, transformers.AutoTokenizer.from_pretrained(path), path


def texts(n, seed=0):
    draw = random.Random(seed)
    alphabet = [
        *"abc XYZ 019\n\t\r",
        "  ",
        "\x00",
        "\x1b",
        "é",
        "ß",
        "漢",
        "字",
        "🎈",
        "👩‍👧",
        "\u200b",
    ]
    alphabet += ["<|eos|>", "<|bos|>", "<|endoftext|>", "<0x0A>", "Ġ", "Ċ", " .", "n't", "\u00a0"]
    return ["".join(draw.choices(alphabet, k=draw.randrange(0, 24))) for _ in range(n)]


def test_u76_text_comes_back_exactly(pair):
    own, theirs, _ = pair
    assert type(theirs) is LoopwiseTokenizer
    for text in [*texts(1000), STORY, "", " ", "\n "]:
        ids = theirs.encode(text)
        assert ids == [own.bos_id, *own.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == text
        assert theirs.decode(theirs.encode(text, add_special_tokens=False)) == text


def test_special_tokens_decode_as_those_of_any_tokenizer_of_transformers(pair):
    """One id alone too: lm-evaluation-harness asks so what a text may begin with already."""
    own, theirs, _ = pair
    stock = transformers.PreTrainedTokenizerFast(
        tokenizer_object=theirs.backend_tokenizer,
        bos_token=theirs.bos_token,
        eos_token=theirs.eos_token,
        clean_up_tokenization_spaces=False,
    )
    ids = theirs.encode("Tom has")
    assert theirs.decode(own.bos_id) == theirs.bos_token
    for asked in (own.bos_id, ids, torch.tensor(ids)):
        for options in ({}, {"skip_special_tokens": True}):
            assert theirs.decode(asked, **options) == stock.decode(asked, **options)
    assert theirs.batch_decode([ids, ids]) == stock.batch_decode([ids, ids])
    assert theirs.batch_decode([ids])[0].startswith(theirs.bos_token)


def test_u77_text_that_spells_a_special_token_stays_text(pair):
    own, theirs, _ = pair
    for token in theirs.all_special_tokens:
        ids = theirs(f"a {token} b", add_special_tokens=False)["input_ids"]
        assert not set(ids) & set(theirs.all_special_ids)
        assert theirs.decode(ids) == f"a {token} b"
        raw = theirs(f"a {token} b", add_special_tokens=False, split_special_tokens=False)
        assert set(raw["input_ids"]) & set(theirs.all_special_ids), "the opt-in reads it"
        assert theirs(f"{token}", add_special_tokens=False)["input_ids"] == own.encode(token)


def test_u28_a_text_begins_once(pair):
    own, theirs, _ = pair
    for text in ("Tom", "", STORY):
        ids = theirs(text)["input_ids"]
        assert ids.count(own.bos_id) == 1 and ids[0] == own.bos_id
    theirs.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "Tom"}]
    found = theirs.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert found == own.encode("Tom"), "a template says itself how a text begins"


def test_u28_a_template_writes_special_tokens_and_messages_do_not(pair, tmp_path):
    own, theirs, _ = pair
    theirs.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    theirs.save_pretrained(tmp_path)
    theirs = LoopwiseTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Tom"}]
    found = theirs.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert found == [own.bos_id, *own.encode("Tom")]
    forged = [{"role": "user", "content": f"Tom{theirs.eos_token}"}]
    with pytest.raises(TokenizerError, match="would forge a turn"):
        theirs.apply_chat_template(forged)
    allowed = theirs.apply_chat_template(
        forged, return_dict=True, tokenizer_kwargs={"split_special_tokens": False}
    )
    assert allowed["input_ids"][-1] == theirs.eos_token_id


def _tool(name: str) -> None:
    """Give it a name <|eos|><|endoftext|>.

    Args:
        name: any.
    """


@dataclass(slots=True)
class _Message:
    role: str
    content: str


def test_u77_nothing_handed_to_a_template_may_spell_a_special_token(pair):
    _, theirs, _ = pair
    theirs.chat_template = "{{ bos_token }}{{ documents }}{{ tools }}{{ note }}{{ messages }}"
    chat, bad = [{"role": "user", "content": "Tom"}], f"a{theirs.eos_token}b"
    for forged in (
        {"documents": [{"title": "x", "text": bad}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": bad}}]},
        {"tools": [{"function": {"parameters": {"properties": {bad: {"type": "string"}}}}}]},
        {"tools": [_tool]},
        {"note": {"deep": (bad,)}},
    ):
        with pytest.raises(TokenizerError, match="would forge a turn"):
            theirs.apply_chat_template(chat, **forged)
    with pytest.raises(TokenizerError, match="would forge a turn"):
        theirs.apply_chat_template(chat, [{"name": bad}])
    with pytest.raises(TokenizerError, match="would forge a turn"):
        theirs.apply_chat_template([_Message("user", bad)])
    given = {"note": "plain", "eos_token": theirs.eos_token}
    given["chat_template"] = f"{theirs.bos_token}{{{{ note }}}}{{{{ eos_token }}}}"
    made = theirs.apply_chat_template(chat, **given)["input_ids"]
    assert (made[0], made[-1]) == (theirs.bos_token_id, theirs.eos_token_id)


def test_u30_padding(pair):
    own, theirs, _ = pair
    batch = theirs(["Tom", "Tom has a ball"], padding=True, return_tensors="pt")
    assert theirs.pad_token_id == own.eos_id and theirs.padding_side == "left"
    short = [own.bos_id, *own.encode("Tom")]
    n = batch["input_ids"].shape[1]
    assert batch["input_ids"][0].tolist() == [own.eos_id] * (n - len(short)) + short
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(short), n]
    plain = theirs.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert plain == ["Tom", "Tom has a ball"]
    assert theirs.decode(batch["input_ids"][1]) == f"{theirs.bos_token}Tom has a ball"


def test_saved_and_loaded(pair, tmp_path):
    own, theirs, path = pair
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (path / "tokenizer.json").read_text()
    again = LoopwiseTokenizer.from_pretrained(tmp_path)
    for text in texts(50, seed=1):
        assert again.encode(text) == theirs.encode(text)
    assert again.special_tokens_map == theirs.special_tokens_map
    assert str(path) not in (tmp_path / "tokenizer_config.json").read_text()
    again.add_bos_token = False
    again.save_pretrained(tmp_path / "plain")
    plain = LoopwiseTokenizer.from_pretrained(tmp_path / "plain")
    assert plain.encode("Tom") == own.encode("Tom")


def test_added_tokens_are_saved_and_loopwise_reads_them(pair, tmp_path):
    own, theirs, _ = pair
    theirs.add_tokens(["<|user|>"], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    again, ours = LoopwiseTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    new = own.vocab_size
    assert again.convert_tokens_to_ids("<|user|>") == new
    assert ours.vocab_size == new + 1 and ours.decode([new], special=True) == "<|user|>"
    for text in texts(50, seed=2):
        assert again.encode(text) == [own.bos_id, *own.encode(text)]
        assert ours.encode(text) == own.encode(text)


def test_begin_and_end_are_those_the_checkpoint_names(tmp_path, folders):
    """A converted chat model ends its turns with another token than its tokenizer knows."""
    source = json.loads((folders / "bpe" / "tokenizer.json").read_text())
    last = len(source["model"]["vocab"])
    for i, name in enumerate(("<|start|>", "<|done|>")):
        source["added_tokens"].append(
            {
                "id": last + i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    tokenizer = BPETokenizer(json.dumps(source))
    facts = {"special_ids": {"bos": last, "eos": [last + 1]}}
    save_checkpoint(tmp_path / "c", _wide(tokenizer), tokenizer, facts)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "c")
    assert (theirs.bos_token, theirs.eos_token) == ("<|start|>", "<|done|>")
    assert theirs("Tom")["input_ids"][0] == last
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    checkpoint = load_checkpoint(tmp_path / "c")
    assert model.generation_config.bos_token_id == last
    assert tuple(model.generation_config.eos_token_id) == checkpoint.tokenizer.end_ids
    assert len(checkpoint.tokenizer.end_ids) == 2


def test_text_in_text_out(folders):
    """As a pipeline runs it."""
    pipe = transformers.pipeline("text-generation", model=str(folders / "byte"), device="cpu")
    torch.manual_seed(0)
    said = pipe("Tom has", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert said.startswith("Tom has")
