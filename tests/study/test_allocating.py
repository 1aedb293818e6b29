"""The allocation stage on a tiny checkpoint: rules, meanings and budgets agree with the trace."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from loopwise.data import generate
from loopwise.errors import TraceError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.measure.convergence import argmax_final_depth
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.models.costs import flops_per_token
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.settings import MeasureConfig, RunConfig
from loopwise.study.allocating import frontier_stage
from loopwise.study.measuring import measure_stage
from loopwise.study.results import collect_results, write_results
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

CONFIG = MeasureConfig(
    horizon=6, tokens=1000, fit_tokens=600, live_tokens=200, live_thresholds=2, batch=2
)


def quiet(event: dict[str, Any]) -> None:
    pass


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Trace, Checkpoint, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("allocating")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        training = {"seq": 48, "depth": {"true_mean": 4.0, "p99": 8}}
        model = make_model(injection="add", n_core_layers=1)
        save_checkpoint(folder / "ckpt", model, ByteTokenizer(), training)
        corpora = {"stories": list(generate("stories", 0, 0, 8))}
        measure_stage(load_checkpoint(folder / "ckpt"), corpora, CONFIG, folder / "t", quiet)
        checkpoint, trace = load_checkpoint(folder / "ckpt"), Trace(folder / "t" / "stories")
        return trace, checkpoint, frontier_stage(trace, checkpoint, CONFIG, quiet)


def test_every_rule_of_the_table_is_there_in_its_meanings(measured):
    _, _, frontier = measured
    policies = frontier["policies"]
    assert set(EXITS) <= set(policies)
    assert set(policies["fixed"]) == {"uniform"}
    for name in EXITS:
        if name == "fixed":
            continue
        truth = EXITS[name].reads is Reads.TRUTH
        assert ("live" in policies[name]) is not truth, "an oracle has no live meaning"
        assert policies[name]["replayed"]
    json.dumps(frontier, allow_nan=False)


def test_uniform_points_are_the_trace_itself(measured):
    trace, _, frontier = measured
    points = frontier["policies"]["fixed"]["uniform"]
    assert frontier["max_depth"] == 4
    losses = trace["loss"].astype(float).mean(axis=0)[:4]
    assert [p["loss_nats"] for p in points] == pytest.approx(list(losses), rel=1e-5)
    assert points[-1]["delta_nats"] == 0.0


def test_live_points_are_twins_of_replayed_ones(measured):
    trace, _, frontier = measured
    for name in ("kl", "latent-change", "probe"):
        for point in frontier["policies"][name]["live"]:
            assert 1 <= point["mean_depth"] <= 4
            assert point["tokens"] <= trace.n_tokens
            replayed = {p["threshold"] for p in frontier["policies"][name]["replayed"]}
            assert point["threshold"] in replayed


def test_the_argmax_oracle_agrees_with_full_depth_everywhere(measured):
    trace, _, frontier = measured
    (point,) = frontier["policies"]["oracle"]["replayed"]
    assert point["argmax_agreement"] == 1.0
    depth = argmax_final_depth(trace["argmax"][:, :4])
    assert point["mean_depth"] == pytest.approx(depth.mean())


def test_logits_rules_pay_and_others_do_not(measured):
    _, checkpoint, frontier = measured
    costs = flops_per_token(checkpoint.model, context=24)
    for name, kinds in frontier["policies"].items():
        for points in (kinds.get("replayed", []), kinds.get("live", [])):
            for p in points:
                reads = p["mean_depth"] - 1 if name == "kl" else 0.0
                assert p["charged_flops"] == pytest.approx(costs.forward(p["mean_depth"], reads))


def test_budgets_name_points_of_the_frontier_or_none(measured):
    _, _, frontier = measured
    assert {b["budget_nats"] for b in frontier["budgets"]} == {0.001, 0.01}
    for budget in frontier["budgets"]:
        points = frontier["policies"][budget["policy"]][budget["meaning"]]
        if budget["point"] is None:
            assert all(p["delta_high"] > budget["budget_nats"] for p in points)
        else:
            assert budget["point"] in points
            assert budget["point"]["delta_high"] <= budget["budget_nats"]


def test_the_judge_of_the_probe_saw_the_traces_outcomes(measured):
    trace, _, frontier = measured
    argmax = trace["argmax"]
    changes = np.stack([(argmax[:, r:] != argmax[:, -1:]).any(axis=1) for r in range(4)], axis=1)
    judged = frontier["policies"]["probe"]["judged"]
    assert judged["positive_share"] == pytest.approx(changes.mean())
    assert 0 <= judged["calibration_error"] <= 1


def test_a_trace_of_other_weights_is_refused(measured, tmp_path):
    trace, checkpoint, _ = measured
    model = make_model(seed=5, injection="add", n_core_layers=1)
    save_checkpoint(tmp_path / "other", model, ByteTokenizer(), checkpoint.training)
    with pytest.raises(TraceError, match="other weights.*measure again"):
        frontier_stage(trace, load_checkpoint(tmp_path / "other"), CONFIG, quiet)


def test_results_are_strict_json_and_hold_what_a_report_reads(measured, tmp_path):
    trace, checkpoint, frontier = measured
    results = collect_results(checkpoint, [trace], [frontier], RunConfig())
    path = write_results(tmp_path, results)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(path.read_text(), parse_constant=refuse)
    assert read["format"] == "loopwise-results"
    assert read["model"]["layers"] == [1, 1, 1]
    (convergence,) = read["convergence"]
    assert convergence["tokens"] == trace.n_tokens
    assert len(convergence["passage"]) == 160
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_a_model_of_one_recurrence_has_uniform_depth_only(tmp_path):
    config = FixedConfig(vocab_size=258, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24, n_layers=1)
    save_checkpoint(tmp_path / "c", FixedModel(config), ByteTokenizer(), {"seq": 48})
    checkpoint = load_checkpoint(tmp_path / "c")
    corpora = {"stories": list(generate("stories", 0, 0, 2))}
    (trace,) = measure_stage(checkpoint, corpora, CONFIG, tmp_path / "t", quiet)
    frontier = frontier_stage(trace, checkpoint, CONFIG, quiet)
    assert frontier["max_depth"] == 1
    assert list(frontier["policies"]) == ["fixed"]
    results = collect_results(checkpoint, [trace], [frontier], RunConfig())
    write_results(tmp_path, results)
