"""GGUF files of Llama shape, written here quantised, against float64 loops of what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.hub.chat import templates_in
from loopwise.hub.convert import convert
from loopwise.models.checkpoint import load_checkpoint
from loopwise.tokenizer import BPETokenizer
from tests.hub.folders import VOCAB, Tensors, fill, forward, gap
from tests.hub.naive_llama import NaiveLlama, shapes
from tests.test_cli import refused, run

gguf = pytest.importorskip("gguf")

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXT = "the cat sat on the mat and the dog sat on the log; " * 8


def name_of(key: str) -> str:
    for ours, theirs in (("embed_tokens", "token_embd"), ("lm_head", "output")):
        if ours in key:
            return f"{theirs}.weight"
    if key == "model.norm.weight":
        return "output_norm.weight"
    _, _, number, part = key.removesuffix(".weight").split(".", 3)
    return f"blk.{number}.{PARTS[part]}.weight"


def neighbours(heads: int, rows: int) -> list[int]:
    """Of each row in a GGUF file, which row of transformers' it is: i and i + half alternate."""
    half = rows // heads // 2
    return [h * 2 * half + i + half * j for h in range(heads) for i in range(half) for j in (0, 1)]


def stored(tensors: Tensors, kind: Any) -> tuple[Tensors, dict[str, np.ndarray]]:
    """The weights that quantising leaves, and the bytes of them by GGUF's names."""
    left: Tensors = {}
    raw = {}
    for key, tensor in tensors.items():
        values = tensor.numpy()
        if values.ndim == 1:
            left[key], raw[name_of(key)] = tensor, values
            continue
        left[key] = torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        )
        if "q_proj" in key or "k_proj" in key:
            heads = CONFIG["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
            values = values[neighbours(heads, len(values))]
        raw[name_of(key)] = gguf.quants.quantize(values, kind)
    return left, raw


def write(path: Path, kind: Any = None, **changes: Any) -> tuple[Path, Tensors, BPETokenizer]:
    """A small file with the fields that llama.cpp's conversion of SmolLM2 writes."""
    kind = gguf.GGMLQuantizationType.Q8_0 if kind is None else kind
    config = {**CONFIG, **changes}
    tensors, raw = stored(fill(shapes(config)), kind)
    writer = gguf.GGUFWriter(path, config.get("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(config.get("turned", 16))
    if "scaling" in config:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config["scaling"]))
    tokenizer = BPETokenizer.train([TEXT], VOCAB)
    model = json.loads(tokenizer.to_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model(config.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(config.get("split", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    if "license" in config:
        writer.add_license(config["license"])
    writer.add_bos_token_id(config.get("start", 1))
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(config.get("begins", False))
    if "chat" in config:
        writer.add_chat_template(config["chat"])
    if "chats" in config:  # which the library's own writer keeps to letters
        writer.add_array("tokenizer.chat_templates", list(config["chats"]))
        for name, text in config["chats"].items():
            writer.add_string(f"tokenizer.chat_template.{name}", text)
    for name, values in raw.items():
        writer.add_tensor(name, values, raw_dtype=None if values.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors, tokenizer


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F32"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_loops_over_the_dequantised_weights(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    path, tensors, tokenizer = write(
        tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind], tie_word_embeddings=tied
    )
    done = convert(path, tmp_path / "out")
    assert (done.format, done.architecture, done.dtype) == ("llama", "fixed", "float32")
    ids = [0, *tokenizer.encode("the cat sat on the log")]
    model = load_checkpoint(tmp_path / "out", torch.float64).model
    config = {**CONFIG, "tie_word_embeddings": tied}
    wanted = NaiveLlama(tensors, config).forward(ids)
    assert wanted.std() > 0.1
    assert gap(forward(model, 1, ids), wanted) < 1e-9
    # Rows left in GGUF's order would be the same weights turned by another phase.
    assert (
        gap(forward(model, 1, ids), NaiveLlama(tensors, config, "interleaved").forward(ids)) > 0.01
    )


def test_the_tokenizer_inside_is_carried_along(tmp_path: Path) -> None:
    path, _, tokenizer = write(tmp_path / "model.gguf")
    convert(path, tmp_path / "out")
    saved = load_checkpoint(tmp_path / "out")
    for text in (TEXT, "12 345", "Été  <|endoftext|>\n\n"):
        ids = saved.tokenizer.encode(text)
        assert ids == tokenizer.encode(text)
        assert saved.tokenizer.decode(ids) == text
        assert saved.tokenizer.eos_id not in ids
    assert saved.training["special_ids"] == {"bos": 1, "eos": 2}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"scaling": "yarn"}, "rope.scaling.type='yarn'"),
        ({"turned": 8}, "turns 8 of the 16 channels"),
        ({"tokenizer": "llama"}, "tokenizer of kind 'llama'"),
        ({"split": "qwen2"}, "split as 'qwen2'"),
        ({"chats": {"../x": "evil"}}, "chat template named '../x'; rename it"),
        ({"chats": {"..": "evil"}}, "chat template named '..'; rename it"),
        ({"begins": True, "start": VOCAB}, f"bos_token_id {VOCAB}, beyond its {VOCAB} tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path, *_ = write(tmp_path / "model.gguf", **changes)
    refused(run("convert", path, tmp_path / "out"), named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("begins", [True, False])
def test_chat_templates_and_what_begins_a_text_are_carried_along(
    tmp_path: Path, begins: bool
) -> None:
    path, _, tokenizer = write(tmp_path / "model.gguf", begins=begins, chat="{{ messages }}")
    assert convert(path, tmp_path / "out").chat_templates == ("default",)
    assert templates_in(tmp_path / "out") == {"default": "{{ messages }}"}
    saved = load_checkpoint(tmp_path / "out")
    found = saved.tokenizer.start
    assert (found.id, found.added) == (1, begins)
    assert saved.tokenizer.encode("the cat") == tokenizer.encode("the cat")


def test_chat_templates_by_name(tmp_path: Path) -> None:
    path, *_ = write(tmp_path / "model.gguf", chat="a", chats={"tool_use": "b"})
    convert(path, tmp_path / "out")
    assert templates_in(tmp_path / "out") == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("kept", [0, 3, 400, 9000, -100])
def test_a_file_cut_short_is_one_line(tmp_path: Path, kept: int) -> None:
    path, *_ = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    size = f"its {path.stat().st_size:,} bytes do not"
    what = "is no GGUF file" if 0 <= kept < 4 else "is truncated or damaged"
    result = run("convert", path, tmp_path / "out")
    refused(result, f"{str(path)!r} {what}: {size}", "; copy it again")
    assert "array" not in result.stderr and "axis" not in result.stderr, "the words of numpy"


def test_a_newer_version_is_told_from_damage(tmp_path: Path) -> None:
    path, *_ = write(tmp_path / "model.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + (9).to_bytes(4, "little") + raw[8:])
    refused(run("convert", path, tmp_path / "out"), "of GGUF version 9, and 3 is the newest known")


def test_a_pointer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(run("convert", path, tmp_path / "out"), "Git LFS pointer")


def test_another_tokenizer_can_be_given(tmp_path: Path) -> None:
    path, *_ = write(tmp_path / "model.gguf", split="qwen2")
    convert(path, tmp_path / "out", tokenizer="byte")
    assert load_checkpoint(tmp_path / "out").tokenizer.vocab_size == 258
