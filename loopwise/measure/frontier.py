"""Quality against depth and compute, for any policy and every threshold, from one trace.

Two meanings of an exit, always named: ``replayed`` takes the decision on a full-depth trajectory,
as paper 1 does; ``live`` freezes a settled token's latent, so later tokens attend to its frozen
entries (:mod:`loopwise.measure.live`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwise.exits import EXITS
from loopwise.exits.rule import ExitRule, should_exit
from loopwise.measure.price import Checks, replayed_checks
from loopwise.measure.statistics import block_sums
from loopwise.measure.trace import Trace
from loopwise.models.costs import Costs

FREE = Checks()


@dataclass(frozen=True)
class Yardstick:
    """Uniform depth on the same tokens: what every rule is held against.

    Attributes:
        loss: ``(tokens, max_depth)`` nats.
        argmax: ``(tokens, max_depth)``.
        block: ``(tokens,)`` unit of resampling.
        costs: FLOPs of the model's parts.
    """

    loss: NDArray
    argmax: NDArray
    block: NDArray
    costs: Costs

    @classmethod
    def of(cls, trace: Trace, max_depth: int, costs: Costs) -> Yardstick:
        n = min(max_depth, trace.horizon)
        return cls(trace["loss"][:, :n], trace["argmax"][:, :n], trace["block"], costs)

    @property
    def max_depth(self) -> int:
        return self.loss.shape[1]

    def uniform_depth_at(self, nats: float) -> float:
        """Smallest uniform depth of that mean loss; see :func:`equal_depth`."""
        return float(equal_depth(np.array([nats]), self.loss.mean(axis=0)[None])[0])


def equal_depth(nats: NDArray, curves: NDArray) -> NDArray[np.float64]:
    """Smallest uniform depth of the same mean loss, linear between depths.

    1 where depth 1 is already as good; where no depth is, the first depth of the lowest loss.

    Args:
        nats: ``(n,)`` mean losses.
        curves: ``(n, max_depth)`` mean loss at each uniform depth.
    """
    best = np.minimum.accumulate(curves, axis=1)
    goal = np.maximum(nats, best[:, -1])
    after = (best <= goal[:, None]).argmax(axis=1)  # index of the first depth that is as good
    rows = np.arange(len(nats))
    before = np.maximum(after - 1, 0)
    high, low = best[rows, before], best[rows, after]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(high > low, (high - goal) / (high - low), 0.0)
    return np.where(after == 0, 1.0, before + 1 + np.clip(part, 0.0, 1.0))


def replay(score: NDArray, rule: ExitRule) -> NDArray[np.int64]:
    """Exit depth of each token on a full-depth trajectory.

    Args:
        score: ``(tokens, horizon)``, lower is more settled.
        rule: its policy's name is not used; ``max_depth`` is cut to the horizon.
    """
    scores = torch.from_numpy(np.ascontiguousarray(score))
    rule = replace(rule, max_depth=min(rule.max_depth, scores.shape[1]))
    hits = torch.zeros(len(scores), dtype=torch.int64)
    depth = torch.zeros_like(hits)
    for r in range(1, rule.max_depth + 1):
        stop, hits = should_exit(rule, scores[:, r - 1], hits, r)
        depth[stop & (depth == 0)] = r
    return depth.numpy()


def score_point(
    depth: NDArray,
    loss: NDArray,
    argmax: NDArray,
    yardstick: Yardstick,
    checks: Checks = FREE,
) -> dict[str, float]:
    """One point of a frontier: what a set of exits cost in quality, and saved in depth.

    Args:
        depth, loss, argmax: of each token at its exit, ``(tokens,)``.
        checks: what the rule is charged for besides.
    """
    full = yardstick.max_depth
    columns = np.column_stack([loss - yardstick.loss[:, -1], loss, depth, yardstick.loss])
    sums = block_sums(columns, yardstick.block)
    resampled = sums.resampled_means()
    low, high = np.quantile(resampled[:, 0], [0.025, 0.975])
    gains = equal_depth(resampled[:, 1], resampled[:, 3:]) / resampled[:, 2]
    gain_low, gain_high = np.quantile(gains, [0.025, 0.975])
    delta, nats, mean_depth = (float(x) for x in sums.mean[:3])
    equal = float(equal_depth(sums.mean[1:2], sums.mean[None, 3:])[0])
    costs = yardstick.costs
    charged = checks.flops(costs, mean_depth)
    return {
        "mean_depth": mean_depth,
        "p95_depth": float(np.quantile(depth, 0.95)),
        "loss_nats": nats,
        "delta_nats": delta,
        "delta_low": float(low),
        "delta_high": float(high),
        "argmax_agreement": float((argmax == yardstick.argmax[:, -1]).mean()),
        "charged_flops": charged,
        "charged_share": charged / costs.forward(full),
        "cap": costs.cap(full, mean_depth),
        "equal_uniform_depth": equal,
        "allocation_gain": equal / mean_depth,
        "gain_low": float(gain_low),
        "gain_high": float(gain_high),
    }


def uniform_points(yardstick: Yardstick) -> list[dict[str, Any]]:
    """A0: every uniform depth up to the largest."""
    points = []
    for r in range(1, yardstick.max_depth + 1):
        depth = np.full(len(yardstick.loss), r)
        columns = yardstick.loss[:, r - 1], yardstick.argmax[:, r - 1]
        points.append({"threshold": None, **score_point(depth, *columns, yardstick)})
    return points


def replayed_points(
    score: NDArray,
    rule: ExitRule,
    yardstick: Yardstick,
    thresholds: Sequence[float],
    asked: NDArray | None = None,
) -> list[dict[str, Any]]:
    """A frontier of ``rule`` over ``thresholds``, by replay.

    Args:
        asked: which rows' logits the policy asked for, where it does not need all or none.
    """
    points = []
    for threshold in thresholds:
        depth = replay(score, replace(rule, threshold=threshold))
        at = np.arange(len(depth)), depth - 1
        checks = replayed_checks(EXITS[rule.policy], depth, asked)
        point = score_point(depth, yardstick.loss[at], yardstick.argmax[at], yardstick, checks)
        points.append({"threshold": float(threshold), "patience": rule.patience, **point})
    return points


def swept_points(
    score: NDArray, rule: ExitRule, yardstick: Yardstick, asked: NDArray | None = None
) -> list[dict[str, Any]]:
    """The whole frontier of a policy by replay, loosest first.

    Over thresholds, at every patience from the rule's own up to the published one; where the score
    says only yes or no, as that of ``argmax`` does, a threshold has nothing to choose, and it is
    over the patience at its stricter value.
    """
    usable = score[:, : rule.max_depth]
    values = np.unique(usable[np.isfinite(usable)]).tolist()
    yes_or_no = len(values) <= 2
    most = rule.max_depth - 1 if yes_or_no else EXITS[rule.policy].published_patience
    points = []
    for patience in range(rule.patience, max(most, rule.patience) + 1):
        at = replace(rule, patience=patience)
        thresholds = values[:1] if yes_or_no else spread_thresholds(score, at)
        points += replayed_points(score, at, yardstick, thresholds, asked)
    return points if yes_or_no else sorted(points, key=lambda p: p["mean_depth"])


def spread_thresholds(score: NDArray, rule: ExitRule, count: int = 24) -> list[float]:
    """Thresholds whose mean depths are spread evenly over what the scores allow, loosest first."""
    usable = score[:, : rule.max_depth]
    finite = usable[np.isfinite(usable)]
    if finite.size == 0:
        return []
    candidates = np.unique(np.quantile(finite, np.linspace(0, 1, 161)))
    sample = score[:: max(1, len(score) // 4000)]
    depths = np.array(
        [replay(sample, replace(rule, threshold=float(t))).mean() for t in candidates]
    )
    goals = np.linspace(depths.min(), depths.max(), count)
    picked = {int(np.abs(depths - goal).argmin()) for goal in goals}
    return [float(candidates[i]) for i in sorted(picked, reverse=True)]


def depth_at_budget(points: Sequence[dict[str, Any]], budget_nats: float) -> dict[str, Any] | None:
    """The shallowest point whose 95% interval lies within ``budget_nats`` of full depth.

    Returns:
        That point, or None where the rule never meets the budget.
    """
    within = [p for p in points if p["delta_high"] <= budget_nats]
    return min(within, key=lambda p: p["mean_depth"]) if within else None
