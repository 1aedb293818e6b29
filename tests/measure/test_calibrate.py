"""The guarantee of a calibration: by simulation where the answer is known, and piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from loopwise.exits.rule import ExitRule
from loopwise.measure.calibrate import (
    CLIP_NATS,
    Choice,
    Judged,
    Verdict,
    choose,
    clip_for,
    judge_convergence,
    judge_sequence,
    level_of_each,
    p_value,
    propose_thresholds,
    unit_means,
    units_needed,
    upper_bound,
)
from loopwise.measure.frontier import replay

BUDGET, CLIP = 0.01, 0.05
EXAMPLES = settings(max_examples=40, deadline=None)  # each costs a few hundred logarithms
excesses = npst.arrays(
    np.float64, st.integers(1, 40), elements=st.floats(-0.2, 0.2, allow_subnormal=False)
)


def judged(excess: NDArray, flops: float = 1.0, policy: str = "kl") -> Judged:
    return Judged(ExitRule(policy=policy), np.asarray(excess, dtype=float), flops, {})


# The p-value.

Draw = Callable[[np.random.Generator, int], NDArray]
AT_THE_BUDGET: dict[str, Draw] = {  # mean excess exactly the budget: the hardest null
    "normal": lambda rng, n: np.clip(rng.normal(BUDGET, 0.01, n), 2 * BUDGET - CLIP, CLIP),
    "constant": lambda rng, n: np.full(n, BUDGET),
    "rare and large": lambda rng, n: np.where(rng.random(n) < 0.2, CLIP, 0.0),
    "mostly a gain": lambda rng, n: np.where(rng.random(n) < 0.5, CLIP, 2 * BUDGET - CLIP),
    "skewed": lambda rng, n: np.where(rng.random(n) < 1 / 3, CLIP, -BUDGET),
}


@pytest.mark.parametrize("name", AT_THE_BUDGET)
@pytest.mark.parametrize("n", [5, 60, 400])
def test_a_rule_at_the_budget_passes_no_more_often_than_the_level(name, n):
    rng, level, runs = np.random.default_rng(0), 0.1, 600
    excess = AT_THE_BUDGET[name](rng, 20_000)
    assert excess.mean() == pytest.approx(BUDGET, abs=0.001)
    passed = sum(p_value(AT_THE_BUDGET[name](rng, n), BUDGET, CLIP) <= level for _ in range(runs))
    assert passed / runs <= level + 3 * math.sqrt(level * (1 - level) / runs)


def test_a_rule_well_within_the_budget_passes():
    rng = np.random.default_rng(0)
    passed = [p_value(rng.normal(0.004, 0.01, 100), BUDGET, CLIP) <= 0.01 for _ in range(50)]
    assert np.mean(passed) > 0.9


@EXAMPLES
@given(excesses, st.integers(0, 100), st.integers(0, 100))
def test_what_passes_at_a_budget_passes_at_a_larger_one(excess, a, b):
    low, high = (CLIP * share / 100 for share in sorted((a, b)))
    assert p_value(excess, high, CLIP) <= p_value(excess, low, CLIP) + 1e-12


@EXAMPLES
@given(excesses, st.randoms())
def test_the_order_of_units_does_not_matter(excess, random):
    shuffled = excess.copy()
    random.shuffle(shuffled)
    assert p_value(shuffled, BUDGET, CLIP) == pytest.approx(p_value(excess, BUDGET, CLIP))


@EXAMPLES
@given(excesses)
def test_an_excess_that_is_larger_everywhere_is_no_better_evidence(excess):
    assert p_value(excess + 0.003, BUDGET, CLIP) >= p_value(excess, BUDGET, CLIP) - 1e-12


def test_clipping_hides_no_disaster():
    """One unit in a hundred loses a nat: the clipped mean is within the budget, the mean is not."""
    excess = np.zeros(2000)
    excess[::90] = 1.0
    assert np.minimum(excess, CLIP).mean() < 0.1 * BUDGET
    assert p_value(excess, BUDGET, CLIP) == 1.0
    assert upper_bound(excess, 0.05, CLIP) > BUDGET


@pytest.mark.parametrize("excess", [[], [math.nan] * 100, [math.inf, *[0.0] * 100]])
def test_what_is_no_number_passes_nothing(excess):
    assert p_value(np.array(excess), BUDGET, CLIP) == 1.0
    assert upper_bound(np.array(excess), 0.05, CLIP) == math.inf


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("level", [0.2, 0.01])
def test_as_many_units_are_needed_as_a_loss_of_nothing_takes(budget, level):
    n = units_needed(budget, level, CLIP)
    assert p_value(np.zeros(n), budget, CLIP) <= level
    assert n == 1 or p_value(np.zeros(n - 1), budget, CLIP) > level


@EXAMPLES
@given(excesses, st.sampled_from([0.3, 0.05]))
def test_the_upper_bound_is_the_smallest_budget_that_passes(excess, level):
    bound = upper_bound(excess, level, CLIP)
    if bound == math.inf:
        assert p_value(excess, CLIP, CLIP) > level
        return
    assert p_value(excess, min(bound + 1e-9, CLIP), CLIP) <= level
    assert bound == 0 or p_value(excess, bound * (1 - 1e-6) - 1e-12, CLIP) > level


def test_the_clip_is_larger_than_every_budget():
    for budgets in ([1e-4], [0.01], [0.002, 0.01, 0.03], [2.0]):
        assert clip_for(budgets) >= CLIP_NATS
        assert clip_for(budgets) > 2 * max(budgets)


# Sequences.


def test_testing_stops_at_the_first_failure_and_runs_nothing_after():
    ran = []

    def candidates() -> Iterator[Judged]:
        for mean in (0.0, 0.001, 0.02, 0.0, 0.0):
            ran.append(mean)
            yield judged(np.full(200, mean))

    verdict = judge_sequence(candidates(), [BUDGET], 0.05, CLIP)
    assert ran == [0.0, 0.001, 0.02], "what comes after a failure has no guarantee"
    assert [j.excess[0] for j in verdict.accepted[BUDGET]] == [0.0, 0.001]
    assert len(verdict.tried) == 3


def test_a_larger_budget_goes_on_where_a_smaller_one_has_failed():
    sequence = [judged(np.full(800, m), 1 - m) for m in (0.0, 0.004, 0.008, 0.015, 0.04)]
    verdict = judge_sequence(sequence, [0.005, 0.01, 0.02], 0.05, 0.1)
    counts = [len(verdict.accepted[b]) for b in (0.005, 0.01, 0.02)]
    assert counts == [2, 3, 4]
    costs = [verdict.cheapest(b).charged_flops for b in (0.005, 0.01, 0.02)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("rule", "uniform", "wanted"),
    [(1.0, 2.0, "kl"), (2.0, 1.0, "fixed"), (1.0, 1.0, "fixed"), (1.0, None, "kl")],
)
def test_uniform_depth_competes_by_charged_compute(rule, uniform, wanted):
    verdicts = {"kl": accepted(judged([0.0], rule))}
    verdicts["fixed"] = accepted(
        *([] if uniform is None else [judged([0.0], 9.0, "fixed"), judged([0.0], uniform, "fixed")])
    )
    choice = choose(verdicts, BUDGET)
    assert choice.cheaper.rule.policy == wanted
    assert choice.rule.charged_flops == rule


@pytest.mark.parametrize(
    ("low", "high", "wanted", "by_wall_clock"),
    [
        (1.1, 1.3, "kl", True),
        (0.7, 0.9, "fixed", True),
        (0.9, 1.3, "fixed", False),
        (1.0, 1.3, "fixed", False),
    ],
)
def test_wall_clock_decides_where_it_tells_the_two_apart(low, high, wanted, by_wall_clock):
    """Else charged compute does, of which uniform depth takes less here."""
    speedup = {"low": low, "median": (low + high) / 2, "high": high}
    choice = Choice(judged([0.0], 2.0), judged([0.0], 1.0, "fixed"), speedup)
    assert choice.by_wall_clock is by_wall_clock
    assert choice.cheaper.rule.policy == wanted


def accepted(*candidates: Judged) -> Verdict:
    return Verdict({BUDGET: list(candidates)}, list(candidates))


def test_nothing_within_the_budget_is_no_choice():
    assert choose({"kl": accepted(), "fixed": accepted()}, BUDGET).cheaper is None


# Everything together, on a made-up model whose true risk is known.

DEPTH, TOKENS = 6, 10


class MadeUp:
    """Tokens whose distance to the last output shrinks at their own rate; units are alike inside.

    Live exits lose half as much again as replayed ones, and each unit has luck of its own.
    """

    def __init__(self, units: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n = units
        hard = np.repeat(rng.gamma(2.0, 0.5, units), TOKENS) * rng.gamma(2.0, 0.5, units * TOKENS)
        r = np.arange(1, DEPTH + 1)
        distance = hard[:, None] * 0.45**r  # (tokens, depth)
        noise = rng.lognormal(0, 0.5, distance.shape)
        scores = {"kl": distance * noise, "latent-change": distance * noise[::-1] ** 2}
        self.scores = {name: score.astype(np.float32) for name, score in scores.items()}
        luck = np.repeat(rng.normal(1.0, 0.5, units), TOKENS)[:, None]
        self.loss = 3.0 + luck * distance * (r < DEPTH)

    def rows(self, units: NDArray) -> NDArray:
        return (units[:, None] * TOKENS + np.arange(TOKENS)).ravel()

    def live(self, rule: ExitRule, units: NDArray) -> tuple[NDArray, float]:
        """Excess of each unit, and the mean depth."""
        rows = self.rows(units)
        if rule.policy == "fixed":
            depth = np.full(len(rows), rule.max_depth)
        else:
            depth = replay(self.scores[rule.policy][rows], rule)
        loss = self.loss[rows]
        lost = 1.5 * (loss[np.arange(len(rows)), depth - 1] - loss[:, -1])
        return unit_means(lost, np.repeat(np.arange(len(units)), TOKENS)), float(depth.mean())


Thresholds = dict[str, list[float]]


def proposed(model: MadeUp, units: NDArray, budgets: list[float]) -> Thresholds:
    rows, unit = model.rows(units), np.repeat(np.arange(len(units)), TOKENS)
    return {
        name: propose_thresholds(
            score[rows], ExitRule(policy=name, max_depth=DEPTH), model.loss[rows], unit, budgets
        )
        for name, score in model.scores.items()
    }


def calibrated(
    model: MadeUp,
    thresholds: Thresholds,
    judging: NDArray,
    budgets: list[float],
    confidence: float,
) -> list[ExitRule]:
    """The rule recommended at each budget; full depth where nothing is."""
    level, clip = level_of_each(confidence, len(thresholds) + 1), clip_for(budgets)

    def run(rules: list[ExitRule]) -> Iterator[Judged]:
        for rule in rules:
            excess, depth = model.live(rule, judging)
            yield Judged(rule, excess, depth, {})

    sequences = {
        name: [ExitRule(policy=name, threshold=t, max_depth=DEPTH) for t in of]
        for name, of in thresholds.items()
    }
    uniform = [ExitRule(policy="fixed", max_depth=d) for d in range(DEPTH - 1, 0, -1)]
    verdicts = {
        name: judge_sequence(run(rules), budgets, level, clip)
        for name, rules in {"fixed": uniform, **sequences}.items()
    }
    best = [choose(verdicts, b).cheaper for b in budgets]
    return [ExitRule(policy="fixed", max_depth=DEPTH) if j is None else j.rule for j in best]


def test_over_200_resplits_the_budget_fails_no_more_often_than_promised():
    model, rng = MadeUp(2000, seed=1), np.random.default_rng(2)
    everyone = np.arange(model.n)
    budgets, confidence, runs = [0.01, 0.03], 0.8, 200
    failures, depths = np.zeros(2), np.zeros(2)
    known: dict[ExitRule, tuple[float, float]] = {}
    for split in range(runs):
        if split % 10 == 0:  # proposing is the slow part, and any fixed proposal will do
            order = rng.permutation(model.n)
            thresholds = proposed(model, order[:40], budgets)
        judging = rng.permutation(order[40:])[:200]
        for i, rule in enumerate(calibrated(model, thresholds, judging, budgets, confidence)):
            if rule not in known:
                excess, depth = model.live(rule, everyone)
                known[rule] = float(excess.mean()), depth
            failures[i] += known[rule][0] > budgets[i]
            depths[i] += known[rule][1] / runs
    allowed = 1 - confidence
    slack = 3 * math.sqrt(allowed * (1 - allowed) / runs)
    assert (failures / runs <= allowed + slack).all(), failures
    assert depths[1] < depths[0] < DEPTH - 0.5, "a guarantee that saves nothing is none"


def test_rules_tested_side_by_side_share_the_error():
    """Twenty rules just past the budget: any that passes breaks the promise."""
    rng, rules, confidence, runs = np.random.default_rng(0), 20, 0.5, 100
    shared = level_of_each(confidence, rules)
    least = []
    for _ in range(runs):
        tried = [AT_THE_BUDGET["normal"](rng, 60) + 1e-6 for _ in range(rules)]
        least.append(min(p_value(excess, BUDGET, CLIP) for excess in tried))
    allowed = 1 - confidence
    slack = 3 * math.sqrt(allowed * (1 - allowed) / runs)
    assert np.mean(np.array(least) <= shared) <= allowed + slack
    assert np.mean(np.array(least) <= allowed) > allowed + slack, "or there is nothing to share"


def test_taking_the_sample_mean_for_the_risk_would_fail_far_more_often():
    """Why there is a test: the threshold that just keeps the budget on a sample is a coin toss."""
    model, rng = MadeUp(2000, seed=1), np.random.default_rng(2)
    fails = []
    for _ in range(40):
        judging = rng.permutation(model.n)[:200]
        low, high = 1e-3, 1.0
        for _ in range(12):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if risk(model, middle, judging) <= 0.01 else (low, middle)
        fails.append(risk(model, low, np.arange(model.n)) > 0.01)
    assert np.mean(fails) > 0.3


def risk(model: MadeUp, threshold: float, units: NDArray) -> float:
    rule = ExitRule(policy="kl", threshold=float(threshold), max_depth=DEPTH)
    return float(model.live(rule, units)[0].mean())


def test_a_larger_budget_never_costs_more():
    model = MadeUp(400, seed=3)
    budgets = [0.005, 0.01, 0.02, 0.04]
    thresholds = proposed(model, np.arange(40), budgets)
    for seed in range(8):
        judging = 40 + np.random.default_rng(seed).permutation(model.n - 40)[:200]
        rules = calibrated(model, thresholds, judging, budgets, 0.9)
        depths = [model.live(rule, judging)[1] for rule in rules]
        assert depths == sorted(depths, reverse=True)


# Proposals.


def test_thresholds_go_from_strict_to_loose_and_can_be_read():
    model = MadeUp(60, seed=0)
    unit = np.repeat(np.arange(60), TOKENS)
    score = model.scores["kl"]
    rule = ExitRule(policy="kl", max_depth=DEPTH)
    found = propose_thresholds(score, rule, model.loss, unit, [0.01])
    assert 3 <= len(found) <= 8
    assert found == sorted(set(found))
    assert all(len(f"{t:g}") <= 9 and float(f"{t:.4g}") == t for t in found)
    depths = [
        replay(score, ExitRule(policy="kl", threshold=t, max_depth=DEPTH)).mean() for t in found
    ]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] < DEPTH


@pytest.mark.parametrize("value", [math.inf, 1.0])
def test_a_rule_that_tells_no_tokens_apart_proposes_little_or_nothing(value):
    score = np.full((40, DEPTH), value, dtype=np.float32)
    loss, unit = np.ones((40, DEPTH)), np.repeat(np.arange(4), 10)
    rule = ExitRule(policy="kl", max_depth=DEPTH)
    found = propose_thresholds(score, rule, loss, unit, [0.01])
    assert found == ([] if math.isinf(value) else [1.0])


def test_means_of_units_weigh_tokens_within_and_not_between():
    unit = np.array([1, 1, 1, 0])
    assert unit_means(np.array([1.0, 2.0, 3.0, 10.0]), unit).tolist() == [10.0, 2.0]


# Convergence.


def steps(rate: float, tokens: int = 50, horizon: int = 32) -> NDArray:
    return np.tile(0.5 * rate ** np.arange(horizon), (tokens, 1))


def kl_of(change: NDArray) -> NDArray:
    kl = change**2
    kl[:, 0] = math.inf
    return kl


def test_a_contracting_model_converges():
    change = steps(0.5)
    found = judge_convergence(change, kl_of(change), full_depth=8)
    assert found["converges"]
    assert found["rate"] == pytest.approx(0.5, abs=0.01)
    assert "shrink by a factor of 0.50" in found["evidence"][0]
    assert len(found["evidence"]) == 3


def test_a_model_that_arrives_at_once_converges():
    change = np.full((50, 8), 1e-6)
    assert judge_convergence(change, kl_of(change), full_depth=4)["converges"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (steps(1.0), "steps grow by a factor of 1.00"),
        (np.vstack([steps(0.5, 30), steps(1.0, 20)]), "40% of tokens still move more than 1%"),
        (np.vstack([steps(0.5, 30), steps(0.95, 20)]), "40% of tokens still move more than 1%"),
    ],
    ids=["no contraction", "some tokens cycle", "some tokens dawdle"],
)
def test_evidence_against_convergence_is_named(change, word):
    found = judge_convergence(change, kl_of(change), full_depth=8)
    assert not found["converges"]
    assert any(word in clause for clause in found["evidence"]), found["evidence"]


def test_full_depth_before_a_contracting_model_settles_is_another_matter():
    change = steps(0.5)
    shallow = judge_convergence(change, kl_of(change), full_depth=3)
    assert shallow["converges"] and not shallow["settled"]
    assert shallow["evidence"] == ["the median token's output still moves by 0.016 nats at depth 3"]
    assert judge_convergence(change, kl_of(change), full_depth=4)["settled"]


def test_a_model_that_diverges_does_not_converge():
    change = steps(0.5)[:, :8]
    found = judge_convergence(change, kl_of(change), 8, diverged="not finite at recurrence 9")
    assert not found["converges"]
    assert found["evidence"] == ["not finite at recurrence 9"]
