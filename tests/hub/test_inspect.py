"""What a checkpoint is said to be and to cost, and the verdict on exits, against hand counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.errors import ConfigError, DataError, DepthError
from loopwise.hub.inspect import inspect_checkpoint, inspect_lines
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.loopformer import LoopFormerConfig, LoopFormerModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

TRAINED = {"depth": {"true_mean": 6.2, "min": 1, "max": 20}}
FEW = 300  # tokens


def saved(folder: Path, model: LoopedLM, training: dict[str, Any]) -> Checkpoint:
    save_checkpoint(folder / "checkpoint", model, ByteTokenizer(), training)
    return load_checkpoint(folder / "checkpoint")


def scaled_core(factor: float) -> LoopedLM:
    """Re-injection by addition, and a core that does nothing but scale."""
    model = make_model(injection="add")
    model.core_step = lambda latent, injection, r, view: factor * latent + injection  # type: ignore[method-assign]
    return model


def test_counts_and_prices_by_hand(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, make_model(), TRAINED)
    facts = inspect_checkpoint(checkpoint, mean_depth=2, tokens=FEW)
    d, ff, vocab = 32, 48, 258
    layer = d * (32 + 2 * 16) + d * d + 3 * d * ff
    attention = 4 * 1024 * 32  # scores and mixing with 1024 tokens
    assert facts["flops_per_token"]["prelude"] == 2 * layer + attention
    assert facts["flops_per_token"]["core"] == 2 * (2 * layer + 2 * d * d) + 2 * attention
    assert facts["flops_per_token"]["head"] == 2 * d * vocab
    assert facts["parameters"] == vocab * d + 4 * (layer + 4 * d) + 2 * d * d + d
    assert facts["dtype"] == ["F32"]
    assert facts["full_depth"] == 6
    once = sum(facts["flops_per_token"][part] for part in ("prelude", "coda", "head"))
    core = facts["flops_per_token"]["core"]
    assert facts["cap"]["mean_depth"] == 2
    assert facts["cap"]["speed_up"] == pytest.approx((once + 6 * core) / (once + 2 * core))


def test_kv_bytes_of_every_policy(tmp_path: Path) -> None:
    facts = inspect_checkpoint(saved(tmp_path, make_model(), TRAINED), tokens=FEW)
    entry = 2 * 2 * 8  # keys and values, heads, head_dim
    for name, entries in (
        ("per-loop", 6),
        ("last", 1),
        ("ring-2", 2),
        ("ring-4", 4),
        ("first-then-last", 2),
    ):
        row = next(row for row in facts["kv"] if row["policy"] == name)
        layers = 1 + 2 * entries + 1
        assert row["entries"] == entries
        assert (row["bytes_bf16"], row["bytes_fp32"]) == (layers * entry * 2, layers * entry * 4)
    assert len(facts["kv"]) == 5


@pytest.mark.parametrize(("factor", "trusted"), [(0.5, True), (0.99, False), (1.5, False)])
def test_the_verdict_follows_the_loop(tmp_path: Path, factor: float, trusted: bool) -> None:
    """Steps that shrink by a known factor: halved they settle, by 1% or growing they do not."""
    checkpoint = saved(tmp_path, make_model(injection="add"), TRAINED)
    object.__setattr__(checkpoint, "model", scaled_core(factor))
    found = inspect_checkpoint(checkpoint, tokens=FEW)["contraction"]
    assert found["trusted"] is trusted
    assert ("not to be trusted" in found["sentence"]) is not trusted
    if trusted:
        assert found["rate"] == pytest.approx(
            0.5, abs=0.03
        )  # of relative steps, as the latent still grows
        assert found["moving_share"] == 0


def test_a_loop_that_overflows_is_not_trusted(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, make_model(injection="add"), TRAINED)
    object.__setattr__(checkpoint, "model", scaled_core(1e20))
    found = inspect_checkpoint(checkpoint, tokens=FEW)["contraction"]
    assert not found["trusted"]
    assert "stops being finite at recurrence" in found["sentence"]


def test_a_model_of_one_recurrence_has_nothing_to_save(tmp_path: Path) -> None:
    shape = {"vocab_size": 258, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24}
    torch.manual_seed(0)
    checkpoint = saved(tmp_path, FixedModel(FixedConfig(**shape, n_layers=2)), {})
    facts = inspect_checkpoint(checkpoint)
    assert facts["cap"] == {"mean_depth": 1.0, "speed_up": 1.0}
    assert "nothing for an exit rule to save" in facts["contraction"]["sentence"]
    assert inspect_lines(facts)[-1] == facts["contraction"]["sentence"]


def test_a_model_of_few_positions_is_watched_on_short_blocks(tmp_path: Path) -> None:
    """It was refused, in blocks that nobody could choose."""
    shape = {"vocab_size": 258, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 24}
    torch.manual_seed(0)
    model = LoopFormerModel(LoopFormerConfig(**shape, max_positions=32))
    facts = inspect_checkpoint(saved(tmp_path, model, TRAINED), tokens=FEW)
    assert facts["contraction"]["sentence"] and facts["precision"]


def test_without_a_training_depth_there_is_no_cap_until_one_is_given(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, make_model(), {})
    facts = inspect_checkpoint(checkpoint, tokens=FEW)
    assert "cap" not in facts
    assert [row["policy"] for row in facts["kv"]] == ["last", "ring-2", "ring-4", "first-then-last"]
    assert any("not known" in line for line in inspect_lines(facts))
    with pytest.raises(ConfigError, match="--full-depth"):
        inspect_checkpoint(checkpoint, mean_depth=2, tokens=FEW)
    given = inspect_checkpoint(checkpoint, full_depth=4, tokens=FEW)
    assert given["cap"]["mean_depth"] == 2


def test_depths_and_text_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, make_model(), TRAINED)
    with pytest.raises(ConfigError, match="between 1 and the full depth of 6"):
        inspect_checkpoint(checkpoint, mean_depth=9, tokens=FEW)
    with pytest.raises(DepthError):
        inspect_checkpoint(checkpoint, full_depth=0, tokens=FEW)
    with pytest.raises(ConfigError, match="--tokens 0"):
        inspect_checkpoint(checkpoint, tokens=0)
    with pytest.raises(DataError):
        inspect_checkpoint(checkpoint, [str(tmp_path / "nothing.txt")], tokens=FEW)
