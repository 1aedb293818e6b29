"""Tiers by name: what they are called, where they are kept, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model

from loopwise.errors import ConfigError, ExitError
from loopwise.exits.rule import ExitRule
from loopwise.measure.tiers import (
    named_rule,
    tier_names,
    tier_rule,
    why_not_promised,
    write_tiers,
)
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_exits
from loopwise.tokenizer import ByteTokenizer

TIERS = {"high": {"rule": "fixed:6"}, "balanced": {"rule": "latent-change:0.25,min=2,max=8"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_checkpoint(tmp_path / "c", make_model(), ByteTokenizer(), {"seq": 32})
    return load_checkpoint(tmp_path / "c")


def stored(checkpoint: Checkpoint) -> dict[str, Any]:
    return json.loads((checkpoint.path / "exits.json").read_text())


@pytest.mark.parametrize(
    ("budgets", "names"),
    [
        ([0.01], ["balanced"]),
        ([0.03, 0.002], ["fast", "high"]),
        ([0.002, 0.01, 0.03], ["high", "balanced", "fast"]),
        ([0.4, 0.1, 0.3, 0.2], ["tier-4", "tier-1", "tier-3", "tier-2"]),
    ],
)
def test_tiers_are_named_by_how_strict_they_are(budgets, names):
    assert tier_names(budgets) == names


def test_given_names_are_kept_in_their_order():
    assert tier_names([0.03, 0.01], ["cheap", "good_one"]) == ["cheap", "good_one"]


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["a"], "gives 1 for 2 budgets"),
        (["a", "a"], "twice"),
        (["kl", "b"], "'kl'"),
        (["a:1", "b"], "'a:1'"),
        (["", "b"], "''"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(names, part):
    with pytest.raises(ConfigError, match=part):
        tier_names([0.01, 0.02], names)


def test_a_tier_is_a_rule(checkpoint):
    checkpoint = write_tiers(checkpoint, TIERS)
    wanted = ExitRule(policy="latent-change", threshold=0.25, min_depth=2, max_depth=8)
    assert tier_rule(checkpoint, "balanced") == wanted
    assert named_rule(checkpoint, " balanced ", max_depth=3) == wanted
    assert tier_rule(load_checkpoint(checkpoint.path), "high").max_depth == 6


def test_rules_are_still_rules(checkpoint):
    assert str(named_rule(checkpoint, "kl:0.5", max_depth=3)) == "kl:0.5,max=3"
    with pytest.raises(ExitError, match="has no threshold"):
        named_rule(checkpoint, "kl", max_depth=3)


def test_tiers_are_added_to_what_is_there(checkpoint):
    checkpoint = write_exits(checkpoint, {"policies": {"probe": {"bias": 1}}, "fitted_on": ["x"]})
    write_tiers(checkpoint, TIERS)
    write_tiers(checkpoint, {"high": {"rule": "fixed:7"}, "mine": {"rule": "fixed:1"}})
    found = stored(checkpoint)
    assert found["policies"] == {"probe": {"bias": 1}}
    assert found["fitted_on"] == ["x"]
    assert found["weights_hash"] == checkpoint.weights_hash
    assert {n: t["rule"] for n, t in found["tiers"].items()} == {
        "high": "fixed:7",
        "balanced": TIERS["balanced"]["rule"],
        "mine": "fixed:1",
    }


def test_what_was_fitted_meanwhile_is_kept(checkpoint):
    """A calibration takes long; another command may write the file before it ends."""
    write_exits(checkpoint, {"policies": {"probe": {"bias": 2}}})
    write_tiers(checkpoint, TIERS)  # the checkpoint as it was read before
    assert stored(checkpoint)["policies"] == {"probe": {"bias": 2}}


def test_an_unknown_tier_names_what_there_is(checkpoint):
    with pytest.raises(ExitError, match="no tier yet"):
        tier_rule(checkpoint, "balanced")
    checkpoint = write_tiers(checkpoint, TIERS)
    with pytest.raises(ExitError, match="did you mean 'balanced'.*tiers: high, balanced"):
        named_rule(checkpoint, "balancd", max_depth=3)


def test_tiers_of_other_weights_are_refused(checkpoint):
    write_tiers(checkpoint, TIERS)
    file = checkpoint.path / "exits.json"
    file.write_text(json.dumps({**stored(checkpoint), "weights_hash": "other"}))
    with pytest.raises(ExitError, match="other weights"):
        tier_rule(load_checkpoint(checkpoint.path), "high")


@pytest.mark.parametrize("tiers", [3, ["high"], {"high": 3}, {"high": {}}, {"high": {"rule": 1}}])
def test_damaged_tiers_are_one_line(checkpoint, tiers):
    checkpoint = write_exits(checkpoint, {"tiers": tiers})
    with pytest.raises(ExitError, match="damaged"):
        tier_rule(checkpoint, "high")
    with pytest.raises(ExitError, match="damaged"):
        write_tiers(checkpoint, TIERS)


def test_another_kv_policy_is_not_what_was_promised(checkpoint):
    checkpoint = write_tiers(checkpoint, {"high": {"rule": "fixed:6", "kv_policy": "per-loop"}})
    assert why_not_promised(checkpoint, "high", "per-loop") is None
    assert why_not_promised(checkpoint, "kl:0.1", "last") is None
    assert why_not_promised(checkpoint, None, "last") is None
    assert "per-loop; under last" in (why_not_promised(checkpoint, "high", "last") or "")
