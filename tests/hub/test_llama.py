"""Plain Llama folders become `fixed` models: the loops agree, what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.errors import CheckpointError, DepthError
from loopwise.hub.convert import convert
from loopwise.models.checkpoint import load_checkpoint
from tests.hub.folders import IDS, converted, decode, fill, forward, gap, write_folder
from tests.hub.naive_llama import NaiveLlama, shapes

# SmolLM2-135M's published fields, at a small size.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 20,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 260,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "untied": {"tie_word_embeddings": False},
    "all heads": {"num_key_value_heads": 6},
    "one key head": {"num_key_value_heads": 1},
    # At this size the frequencies lie below, between and above the two limits.
    "llama 3 phase": {"rope_scaling": LLAMA3, "rope_theta": 500.0, "num_attention_heads": 2},
}


def folder(tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    config = {**CONFIG, **changes}
    return write_folder(tmp_path / "llama", config, fill(shapes(config))), config


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_documented_mathematics(tmp_path: Path, variant: str) -> None:
    path, config = folder(tmp_path, **VARIANTS[variant])
    wanted = NaiveLlama(fill(shapes(config)), config).forward(IDS)
    assert wanted.std() > 0.1, "the comparison would say nothing about flat logits"
    model = converted(path)
    assert model.name == "fixed"
    assert gap(forward(model, 1), wanted) < 1e-8
    assert gap(forward(converted(path, torch.float32), 1), wanted) < 1e-4
    assert gap(decode(model, 1), wanted) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "interleaved",
        "another base",
        "another epsilon",
        "up before gate",
        "values before keys",
        "key heads in turn",
        "norms swapped",
        "embedding scaled",
    ],
)
def test_no_other_convention_gives_these_logits(tmp_path: Path, wrong: str) -> None:
    path, config = folder(tmp_path)
    twisted = NaiveLlama(fill(shapes(config)), config, wrong).forward(IDS)
    assert gap(forward(converted(path), 1), twisted) > 1e-3


def test_phase_scaling_matters_and_covers_all_three_ranges(tmp_path: Path) -> None:
    path, config = folder(tmp_path, **VARIANTS["llama 3 phase"])
    model = converted(path)
    twisted = NaiveLlama(fill(shapes(config)), config, "no scaling").forward(IDS)
    assert gap(forward(model, 1), twisted) > 1e-3
    rope = model.geometry.rope
    assert rope.scaling is not None
    plain = rope.base ** (-2 * torch.arange(6).double() / 12)
    kept = rope.scaling.stretch(plain) / plain
    assert kept[0] == 1 and kept[-1] == 1 / 8
    assert ((kept > 1 / 8) & (kept < 1)).any()


def test_it_runs_once(tmp_path: Path) -> None:
    path, _ = folder(tmp_path)
    model = converted(path)
    assert model.geometry.max_depth == 1
    assert load_checkpoint(tmp_path / "llama-converted").trained_mean_depth == 1
    with pytest.raises(DepthError):
        decode(model, 2)


def test_the_newer_spelling_of_rotary_fields_is_read(tmp_path: Path) -> None:
    old, _ = folder(tmp_path, **VARIANTS["llama 3 phase"])
    config = {**CONFIG, "num_attention_heads": 2}
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {"rope_theta": 500.0, **LLAMA3}
    new = write_folder(tmp_path / "newer", config, fill(shapes(config)))
    assert torch.equal(forward(converted(new), 1), forward(converted(old), 1))


def test_tables_of_old_conversions_are_checked_and_left_out(tmp_path: Path) -> None:
    weights = fill(shapes(CONFIG))
    table = CONFIG["rope_theta"] ** (-2 * torch.arange(2).double() / 4)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = table.float()
    path = write_folder(tmp_path / "llama", CONFIG, weights)
    convert(path, tmp_path / "out")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] *= 2
    other = write_folder(tmp_path / "other", CONFIG, weights)
    with pytest.raises(CheckpointError, match="inv_freq .* is not the rotary table"):
        convert(other, tmp_path / "other-out")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"head_dim": 8}, "head_dim=8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "of type 'yarn'"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling has no factor"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"bits": 8}}, "quantization_config="),
        ({"hidden_size": None}, "no hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write_folder(tmp_path / "llama", {**CONFIG, **changes}, fill(shapes(CONFIG)))
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)


def test_biases_are_unknown_keys_not_dropped(tmp_path: Path) -> None:
    weights = {**fill(shapes(CONFIG)), "model.layers.0.self_attn.q_proj.bias": torch.ones(24)}
    path = write_folder(tmp_path / "llama", CONFIG, weights)
    with pytest.raises(CheckpointError, match=r"unknown model.layers.0.self_attn.q_proj.bias"):
        convert(path, tmp_path / "out")
