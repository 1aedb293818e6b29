"""Maps of the stability lab: who survived where, and latent norms by recurrence and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from loopwise.report import words
from loopwise.report.draw import WIDTH_IN, panel
from loopwise.report.palette import INK, MUTED, SHADES, SURFACE
from loopwise.report.stability_facts import Array, Lab, Run, binned, mean, median
from loopwise.report.stability_plots import CROSS, log_ticks, plain

_SURVIVED, _COLLAPSED = SHADES["latent"][0], SHADES["probe"][0]
_ROW_IN = 0.62


def verdicts_by_variant(lab: Lab, rate: float) -> Figure:
    """Variant by loops at one learning rate."""
    title = "Survived seeds" + (f" · lr {rate:g}" if len(lab.rates) > 1 else "")
    return _verdicts(title, "", lab.variants, lab, lambda name, k: lab.select(name, k, rate))


def verdicts_by_rate(lab: Lab, variant: str) -> Figure:
    """Learning rate by loops of one variant."""
    rates = [f"{rate:g}" for rate in reversed(lab.rates)]
    at = dict(zip(rates, reversed(lab.rates), strict=True))
    return _verdicts(
        f"Survived seeds · {variant}",
        "learning rate of matrices",
        rates,
        lab,
        lambda name, k: lab.select(variant, k, at[name]),
    )


def _verdicts(
    title: str, y: str, names: Sequence[str], lab: Lab, runs_of: Callable[[str, int], list[Run]]
) -> Figure:
    """A box for each place, filled by the share that survived; a line where the majority turns."""
    height = 0.9 + _ROW_IN * len(names)
    left = 1.1 if not y else 0.85
    fig, ax = panel(title, "loops K in training", y, height=height, left=left)
    for row, name in enumerate(names):
        for column, loops in enumerate(lab.loops):
            _box(ax, column, row, runs_of(name, loops))
    good = np.array([[_majority(runs_of(name, k)) for k in lab.loops] for name in names])
    _boundary(ax, good)
    ax.set_xticks(range(len(lab.loops)), [str(k) for k in lab.loops])
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.set_xlim(-0.5, len(lab.loops) - 0.5)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)
    return fig


def _box(ax: Any, column: int, row: int, runs: list[Run]) -> None:
    edge = 0.46
    if not runs:
        ax.text(column, row, "not run", color=MUTED, fontsize=8, ha="center", va="center")
        return
    share = sum(run.survived for run in runs) / len(runs)
    split = 2 * edge * share
    for start, width, colour in (
        (column - edge, split, _SURVIVED),
        (column - edge + split, 2 * edge - split, _COLLAPSED),
    ):
        if width > 0:
            box = Rectangle((start, row - edge), width, 2 * edge, linewidth=0)
            box.set(facecolor=colour, alpha=0.25)
            ax.add_patch(box)
    text: dict[str, Any] = {"color": INK, "ha": "center", "va": "center"}
    ax.text(column, row - 0.17, verdict(runs), fontsize=9, fontweight="bold", **text)
    ax.text(column, row + 0.2, detail(runs), fontsize=8, **text)


def verdict(runs: list[Run]) -> str:
    kept = sum(run.survived for run in runs)
    return f"{kept}/{len(runs)}" if kept else f"{words.TIMES} 0/{len(runs)}"


def detail(runs: list[Run]) -> str:
    """Mean loss of the seeds that survived, and the median step of those that did not."""
    losses = np.array([run.final_loss for run in runs if run.survived])
    stops = [float(run.last_step) for run in runs if not run.survived]
    parts = []
    if len(losses):
        parts.append(words.number(_or_none(float(mean(losses))), 3))
    if stops:
        step = median(stops)
        parts.append(f"{words.TIMES} {step:,.0f}" if losses.size else f"step {step:,.0f}")
    return ", ".join(parts)


def _majority(runs: list[Run]) -> float:
    if not runs:
        return math.nan
    return float(2 * sum(run.survived for run in runs) >= len(runs))


def _boundary(ax: Any, good: Array) -> None:
    line = {"color": INK, "linewidth": 2.2, "solid_capstyle": "round", "zorder": 4}
    rows, columns = good.shape
    for i in range(rows):
        for j in range(columns):
            if j + 1 < columns and abs(good[i, j] - good[i, j + 1]) == 1:
                ax.plot([j + 0.5, j + 0.5], [i - 0.5, i + 0.5], **line)
            if i + 1 < rows and abs(good[i, j] - good[i + 1, j]) == 1:
                ax.plot([j - 0.5, j + 0.5], [i + 0.5, i + 0.5], **line)


def latent_map(lab: Lab, runs: list[Run], title: str, limits: tuple[float, float]) -> Figure | None:
    """Latent norm by step and recurrence, averaged over the seeds still running."""
    logs = log_latents(lab, runs)
    if logs is None:
        return None
    fig, ax = panel(title, "optimiser step", "recurrence r", height=2.5, left=0.5, right=0.85)
    scale, deepest = LogNorm(*limits), logs.shape[1]
    span = logs.shape[0] * lab.bin
    image = np.exp(logs).T
    ax.imshow(
        np.ma.masked_invalid(image),
        norm=scale,
        cmap="viridis",
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(0.5, span + 0.5, 0.5, deepest + 0.5),
    )
    for run in runs:
        if not run.survived:
            ax.axvline(run.last_step, color=SURFACE, linewidth=1.6)
            ax.axvline(run.last_step, color=INK, linewidth=0.8)
            ax.plot(run.last_step, deepest + 0.5, color=_COLLAPSED, clip_on=False, **CROSS)
    ax.set_xlim(0.5, span + 0.5)
    ax.grid(False)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    _colour_bar(fig, ax, scale)
    return fig


def log_latents(lab: Lab, runs: list[Run]) -> Array | None:
    """Mean over seeds of the logarithm of the norm, ``(bins, recurrences)``; None without any."""
    deepest = max((run.latent.shape[1] for run in runs), default=0)
    if not deepest:
        return None
    layers = []
    for run in runs:
        table = np.full((lab.steps, deepest), np.nan)
        source = run.latent[: lab.steps]
        table[: len(source), : source.shape[1]] = np.log(np.where(source > 0, source, np.nan))
        layers.append(binned(table, lab.bin))
    out = mean(np.stack(layers))
    return out if np.isfinite(out).any() else None


def _colour_bar(fig: Figure, ax: Any, scale: LogNorm) -> None:
    box = ax.get_position()
    bar = fig.add_axes((box.x1 + 0.1 / WIDTH_IN, box.y0, 0.12 / WIDTH_IN, box.height))
    low, high = float(scale.vmin or 1), float(scale.vmax or 1)
    ramp = np.geomspace(low, high, 128)[:, None]
    bar.pcolormesh([0, 1], np.geomspace(low, high, 129), ramp, norm=scale, rasterized=True)
    bar.set_yscale("log")
    bar.set_ylim(low, high)
    bar.xaxis.set_major_locator(NullLocator())
    bar.yaxis.set_major_locator(log_ticks(low, high))
    bar.yaxis.set_major_formatter(FuncFormatter(lambda v, _: plain(v)))
    bar.yaxis.set_minor_locator(NullLocator())
    bar.yaxis.tick_right()
    bar.tick_params(colors=MUTED, labelsize=8, length=0)
    bar.set_title("norm", fontsize=8, color=INK, pad=3)
    for spine in bar.spines.values():
        spine.set_visible(False)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
