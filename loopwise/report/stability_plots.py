"""Curves of the stability lab: against steps, against an index, against the number of loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator

from loopwise.report.draw import end_labels, note, panel
from loopwise.report.palette import INK, MUTED, SHADES, Style
from loopwise.report.stability_facts import Array, Lab, Run, binned, median, over_seeds
from loopwise.report.words import TIMES

_STYLES = {
    "lt": Style("lt", SHADES["fixed"][0], "o"),
    "lt-input": Style("lt-input", SHADES["probe"][0], "s"),
    "lt-attn-first": Style("lt-attn-first", SHADES["oracle-kl"][0], "^"),
    "fla": Style("fla", SHADES["latent"][0], "v"),
    "flt": Style("flt", SHADES["kl"][0], "D"),
}
_LABELS_IN = 0.95  # room for variant names at the right
CROSS: dict[str, Any] = {"marker": "x", "markersize": 7, "mew": 2.0, "linestyle": "none"}


class Quantity(NamedTuple):
    """What a figure shows of a run, and how its axis is named."""

    title: str
    unit: str
    of: Callable[[Run], Any]
    log: bool = True


def style(variant: str) -> Style:
    """Look of a variant; one that is not in the table keeps its name and a spare colour."""
    return _STYLES.get(variant, Style(variant, SHADES["other"][0], "P"))


def against_steps(lab: Lab, loops: int, rate: float, what: Quantity) -> Figure | None:
    """Median and range over seeds by step; a cross where a collapsed run stopped."""
    fig, ax = panel(_title(lab, what, loops, rate), "optimiser step", what.unit, right=_LABELS_IN)
    size, labels, ends, drawn = lab.bin, [], [], []
    for variant in lab.variants:
        runs, colour = lab.select(variant, loops, rate), style(variant).colour
        rows = [_positive(binned(what.of(run), size), what.log) for run in runs]
        line, low, high = over_seeds(rows)
        good = np.flatnonzero(np.isfinite(line))
        if not len(good):
            continue
        x = np.minimum((np.arange(len(line)) + 0.5) * size + 0.5, lab.steps)
        if len(runs) > 1:
            ax.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        ax.plot(x, line, color=colour, linewidth=1.3, marker="." if len(good) == 1 else None)
        for run, row in zip(runs, rows, strict=True):
            known = row[np.isfinite(row)]
            if not run.survived and len(known):
                ends.append((run.last_step, float(known[-1]), colour))
        labels.append((float(line[good[-1]]), _name(variant, runs), colour))
        drawn.append(line[good])
    if not drawn:
        return None
    if what.log:
        _log_axis(ax, np.concatenate([*drawn, [y for _, y, _ in ends]]))
    else:
        _loss_limits(ax, lab, drawn)
    bottom, top = ax.get_ylim()
    for x_end, y, colour in ends:
        ax.plot(x_end, min(max(y, bottom), top), color=colour, clip_on=False, zorder=5, **CROSS)
    ax.set_xlim(0, lab.steps)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    end_labels(ax, labels)
    return fig


def against_index(
    lab: Lab, loops: int, rate: float, what: Quantity, x: str, mark: int | None = None
) -> Figure | None:
    """Median and range over seeds by recurrence, layer or depth; collapsed variants dashed.

    Args:
        x: name of the index, which counts from 1.
        mark: index of a vertical line, the loops in training.
    """
    fig, ax = panel(_title(lab, what, loops, rate), x, what.unit, right=_LABELS_IN)
    labels, drawn, longest = [], [], 1
    for variant in lab.variants:
        runs, look = lab.select(variant, loops, rate), style(variant)
        line, low, high = over_seeds([_positive(what.of(run), what.log) for run in runs])
        good = np.flatnonzero(np.isfinite(line))
        if not len(good):
            continue
        at, longest = np.arange(1, len(line) + 1), max(longest, len(line))
        dashes = "-" if any(run.survived for run in runs) else (0, (4, 2))
        if len(runs) > 1:
            ax.fill_between(at, low, high, color=look.colour, alpha=0.16, linewidth=0)
        ax.plot(at, line, color=look.colour, linewidth=1.3, linestyle=dashes)
        ax.plot(at, line, color=look.colour, marker=look.marker, markersize=3.5, linestyle="none")
        labels.append((float(line[good[-1]]), _name(variant, runs), look.colour))
        drawn.append(line[good])
    if not drawn:
        return None
    if what.log:
        _log_axis(ax, np.concatenate(drawn))
    else:
        _judged_limits(ax, lab, drawn)
    ax.set_xlim(0.6, longest + 0.4)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    if mark is not None:
        ax.axvline(mark, color=MUTED, linewidth=1.0, linestyle=(0, (1.5, 1.5)), zorder=0)
        text = f" trained at K = {mark}"
        note(ax, mark, 0.98, text, INK, va="top", transform=ax.get_xaxis_transform())
    end_labels(ax, labels)
    return fig


def against_loops(lab: Lab, rate: float, what: Quantity) -> Figure | None:
    """Each seed, and the median joined, for each number of loops in training."""
    fig, ax = panel(_title(lab, what, None, rate), "loops K in training", what.unit, right=0.95)
    labels, drawn = [], []
    for i, variant in enumerate(lab.variants):
        look, medians = style(variant), []
        shift = 0.12 * (i - (len(lab.variants) - 1) / 2)
        everyone: list[Run] = []
        for place, loops in enumerate(lab.loops):
            runs = lab.select(variant, loops, rate)
            everyone += runs
            middle = median(_one(run, what) for run in runs)
            medians.append(math.nan if middle is None else middle)
            for run in runs:
                value = _one(run, what)
                if math.isfinite(value):
                    drawn.append(value)
                    mark = {"marker": look.marker, "markersize": 4.5} if run.survived else CROSS
                    ax.plot(place + shift, value, color=look.colour, **mark)
        known = [m for m in medians if math.isfinite(m)]
        if known:
            ax.plot(
                np.arange(len(medians)) + shift, medians, color=look.colour, linewidth=1, alpha=0.6
            )
            labels.append((known[-1], _name(variant, everyone), look.colour))
    if not drawn:
        return None
    _log_axis(ax, np.array([*drawn, 1.0]))
    ax.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (5, 2)), zorder=1)
    ax.set_xticks(range(len(lab.loops)), [str(k) for k in lab.loops])
    ax.set_xlim(-0.5, len(lab.loops) - 0.5)
    ax.grid(False, axis="x")
    end_labels(ax, labels)
    return fig


def _one(run: Run, what: Quantity) -> float:
    """The number of a run, NaN where a logarithm has no place for it."""
    value = float(what.of(run))
    return value if value > 0 else math.nan


def _title(lab: Lab, what: Quantity, loops: int | None, rate: float) -> str:
    parts = [what.title]
    if loops is not None:
        parts.append(f"K = {loops}")
    if len(lab.rates) > 1:
        parts.append(f"lr {rate:g}")
    return " · ".join(parts)


def _name(variant: str, runs: list[Run]) -> str:
    """Name at the end of a line, with a cross where no seed survived."""
    return style(variant).label + ("" if any(r.survived for r in runs) else f" {TIMES}")


def _positive(values: Array, log: bool) -> Array:
    return np.where(values > 0, values, np.nan) if log else values


def _log_axis(ax: Any, values: Array) -> None:
    ax.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    margin = max(1.25, (high / low) ** 0.06)
    low, high = low / margin, high * margin
    ax.set_ylim(low, high)
    ax.yaxis.set_major_locator(log_ticks(low, high))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: plain(v)))
    ax.minorticks_off()


def log_ticks(low: float, high: float) -> Locator:
    """Powers of ten, or closer where those would leave the axis bare."""
    if high / low < 6:
        return MaxNLocator(5)
    subs = (1.0, 2.0, 5.0) if high / low < 60 else (1.0,)
    return LogLocator(base=10, subs=subs, numticks=8)


def plain(value: float) -> str:
    """1, 0.05, 200; powers of ten outside 0.001 .. 10,000."""
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _loss_limits(ax: Any, lab: Lab, drawn: list[Array]) -> None:
    """Room for what was learned: losses above the floor are cut soon, the floor is drawn."""
    low = min(float(line.min()) for line in drawn)
    high = max(lab.floor, low) * 1.06
    ax.set_ylim(low - 0.04 * (high - low), high)
    ax.axhline(lab.floor, color=INK, linewidth=0.9, linestyle=(0, (5, 2)), zorder=1)
    place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "top"}
    note(ax, 0.99, lab.floor - 0.015 * (high - low), "unigram entropy", INK, **place)


def _judged_limits(ax: Any, lab: Lab, drawn: list[Array]) -> None:
    """Close around the losses, as far as the floor."""
    low = min(float(line.min()) for line in drawn)
    high = max(min(max(float(line.max()) for line in drawn), lab.floor), low + 0.05)
    ax.set_ylim(low - 0.08 * (high - low), high + 0.2 * (high - low))
