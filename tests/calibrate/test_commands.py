"""``loopwise calibrate`` from end to end on a tiny trained checkpoint, and its refusals."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from numpy.typing import NDArray
from typer.testing import CliRunner

from loopwise.calibrate.running import Calibration
from loopwise.calibrate.texts import _part
from loopwise.cli import app
from loopwise.data import generate
from loopwise.exits.fixed import FixedDepth
from loopwise.exits.rule import ExitRule, parse_rule
from loopwise.measure.calibrate import Verdict, unit_means
from loopwise.measure.live import LiveResult, run_live
from loopwise.measure.units import Span, trace_units

TINY = [
    "tokenizer.kind=byte",
    "data.held_out_fraction=0.4",
    "train.steps=4",
    "train.seq=32",
    "train.micro_batch=2",
    "train.compile=off",
    "train.dtype=fp32",
    "train.eval_every=4",
    "train.eval_blocks=1",
    "train.eval_depths=[1]",
    "train.save_every=4",
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "model.d_ff=24",
    "model.n_core_layers=1",
    "depth.mean=4",
    "depth.backprop_depth=2",
]
CHEAP = ("--rules", "latent-change,kl")


def sets(*items: str) -> list[str]:
    return [part for item in items for part in ("--set", item)]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.stderr, result.exception)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)


def refused(result: Result, *parts: str) -> None:
    trouble = result.exception
    assert trouble is None or isinstance(trouble, SystemExit), f"a traceback: {trouble!r}"
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("calibrate")
    text = write_text(root / "train.txt", 0, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        made = run("train", "--data", text, *sets(*TINY), "--out", root / "run", "--json")
    assert made.exit_code == 0, (made.stderr, made.exception)
    return root / "run"


@pytest.fixture
def a_run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    """Text that nothing was trained on: 90 documents."""
    return write_text(tmp_path_factory.mktemp("fresh") / "fresh.txt", 100, 90)


def write_text(path: Path, first: int, count: int) -> Path:
    texts = [d.text.strip() for d in generate("stories", 0, first, count)]
    path.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return path


def exits_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("checkpoints/step-*/exits.json")
    return json.loads(file.read_text())


def calibrate(folder: Path, text: Path, *more: str | Path) -> Result:
    """Decided by charged compute: fast, and the same every time."""
    return run("calibrate", folder, "--data", text, *more, "--no-wall", "--json")


def test_tiers_from_end_to_end(a_run, fresh):
    budgets = "0.3,0.5,0.9"
    result = calibrate(a_run, fresh, "--budget", budgets, "--confidence", "0.5", "--force", *CHEAP)
    made = answer(result)
    assert list(made["tiers"]) == ["high", "balanced", "fast"]
    assert exits_of(a_run)["tiers"] == made["tiers"]
    assert Path(made["exits"]).name == "exits.json"
    for tier, budget in zip(made["tiers"].values(), (0.3, 0.5, 0.9), strict=True):
        rule = parse_rule(tier["rule"])
        assert (rule.policy, rule.max_depth) == (tier["policy"], tier["max_depth"])
        assert (tier["budget_nats"], tier["full_depth"]) == (budget, 4)
        assert (tier["confidence"], tier["kv_policy"]) == (0.5, "per-loop")
        risk, live = tier["risk"], tier["live"]
        assert risk["low"] <= risk["mean"] <= risk["high"]
        assert risk["mean"] <= risk["upper_bound"] <= budget
        assert risk["p_value"] <= tier["guarantee"]["level"] == pytest.approx(0.5 / 3)
        assert 1 <= live["mean_depth"] <= 4
        assert 0 < live["charged_share"] <= 1
        assert set(tier["replayed"]) == set(live)
        assert set(tier["candidates"]) == {"latent-change", "kl"}
        assert tier["data"]["sources"] == [str(fresh)]
        assert len(tier["data"]["text_hash"]) == 64
        assert tier["guarantee"]["units"] + tier["guarantee"]["units_proposing"] <= 90
    costs = [t["live"]["charged_flops"] for t in made["tiers"].values()]
    assert costs == sorted(costs, reverse=True), "a larger budget never costs more"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("model ") and "converge" in lines[0]
    for name in ("high", "balanced", "fast"):
        assert [line for line in lines if line.startswith(f"{name}: ") and "uniform" in line]


# What each tier rests on: live exits, uniform depth as it is, documents nothing was fitted on.


def shift_live(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Live exits lose ``nats`` more than they do; replayed ones what they did."""

    def worse(*args: Any) -> LiveResult:
        found = run_live(*args)
        return replace(found, loss=found.loss + nats)

    monkeypatch.setattr("loopwise.calibrate.running.run_live", worse)


def shift_uniform(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Every depth short of full loses ``nats`` more than it does."""

    def worse(*args: Any) -> dict[str, Any]:
        seen = trace_units(*args)
        if "loss" in seen:
            seen["loss"][:, :-1] += nats
        return seen

    monkeypatch.setattr("loopwise.calibrate.running.trace_units", worse)


def test_the_excess_is_that_of_live_exits(a_run, fresh, monkeypatch):
    def margin() -> dict[str, Any]:
        made = answer(calibrate(a_run, fresh, "--budget", "5", "--rules", "margin", "--force"))
        return made["tiers"]["balanced"]["candidates"]["margin"]

    before = margin()
    shift_live(monkeypatch, 0.1)
    after = margin()
    assert after["rule"] == before["rule"]
    assert after["risk"]["mean"] == pytest.approx(before["risk"]["mean"] + 0.1, abs=1e-5)
    assert after["risk"]["upper_bound"] > before["risk"]["upper_bound"] + 0.05
    assert after["replayed"] == before["replayed"]
    mean = after["live"]["mean_depth"]
    assert after["live"]["allocation_gain"] == after["live"]["equal_uniform_depth"] / mean
    assert after["live"]["allocation_gain"] <= before["live"]["allocation_gain"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_uniform_depth_loses_what_it_loses(a_run, fresh, monkeypatch, depth):
    """Held against an evaluation of the same units at that depth and at full depth."""
    seen: list[Calibration] = []

    def kept(self: Calibration, rules: list[ExitRule]) -> dict[str, Verdict]:
        seen.append(self)
        return judge(self, rules)

    judge = Calibration.judge
    monkeypatch.setattr(Calibration, "judge", kept)
    answer(calibrate(a_run, fresh, "--budget", "5", *CHEAP))
    (one,) = seen
    tried = {j.rule.max_depth: j for j in judge(one, [])["fixed"].tried}
    nats = [losses(one, d) for d in (depth, 4)]
    wanted = unit_means(nats[0] - nats[1], one.split.judging.unit)
    assert np.allclose(tried[depth].excess, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 1e-4, "or every depth would do"
    live = tried[depth].figures["live"]
    assert live["mean_depth"] == depth >= live["equal_uniform_depth"] >= 1


def losses(one: Calibration, depth: int) -> NDArray[Any]:
    """Nats of each token of the judging units at a uniform depth, by a pass of its own."""
    rule = ExitRule(policy="fixed", max_depth=depth)
    return run_live(one.model, one.split.judging.batches, rule, FixedDepth()).loss.numpy()


@pytest.mark.parametrize("seen", [0, 3, 30])
def test_documents_that_rules_were_fitted_on_judge_nothing(seen):
    """However many they are: those that do not propose are not used at all."""
    spans = [[Span(document, 0, 9)] for document in range(40)]
    proposing, judging = _part(spans, seen)
    assert [s.document for s in proposing] == list(range(10)), "a quarter, from the first on"
    assert [s.document for s in judging] == list(range(max(10, seen), 40))


# Wall clock.


def test_finalists_are_timed_and_what_is_faster_every_time_is_taken(a_run, fresh, monkeypatch):
    """Wall clock is made up: the model here is too small to tell anything apart."""

    def seconds(rule: float, uniform: list[float]) -> None:
        def timed(runs: Any, repeats: int) -> dict[str, list[float]]:
            assert list(runs) == ["exit_rule", "uniform"]
            return {"exit_rule": [rule] * 3, "uniform": uniform}

        monkeypatch.setattr("loopwise.calibrate.timing.interleaved", timed)

    def tier() -> tuple[dict[str, Any], str]:
        command = ("calibrate", a_run, "--data", fresh, "--budget", "5", "--force", *CHEAP)
        result = run(*command, "--json")
        return answer(result)["tiers"]["balanced"], result.stdout

    seconds(1.0, [2.0, 1.5, 1.2])
    found, said = tier()
    assert found["policy"] in ("latent-change", "kl"), "though depth 1 costs less compute"
    assert found["decided_by"] == "wall clock"
    assert found["wall"]["speedup"] == {"median": 1.5, "low": 1.2, "high": 2.0}
    assert found["wall"]["rules"] == {"exit_rule": found["rule"], "uniform": "fixed:1"}
    assert found["wall"]["tokens_per_s"]["exit_rule"]["median"] > 0
    assert "is faster than uniform depth 1" in found["says"]
    assert "decided by wall clock: " in said and "ratio 1.50 (1.20 to 2.00 over 5 repeats)" in said
    seconds(1.0, [2.0, 1.5, 0.9])
    found, said = tier()
    assert (found["rule"], found["decided_by"]) == ("fixed:1", "charged compute")
    assert "decided by charged compute: " in said and "ratio 1.50 (0.90 to 2.00" in said
    seconds(2.0, [1.0, 1.1, 1.2])
    found, _ = tier()
    assert (found["rule"], found["decided_by"]) == ("fixed:1", "wall clock")
    assert "uniform depth 1" in found["says"] and "is faster than" in found["says"]


def test_engines_are_really_timed(a_run, fresh):
    command = ("calibrate", a_run, "--data", fresh, "--budget", "5", "--force", *CHEAP, "--json")
    wall = answer(run(*command))["tiers"]["balanced"]["wall"]
    assert wall["repeats"] == 5 and wall["threads"] >= 1
    for rate in wall["tokens_per_s"].values():
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]


def test_nothing_is_timed_where_that_is_asked(a_run, fresh):
    result = calibrate(a_run, fresh, "--budget", "5", "--force", *CHEAP)
    tier = answer(result)["tiers"]["balanced"]
    assert tier["wall"] is None and tier["decided_by"] == "charged compute"
    assert "decided by charged compute; nothing was timed" in result.stdout


def test_where_depth_does_not_matter_uniform_depth_wins_and_it_is_said(a_run, fresh):
    made = answer(calibrate(a_run, fresh, "--budget", "5", "--force", *CHEAP))
    (tier,) = made["tiers"].values()
    assert tier["rule"] == "fixed:1"
    assert tier["uniform"]["rule"] == "fixed:1"
    assert "uniform" in tier["says"]


def test_a_tier_decodes_by_its_name(a_run, fresh):
    answer(calibrate(a_run, fresh, "--budget", "5", "--names", "quick", *CHEAP))
    made = answer(run("generate", a_run, "Tom", "--exit", "quick", "--max-tokens", 3, "--json"))
    assert made["rule"] == "fixed:1"
    assert made["exit_depths"] == [1] * len(made["exit_depths"])
    refused(run("generate", a_run, "Tom", "--exit", "quik"), "did you mean 'quick'", "tiers: quick")
    other = run("generate", a_run, "T", "--exit", "quick", "--kv", "last", "--max-tokens", 1)
    assert "under last nothing is" in other.stderr


def test_calibrating_again_keeps_other_tiers_and_the_fitted_rules(a_run, fresh):
    measured = ("measure.horizon=4", "measure.tokens=100", "measure.fit_tokens=200")
    traces = a_run / "t"
    assert run("measure", a_run, "--data", fresh, *sets(*measured), "--out", traces).exit_code == 0
    before = exits_of(a_run)
    answer(calibrate(a_run, fresh, "--budget", "5", *CHEAP))
    made = answer(calibrate(a_run, fresh, "--budget", "4", "--names", "mine"))
    after = exits_of(a_run)
    assert list(after["tiers"]) == ["balanced", "mine"]
    assert {k: v for k, v in after.items() if k != "tiers"} == before
    assert made["tiers"]["mine"]["data"]["left_out"] == {}


def test_the_same_seed_gives_the_same_tiers_and_another_divides_differently(a_run, fresh):
    again = [answer(calibrate(a_run, fresh, "--budget", "5", *CHEAP)) for _ in range(2)]
    assert again[0] == again[1]
    other = answer(calibrate(a_run, fresh, "--budget", "5", "--seed", "7", *CHEAP))
    assert other["tiers"]["balanced"]["risk"] != again[0]["tiers"]["balanced"]["risk"]


def test_rules_are_fitted_on_the_text_that_proposes_where_none_was_fitted(a_run, fresh):
    result = calibrate(a_run, fresh, "--budget", "5", "--force")
    (tier,) = answer(result)["tiers"].values()
    assert set(tier["candidates"]) == {"latent-kl", "latent-change", "second-difference"}
    stored = exits_of(a_run)
    assert set(stored["policies"]) == {"latent-kl"} and stored["fitted_on"]
    assert run("generate", a_run, "T", "--exit", "latent-kl:0.1", "--max-tokens", 1).exit_code == 0
    # What it was fitted on proposes again and judges nothing, so the same command says the same.
    again = answer(calibrate(a_run, fresh, "--budget", "5", "--force"))["tiers"]["balanced"]
    assert again["rule"] == tier["rule"] and again["data"] == tier["data"]
    assert again["risk"]["mean"] == pytest.approx(tier["risk"]["mean"])
    # Nothing is fitted beside it.
    refused(calibrate(a_run, fresh, "--rules", "probe"), "must be fitted")


def test_a_fit_that_leads_to_no_tier_is_not_stored(a_run, fresh):
    refused(calibrate(a_run, fresh, "--budget", "1e-9", "--confidence", "0.5", "--force"))
    assert not (a_run / "exits.json").exists() and not list(a_run.rglob("exits.json"))


def test_a_model_that_does_not_converge_is_offered_uniform_depth_alone(a_run, fresh, monkeypatch):
    def never(change: Any, kl: Any, full: int, diverged: str | None) -> dict[str, Any]:
        evidence = ["steps grow by a factor of 1.10"]
        return {"converges": False, "settled": False, "evidence": evidence, "rate": 1.1}

    monkeypatch.setattr("loopwise.calibrate.running.judge_convergence", never)
    result = calibrate(a_run, fresh, "--budget", "5", *CHEAP)
    (tier,) = answer(result)["tiers"].values()
    assert tier["candidates"] == {} and tier["policy"] == "fixed"
    assert "exit rules are not offered" in tier["says"]
    assert "does not converge (steps grow by a factor of 1.10)" in result.stderr
    assert "model does not converge: steps grow" in result.stdout
    forced = calibrate(a_run, fresh, "--budget", "5", "--force", *CHEAP)
    assert set(answer(forced)["tiers"]["balanced"]["candidates"]) == {"latent-change", "kl"}
    assert "--force insists" in forced.stderr
    # A rule that looks at one recurrence alone says what it says on any model.
    some = calibrate(a_run, fresh, "--budget", "5", "--rules", "margin,kl")
    assert set(answer(some)["tiers"]["balanced"]["candidates"]) == {"margin"}
    assert "kl left out" in some.stderr
    alone = calibrate(a_run, fresh, "--budget", "5", "--rules", "margin")
    assert set(answer(alone)["tiers"]["balanced"]["candidates"]) == {"margin"}
    assert "left out" not in alone.stderr


def test_a_full_depth_too_shallow_to_settle_in_is_a_warning(a_run, fresh, monkeypatch):
    """Told apart from a model that does not converge: the rules are offered."""
    clause = "the median token's output still moves by 0.018 nats at depth 4"

    def shallow(change: Any, kl: Any, full: int, diverged: str | None) -> dict[str, Any]:
        return {"converges": True, "settled": False, "evidence": [clause], "rate": 0.54}

    monkeypatch.setattr("loopwise.calibrate.running.judge_convergence", shallow)
    result = calibrate(a_run, fresh, "--budget", "5", *CHEAP)
    assert set(answer(result)["tiers"]["balanced"]["candidates"]) == {"latent-change", "kl"}
    assert f"converges, but not by the full depth asked for ({clause})" in result.stderr
    assert "does not converge" not in result.output
    assert f"model converges, but not by full depth: {clause}" in result.stdout


def test_parts_of_documents_can_be_the_unit(a_run, tmp_path):
    long = tmp_path / "long.txt"
    texts = [d.text.strip() for d in generate("stories", 0, 300, 120)]
    parts = [" ".join(texts[i::8]) for i in range(8)]
    long.write_text("\n<|endoftext|>\n".join(parts))
    before = list((a_run / "checkpoints").glob("*/exits.json"))
    refused(
        calibrate(a_run, long, "--budget", "5", *CHEAP),
        "8 documents are too few",
        "--unit block, of which there are about",
    )
    assert list((a_run / "checkpoints").glob("*/exits.json")) == before == []
    made = answer(calibrate(a_run, long, "--budget", "5", "--unit", "block", *CHEAP))
    assert made["tiers"]["balanced"]["guarantee"]["unit"] == "block"


def test_what_the_run_held_out_serves_by_default(a_run):
    refused(run("calibrate", a_run, "--budget", "5"), "train: 3 documents are too few")


# Training text.


def test_training_text_is_refused(a_run, tmp_path):
    training = write_text(tmp_path / "again.txt", 0, 10)
    refused(calibrate(a_run, training), "trained on", "--allow-training-data")
    insisted = calibrate(a_run, training, "--allow-training-data")
    refused(insisted, "10 documents are too few")


def test_a_few_training_documents_are_left_out_and_counted(a_run, tmp_path):
    mixed = write_text(tmp_path / "mixed.txt", 0, 110)
    result = calibrate(a_run, mixed, "--budget", "5", *CHEAP)
    (tier,) = answer(result)["tiers"].values()
    assert tier["data"]["left_out"] == {"trained on": 7}
    assert "7 trained on" in result.stderr


def test_training_text_is_known_wherever_the_checkpoint_has_gone(a_run, tmp_path):
    settings = json.loads((a_run / "config.json").read_text())["settings"]
    lone = tmp_path / "lone"
    shutil.copytree(next(a_run.glob("checkpoints/step-*")), lone)
    from loopwise.config import from_table
    from loopwise.settings import RunConfig
    from loopwise.study.texts import read_texts

    config = from_table(RunConfig, settings)
    kept = read_texts(config.data, config.seed).train
    text = tmp_path / "kept.txt"
    text.write_text("\n<|endoftext|>\n".join(d.text for d in kept[:4]))
    refused(calibrate(lone, text), "trained on 4 of these 4 documents")
    refused(run("calibrate", lone), "not part of a run", "--data")


# What cannot be.


def test_a_budget_that_nothing_meets_names_the_closest_and_stores_nothing(
    a_run, fresh, monkeypatch
):
    """A model whose output each recurrence moves by half a nat, whatever it was trained to."""
    shift_uniform(monkeypatch, 0.5)
    shift_live(monkeypatch, 0.5)
    result = calibrate(a_run, fresh, "--budget", "0.1", "--confidence", "0.5", "--force", *CHEAP)
    parts = "nothing cheaper than depth 4 keeps a budget of 0.1 nats", "the closest is", "measured"
    refused(result, *parts, "guaranteed")
    assert not list((a_run / "checkpoints").glob("*/exits.json"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--budget", "0"], ["--budget 0", "above 0"]),
        (["--budget", "-1"], ["--budget -1"]),
        (["--budget", "nan"], ["--budget nan"]),
        (["--budget", "inf"], ["--budget inf"]),
        (["--budget", "low"], ["--budget 'low'", "comma list"]),
        (["--budget", ","], ["--budget is empty"]),
        (["--budget", "0.1,0.1"], ["twice"]),
        (["--budget", "0.1,0.2", "--names", "a"], ["gives 1 for 2"]),
        (["--names", "kl"], ["'kl'"]),
        (["--rules", "latnt-change"], ["did you mean 'latent-change'"]),
        (["--rules", "oracle"], ["later recurrences"]),
        (["--rules", "fixed"], ["always competes"]),
        (["--rules", "gate"], ["gate"]),
        (["--confidence", "1"], ["--confidence 1", "between 0 and 1"]),
        (["--confidence", "95"], ["--confidence 95"]),
        (["--budget", "1e308"], ["--budget 1e+308", "at most 100"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--units", "0"], ["--units 0"]),
        (["--units", "3"], ["--units 3 is too few", "takes at least"]),
        (["--depth", "1"], ["nothing to save"]),
        (["--depth", "0"], ["depth 0"]),
        (["--min-depth", "9"], ["min=9 max=4"]),
        (["--patience", "0"], ["patience=0"]),
        (["--budget", "0.0001"], ["90 documents are too few", "0.0001 nats at 0.95 confidence"]),
        (["--data", "{t}/none.txt"], ["none.txt"]),
        (["--set", "data.read.seperator=x"], ["'seperator'", "did you mean 'separator'"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_stores_nothing(trained, fresh, tmp_path, arguments, parts):
    arguments = [a.format(t=tmp_path) for a in arguments]
    refused(run("calibrate", trained, "--data", fresh, *arguments), *parts)
    assert not list((trained / "checkpoints").glob("*/exits.json"))


def test_a_model_of_one_recurrence_has_nothing_to_calibrate(tmp_path, fresh):
    out = tmp_path / "run"
    fixed = ["architecture=fixed", "model.n_layers=1", "depth.kind=fixed", "depth.mean=1"]
    shape = [s for s in TINY if not s.startswith(("depth.", "model.n_core"))]
    text = write_text(tmp_path / "t.txt", 0, 10)
    answer(run("train", "--data", text, *sets(*shape, *fixed), "--out", out, "--json"))
    refused(calibrate(out, fresh), "nothing to save", "this model runs no more")


def test_exits_of_other_weights_are_refused(a_run, fresh):
    answer(calibrate(a_run, fresh, "--budget", "5", *CHEAP))
    (file,) = a_run.glob("checkpoints/step-*/exits.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "weights_hash": "other"}))
    before = file.read_bytes()
    refused(calibrate(a_run, fresh, "--budget", "5", *CHEAP), "other weights")
    refused(run("generate", a_run, "x", "--exit", "balanced"), "other weights")
    assert file.read_bytes() == before


def test_a_path_to_nothing_is_one_line(tmp_path, fresh):
    refused(calibrate(tmp_path / "none", fresh), str(tmp_path / "none"))


def test_figures_are_finite(a_run, fresh):
    made = answer(calibrate(a_run, fresh, "--budget", "5", "--force", *CHEAP))

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for v in value.values():
                walk(v)
        elif isinstance(value, float):
            assert math.isfinite(value)

    walk(made["tiers"])
