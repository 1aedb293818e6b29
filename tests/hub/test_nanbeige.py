"""Nanbeige4.2: Llama layers looped, heads wider than the model, the final norm in every loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.errors import CheckpointError
from loopwise.hub.convert import convert
from loopwise.models.checkpoint import load_checkpoint
from tests.hub.folders import IDS, Tensors, converted, decode, fill, forward, gap, write_folder
from tests.hub.naive_llama import NaiveLlama, shapes

# The published fields, at a small size: 4 heads of 8 are twice the width, as 48 of 128 are of 3072.
CONFIG: dict[str, Any] = {
    "architectures": ["NanbeigeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "kv_channels": 8,
    "loop_loss_weights": [],
    "max_position_embeddings": 262144,
    "model_type": "nanbeige",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_loops": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 70000000,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 260,
}


def tensors() -> Tensors:
    return fill(shapes(CONFIG))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "nanbeige", CONFIG, tensors())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    wanted = NaiveLlama(tensors(), CONFIG).forward(IDS, depth)
    assert wanted.std() > 0.1
    model = converted(source)
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4
    assert gap(decode(model, depth), wanted) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "interleaved",
        "another base",
        "up before gate",
        "norm after the last loop only",
        "key heads in turn",
        "norms swapped",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    twisted = NaiveLlama(tensors(), CONFIG, wrong).forward(IDS, 2)
    assert gap(forward(converted(source), 2), twisted) > 1e-3


def test_it_is_a_row_of_the_loop_it_shares_with_ouro(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out")
    assert (done.format, done.architecture) == ("nanbeige", "ouro")
    assert done.notes == ()
    saved = load_checkpoint(tmp_path / "out")
    assert saved.trained_depths == (2, 2)
    assert not saved.model.config.exit_gate


@pytest.mark.parametrize(
    "changes",
    [
        {"skip_loop_final_norm": True},
        {"enable_double_loop_split": True},
        {"loop_share_kv": True},
        {"enable_hyper_connection": True},
        {"enable_depth_attention": True},
        {"qk_layernorm": True},
        {"emb_neighbor_num": 3},
        {"kv_channels": 4},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_switches_of_the_published_code_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_folder(tmp_path / "nanbeige", {**CONFIG, **changes}, tensors())
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        convert(path, tmp_path / "out")
