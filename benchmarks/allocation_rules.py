"""Ways to decide on the same scores, for ``allocation_grid``: patience, bounds, fitted thresholds.

Thresholds of their own, by the token read or by recurrence, are fitted on other text: for each
price of a recurrence the ones of the least loss plus depth times price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.exits.rule import ExitRule
from loopwise.measure.crossing import Between, Point, Stops, at_cost, at_loss
from loopwise.measure.frontier import FREE, Yardstick, replay, score_point, spread_thresholds
from loopwise.measure.statistics import mean_with_interval
from loopwise.measure.token_types import TOKEN_TYPES, classify_targets
from loopwise.measure.trace import Trace
from loopwise.tokenizer import Tokenizer

FIRST = "kl, entropy at 1"
READ = {"kl": "kl_prev", "latent-change": "change"}  # the column of a trace that a rule scores by
PRICES = np.geomspace(1e-4, 0.1, 32)  # nats of a recurrence
_SWEEPS = 4
_CUTS = 200  # thresholds tried for a group

Floats = NDArray[np.floating]
Depths = NDArray[np.int64]


@dataclass(frozen=True)
class Frontier:
    """Exits of the judged tokens at several settings of one way to decide.

    Attributes:
        exits: depth of each token, ``(settings, tokens)``.
        points: of each setting.
    """

    exits: list[Depths]
    points: list[Point]
    yardstick: Yardstick

    @classmethod
    def of(cls, exits: list[Depths], yardstick: Yardstick) -> Frontier:
        """Full depth is added, so that every budget is met."""
        exits = [*exits, np.full(len(yardstick.loss), yardstick.max_depth)]
        points = [score_point(d, *_at(d, yardstick), yardstick) for d in exits]
        return cls(exits, points, yardstick)

    def at_loss(self, nats: float) -> Stops:
        place = at_loss(self.points, nats)
        assert place is not None, "full depth, which ends every frontier, loses nothing"
        return self._between(place)

    def point(self, stops: Stops) -> Point:
        return score_point(stops.depth, stops.loss, stops.argmax, self.yardstick)

    def against(self, other: Frontier, mean_depth: float) -> dict[str, float] | None:
        """Loss above the other's at equal depth, in nats; None where this one is deeper always."""
        ours, theirs = (at_cost(f.points, "mean_depth", mean_depth) for f in (self, other))
        if ours is None or theirs is None:
            return None
        lost = self._between(ours).loss - other._between(theirs).loss
        return mean_with_interval(lost, self.yardstick.block)

    def _between(self, place: Between) -> Stops:
        first, second = self._stops(place.first), self._stops(place.second)
        return first.mixed(second, place.share) if place.share else first

    def _stops(self, index: int) -> Stops:
        depth = self.exits[index]
        return Stops(depth, *_at(depth, self.yardstick), FREE)


def _at(depth: Depths, yardstick: Yardstick) -> tuple[Floats, NDArray[Any]]:
    rows = np.arange(len(depth)), depth - 1
    return yardstick.loss[rows], yardstick.argmax[rows]


def rule_frontiers(
    fit: Trace, judge: Trace, yardstick: Yardstick, tokenizer: Tokenizer
) -> dict[str, Frontier]:
    """Every way to decide, judged on the tokens of ``yardstick``; plain ``kl`` comes first."""
    depth = yardstick.max_depth
    loss = fit["loss"][:, :depth].astype(np.float64)
    kinds = tuple(kinds_read(trace, tokenizer) for trace in (fit, judge))
    one_kind = tuple(np.zeros(trace.n_tokens, dtype=np.int64) for trace in (fit, judge))
    found: dict[str, Frontier] = {}
    for name, column in READ.items():
        learn, score = fit[column][:, :depth], judge[column][:, :depth]
        for title, patience, first in (
            (name, 1, 1),
            (f"{name}, patience 2", 2, 1),
            (f"{name}, from 2", 1, 2),
            (f"{name}, from 3", 1, 3),
        ):
            if name == "kl" and first == 2:
                continue  # it has no score at recurrence 1
            rule = ExitRule(policy=name, patience=patience, min_depth=first, max_depth=depth)
            found[title] = Frontier.of(swept(score, rule), yardstick)
        for title, by in (("one fitted", one_kind), ("by token read", kinds)):
            exits = [
                exits_by_group(score, by[1], group_thresholds(learn, loss, by[0], price))
                for price in PRICES
            ]
            found[f"{name}, {title}"] = Frontier.of(exits, yardstick)
        exits = [first_below(score, recurrence_thresholds(learn, loss, p)) for p in PRICES]
        found[f"{name}, by recurrence"] = Frontier.of(exits, yardstick)
    return found | {FIRST: entropy_first(fit, judge, yardstick)}


def entropy_first(fit: Trace, judge: Trace, yardstick: Yardstick) -> Frontier:
    """A1 that may stop at recurrence 1, where it has no KL yet but has read the output already.

    Its score there is the entropy; thresholds of each recurrence are fitted.
    """
    depth = yardstick.max_depth
    learn, score = (_entropy_then_kl(trace, depth) for trace in (fit, judge))
    loss = fit["loss"][:, :depth].astype(np.float64)
    exits = [first_below(score, recurrence_thresholds(learn, loss, p)) for p in PRICES]
    return Frontier.of(exits, yardstick)


def _entropy_then_kl(trace: Trace, depth: int) -> Floats:
    return np.column_stack((trace["entropy"][:, 0], trace["kl_prev"][:, 1:depth]))


def swept(score: Floats, rule: ExitRule) -> list[Depths]:
    """Exits at thresholds over all that the scores allow."""
    return [replay(score, replace(rule, threshold=t)) for t in spread_thresholds(score, rule)]


def kinds_read(trace: Trace, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Type of the token each prediction is made from, which is known when it stops.

    The first of a block is taken for one that begins a word.
    """
    token = trace["token"]
    before = np.where(trace["column"] == 0, trace["target"], np.roll(token, 1))
    return classify_targets(tokenizer, before, token).astype(np.int64)


def first_below(score: Floats, thresholds: Floats) -> Depths:
    """First recurrence whose score is at most its threshold, else full depth.

    Args:
        score: ``(tokens, depth)``.
        thresholds: ``(depth,)``, or one row for each token.
    """
    hit = score <= thresholds
    hit[:, -1] = True
    return hit.argmax(axis=1) + 1


def exits_by_group(score: Floats, group: NDArray[np.int64], thresholds: Floats) -> Depths:
    """Exits where every group has one threshold, ``(groups,)``."""
    return first_below(score, thresholds[group][:, None])


def group_thresholds(score: Floats, loss: Floats, group: NDArray[np.int64], price: float) -> Floats:
    """For each group the threshold of the least loss plus depth times price."""
    found = np.full(len(TOKEN_TYPES), -np.inf)
    for g in np.unique(group):
        mine, cost = score[group == g], priced(loss[group == g], price)
        finite = mine[:, :-1][np.isfinite(mine[:, :-1])]
        cuts = [-np.inf, *np.unique(np.quantile(finite, np.linspace(0, 1, _CUTS)))]
        totals = [cost[np.arange(len(mine)), first_below(mine, t) - 1].sum() for t in cuts]
        found[g] = cuts[int(np.argmin(totals))]
    return found


def recurrence_thresholds(score: Floats, loss: Floats, price: float) -> Floats:
    """A threshold for each recurrence, one after the other the best beside the others.

    Args:
        score, loss: ``(tokens, depth)``.
        price: nats of a recurrence.
    Returns:
        ``(depth,)``; at full depth all stop, whatever it says.
    """
    cost, rows = priced(loss, price), np.arange(len(loss))
    found = np.full(score.shape[1], -np.inf)
    for _ in range(_SWEEPS):
        for r in range(score.shape[1] - 2, -1, -1):
            here = ~(score[:, :r] <= found[:r]).any(axis=1)
            later = np.where(np.arange(score.shape[1]) > r, found, -np.inf)
            saved = cost[rows, first_below(score, later) - 1] - cost[:, r]
            found[r] = best_cut(score[here, r], saved[here])
    return found


def best_cut(score: Floats, saved: Floats) -> float:
    """The threshold that saves most where all at or below it save ``saved``; -inf for none."""
    known = np.isfinite(score)
    score, saved = score[known], saved[known]
    order = np.argsort(score, kind="stable")
    values, totals = score[order], np.cumsum(saved[order])
    last = np.append(values[1:] > values[:-1], True) if len(values) else np.zeros(0, dtype=bool)
    values, totals = values[last], totals[last]  # equal scores stop together
    best = int(totals.argmax()) if len(totals) else -1
    return float(values[best]) if best >= 0 and totals[best] > 0 else -np.inf


def priced(loss: Floats, price: float) -> Floats:
    return loss + price * np.arange(1, loss.shape[1] + 1)
