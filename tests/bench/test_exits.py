"""The comparison of exit rules: its rows are what frontiers, live runs and AUROC say."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from loopwise.bench.commands import COMMANDS, BenchOptions, keep_result
from loopwise.bench.compare import ORACLES, Comparison, oracle_curves, ranking
from loopwise.bench.samples import (
    deal,
    fresh_documents,
    trace_samples,
    why_not_new,
    with_fits,
)
from loopwise.cli import app
from loopwise.data import ReadOptions, ReadReport, document_hash, generate, read_documents
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.errors import ConfigError, DataError
from loopwise.exits import EXITS
from loopwise.exits.rule import parse_rule
from loopwise.measure.convergence import loss_optimal
from loopwise.measure.crossing import best_points
from loopwise.measure.frontier import depth_at_budget, uniform_points
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.report.exits import exits_table, summary_lines
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

DEPTH, BUDGET = 4, 0.05
OPTIONS = BenchOptions(
    data=("builtin:stories:60",), depth=DEPTH, budget=BUDGET, seeds=2, smoke=True
)
RULES = [n for n in EXITS if n not in ("fixed", "gate", "oracle")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits") / "model"
    training = {"seq": 32, "depth": {"true_mean": 4.0}}
    model = make_model(injection="add", n_core_layers=1)
    save_checkpoint(folder, model, ByteTokenizer(), training)
    return folder


@pytest.fixture(scope="module")
def comparison(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    def quiet(text: str) -> None:
        pass

    checkpoint = load_checkpoint(path)
    documents = list(generate("stories", 0, 0, 40))
    *parts, fit = deal(documents, checkpoint.tokenizer, 3, 256, seed=0)
    checkpoint = with_fits(checkpoint, fit, 256, DEPTH, quiet)
    folder = tmp_path_factory.mktemp("traces")
    samples = trace_samples(checkpoint, parts, 256, DEPTH, folder, quiet)
    return Comparison.of(checkpoint, samples, DEPTH, BUDGET)


@pytest.fixture(scope="module")
def found(path: Path) -> dict[str, Any]:
    return COMMANDS["exits"](path, OPTIONS, Console(quiet=True))


def test_a_score_that_knows_ranks_perfectly_and_one_that_does_not_like_a_coin():
    rng = np.random.default_rng(0)
    label = rng.random((3000, 6)) < 0.3
    assert ranking(label.astype(np.float32), label)["auroc"] == 1.0
    assert ranking(-label.astype(np.float32), label)["auroc"] == 0.0
    assert ranking(np.zeros_like(label, dtype=np.float32), label)["auroc"] == 0.5
    assert ranking(np.zeros((9, 6)), np.zeros((9, 6), dtype=bool))["auroc"] is None


def test_the_auroc_of_two_normal_scores_is_the_one_in_the_books():
    """Phi(d / sqrt 2) for unit normals d apart; recurrences 1 and the last do not count."""
    rng = np.random.default_rng(1)
    label = rng.random((20_000, 5)) < 0.4
    score = rng.normal(size=label.shape) + 1.0 * label
    score[:, [0, -1]] = -100.0 * label[:, [0, -1]]
    found = ranking(score, label)
    known = 0.5 * (1 + math.erf(1 / 2))
    assert found["auroc"] == pytest.approx(known, abs=0.01)
    assert found["by_recurrence"] == pytest.approx([known] * 3, abs=0.015)
    assert found["share"] == pytest.approx(0.4, abs=0.01)


def test_an_infinite_score_is_the_least_settled():
    label = np.array([[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool)
    score = np.array([[9, np.inf, 2, 0], [9, 1, 2, 0], [9, 1, 1, 0]])
    assert ranking(score, label)["auroc"] == 1.0


def test_parts_share_no_document_and_are_the_same_for_the_same_seed():
    documents = list(generate("stories", 0, 0, 30))
    parts = deal(documents, ByteTokenizer(), 3, 10**9, seed=4)
    assert parts == deal(documents, ByteTokenizer(), 3, 10**9, seed=4)
    assert parts != deal(documents, ByteTokenizer(), 3, 10**9, seed=5)
    dealt = [d.text for part in parts for d in part]
    assert sorted(dealt) == sorted(d.text for d in documents)
    sizes = [sum(len(d.text) for d in part) for part in parts]
    assert max(sizes) < 1.3 * min(sizes)
    with pytest.raises(DataError, match="too few to deal to 31 parts"):
        deal(documents, ByteTokenizer(), 31, 100, seed=0)


def test_training_text_is_named(path):
    checkpoint = load_checkpoint(path)
    trained, other = list(generate("stories", 0, 0, 30)), list(generate("stories", 0, 30, 10))
    assert why_not_new(checkpoint, trained) is None, "nobody knows what it was trained on"
    training = {TRAINED_ON: DocumentSketch.of(trained).to_json()}
    checkpoint = replace(checkpoint, training=training)
    assert why_not_new(checkpoint, other) is None
    assert "trained on 4 of the 14" in (why_not_new(checkpoint, trained[:4] + other) or "")


def test_a_comparison_on_training_text_says_so(tmp_path):
    sketch = DocumentSketch.of(read_documents(OPTIONS.data, ReadOptions(), ReadReport()))
    training = {"seq": 32, "depth": {"true_mean": 4.0}, TRAINED_ON: sketch.to_json()}
    model = make_model(injection="add", n_core_layers=1)
    save_checkpoint(tmp_path / "model", model, ByteTokenizer(), training)
    out = io.StringIO()
    options = replace(OPTIONS, wall=False, seeds=1)
    found = COMMANDS["exits"](tmp_path / "model", options, Console(file=out))
    assert out.getvalue().count("warning: the model was trained on 60 of the 60") == 1
    assert len(found["warnings"]) == 1


def test_text_that_rules_were_fitted_on_is_left_out(path):
    checkpoint = load_checkpoint(path)
    every = fresh_documents(checkpoint, OPTIONS.data)
    seen = replace(checkpoint, exits={"fitted_on": [document_hash(every[3])]})
    assert fresh_documents(seen, OPTIONS.data) == every[:3] + every[4:]
    all_seen = {"fitted_on": [document_hash(d) for d in every]}
    with pytest.raises(DataError, match="was used to fit"):
        fresh_documents(replace(checkpoint, exits=all_seen), OPTIONS.data)


def test_a_trace_records_the_rules_that_are_asked_for(path, tmp_path):
    checkpoint, documents = load_checkpoint(path), list(generate("stories", 0, 0, 4))
    one = trace_samples(checkpoint, [documents], 64, 2, tmp_path, str, ["kl", "cosine"])
    assert one.traces[0].policies == ["cosine"], "the score of kl is a column anyway"


def test_seeds_are_pooled_without_mixing_their_blocks(comparison):
    samples, yardstick = comparison.samples, comparison.yardstick
    n = [trace.n_tokens for trace in samples.traces]
    assert yardstick.loss.shape == (sum(n), DEPTH)
    assert (samples["token"][: n[0]] == samples.traces[0]["token"]).all()
    first, second = (set(yardstick.block[comparison.seed == i]) for i in range(2))
    assert not first & second


@pytest.mark.parametrize("name", ["fixed", *RULES])
def test_rows_agree_with_the_frontier(comparison, name):
    """Depth at the budget and loss at equal depth are those of the swept points, interpolated."""
    row, points = comparison.row(name), comparison.curves[name].points
    kept = [points[i] for i in best_points(points, "mean_depth")]
    depth, delta = ([p[k] for p in kept] for k in ("mean_depth", "delta_nats"))
    wanted = np.interp(BUDGET, delta[::-1], depth[::-1])
    assert row["equal_nll"]["mean_depth"] == pytest.approx(wanted)
    if row["equal_depth"] is not None:
        ours = np.interp(comparison.equal_depth, depth, delta)
        uniform = uniform_points(comparison.yardstick)
        best = [uniform[i] for i in best_points(uniform, "mean_depth")]
        base = np.interp(
            comparison.equal_depth, *([p[k] for p in best] for k in ("mean_depth", "delta_nats"))
        )
        found = row["equal_depth"]["vs_uniform_nats"]
        assert found["mean"] == pytest.approx(ours - base, abs=1e-6)
        assert found["low"] <= found["mean"] <= found["high"]
        assert min(found["by_seed"]) <= found["mean"] <= max(found["by_seed"])


def test_a_rule_beside_itself_differs_by_nothing(comparison):
    beside = comparison.row("kl")["equal_depth"]
    assert beside["mean_depth"] == pytest.approx(comparison.equal_depth)
    assert beside["vs_a1_nats"]["mean"] == beside["vs_a1_nats"]["high"] == 0.0


def test_a_rule_may_be_compared_under_any_name(comparison):
    """As benchmarks do that fit a rule in several ways: a curve says itself what it reads."""
    twin = replace(comparison, curves=comparison.curves | {"kl, again": comparison.curves["kl"]})
    assert twin.row("kl, again") == twin.row("kl") | {"name": "kl, again"}
    assert twin.row("oracle-kl")["reads"] is None and twin.row("kl")["reads"] == "logits"


def test_bounds_know_what_comes(comparison):
    samples, curves = comparison.samples, comparison.curves
    found = oracle_curves(comparison.yardstick, samples["kl_last"])
    assert found.keys() == set(ORACLES)
    assert (found["oracle"].score[:, -1] == 0).all()
    for name, curve in found.items():
        assert curve.points == curves[name].points


def test_live_runs_of_uniform_depth_are_the_yardstick(comparison):
    """The same tokens in the same order, so that differences are paired."""
    curve = comparison.curves["fixed"]
    for rule, point in zip(curve.rules, curve.points, strict=True):
        found = comparison.live(rule)
        assert found["mean_depth"] == point["mean_depth"]
        assert found["delta_nats"] == pytest.approx(point["delta_nats"], abs=1e-5)


def test_what_serves_keeps_the_budget_or_says_that_it_does_not(comparison):
    for name in ("kl", "latent-kl"):
        served = comparison.served(name, lambda _: None)
        start = depth_at_budget(comparison.curves[name].points, BUDGET)
        assert served["replayed"]["mean_depth"] >= start["mean_depth"]
        again = comparison.live(parse_rule(served["rule"]))
        assert {k: served[k] for k in again} == again
        assert served["within_budget"] is (again["delta_high"] <= BUDGET)


def test_every_rule_the_checkpoint_can_run_has_a_row(found):
    names = [row["name"] for row in found["rows"]]
    assert set(names) == {"fixed", *RULES, "oracle", "oracle-kl"}
    assert names[:2] == ["fixed", "kl"]
    assert set(found["left_out"]) == {"gate"}
    assert found["fitted_here"] == ["latent-kl", "certified", "probe"]
    assert found["seeds"] == 2 and found["tokens"] == sum(found["tokens_by_seed"])


def test_the_headline_is_the_default_rule_as_served(found):
    row = next(row for row in found["rows"] if row["name"] == "latent-kl")
    assert found["rule"] == row["served"]["rule"]
    assert found["mean_depth"] == row["served"]["mean_depth"]
    assert found["nll_delta_nats"] == row["served"]["delta_nats"]
    assert found["speedup_vs_a1"] == row["speed"]["speedup_vs_a1"]["median"] > 0
    assert found["check_price_recurrences"] == 0.0
    assert found["check_in_wall_recurrences"] > 0
    a1 = next(row for row in found["rows"] if row["name"] == "kl")
    assert a1["speed"]["speedup_vs_a1"]["median"] == 1.0
    assert a1["served"]["check_price_recurrences"] > 0


def test_the_oracle_comes_with_its_null(comparison, found):
    yardstick, null = comparison.yardstick, comparison.samples["null_loss"]
    assert comparison.optimal == loss_optimal(yardstick.loss, null, yardstick.block)
    assert {"headroom_nats", "null_headroom_nats", "over_null_nats"} <= set(found["loss_optimal"])
    assert all(row["served"] is None for row in found["rows"] if row["name"].startswith("oracle"))


def test_the_table_fits_a_terminal(found):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(exits_table(found))
    lines = console.export_text().splitlines()
    first = {line.split()[0] for line in lines if line.strip()}
    assert {row["name"] for row in found["rows"]} <= first, "no name is cut"
    assert max(map(len, lines)) <= 100
    assert any("gate" in line for line in summary_lines(found))


def test_results_and_picture_are_kept(found, tmp_path):
    keep_result(found, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert set(kept["frontier"]["policies"]) == {row["name"] for row in found["rows"]}
    assert (tmp_path / "out" / "exits.png").stat().st_size > 10_000


def test_the_command_ends_in_one_line_and_can_time_nothing(path):
    arguments = ["bench", "exits", str(path), "--data", "builtin:stories:60", "--smoke"]
    result = CliRunner().invoke(app, [*arguments, "--seeds", "2", "--no-wall"])
    assert result.exit_code == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["speedup_vs_a1"] is None
    assert last["check_price_recurrences"] == 0.0
    assert {"mean_depth", "nll_delta_nats", "rows"} <= set(last)
    assert "frontier" not in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exits", "--exit", "kl:1e-3"], "bench exits has no use for --exit"),
        (["decode", "--seeds", "2"], "bench decode has no use for --seeds"),
        (["kv", "--no-wall"], "bench kv has no use for --no-wall"),
        (["exits", "--budget", "0"], "--budget 0"),
        (["exits", "--seeds", "0"], "--seeds 0"),
        (["exits", "--depth", "1"], "nothing to compare"),
        (["exits", "--data", "builtin:stories:2"], "too few to deal to 4 parts"),
    ],
)
def test_bad_input_is_one_line(path, arguments, message):
    command, *options = arguments
    result = CliRunner().invoke(app, ["bench", command, str(path), "--smoke", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_rules_of_another_checkpoint_are_refused(path, tmp_path):
    model = make_model(seed=1, injection="add", n_core_layers=1)
    save_checkpoint(tmp_path / "other", model, ByteTokenizer(), {"seq": 32})
    (tmp_path / "other" / "exits.json").write_text(json.dumps({"weights_hash": "0" * 64}))
    arguments = ["bench", "exits", str(tmp_path / "other"), "--smoke", "--depth", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "was fitted on other weights" in result.stderr


@pytest.mark.parametrize("budget", [-1.0, math.nan, math.inf])
def test_a_budget_must_be_a_number_of_nats(budget):
    with pytest.raises(ConfigError, match="--budget"):
        BenchOptions(budget=budget)
