"""From a budget in nats to an exit rule that keeps it: candidates, risk, guarantee.

The guarantee is Learn-then-Test (Angelopoulos et al. 2021, arXiv:2110.01052) with fixed-sequence
testing. The **unit** is one piece of text (a document, or a block of one): its tokens depend on
each other, pieces drawn alike do not. The **excess** of a unit is the mean over its tokens of the
loss under live exits minus the loss at full depth. A candidate's null hypothesis is that the mean
excess of such units is above the budget. Candidates of one rule are tested from strict to loose and
testing stops at the first that is not rejected, so all that were rejected before it hold together.
Candidates come from other units than those that judge them. Rules that are tested side by side
share the error between them (Bonferroni).

The test bets against the null. With an excess of at most ``clip`` and a stake of 0 < g < 1,

    K_g = product over units of 1 + g (budget - excess) / clip

is not negative and has a mean of at most 1 wherever the mean excess is at or above the budget, for
any distribution and any number of units. So has a weighted average over stakes fixed beforehand,
and by Markov's inequality 1 / K is a p-value (Waudby-Smith and Ramdas 2024, arXiv:2010.09686).
It does not depend on the order of the units and falls as the budget grows. Excess is clipped to
``[-clip, clip]``: from below that only makes the test stricter; from above it is a promise about
the clipped mean, so what was clipped is counted, and a candidate whose unclipped mean is above the
budget never passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.exits.rule import ExitRule
from loopwise.measure.convergence import MOVING_CHANGE, contraction
from loopwise.measure.frontier import replay

STAKES = tuple(0.9 * 2.0**-k for k in range(6))
_WEIGHTS = tuple(2.0**-k / (2 - 2.0**-5) for k in range(6))  # units vary little beside the clip
HORIZON = 32  # recurrences that convergence is watched over, or twice the full depth
CLIP_NATS = 0.05  # at least; a unit that loses more counts as this much
CLIP_BUDGETS = 5  # and at least so many times the largest budget
_SHARES = (0.1, 0.3, 0.5, 0.65, 0.8, 0.95, 1.1)  # of a budget, replayed; candidates stand there
_FINE = 100  # thresholds that candidates are picked from
_DIGITS = 4  # of a threshold; people read and type them

MOVING_SHARE = 0.2  # of tokens still moving at the horizon; above it exits are not trusted
UNSETTLED_KL = 0.01  # nats to the previous output at full depth, median; above it depth is shallow
FLOOR = 1e-4  # a median relative change at or below it is rounding: the latent has arrived

Floats = NDArray[np.float64]


def clip_for(budgets: Iterable[float]) -> float:
    """The clip in nats for budgets that are calibrated together.

    One for all of them, so that what passes at one budget passes at every larger one.
    """
    return max(CLIP_NATS, CLIP_BUDGETS * max(budgets))


def level_of_each(confidence: float, sequences: int) -> float:
    """Error allowed to each of the sequences of candidates that are tested side by side.

    Together they err with a chance of at most ``1 - confidence`` (Bonferroni).
    """
    return (1 - confidence) / sequences


def p_value(excess: NDArray[Any], budget: float, clip: float) -> float:
    """Evidence that the mean clipped excess is within ``budget``; small is good.

    Valid for independent units whatever their distribution and number; see the module.

    Args:
        excess: nats of each unit, ``(units,)``.
        budget: nats, from 0 up to ``clip``.
        clip: nats, above 0.
    """
    assert 0 <= budget <= clip, "clip_for makes the clip larger than every budget"
    if not len(excess) or not excess.mean() <= budget:  # nan passes nothing
        return 1.0
    return min(1.0, math.exp(-_log_capital(np.asarray(excess, dtype=np.float64), budget, clip)))


def _log_capital(excess: Floats, budget: float, clip: float) -> float:
    gain = (budget - excess.clip(-clip, clip)) / clip
    return _log_average([float(np.log1p(g * gain).sum()) for g in STAKES])


def _log_average(logs: Sequence[float]) -> float:
    """Logarithm of the average over stakes of what each made of 1, from logarithms."""
    top = max(logs)
    shares = zip(_WEIGHTS, logs, strict=True)
    return top + math.log(sum(weight * math.exp(x - top) for weight, x in shares))


def upper_bound(excess: NDArray[Any], level: float, clip: float) -> float:
    """Upper confidence bound of the mean clipped excess, nats; inf where none below the clip.

    The smallest budget from 0 on at which the p-value is at most ``level``.
    """
    if p_value(excess, clip, clip) > level:
        return math.inf
    low, high = 0.0, clip
    for _ in range(60):
        middle = (low + high) / 2
        if p_value(excess, middle, clip) <= level:
            high = middle
        else:
            low = middle
    return 0.0 if high < 1e-12 else high


def units_needed(budget: float, level: float, clip: float) -> int:
    """Units below which not even an excess of 0 in every one of them would pass."""

    def enough(n: int) -> bool:
        logs = [n * math.log1p(g * budget / clip) for g in STAKES]
        return _log_average(logs) >= -math.log(level)

    high = 1
    while not enough(high):
        high *= 2
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def unit_means(values: NDArray[Any], unit: NDArray[Any]) -> Floats:
    """Mean over the tokens of each unit, ``(units,)``.

    Args:
        values: ``(tokens,)``.
        unit: ``(tokens,)``, from 0 without gaps.
    """
    sums = np.bincount(unit, weights=values.astype(np.float64))
    return sums / np.bincount(unit)


@dataclass(frozen=True)
class Judged:
    """One candidate, run live on the judging units.

    Attributes:
        rule: policy, threshold, bounds; ``fixed`` for a uniform depth.
        excess: nats of each unit, ``(units,)``.
        charged_flops: of a token on average, checks included.
        figures: what else was measured, as plain values.
    """

    rule: ExitRule
    excess: Floats
    charged_flops: float
    figures: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What testing one sequence of candidates found.

    Attributes:
        accepted: for each budget the candidates within it, strict to loose.
        tried: all that were run; the last ones may be within no budget.
    """

    accepted: dict[float, list[Judged]]
    tried: list[Judged]

    def cheapest(self, budget: float) -> Judged | None:
        """The accepted candidate of the least charged compute."""
        of = self.accepted[budget]
        return min(of, key=lambda j: j.charged_flops) if of else None


def judge_sequence(
    candidates: Iterable[Judged], budgets: Sequence[float], level: float, clip: float
) -> Verdict:
    """Fixed-sequence test: walk from strict to loose, each budget until its first failure.

    Candidates are drawn one at a time, and none after every budget has failed. The order must be
    fixed without looking at the units that judge.

    Args:
        level: error allowed to this sequence, for each budget.
    """
    accepted: dict[float, list[Judged]] = {b: [] for b in budgets}
    tried: list[Judged] = []
    still = list(budgets)
    for candidate in candidates:
        tried.append(candidate)
        still = [b for b in still if p_value(candidate.excess, b, clip) <= level]
        for budget in still:
            accepted[budget].append(candidate)
        if not still:
            break
    return Verdict(accepted, tried)


@dataclass(frozen=True)
class Choice:
    """The best exit rule and the best uniform depth within a budget; None where none is.

    Attributes:
        speedup: of the rule over uniform depth in wall clock, ``low`` and ``high`` of the repeats;
            None: not timed.
    """

    rule: Judged | None
    uniform: Judged | None
    speedup: Mapping[str, float] | None = None

    @property
    def by_wall_clock(self) -> bool:
        """Whether one of the two was faster in every repeat."""
        return self.speedup is not None and not self.speedup["low"] <= 1 <= self.speedup["high"]

    @property
    def cheaper(self) -> Judged | None:
        """What was faster every time; else what costs less in charged compute, or is uniform."""
        if self.speedup is not None and self.by_wall_clock:
            return self.rule if self.speedup["low"] > 1 else self.uniform
        found = [j for j in (self.uniform, self.rule) if j is not None]
        return min(found, key=lambda j: j.charged_flops) if found else None


def choose(verdicts: Mapping[str, Verdict], budget: float) -> Choice:
    """What competes at one budget, from the verdicts by policy; ``fixed`` is uniform depth."""
    best = {name: verdict.cheapest(budget) for name, verdict in verdicts.items()}
    rules = [j for name, j in best.items() if j is not None and name != "fixed"]
    return Choice(
        rule=min(rules, key=lambda j: j.charged_flops) if rules else None,
        uniform=best.get("fixed"),
    )


def propose_thresholds(
    score: NDArray[Any],
    rule: ExitRule,
    loss: NDArray[Any],
    unit: NDArray[Any],
    budgets: Sequence[float],
) -> list[float]:
    """Thresholds to test, from strict to loose, by replay on units that judge nothing.

    For each budget those whose replayed excess is nearest to some shares of it. Empty where the
    rule does not tell tokens apart.

    Args:
        score: of the rule, ``(tokens, depth)``, lower is more settled.
        rule: its threshold is not used; ``max_depth`` is full depth.
        loss: nats at each depth, ``(tokens, depth)``.
        unit: ``(tokens,)``.
    """
    usable = score[:, : rule.max_depth]
    finite = usable[np.isfinite(usable)]
    if not finite.size:
        return []
    quantiles = np.quantile(finite, np.linspace(0, 1, _FINE))
    readable = sorted({float(f"{t:.{_DIGITS}g}") for t in quantiles})
    fine, excess = _saving(readable, score, rule, loss, unit)
    if not fine:
        return []
    worst = np.maximum.accumulate(excess)  # a looser threshold is not taken for a better one
    picked = {
        int(np.abs(worst - share * budget).argmin()) for budget in budgets for share in _SHARES
    }
    return [fine[i] for i in sorted(picked)]


def _saving(
    thresholds: Sequence[float],
    score: NDArray[Any],
    rule: ExitRule,
    loss: NDArray[Any],
    unit: NDArray[Any],
) -> tuple[list[float], Floats]:
    """Thresholds that end some token early, with their replayed mean excess in nats."""
    kept, excess = [], []
    for threshold in thresholds:
        depth = replay(score, replace(rule, threshold=threshold))
        if depth.min() < rule.max_depth:
            kept.append(threshold)
            at = loss[np.arange(len(depth)), depth - 1]
            excess.append(unit_means(at - loss[:, rule.max_depth - 1], unit).mean())
    return kept, np.array(excess)


def judge_convergence(
    change: NDArray[Any], kl: NDArray[Any], full_depth: int, diverged: str | None = None
) -> dict[str, Any]:
    """Whether the loop settles, so that exits which watch it settle can be trusted.

    Two questions: whether it converges at all, and whether it has by full depth. A loop that
    converges but is cut short leaves such exits little to see, yet what they see means what it
    should.

    Args:
        change: relative latent change, ``(tokens, horizon)``.
        kl: KL(p_r || p_{r-1}) in nats, ``(tokens, horizon)``; +inf at recurrence 1.
        full_depth: recurrences that budgets are counted from.
        diverged: why a longer horizon could not be run.
    Returns:
        ``converges``; ``settled`` by full depth; ``evidence`` for people, one clause per finding
        (what speaks against either, or all where nothing does), and what it rests on.
    """
    measured = contraction(change, floor=FLOOR)
    rate, moving = measured["rate"], measured["moving_share"]
    arrived = float(np.median(change[:, -1])) <= FLOOR
    unsettled = float(np.median(kl[:, full_depth - 1]))
    horizon = change.shape[1]
    contracts = measured["converges"] or (arrived and not rate >= 1)
    converges = [
        (contracts, _rate_clause(rate, horizon)),
        (
            moving <= MOVING_SHARE,
            f"{moving:.0%} of tokens still move more than {MOVING_CHANGE:.0%} at recurrence "
            f"{horizon}",
        ),
    ]
    if diverged is not None:
        converges.append((False, diverged))
    settled = unsettled <= UNSETTLED_KL
    clause = f"the median token's output still moves by {unsettled:.2g} nats at depth {full_depth}"
    checks = [*converges, (settled, clause)]
    good = all(fine for fine, _ in checks)
    return {
        "converges": all(fine for fine, _ in converges),
        "settled": settled,
        "evidence": [said for fine, said in checks if good or not fine],
        "rate": None if math.isnan(rate) else rate,
        "moving_share": moving,
        "kl_at_full_depth": unsettled,
        "horizon": horizon,
        "tokens": len(change),
    }


def _rate_clause(rate: float, horizon: int) -> str:
    if math.isnan(rate):
        return f"the median token's steps have no rate over {horizon} recurrences"
    word = "shrink" if rate < 1 else "grow"
    return f"the median token's steps {word} by a factor of {rate:.2f} per recurrence"
