"""Exit rules held against one another on the same tokens: equal depth, compute and quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.bench.common import spread
from loopwise.bench.samples import Samples, decides, left_out
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.convergence import argmax_final_depth, loss_optimal
from loopwise.measure.crossing import Curve, Stops, at_cost, at_loss
from loopwise.measure.frontier import Yardstick, depth_at_budget, equal_depth, score_point
from loopwise.measure.live import run_live
from loopwise.measure.price import live_checks
from loopwise.measure.probe_fit import auroc
from loopwise.measure.statistics import mean_with_interval
from loopwise.models.checkpoint import Checkpoint
from loopwise.settings import MeasureConfig

A0, A1, DEFAULT = "fixed", "kl", "latent-kl"
ORACLES = ("oracle", "oracle-kl")
IMPROVES_NATS = 0.05  # a loss that falls by so much until full depth still improves
_LIVE_TRIES = 4  # thresholds run live, from the replayed one on, until one keeps the budget

Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Every rule's frontier on the tokens of all seeds, and what they are compared at.

    Attributes:
        curves: uniform depth and ``kl`` at least, others by any name; a rule's own policy says
            what it reads.
        seed: which seed drew each token, ``(tokens,)``.
        budget: nats above full depth.
        optimal: the loss-optimal oracle with its null.
    """

    checkpoint: Checkpoint
    samples: Samples
    yardstick: Yardstick
    curves: dict[str, Curve]
    seed: NDArray[np.int64]
    budget: float
    optimal: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint, samples: Samples, depth: int, budget: float) -> Comparison:
        """Replay everything; the traces are not read again."""
        yardstick = samples.yardstick(checkpoint, depth)
        optimal = loss_optimal(yardstick.loss, samples["null_loss"][:, :depth], yardstick.block)
        curves = _curves(checkpoint, samples, yardstick)
        return cls(checkpoint, samples, yardstick, curves, samples.seed, budget, optimal)

    @cached_property
    def equal_depth(self) -> float:
        """Mean depth at which A1 meets the budget."""
        return float(self._at_budget(A1).depth.mean())

    @cached_property
    def equal_flops(self) -> float:
        """Charged compute of a token there."""
        checks = self._at_budget(A1).checks
        return checks.flops(self.yardstick.costs, self.equal_depth)

    def row(self, name: str) -> Row:
        """What replay says of one rule."""
        stops = self._at_budget(name)
        reads = EXITS[self.curves[name].rules[0].policy].reads
        return {
            "name": name,
            "reads": None if reads is Reads.TRUTH else reads.value,
            "equal_depth": self._against(name, "mean_depth", self.equal_depth),
            "equal_compute": self._against(name, "charged_flops", self.equal_flops),
            "equal_nll": {**self.curves[name].point(stops), "by_seed": self._by_seed(stops)},
            "auroc": None if name == A0 else self._auroc(self.curves[name].score),
        }

    def served(self, name: str, say: Callable[[str], None]) -> Row:
        """The rule to serve with: the loosest whose interval lies within the budget, live too."""
        curve = self.curves[name]
        start = depth_at_budget(curve.points, self.budget)
        assert start is not None, "full depth, which ends every curve, is within any budget"
        deeper = [i for i, p in enumerate(curve.points) if p["mean_depth"] >= start["mean_depth"]]
        deeper.sort(key=lambda i: curve.points[i]["mean_depth"])
        for i in deeper[:_LIVE_TRIES]:
            rule = curve.rules[i]
            say(f"live: {rule}")
            found = self.live(rule)
            if found["delta_high"] <= self.budget:
                break
        replayed = {k: curve.points[i][k] for k in ("mean_depth", "delta_nats", "charged_share")}
        return {**found, "within_budget": found["delta_high"] <= self.budget, "replayed": replayed}

    def live(self, rule: ExitRule) -> Row:
        """A point of a frontier from live exits on the same tokens."""
        model, fitted = self.checkpoint.model, self.checkpoint.fitted_policies()
        policy = build_policy(rule, fitted, model)
        found = run_live(model, self.samples.batches(), rule, policy)
        checks = live_checks(policy, found)
        depth, loss, argmax = (t.numpy() for t in (found.exit_depth, found.loss, found.argmax))
        price = checks.one_in_recurrences(type(policy), self.yardstick.costs)
        return {
            "rule": str(rule),
            "check_price_recurrences": price,
            **score_point(depth, loss, argmax, self.yardstick, checks),
        }

    def frontier(self, rows: list[Row]) -> Row:
        """Everything as a figure of the report takes it; few rules show their live point."""
        shown = MeasureConfig().live_rules
        policies: Row = {A0: {"uniform": self.curves[A0].points}}
        for row in rows:
            if row["name"] != A0:
                policies[row["name"]] = {"replayed": self.curves[row["name"]].points}
            if row["name"] in shown:
                policies[row["name"]]["live"] = [row["served"]]
        budgets = [
            {
                "policy": name,
                "meaning": meaning,
                "budget_nats": self.budget,
                "point": depth_at_budget(kinds[meaning], self.budget),
            }
            for name, kinds in policies.items()
            for meaning in kinds
        ]
        return {
            "corpus": f"{self.seed.max() + 1} seeds",
            "max_depth": self.yardstick.max_depth,
            "policies": policies,
            "budgets": budgets,
        }

    def _at_budget(self, name: str) -> Stops:
        place = at_loss(self.curves[name].points, self.budget)
        assert place is not None, "full depth, which ends every curve, loses nothing"
        return self.curves[name].between(place)

    def _at_cost(self, name: str, cost: str, goal: float) -> Stops | None:
        place = at_cost(self.curves[name].points, cost, goal)
        return None if place is None else self.curves[name].between(place)

    def _against(self, name: str, cost: str, goal: float) -> Row | None:
        """Loss above that of A1 and of uniform depth at the same cost; None where it costs more."""
        stops = self._at_cost(name, cost, goal)
        a1, a0 = self._at_cost(A1, cost, goal), self._at_cost(A0, cost, goal)
        if stops is None:
            return None
        assert a1 is not None and a0 is not None, "the goal is A1's own; depth 1 costs less"
        return {
            "mean_depth": float(stops.depth.mean()),
            "vs_a1_nats": self._difference(stops, a1),
            "vs_uniform_nats": self._difference(stops, a0),
        }

    def _difference(self, ours: Stops, other: Stops) -> Row:
        lost = ours.loss.astype(np.float64) - other.loss
        by_seed = [float(lost[self.seed == i].mean()) for i in range(self.seed.max() + 1)]
        return {**mean_with_interval(lost, self.yardstick.block), "by_seed": by_seed}

    def _by_seed(self, stops: Stops) -> Row:
        """Mean depth and allocation gain of the same thresholds on each seed: median and range."""
        depths, gains = [], []
        for i in range(self.seed.max() + 1):
            of = self.seed == i
            depths.append(float(stops.depth[of].mean()))
            nats, curve = stops.loss[of].mean(), self.yardstick.loss[of].mean(axis=0)
            gains.append(float(equal_depth(np.array([nats]), curve[None])[0]) / depths[-1])
        return {"mean_depth": spread(depths), "allocation_gain": spread(gains)}

    def _auroc(self, score: NDArray[Any]) -> Row:
        loss, argmax = self.yardstick.loss, self.yardstick.argmax
        return {
            "argmax_changes": ranking(score, argmax != argmax[:, -1:]),
            "loss_improves": ranking(score, loss - loss[:, -1:] >= IMPROVES_NATS),
        }


def ranking(score: NDArray[Any], label: NDArray[np.bool_]) -> Row:
    """How well a score tells who must go on, 0.5 for one that knows nothing.

    From recurrence 2, the first at which every rule has a score, to the last but one, after which
    nothing can change. One threshold serves all recurrences, so they count together; each alone
    says what a rule knows beside the recurrence. None where all are of one kind.

    Args:
        score: ``(tokens, depth)``, lower is more settled.
        label: of those who must go on, ``(tokens, depth)``.
    """
    inside = slice(1, score.shape[1] - 1)
    score, label = score[:, inside], label[:, inside]

    def of(s: NDArray[Any], y: NDArray[np.bool_]) -> float | None:
        return auroc(s, y) if y.any() and not y.all() else None

    each = [of(s, y) for s, y in zip(score.T, label.T, strict=True)]
    share = float(label.mean()) if label.size else None
    return {"auroc": of(score.ravel(), label.ravel()), "by_recurrence": each, "share": share}


def _curves(checkpoint: Checkpoint, samples: Samples, yardstick: Yardstick) -> dict[str, Curve]:
    curves = {A0: Curve.uniform(yardstick)}
    fitted, unknown = checkpoint.fitted_policies(), left_out(checkpoint)
    for name in EXITS:
        if decides(name) and name not in unknown:
            rule = ExitRule(policy=name, max_depth=yardstick.max_depth)
            score = samples.score(name, fitted)
            curves[name] = Curve.swept(score, rule, yardstick, samples.asked(name))
    return curves | oracle_curves(yardstick, samples["kl_last"])


def oracle_curves(yardstick: Yardstick, kl_last: NDArray[Any]) -> dict[str, Curve]:
    """Bounds that look ahead: the argmax oracle as a score, and the KL to the last output.

    Args:
        kl_last: KL(p_r || p_horizon) in nats, ``(tokens, depth)``.
    """
    ahead = ExitRule(policy="oracle", max_depth=yardstick.max_depth)
    final = argmax_final_depth(yardstick.argmax)[:, None]
    changes = (final > np.arange(1, yardstick.max_depth + 1)).astype(np.float32)
    scores = dict(zip(ORACLES, (changes, kl_last), strict=True))
    return {name: Curve.swept(s, ahead, yardstick) for name, s in scores.items()}
