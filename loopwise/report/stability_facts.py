"""A stability grid as numbers: its cells, their logs, and what is derived from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.measure.stability import CollapseRule, running_std
from loopwise.report.facts import Results, read_versioned
from loopwise.train.metrics import read_metrics

Array = NDArray[np.float64]

OSCILLATION_WINDOW = 50  # steps; shorter where the runs are
TAIL_SHARE = 0.1  # the last of a run's steps, for "at the end"
_MAX_POINTS = 240  # of a curve; more steps than that are averaged in bins
_REMEDY = "make it with 'loopwise stability'"
_TRAIN = ("steps", "seq", "micro_batch", "accumulation")
_CELL = ("cell", "variant", "loops", "lr", "seed", "status", "step", "reason")


@dataclass(frozen=True)
class Run:
    """One cell: its record, and its log by step; NaN where nothing finite was logged.

    Attributes:
        last_step: the last one in the log, or the one of the record.
        loss, grad_norm: ``(steps,)``.
        latent, latent_grad: ``(steps, recurrences)``.
        attn, mlp: gradient norms, ``(steps, layers)``.
    """

    record: dict[str, Any]
    last_step: int
    loss: Array
    grad_norm: Array
    latent: Array
    latent_grad: Array
    attn: Array
    mlp: Array

    @property
    def survived(self) -> bool:
        return self.record["status"] == "survived"

    @property
    def loops(self) -> int:
        return int(self.record["loops"])

    @property
    def final_loss(self) -> float:
        return _value(self.record.get("final_loss_nats"))

    def spectrum(self, key: str) -> float:
        return _value((self.record.get("spectrum") or {}).get(key))

    @property
    def loss_by_depth(self) -> Array:
        """Held-out loss at 1 .. 2K loops; empty for a run that was not judged."""
        table = self.record.get("loss_nats_by_depth") or {}
        return np.array([_value(table[r]) for r in sorted(table, key=int)])

    def tail(self, values: Array) -> Array:
        """Mean over the last tenth of the steps this run made, column by column."""
        count = max(1, math.ceil(TAIL_SHARE * self.last_step))
        return mean(values[max(0, self.last_step - count) : self.last_step])

    @property
    def latent_ends(self) -> tuple[float, float]:
        """Latent norm at the first loop and at loop K, at the end of the run."""
        norms = self.tail(self.latent)
        if len(norms) < self.loops:
            return math.nan, math.nan
        return float(norms[0]), float(norms[self.loops - 1])

    @property
    def growth(self) -> float:
        first, last = self.latent_ends
        return last / first if first else math.nan


@dataclass(frozen=True)
class Lab:
    """A finished grid."""

    results: Results
    runs: list[Run]

    @property
    def train(self) -> dict[str, Any]:
        return self.results["settings"]["train"]

    @property
    def steps(self) -> int:
        return int(self.train["steps"])

    @property
    def floor(self) -> float:
        return float(self.results["unigram_nats"])

    @property
    def rule(self) -> CollapseRule:
        stored = self.results["grid"]["collapse"]
        return CollapseRule(**{f.name: stored[f.name] for f in fields(CollapseRule)})

    @property
    def tokens_per_step(self) -> int:
        return int(self.train["seq"] * self.train["micro_batch"] * self.train["accumulation"])

    @cached_property
    def variants(self) -> list[str]:
        """In the order of the grid; those without a cell are left out."""
        found = dict.fromkeys(run.record["variant"] for run in self.runs)
        asked = [v for v in self.results["grid"]["variants"] if v in found]
        return asked + [v for v in found if v not in asked]

    @cached_property
    def loops(self) -> list[int]:
        return sorted({run.loops for run in self.runs})

    @cached_property
    def rates(self) -> list[float]:
        return sorted({run.record["lr"] for run in self.runs})

    @property
    def main_rate(self) -> float:
        """The learning rate shown first: that of the settings, else the middle one."""
        rate = self.results["settings"]["optim"].get("lr")
        return rate if rate in self.rates else self.rates[len(self.rates) // 2]

    @property
    def window(self) -> int:
        """Steps of the running standard deviation."""
        return min(OSCILLATION_WINDOW, max(2, self.steps // 5))

    @property
    def bin(self) -> int:
        """Steps averaged into one point of a curve."""
        return math.ceil(self.steps / _MAX_POINTS)

    def select(self, variant: str, loops: int, rate: float) -> list[Run]:
        """The seeds of one place in the grid."""
        key = variant, loops, rate
        return [
            run for run in self.runs if (run.record["variant"], run.loops, run.record["lr"]) == key
        ]

    def oscillation(self, run: Run) -> Array:
        return running_std(run.grad_norm, self.window)

    def typical_oscillation(self, run: Run) -> float:
        """Median over the run's steps; NaN where it is shorter than the window."""
        middle = median(self.oscillation(run))
        return math.nan if middle is None else middle

    def places(self) -> Iterable[tuple[str, int, float, list[Run]]]:
        """Everything that was run: variant, loops, rate and its seeds."""
        for variant in self.variants:
            for loops in self.loops:
                for rate in self.rates:
                    if runs := self.select(variant, loops, rate):
                        yield variant, loops, rate, runs


def read_lab(folder: Path) -> Lab:
    """A grid folder.

    Raises:
        RunFolderError: it holds no valid ``results.json``.
    """
    results = read_versioned(folder, "loopwise-stability", _missing, _REMEDY)
    return gather(results, folder)


def gather(results: Results, folder: Path | None) -> Lab:
    """A grid's results with the logs of its cells; without a folder the logs are empty."""
    steps = int(results["settings"]["train"]["steps"])
    runs = []
    for record in results["cells"]:
        log = folder / "cells" / record["cell"] / "metrics.jsonl" if folder else None
        runs.append(_read_run(record, log, steps))
    return Lab(results, runs)


def _missing(results: Results) -> list[str]:
    """Keys that a results file of a grid has and this one has not."""
    rule = tuple(f.name for f in fields(CollapseRule))
    needed: dict[str, tuple[str, ...]] = {
        "grid": ("variants", "loops", "seeds", "collapse"),
        "settings": ("model", "optim", "train"),
    }
    lacking = [k for k in ("unigram_nats", "cells") if not results.get(k)]
    for part, keys in needed.items():
        lacking += _lacking(results.get(part), keys, part)
    if not lacking:
        lacking += _lacking(results["grid"]["collapse"], rule, "grid.collapse")
        lacking += _lacking(results["settings"]["train"], _TRAIN, "settings.train")
        for i, cell in enumerate(results["cells"]):
            lacking += _lacking(cell, _CELL, f"cells[{i}]")
    return lacking


def _lacking(table: Any, keys: Iterable[str], name: str) -> list[str]:
    if not isinstance(table, dict):
        return [name]
    return [f"{name}.{k}" for k in keys if k not in table]


def _read_run(record: dict[str, Any], log: Path | None, steps: int) -> Run:
    events = read_metrics(log, "step") if log else []
    diagnostics = read_metrics(log, "diagnostics") if log else []
    logged = max((e["step"] for e in events), default=0)

    def column(key: str) -> Array:
        out = np.full(max(steps, logged), np.nan)
        for e in events:
            out[e["step"] - 1] = _value(e.get(key))
        return out

    def columns(key: str) -> Array:
        names = list(dict.fromkeys(name for e in diagnostics for name in e.get(key, {})))
        if all(name.isdigit() for name in names):  # recurrences, each in its own column
            names = [str(r) for r in range(1, max(map(int, names), default=0) + 1)]
        last = max((e["step"] for e in diagnostics), default=0)
        out = np.full((max(steps, last), len(names)), np.nan)
        for e in diagnostics:
            row = e.get(key, {})
            out[e["step"] - 1] = [_value(row.get(name)) for name in names]
        return out

    return Run(
        record=record,
        last_step=logged or record["step"] or 0,
        loss=column("loss_nats"),
        grad_norm=column("grad_norm"),
        latent=columns("latent_norm"),
        latent_grad=columns("latent_grad_norm"),
        attn=columns("grad_norm_attn"),
        mlp=columns("grad_norm_mlp"),
    )


def mean(values: Array) -> Array:
    """Mean of the finite values along the first axis; NaN where there are none."""
    good = np.isfinite(values)
    total = np.where(good, values, 0.0).sum(axis=0)
    count = good.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def median(values: Iterable[float]) -> float | None:
    """Median of the finite values, None where there are none."""
    good = [v for v in values if math.isfinite(v)]
    return float(np.median(good)) if good else None


def binned(values: Array, size: int) -> Array:
    """Means over ``size`` consecutive steps."""
    short = -len(values) % size
    padded = np.concatenate([values, np.full((short, *values.shape[1:]), np.nan)])
    stacked = padded.reshape(-1, size, *values.shape[1:])
    return mean(stacked.swapaxes(0, 1))


def over_seeds(rows: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Median, smallest and largest over the seeds that have a value; NaN where none has."""
    width = max((len(row) for row in rows), default=0)
    table = np.full((len(rows), width), np.nan)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    out = np.full((3, width), np.nan)
    some = np.isfinite(table).any(axis=0)
    good = np.where(np.isfinite(table), table, np.nan)[:, some]
    if some.any():
        out[:, some] = np.nanmedian(good, 0), np.nanmin(good, 0), np.nanmax(good, 0)
    return out[0], out[1], out[2]


def middle(runs: list[Run], value: Callable[[Run], float]) -> float | None:
    """Median over seeds of one number."""
    return median(value(run) for run in runs)


def _value(number: float | None) -> float:
    return math.nan if number is None else float(number)
