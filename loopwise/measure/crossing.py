"""Rules held against one another where they cost the same, or lose the same: between two points.

A frontier has points at some thresholds only. Between two of them lies the rule that takes one
threshold for a share of the tokens, drawn at random, and the other for the rest. Its depth, loss
and charge are the mixture of theirs, token by token, so that differences stay paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loopwise.exits import EXITS
from loopwise.exits.rule import ExitRule
from loopwise.measure.frontier import (
    Yardstick,
    replay,
    replayed_points,
    score_point,
    swept_points,
    uniform_points,
)
from loopwise.measure.price import Checks, replayed_checks

Point = dict[str, Any]
_ROUNDING = 1e-9  # relative; a goal may be the cost of a point itself, summed in another order


@dataclass(frozen=True, slots=True)
class Between:
    """A place on a frontier: point ``first`` for a part of the tokens, ``second`` for ``share``."""

    first: int
    second: int
    share: float


def best_points(points: Sequence[Point], cost: str) -> list[int]:
    """Which points no other beats in ``cost`` and loss at once, cheapest first.

    Args:
        cost: ``mean_depth`` or ``charged_flops``.
    """
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][cost], points[i]["delta_nats"])):
        if not kept or points[i]["delta_nats"] < points[kept[-1]]["delta_nats"]:
            kept.append(i)
    return kept


def at_cost(points: Sequence[Point], cost: str, goal: float) -> Between | None:
    """Between the two nearest points that no other beats; None where the cheapest costs more.

    Where no more can be had for more, the last point that is worth its cost.
    """
    kept = best_points(points, cost)
    within = [i for i in kept if points[i][cost] <= goal * (1 + _ROUNDING)]
    if not within:
        return None
    first, after = within[-1], kept[len(within) :]
    if not after:
        return Between(first, first, 0.0)
    low, high = points[first][cost], points[after[0]][cost]
    return Between(first, after[0], max(0.0, (goal - low) / (high - low)))


def at_loss(points: Sequence[Point], nats: float) -> Between | None:
    """Where the mean loss falls to ``nats`` above full depth, between points that no other beats.

    None where it never does.
    """
    kept = best_points(points, "mean_depth")
    place = next((n for n, i in enumerate(kept) if points[i]["delta_nats"] <= nats), None)
    if place is None:
        return None
    second = kept[place]
    if place == 0:
        return Between(second, second, 0.0)
    first = kept[place - 1]
    high, low = points[first]["delta_nats"], points[second]["delta_nats"]
    return Between(first, second, (high - nats) / (high - low))


@dataclass(frozen=True, slots=True)
class Stops:
    """What tokens came to; a mixture has fractional depths and losses of no single exit.

    Attributes:
        depth, loss, argmax: of each token, ``(tokens,)``.
        checks: of one token, on average.
    """

    depth: NDArray[Any]
    loss: NDArray[Any]
    argmax: NDArray[Any]
    checks: Checks

    def mixed(self, other: Stops, share: float) -> Stops:
        """With ``other`` for a share of the tokens; the argmax is that of the larger part."""

        def mix(a: Any, b: Any) -> Any:
            return (1 - share) * a + share * b

        return Stops(
            depth=mix(self.depth, other.depth),
            loss=mix(self.loss, other.loss),
            argmax=other.argmax if share > 0.5 else self.argmax,
            checks=Checks(
                codas=mix(self.checks.codas, other.checks.codas),
                heads=mix(self.checks.heads, other.checks.heads),
                products=mix(self.checks.products, other.checks.products),
            ),
        )


@dataclass(frozen=True)
class Curve:
    """A rule's frontier by replay, with what it takes to tell each token's exit.

    Attributes:
        score: ``(tokens, max_depth)``, lower is more settled.
        rules: of each point.
        points: as :func:`loopwise.measure.frontier.score_point` gives them.
        asked: which rows' logits the policy asked for, where it does not need all or none.
    """

    score: NDArray[Any]
    rules: Sequence[ExitRule]
    points: Sequence[Point]
    yardstick: Yardstick
    asked: NDArray[Any] | None = None

    @classmethod
    def swept(
        cls,
        score: NDArray[Any],
        rule: ExitRule,
        yardstick: Yardstick,
        asked: NDArray[Any] | None = None,
    ) -> Self:
        """Every threshold of ``rule``, down to one that no token meets: full depth, checked."""
        points = swept_points(score, rule, yardstick, asked)
        points += replayed_points(score, rule, yardstick, [-math.inf], asked)
        rules = [replace(rule, threshold=p["threshold"], patience=p["patience"]) for p in points]
        return cls(score, rules, points, yardstick, asked)

    @classmethod
    def uniform(cls, yardstick: Yardstick) -> Self:
        """A0: every uniform depth."""
        rules = [ExitRule(policy="fixed", max_depth=r + 1) for r in range(yardstick.max_depth)]
        never = np.full(yardstick.loss.shape, np.inf, dtype=np.float32)
        return cls(never, rules, uniform_points(yardstick), yardstick)

    def stops(self, index: int) -> Stops:
        """Each token's exit at one point."""
        rule = self.rules[index]
        depth = replay(self.score, rule)
        at = np.arange(len(depth)), depth - 1
        checks = replayed_checks(EXITS[rule.policy], depth, self.asked)
        return Stops(depth, self.yardstick.loss[at], self.yardstick.argmax[at], checks)

    def between(self, place: Between) -> Stops:
        """Each token's share of two exits."""
        first = self.stops(place.first)
        return first.mixed(self.stops(place.second), place.share) if place.share else first

    def point(self, stops: Stops) -> Point:
        """A point of its own for a place between two."""
        return score_point(stops.depth, stops.loss, stops.argmax, self.yardstick, stops.checks)
