"""Between two points of a frontier lies a mixture whose cost, or loss, is what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from loopwise.exits.rule import ExitRule
from loopwise.measure.crossing import Between, Curve, at_cost, at_loss, best_points
from loopwise.measure.frontier import Yardstick, swept_points, uniform_points
from loopwise.models.costs import Costs

COSTS = Costs(prelude=10, core=100, coda=20, head=220, row=3)


def points(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"mean_depth": depth, "delta_nats": delta} for depth, delta in pairs]


@pytest.fixture
def yardstick() -> Yardstick:
    rng = np.random.default_rng(0)
    loss = 2 + rng.exponential(size=(400, 1)) * 0.5 ** np.arange(6) + rng.normal(size=(400, 6)) / 50
    argmax = rng.integers(0, 3, size=loss.shape)
    return Yardstick(loss.astype(np.float32), argmax, np.arange(400) // 20, COSTS)


@pytest.fixture
def curve(yardstick: Yardstick) -> Curve:
    score = np.abs(np.diff(yardstick.loss, axis=1, prepend=np.inf)).astype(np.float32)
    return Curve.swept(score, ExitRule(policy="kl", max_depth=6), yardstick)


def test_points_that_another_beats_are_passed_over():
    found = points((3, 0.1), (2, 0.5), (4, 0.2), (2, 0.4), (6, 0.0), (5, 0.1))
    assert best_points(found, "mean_depth") == [3, 0, 4]


def test_a_cost_is_met_between_its_neighbours():
    found = points((2, 0.4), (4, 0.1), (8, 0.0))
    assert at_cost(found, "mean_depth", 3) == Between(0, 1, 0.5)
    assert at_cost(found, "mean_depth", 4) == Between(1, 2, 0.0)
    assert at_cost(found, "mean_depth", 9) == Between(2, 2, 0.0), "more cannot be had"
    assert at_cost(found, "mean_depth", 1.5) is None, "even the cheapest costs more"


def test_a_loss_is_met_at_the_shallowest_place():
    found = points((2, 0.4), (4, 0.1), (8, 0.0))
    assert at_loss(found, 0.5) == Between(0, 0, 0.0)
    place = at_loss(found, 0.05)
    assert place is not None
    assert (place.first, place.second, place.share) == (1, 2, pytest.approx(0.5))
    assert at_loss(found, -0.1) is None


@pytest.mark.parametrize("goal", [2.5, 3.3, 5.0])
def test_a_mixture_has_the_depth_it_was_made_for(curve, goal):
    place = at_cost(curve.points, "mean_depth", goal)
    found = curve.point(curve.between(place))
    assert found["mean_depth"] == pytest.approx(goal)
    ends = sorted(curve.points[i]["loss_nats"] for i in (place.first, place.second))
    assert ends[0] <= found["loss_nats"] <= ends[1]


def test_a_mixture_is_charged_for_the_checks_of_both(curve):
    goal = 1234.0
    place = at_cost(curve.points, "charged_flops", goal)
    assert curve.point(curve.between(place))["charged_flops"] == pytest.approx(goal)


def test_a_mixture_meets_the_budget_it_was_made_for(curve):
    place = at_loss(curve.points, 0.02)
    assert curve.point(curve.between(place))["delta_nats"] == pytest.approx(0.02, abs=1e-6)


def test_a_curve_is_the_frontier_and_full_depth_with_its_checks(curve, yardstick):
    rule = ExitRule(policy="kl", max_depth=6)
    assert list(curve.points[:-1]) == swept_points(curve.score, rule, yardstick)
    last = curve.points[-1]
    assert (last["mean_depth"], last["delta_nats"]) == (6.0, 0.0)
    assert last["charged_flops"] == COSTS.forward(6, codas=5, heads=5)
    for i, point in enumerate(curve.points):
        assert curve.stops(i).depth.mean() == pytest.approx(point["mean_depth"])


def test_uniform_depth_is_a_curve_too(yardstick):
    curve = Curve.uniform(yardstick)
    assert list(curve.points) == uniform_points(yardstick)
    assert [set(curve.stops(i).depth) for i in range(6)] == [{r} for r in range(1, 7)]
    assert curve.point(curve.stops(2)) == pytest.approx(
        {k: v for k, v in curve.points[2].items() if k != "threshold"}
    )
