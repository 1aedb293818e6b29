"""Running a calibration: convergence, proposals by replay, candidates live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.calibrate.options import CalibrateOptions, Emit, Event, progress
from loopwise.calibrate.texts import Split
from loopwise.errors import DivergenceError
from loopwise.exits import needs_fitting
from loopwise.exits.base import ExitPolicy
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.calibrate import (
    HORIZON,
    Judged,
    Verdict,
    judge_convergence,
    judge_sequence,
    propose_thresholds,
    unit_means,
)
from loopwise.measure.frontier import FREE, equal_depth, replay
from loopwise.measure.live import run_live
from loopwise.measure.price import Checks, live_checks, replayed_checks
from loopwise.measure.statistics import mean_with_interval
from loopwise.measure.units import Units, trace_units
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.costs import flops_per_token
from loopwise.study.measuring import fit_policy

Columns = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Exits:
    """Depth, loss in nats and most likely token of each token at its exit, ``(tokens,)`` each.

    And what the rule's checks took to find it.
    """

    depth: NDArray[Any]
    loss: NDArray[Any]
    argmax: NDArray[Any]
    checks: Checks


class Calibration:
    """One calibration: the model, the two splits, and what full depth does on them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CalibrateOptions,
        full: int,
        split: Split,
        emit: Emit,
    ) -> None:
        self.checkpoint, self.options, self.full = checkpoint, options, full
        self.split, self.emit = split, emit
        self.model = checkpoint.model
        self.costs = flops_per_token(self.model, context=split.unit_tokens // 2)
        self.cost = self.costs.forward(full)  # FLOPs of a token at full depth
        self.budgets = sorted(options.budgets)

    def watch(self) -> Event:
        """Whether the model converges, beyond full depth."""
        limit = self.model.geometry.max_depth
        horizon = max(HORIZON, 2 * self.full)
        horizon = horizon if limit is None else min(horizon, limit)
        columns, stage = ("change", "kl_prev"), "watching convergence"
        diverged = None
        try:
            seen = self._trace(self.split.watched, horizon, columns, stage)
        except DivergenceError as err:
            diverged = str(err).split(":")[0]
            seen = self._trace(self.split.watched, self.full, columns, stage)
        return judge_convergence(seen["change"], seen["kl_prev"], self.full, diverged)

    def fit_missing(self, rules: list[ExitRule]) -> None:
        """Fit the rules that need it on the units that propose, if none was fitted before.

        The checkpoint knows them from then on; nothing is stored yet.
        """
        fitted = self.checkpoint.fitted_policies()
        missing = [rule.policy for rule in rules if needs_fitting(rule.policy)]
        if fitted or not missing:
            return
        limit = self.model.geometry.max_depth
        horizon = min(2 * self.full, limit or 2 * self.full)
        states = {}
        for name in missing:
            self.emit(progress(f"fitting {name}", 0, 1))
            parts = self.split.proposing.batches
            states[name] = fit_policy(name, self.checkpoint, parts, horizon)
            self.emit(progress(f"fitting {name}", 1, 1))
        fitted_on = list(self.split.proposing_documents)
        of = {"weights_hash": self.checkpoint.weights_hash}
        exits = {**of, "policies": states, "fitted_on": fitted_on}
        self.checkpoint = replace(self.checkpoint, exits=exits)

    def judge(self, rules: list[ExitRule]) -> dict[str, Verdict]:
        """Every rule's sequence and that of uniform depths, by policy."""
        fitted = self.checkpoint.fitted_policies()
        policies = {rule.policy: build_policy(rule, fitted, self.model) for rule in rules}
        columns, scored = ("loss", "argmax"), tuple(policies.values())
        proposing = self._trace(
            self.split.proposing, self.full, columns, "proposing thresholds", scored
        )
        judging = self._trace(self.split.judging, self.full, columns, "full depth", scored)
        level, clip = self.split.level, self.split.clip
        verdicts = {
            "fixed": judge_sequence(self._uniform(judging), self.budgets, level, clip),
        }
        for rule in rules:
            name = rule.policy
            thresholds = propose_thresholds(
                proposing[f"score.{name}"],
                rule,
                proposing["loss"],
                self.split.proposing.unit,
                self.budgets,
            )
            candidates = self._live(rule, policies[name], thresholds, judging)
            verdicts[name] = judge_sequence(candidates, self.budgets, level, clip)
        return verdicts

    def _trace(
        self,
        units: Units,
        depth: int,
        columns: tuple[str, ...],
        stage: str,
        policies: tuple[ExitPolicy, ...] = (),
    ) -> Columns:
        def report(done: int, total: int) -> None:
            self.emit(progress(stage, done, total))

        return trace_units(self.model, units, depth, columns, policies, report)

    def _uniform(self, full: Columns) -> Iterator[Judged]:
        """Uniform depths from full depth, which loses nothing and keeps every budget, to 1."""
        for depth in range(self.full, 0, -1):
            rule = ExitRule(policy="fixed", max_depth=depth)
            ran = Exits(
                np.full(len(full["loss"]), depth),
                full["loss"][:, depth - 1],
                full["argmax"][:, depth - 1],
                FREE,
            )
            yield self._judged(rule, ran, ran, full)

    def _live(
        self, rule: ExitRule, policy: ExitPolicy, thresholds: list[float], full: Columns
    ) -> Iterator[Judged]:
        """A rule's thresholds from strict to loose, each run live when its turn comes."""
        batches = self.split.judging.batches
        for i, threshold in enumerate(thresholds):
            at = replace(rule, threshold=threshold)

            def report(done: int, i: int = i) -> None:
                total = len(thresholds) * len(batches)
                self.emit(progress(f"live exits, {rule.policy}", i * len(batches) + done, total))

            found = run_live(self.model, batches, at, policy, report)
            live = Exits(
                found.exit_depth.numpy(),
                found.loss.numpy(),
                found.argmax.numpy(),
                live_checks(policy, found),
            )
            depth = replay(full[f"score.{rule.policy}"], at)
            rows = np.arange(len(depth)), depth - 1
            asked = full.get(f"read.{rule.policy}")
            checks = replayed_checks(type(policy), depth, asked)
            replayed = Exits(depth, full["loss"][rows], full["argmax"][rows], checks)
            yield self._judged(at, live, replayed, full)

    def _judged(self, rule: ExitRule, live: Exits, replayed: Exits, full: Columns) -> Judged:
        figures = {
            "live": self._figures(live, full),
            "replayed": self._figures(replayed, full),
        }
        excess = unit_means(live.loss - full["loss"][:, -1], self.split.judging.unit)
        return Judged(rule, excess, figures["live"]["charged_flops"], figures)

    def _figures(self, exits: Exits, full: Columns) -> Event:
        lost = exits.loss - full["loss"][:, -1]
        excess = unit_means(lost, self.split.judging.unit)
        depth = float(exits.depth.mean())
        flops = exits.checks.flops(self.costs, depth)
        nats = exits.loss.mean(dtype=np.float64, keepdims=True)
        equal = float(equal_depth(nats, full["loss"].mean(axis=0, dtype=np.float64)[None])[0])
        return {
            "mean_depth": depth,
            "p95_depth": float(np.quantile(exits.depth, 0.95)),
            "excess_nats": mean_with_interval(excess, np.arange(len(excess))),
            "token_excess_nats": float(lost.mean()),
            "argmax_agreement": float((exits.argmax == full["argmax"][:, -1]).mean()),
            "equal_uniform_depth": equal,
            "allocation_gain": equal / depth,
            "charged_flops": flops,
            "charged_share": flops / self.cost,
        }
