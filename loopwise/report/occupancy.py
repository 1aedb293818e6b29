"""What an engine's ticks were filled with, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loopwise.report.draw import legend_below, panel

_ROW_IN = 0.17  # of the legend
_COLUMNS = 4


def rows_by_recurrence(ticks: Sequence[Sequence[int]]) -> Figure:
    """Live rows of every tick, stacked by the recurrence they did.

    Args:
        ticks: of each, the rows at recurrence 0, 1, ...; recurrence 0 is never done.
    """
    rows = np.array(ticks, dtype=float)[:, 1:]
    depth = rows.shape[1]
    lines = -(-depth // _COLUMNS)
    fig, ax = panel(
        "Rows in the core",
        "tick",
        "rows",
        height=2.9 + _ROW_IN * lines,
        bottom=0.55 + _ROW_IN * lines,
    )
    ramp = colormaps["viridis_r"](np.linspace(0.08, 1.0, depth))
    names = [f"r={r}" for r in range(1, depth + 1)]
    bands = ax.stackplot(
        np.arange(len(rows)), rows.T, labels=names, colors=ramp, step="post", linewidth=0
    )
    ax.set_xlim(0, max(1, len(rows) - 1))
    ax.set_ylim(0, 1.03 * rows.sum(axis=1).max())
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    legend_below(ax, list(bands), _COLUMNS)
    return fig
