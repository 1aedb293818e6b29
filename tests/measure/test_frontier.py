"""Frontiers on scores and losses made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loopwise.exits.rule import ExitRule
from loopwise.measure.frontier import (
    Yardstick,
    depth_at_budget,
    replay,
    replayed_points,
    score_point,
    spread_thresholds,
    swept_points,
    uniform_points,
)
from loopwise.measure.price import Checks
from loopwise.models.costs import Costs

COSTS = Costs(prelude=10.0, core=100.0, coda=20.0, head=220.0)
INF = float("inf")


def rule(threshold: float = 0.1, **changes: object) -> ExitRule:
    return replace(ExitRule(policy="kl", threshold=threshold, max_depth=8), **changes)


def yardstick(curve: list[float], n: int = 64, spread: float = 0.0) -> Yardstick:
    """Every token at ``curve``, up to noise that all depths of a token share."""
    noise = spread * np.random.default_rng(0).normal(size=(n, 1))
    loss = np.asarray(curve) + noise
    argmax = np.tile(np.arange(len(curve)), (n, 1))
    return Yardstick(loss, argmax, np.arange(n) // 4, COSTS)


# Replay.


@pytest.mark.parametrize(
    ("scores", "changes", "depth"),
    [
        ([INF, 1, 0.05, 0.5, 0.5], {}, 3),
        ([INF, 1, 0.1, 0.5, 0.5], {}, 3),
        ([0.0, 1, 1, 1, 1], {}, 1),
        ([INF, 1, 1, 1, 1], {}, 5),
        ([INF, INF, INF, INF, INF], {}, 5),
        ([float("nan")] * 5, {}, 5),
        ([INF, 0, 0, 0, 0], {"patience": 2}, 3),
        ([INF, 0, 1, 0, 0], {"patience": 2}, 5),
        ([INF, 0, 1, 0, 1], {"patience": 2}, 5),
        ([0, 0, 0, 0, 0], {"patience": 4}, 4),
        ([0, 0, 0, 0, 0], {"patience": 9}, 5),
        ([0, 0, 0, 0, 0], {"min_depth": 3}, 3),
        ([0, 0, 1, 1, 0], {"min_depth": 3}, 5),
        ([0, 0, 0, 0, 0], {"min_depth": 2, "patience": 2}, 2),
        ([1, 1, 1, 1, 0], {"max_depth": 3}, 3),
        ([1, 0, 1, 1, 0], {"max_depth": 2}, 2),
        ([1, 1, 1, 1, 1], {"max_depth": 200}, 5),
        ([1, 1, 1, 1, 1], {"max_depth": 1}, 1),
    ],
)
def test_replay_by_hand(scores, changes, depth):
    assert replay(np.array([scores], dtype=np.float32), rule(**changes)).tolist() == [depth]


def test_rows_are_decided_apart():
    scores = np.array([[INF, 0, 0], [INF, 1, 0], [INF, 1, 1]], dtype=np.float32)
    assert replay(scores, rule()).tolist() == [2, 3, 3]
    assert replay(scores[::-1], rule()).tolist() == [3, 3, 2]


@settings(max_examples=80, deadline=None)
@given(
    arrays(np.float32, (5, 6), elements=st.floats(0, 1, width=32)),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_a_stricter_rule_never_exits_earlier(score, a, b, patience, min_depth):
    strict = rule(min(a, b), patience=patience, min_depth=min_depth, max_depth=6)
    loose = replace(strict, threshold=max(a, b))
    depth = replay(score, strict)
    assert (depth >= replay(score, loose)).all()
    assert (replay(score, replace(strict, patience=patience + 1)) >= depth).all()
    assert (depth >= min_depth).all()
    assert (depth <= 6).all()


# The yardstick.


def test_uniform_depth_between_depths():
    line = yardstick([4.0, 3.0, 2.5, 2.4])
    assert line.uniform_depth_at(3.0) == pytest.approx(2.0)
    assert line.uniform_depth_at(3.25) == pytest.approx(1.75)
    assert line.uniform_depth_at(2.75) == pytest.approx(2.5)
    assert line.uniform_depth_at(2.425) == pytest.approx(3.75)


def test_uniform_depth_is_clamped_to_what_was_measured():
    line = yardstick([4.0, 3.0, 2.5, 2.4])
    assert line.uniform_depth_at(9.0) == 1.0
    assert line.uniform_depth_at(4.0) == 1.0
    assert line.uniform_depth_at(2.4) == 4.0
    assert line.uniform_depth_at(1.0) == 4.0


def test_a_curve_that_rises_again_counts_its_smallest_depth():
    line = yardstick([4.0, 2.0, 3.0, 2.5, 2.2])
    assert line.uniform_depth_at(2.0) == 2.0
    assert line.uniform_depth_at(1.0) == 2.0
    assert line.uniform_depth_at(3.0) == pytest.approx(1.5)
    late = yardstick([4.0, 2.0, 3.0, 1.0])
    assert late.uniform_depth_at(2.0) == pytest.approx(2.0)
    assert late.uniform_depth_at(1.5) == pytest.approx(3.5)


def test_a_curve_that_only_rises_is_best_at_one():
    line = yardstick([1.0, 2.0, 3.0])
    for nats in (0.5, 1.0, 2.5):
        assert line.uniform_depth_at(nats) == 1.0


def test_a_flat_stretch_divides_by_nothing():
    line = yardstick([3.0, 2.0, 2.0, 2.0, 1.0])
    assert line.uniform_depth_at(2.0) == pytest.approx(2.0)
    assert line.uniform_depth_at(1.5) == pytest.approx(4.5)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, 6, elements=st.floats(0, 5)), st.floats(-1, 6), st.floats(-1, 6))
def test_less_loss_never_needs_less_depth(curve, a, b):
    line = yardstick(list(curve), n=2)
    low, high = line.uniform_depth_at(min(a, b)), line.uniform_depth_at(max(a, b))
    assert 1.0 <= high <= low <= 6.0


def test_uniform_points_of_a_falling_curve_gain_nothing():
    points = uniform_points(yardstick([4.0, 3.0, 2.5, 2.4, 2.35], spread=0.5))
    assert [p["mean_depth"] for p in points] == [1, 2, 3, 4, 5]
    assert [p["allocation_gain"] for p in points] == pytest.approx([1.0] * 5)
    assert [p["equal_uniform_depth"] for p in points] == pytest.approx([1, 2, 3, 4, 5])
    assert points[-1]["delta_nats"] == points[-1]["delta_low"] == points[-1]["delta_high"] == 0.0
    assert points[-1]["argmax_agreement"] == 1.0
    assert points[-1]["charged_share"] == points[-1]["cap"] == 1.0
    assert [p["delta_nats"] for p in points] == pytest.approx([1.65, 0.65, 0.15, 0.05, 0.0])
    assert [p["p95_depth"] for p in points] == [1, 2, 3, 4, 5]


def test_the_interval_is_paired():
    """Tokens differ by nats, the two depths by a constant: the interval has no width."""
    first = uniform_points(yardstick([3.0, 2.0], spread=5.0))[0]
    assert first["delta_low"] == pytest.approx(1.0)
    assert first["delta_high"] == pytest.approx(1.0)


def test_uniform_depth_gains_nothing_at_the_size_of_a_real_trace():
    """200,000 float32 losses of which deep recurrences win a ten-thousandth of a nat each."""
    rng = np.random.default_rng(0)
    curve = 3.2 - 1e-4 * np.arange(8)
    token = rng.exponential(1.0, (200_000, 1))
    loss = (curve + token - 1.0).astype(np.float32)
    line = Yardstick(loss, np.zeros_like(loss, dtype=np.int32), np.arange(200_000) // 256, COSTS)
    gains = [p["allocation_gain"] for p in uniform_points(line)]
    assert gains == pytest.approx([1.0] * 8, abs=0.02)


def test_a_yardstick_is_cut_to_its_depth():
    class Columns:
        horizon = 6

        def __getitem__(self, name: str) -> np.ndarray:
            return np.zeros(4) if name == "block" else np.tile(np.arange(6.0), (4, 1))

    assert Yardstick.of(Columns(), 4, COSTS).max_depth == 4  # type: ignore[arg-type]
    assert Yardstick.of(Columns(), 40, COSTS).max_depth == 6  # type: ignore[arg-type]


# Points.


def test_charged_flops_of_each_kind_of_rule():
    """prelude + coda + head once, core per recurrence; a logits rule reads at every recurrence."""
    line = yardstick([4.0, 3.0, 2.0, 1.0], n=4)
    depth = np.array([1, 2, 4, 4])
    loss, argmax = line.loss[np.arange(4), depth - 1], line.argmax[np.arange(4), depth - 1]
    mean = 11 / 4
    free = score_point(depth, loss, argmax, line)
    assert free["charged_flops"] == pytest.approx(10 + 20 + 220 + mean * 100)
    assert free["charged_share"] == pytest.approx((250 + mean * 100) / (250 + 400))
    dear = score_point(depth, loss, argmax, line, Checks(codas=mean - 1, heads=mean - 1))
    assert dear["charged_flops"] == pytest.approx(10 + mean * (20 + 220) + mean * 100)
    for point in (free, dear):
        assert point["cap"] == pytest.approx((250 + 400) / (250 + mean * 100))
        assert point["mean_depth"] == mean
        assert point["loss_nats"] == pytest.approx((4 + 3 + 1 + 1) / 4)
        assert point["delta_nats"] == pytest.approx(5 / 4)
        assert point["argmax_agreement"] == 0.5


def test_a_logits_rule_at_full_depth_costs_more_than_uniform_depth():
    line = yardstick([2.0, 1.0, 0.5])
    score = np.full((64, 3), INF, dtype=np.float32)
    point = replayed_points(score, rule(max_depth=3), line, [0.1])[0]
    assert point["mean_depth"] == 3
    assert point["charged_share"] == pytest.approx(1 + 2 * 240 / 550)


def test_a_rule_that_knows_which_tokens_are_hard_gains():
    """Half the tokens are done at 1, half need 4: mean depth 2.5 for the loss of depth 4."""
    easy = np.tile([1.0, 1.0, 1.0, 1.0], (50, 1))
    hard = np.tile([4.0, 3.0, 2.0, 1.0], (50, 1))
    loss = np.concatenate([easy, hard])
    line = Yardstick(loss, np.zeros((100, 4), dtype=int), np.arange(100), COSTS)
    score = np.where(loss > 1.0, 1.0, 0.0)
    point = replayed_points(score, rule(max_depth=4), line, [0.5])[0]
    assert point["mean_depth"] == 2.5
    assert point["delta_nats"] == 0.0
    assert point["allocation_gain"] == pytest.approx(4 / 2.5)


def test_replayed_points_take_loss_and_argmax_at_the_exit():
    line = yardstick([4.0, 3.0, 2.0])
    score = np.tile([INF, 0.05, 0.001], (64, 1))
    loose, strict = replayed_points(score, rule(max_depth=3), line, [0.1, 0.01])
    assert (loose["threshold"], loose["mean_depth"], loose["loss_nats"]) == (0.1, 2.0, 3.0)
    assert (strict["threshold"], strict["mean_depth"], strict["loss_nats"]) == (0.01, 3.0, 2.0)
    assert (loose["argmax_agreement"], strict["argmax_agreement"]) == (0.0, 1.0)


# Thresholds and budgets.


def test_thresholds_cover_the_range_evenly():
    rng = np.random.default_rng(0)
    score = np.exp(rng.normal(0, 1, (3000, 8)) - np.arange(8)).astype(np.float32)
    score[:, 0] = INF
    thresholds = spread_thresholds(score, rule(max_depth=8))
    depths = [replay(score, rule(t)).mean() for t in thresholds]
    assert thresholds == sorted(thresholds, reverse=True), "loosest first"
    assert len(set(thresholds)) == len(thresholds)
    assert 12 <= len(thresholds) <= 24
    assert depths[0] == pytest.approx(2.0, abs=0.05)
    assert depths[-1] > 7.9
    assert np.diff(depths).max() < 0.75


def test_thresholds_ignore_what_lies_past_the_largest_depth():
    score = np.array([[INF, 1.0, 1e-6, 1e-9]] * 10, dtype=np.float32)
    assert spread_thresholds(score, rule(max_depth=2)) == [1.0]


def test_no_finite_score_gives_no_threshold_and_no_point():
    score = np.full((10, 4), INF, dtype=np.float32)
    assert spread_thresholds(score, rule()) == []
    assert replayed_points(score, rule(max_depth=4), yardstick([1.0] * 4), []) == []


def test_one_score_for_all_gives_one_threshold():
    assert spread_thresholds(np.zeros((10, 4)), rule()) == [0.0]


def test_depth_at_budget_takes_the_shallowest_sure_point():
    points = [
        {"mean_depth": 2.0, "delta_high": 0.5},
        {"mean_depth": 4.0, "delta_high": 0.009},
        {"mean_depth": 3.0, "delta_high": 0.01},
        {"mean_depth": 5.0, "delta_high": -0.2},
    ]
    assert depth_at_budget(points, 0.01) is points[2]
    assert depth_at_budget(points, 0.0) is points[3]
    assert depth_at_budget(points, -1.0) is None
    assert depth_at_budget([], 0.01) is None


def test_a_sweep_is_over_thresholds_unless_the_score_says_yes_or_no():
    line = yardstick([4.0, 3.0, 2.0, 1.0])
    graded = np.tile(np.float32([np.inf, 0.3, 0.2, 0.1]), (len(line.loss), 1))
    points = swept_points(graded, rule(max_depth=4), line)
    assert points == replayed_points(
        graded, rule(max_depth=4), line, spread_thresholds(graded, rule(max_depth=4))
    )
    twice = swept_points(graded, rule(max_depth=4, patience=2), line)
    assert twice and {p["patience"] for p in twice} == {2}, "the rule's own patience is kept"
    answers = np.tile(np.float32([np.inf, 1, 0, 0]), (len(line.loss), 1))
    points = swept_points(answers, rule(max_depth=4), line)
    assert [(p["threshold"], p["patience"], p["mean_depth"]) for p in points] == [
        (0.0, 1, 3.0),
        (0.0, 2, 4.0),
        (0.0, 3, 4.0),
    ]
