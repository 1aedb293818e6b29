"""The allocation stage: every rule's frontier on one trace, replayed, and live for some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.data import TokenBatch
from loopwise.errors import TraceError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import Reads
from loopwise.exits.rule import ExitRule, build_policy, why_not_built
from loopwise.measure.certified_fit import judge_certified
from loopwise.measure.convergence import argmax_final_depth
from loopwise.measure.frontier import (
    Yardstick,
    depth_at_budget,
    score_point,
    swept_points,
    uniform_points,
)
from loopwise.measure.latent_kl_fit import judge_latent_kl
from loopwise.measure.live import run_live
from loopwise.measure.price import live_checks
from loopwise.measure.probe_fit import judge_probe
from loopwise.measure.scores import Scores, recorded_asks, recorded_score, why_unknown
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.costs import flops_per_token
from loopwise.settings import MeasureConfig

Event = dict[str, Any]
BUDGETS_NATS = (0.001, 0.01)
MEANINGS = ("uniform", "replayed", "live")
_DECIDES = (Reads.LATENT, Reads.HIDDEN, Reads.LOGITS)  # neither uniform depth nor an oracle


def frontier_stage(
    trace: Trace, checkpoint: Checkpoint, config: MeasureConfig, emit: Callable[[Event], None]
) -> dict[str, Any]:
    """Every rule's frontier: replayed at all thresholds, live rules live at some of them.

    A rule that this trace and this checkpoint cannot judge is named under ``left_out`` with the
    reason, and warned of where it was to run live.

    Raises:
        TraceError: the trace was taken of other weights.
    """
    if trace.header["weights_hash"] != checkpoint.weights_hash:
        raise TraceError(
            f"trace {str(trace.folder)!r} was taken of other weights than "
            f"{str(checkpoint.path)!r}; measure again"
        )
    costs = flops_per_token(checkpoint.model, context=trace.header["seq"] // 2)
    mean = trace.header["trained_mean_depth"] or trace.horizon
    max_depth = max(1, min(round(mean), trace.horizon))
    yardstick = Yardstick.of(trace, max_depth, costs)
    policies: dict[str, Any] = {"fixed": {"uniform": uniform_points(yardstick)}}
    left_out: dict[str, str] = {}
    if max_depth > 1:
        fitted = checkpoint.fitted_policies()
        names = [name for name in EXITS if EXITS[name].reads in _DECIDES]
        left_out = _left_out(names, trace, checkpoint)
        live = _LiveRuns(trace, checkpoint, yardstick, config, emit)
        policies |= _oracles(trace, yardstick)
        policies |= {
            name: _frontier(name, recorded_score(trace, name, fitted), trace, yardstick, live)
            for name in names
            if name not in left_out
        }
    for name in config.live_rules:
        if name in left_out:
            emit({"event": "warning", "text": f"{name} is left out: {left_out[name]}"})
    return {
        "corpus": trace.header["corpus"],
        "max_depth": max_depth,
        "check_in_recurrences": costs.check_in_recurrences,
        "policies": policies,
        "left_out": left_out,
        "budgets": _budgets(policies),
    }


def _left_out(names: Sequence[str], trace: Trace, checkpoint: Checkpoint) -> dict[str, str]:
    """Rules that this trace and this checkpoint cannot judge, with the reason."""
    fitted, reasons = checkpoint.fitted_policies(), {}
    for name in names:
        why = why_unknown(trace, name, fitted)
        if why is not None and (name in fitted or not needs_fitting(name)):
            why = why_not_built(name, fitted, checkpoint.model) or why
        if why is not None:
            reasons[name] = why
    return reasons


def _frontier(
    name: str, score: Scores, trace: Trace, yardstick: Yardstick, live: _LiveRuns
) -> dict[str, Any]:
    """One rule: its sweep replayed, some of it live for a live rule, its predictions judged."""
    rule = ExitRule(policy=name, max_depth=yardstick.max_depth)
    points = swept_points(score, rule, yardstick, recorded_asks(trace, name))
    out: dict[str, Any] = {"replayed": points}
    if name in live.config.live_rules:
        out["live"] = live.points(rule, points)
    if name in _JUDGES:
        out["judged"] = _JUDGES[name](trace, score[:, : yardstick.max_depth])
    return out


def _oracles(trace: Trace, yardstick: Yardstick) -> dict[str, Any]:
    """Bounds that look ahead: the argmax oracle, and one that knows the KL to the last output."""
    depth = argmax_final_depth(yardstick.argmax)
    at = np.arange(len(depth)), depth - 1
    argmax = score_point(depth, yardstick.loss[at], yardstick.argmax[at], yardstick)
    rule = ExitRule(policy="oracle", max_depth=yardstick.max_depth)
    score = trace["kl_last"]
    return {
        "oracle": {"replayed": [{"threshold": None, **argmax}]},
        "oracle-kl": {"replayed": swept_points(score, rule, yardstick)},
    }


class _LiveRuns:
    """Runs rules again with frozen entries, on the first blocks of a trace."""

    def __init__(
        self,
        trace: Trace,
        checkpoint: Checkpoint,
        yardstick: Yardstick,
        config: MeasureConfig,
        emit: Callable[[Event], None],
    ) -> None:
        blocks = trace.blocks()
        n = max(1, min(config.live_tokens // trace.header["seq"], len(blocks.token_ids)))
        of = trace["block"] < n
        self.yardstick = replace(
            yardstick,
            loss=yardstick.loss[of],
            argmax=yardstick.argmax[of],
            block=yardstick.block[of],
        )
        firsts = range(0, n, config.batch)
        self.batches = [_slice(blocks, a, min(a + config.batch, n)) for a in firsts]
        self.checkpoint, self.config, self.emit = checkpoint, config, emit

    def points(self, rule: ExitRule, replayed: Sequence[Event]) -> list[Event]:
        """Live twins of some replayed points: spread evenly, and where the budgets are met."""
        model = self.checkpoint.model
        policy = build_policy(rule, self.checkpoint.fitted_policies(), model)
        picked = self._pick(replayed)
        stage = f"live exits, {rule.policy}"
        out: list[Event] = []
        for twin in picked:
            self._report(stage, len(out), len(picked))
            swept = {name: twin[name] for name in ("threshold", "patience")}
            at = replace(rule, **swept)
            result = run_live(model, self.batches, at, policy)
            point = score_point(
                result.exit_depth.numpy(),
                result.loss.numpy(),
                result.argmax.numpy(),
                self.yardstick,
                live_checks(policy, result),
            )
            out.append({**swept, "tokens": len(result.loss), **point})
        self._report(stage, len(out), len(picked))
        return out

    def _pick(self, replayed: Sequence[Event]) -> list[Event]:
        count = min(self.config.live_thresholds, len(replayed))
        picked = {round(i) for i in np.linspace(0, len(replayed) - 1, count)}
        for budget in BUDGETS_NATS:
            point = depth_at_budget(replayed, budget)
            if point is not None:  # live may need a stricter threshold than replayed
                at = list(replayed).index(point)
                picked |= set(range(at, min(at + 3, len(replayed))))
        return [replayed[i] for i in sorted(picked)]

    def _report(self, stage: str, done: int, total: int) -> None:
        self.emit({"event": "progress", "stage": stage, "done": done, "total": total})


def _slice(blocks: TokenBatch, first: int, last: int) -> TokenBatch:
    return TokenBatch(
        token_ids=blocks.token_ids[first:last],
        targets=blocks.targets[first:last],
        document_ids=blocks.document_ids[first:last],
        positions=blocks.positions[first:last],
        hops=blocks.hops[first:last],
    )


def _judge_probe(trace: Trace, score: Scores) -> dict[str, Any]:
    """Predictions ``(tokens, max_depth)`` against what happened, on text not fitted on."""
    differs: NDArray[np.bool_] = trace["argmax"] != trace["argmax"][:, -1:]
    changes_later = np.maximum.accumulate(differs[:, ::-1], axis=1)[:, ::-1]
    return judge_probe(score.ravel(), changes_later[:, : score.shape[1]].ravel())


def _judge_latent_kl(trace: Trace, score: Scores) -> dict[str, Any]:
    """Predicted KL ``(tokens, max_depth)`` against the KL itself, on text not fitted on."""
    return judge_latent_kl(score, trace["kl_prev"][:, : score.shape[1]])


def _judge_certified(trace: Trace, score: Scores) -> dict[str, Any]:
    """Certificates ``(tokens, max_depth)`` against the answers of every later recurrence."""
    return judge_certified(score, trace["argmax"])


_JUDGES = {  # what predicts can be wrong
    "probe": _judge_probe,
    "latent-kl": _judge_latent_kl,
    "certified": _judge_certified,
}


def _budgets(policies: dict[str, Any]) -> list[Event]:
    """For each rule and meaning: the shallowest point within each budget, or None."""
    return [
        {
            "policy": name,
            "meaning": meaning,
            "budget_nats": budget,
            "point": depth_at_budget(kinds[meaning], budget),
        }
        for name, kinds in policies.items()
        for meaning in MEANINGS
        if meaning in kinds
        for budget in BUDGETS_NATS
    ]
