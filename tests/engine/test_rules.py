"""Exit rules an engine offers: by name, by tier, and what it warns of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from loopwise.engine import Engine, EngineConfig, SamplingParams
from loopwise.errors import DepthError, ExitError
from loopwise.measure.tiers import write_tiers
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

TIERS = {
    "balanced": {"rule": "latent-change:0.5,min=2,max=4", "kv_policy": "per-loop"},
    "deep": {"rule": "fixed:9", "kv_policy": "per-loop"},
}
DEPTH = {"true_mean": 3.5, "min": 1, "max": 8, "p99": 6}
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("rules") / "checkpoint"
    save_checkpoint(folder, make_model(injection="add"), ByteTokenizer(), {"depth": DEPTH})
    return write_tiers(load_checkpoint(folder), TIERS)


def engine_of(checkpoint: Checkpoint, **config: Any) -> Engine:
    return Engine.from_checkpoint(
        checkpoint, EngineConfig(**{"exit": "fixed:2", "max_seq": 32, "slots": 2, **config})
    )


def test_a_tier_is_asked_for_by_its_name(checkpoint):
    """An engine of the checkpoint knew no tier; every command looked them up by itself."""
    rule = TIERS["balanced"]["rule"]
    by_rule = engine_of(checkpoint).generate(["Tom has"], SHORT, exit=rule)[0].completions
    assert engine_of(checkpoint).generate(["Tom has"], SHORT, exit="balanced")[0].completions == (
        by_rule
    )
    usual = engine_of(checkpoint, exit=" balanced ")
    assert str(usual.default_rule) == rule
    assert usual.generate(["Tom has"], SHORT)[0].completions == by_rule
    assert usual.stats()["log"] == []


def test_an_unknown_name_lists_tiers_and_rules(checkpoint):
    with pytest.raises(
        ExitError, match=r"did you mean 'balanced'.*tiers: balanced, deep; exit rul"
    ):
        engine_of(checkpoint, exit="balancd")
    with pytest.raises(ExitError, match=r"no tier or exit rule named 'fast'.*tiers: .*fixed, kl"):
        engine_of(checkpoint).submit([1], exit="fast")
    with pytest.raises(DepthError, match="fixed:9 goes to 9 recurrences, this engine holds 8"):
        engine_of(checkpoint, exit="deep")


def test_a_tier_under_another_kv_policy_is_warned_of_once(checkpoint, caplog):
    engine = engine_of(checkpoint, exit="balanced", kv_policy="last")
    engine.submit([1], exit="balanced")
    said = "tier 'balanced' was calibrated under per-loop; under last nothing is promised"
    assert engine.stats()["log"] == [said]
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.WARNING, said)]


def test_depths_past_training_are_warned_of(checkpoint):
    assert engine_of(checkpoint, exit="fixed:6").stats()["log"] == []
    engine = engine_of(checkpoint, max_depth=20)
    assert engine.stats()["log"] == [], "storage for more is no depth"
    engine.submit([1], exit="kl:0.1,max=7")
    engine.submit([1], exit="fixed:20")
    first, second = engine.stats()["log"]
    assert first.startswith("7 recurrences are past training, which ran at most 6 in 99%")
    assert second.startswith("20 recurrences are past training")
    assert "at most 8 in any" in second


def test_a_checkpoint_that_says_nothing_of_depth_warns_of_none(tmp_path: Path):
    save_checkpoint(tmp_path / "c", make_model(injection="add"), ByteTokenizer(), {})
    found = load_checkpoint(tmp_path / "c")
    assert engine_of(found, exit="fixed:9", max_depth=9).stats()["log"] == []
    with pytest.raises(ExitError, match="no tier yet"):
        engine_of(found, exit="balanced")


def test_settings_that_results_depend_on_are_shown(checkpoint):
    """U55: the ids that end a text, from every source, and the length of chunks."""
    stats = engine_of(checkpoint, end_ids=(5,), chunk=16).stats()
    assert (stats["end_ids"], stats["chunk"]) == ([5, 257], 16)
