"""An empty figure in the house style, and how figures leave: PNG, and SVG that follows the page."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from loopwise.report.palette import GRID, INK, MUTED, SURFACE, follow_theme

WIDTH_IN = 4.7  # narrow, so that text stays readable when a phone scales the drawing down
_PT = {"title": 10.0, "label": 9.0, "tick": 8.5, "note": 8.0}


def panel(
    title: str,
    x: str,
    y: str,
    *,
    height: float = 3.1,
    left: float = 0.66,
    right: float = 0.2,
    bottom: float = 0.5,
) -> tuple[Figure, Axes]:
    """One axes with fixed margins.

    Args:
        height, left, right, bottom: inches; ``right`` is the room for labels at the ends of lines,
            ``bottom`` for the axis label and notes beneath it.
    """
    figure = Figure(figsize=(WIDTH_IN, height), facecolor=SURFACE)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (
            left / WIDTH_IN,
            bottom / height,
            (WIDTH_IN - left - right) / WIDTH_IN,
            (height - bottom - 0.38) / height,
        )
    )
    axes.set_facecolor("none")
    name: dict[str, Any] = {"fontsize": _PT["title"], "color": INK, "fontweight": "bold"}
    figure.text(0.1 / WIDTH_IN, 1 - 0.13 / height, title, va="top", **name)
    axes.set_xlabel(x, fontsize=_PT["label"], color=INK)
    axes.set_ylabel(y, fontsize=_PT["label"], color=INK)
    axes.tick_params(which="both", colors=MUTED, labelsize=_PT["tick"], length=0)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(MUTED)
    return figure, axes


def note(axes: Axes, x: float, y: float, text: str, colour: str = MUTED, **kwargs: Any) -> None:
    """Small text at data coordinates, with a halo so that lines beneath do not cut it."""
    label = axes.text(x, y, text, color=colour, fontsize=_PT["note"], **kwargs)
    label.set_path_effects([withStroke(linewidth=2.5, foreground=SURFACE)])


def legend(axes: Axes, columns: int = 1, **kwargs: Any) -> None:
    axes.legend(
        fontsize=_PT["note"],
        labelcolor="linecolor",
        facecolor=SURFACE,
        edgecolor="none",
        framealpha=0.85,
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.3,
        **kwargs,
    )


def legend_below(axes: Axes, handles: list[Any], columns: int) -> None:
    """A legend of some lines at the lower edge of the figure, in the room of its margin."""
    axes.figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.06, 0.0),
        fontsize=_PT["note"],
        labelcolor="linecolor",
        frameon=False,
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.3,
        labelspacing=0.3,
    )


def end_labels(axes: Axes, labels: list[tuple[float, str, str]], gap_pt: float = 10.0) -> None:
    """Name lines at the right edge, pushed apart where they would overlap.

    Args:
        labels: ``(y, text, colour)`` in data coordinates; call it once the limits are set.
    """
    low, high = (axes.transData.transform((0, y))[1] for y in sorted(axes.get_ylim()))
    per_pt = axes.figure.dpi / 72
    gap = gap_pt * per_pt
    placed = sorted(
        [min(max(axes.transData.transform((0, y))[1], low), high), text, colour]
        for y, text, colour in labels
    )
    for i in range(1, len(placed)):
        placed[i][0] = max(placed[i][0], placed[i - 1][0] + gap)
    overflow = placed[-1][0] - high if placed else 0.0
    if overflow > 0:
        placed[-1][0] -= overflow
        for i in range(len(placed) - 2, -1, -1):
            placed[i][0] = min(placed[i][0], placed[i + 1][0] - gap)
    for pixel, text, colour in placed:
        fraction = (pixel - low) / (high - low) if high > low else 0.5
        if axes.yaxis_inverted():
            fraction = 1 - fraction
        axes.text(
            1.015,
            fraction,
            text,
            transform=axes.transAxes,
            color=colour,
            fontsize=_PT["note"],
            va="center",
        )


def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=160)


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Inline SVG whose colours are the page's custom properties and whose text is text.

    Args:
        name: keeps the ids of different drawings on one page apart.
        description: read aloud instead of the drawing.
    """
    out = io.StringIO()
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with matplotlib.rc_context(options):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font: ([\w ]*?)([\d.]+)px [^;\"]*", r"font: \1\2px var(--font)", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    label = escape(description, quote=True)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return follow_theme(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
