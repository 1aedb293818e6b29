"""Figures of quality against depth and charged compute, from plain results."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from loopwise.report import facts, words
from loopwise.report.draw import legend, legend_below, note, panel
from loopwise.report.palette import INK, MUTED, Style, in_order, policy_style

Frontier = dict[str, Any]

LINEAR_NATS = 0.01  # the axis is linear up to here and logarithmic beyond
_DELTA = "loss above full depth (nats)"
_LEGEND_COLUMNS = 4  # beneath the axes
_CAP_PT = 11
_TICKS = (-0.1, -0.01, 0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


def by_mean_depth(frontier: Frontier) -> Figure:
    """Loss above full depth against mean recurrences per token."""
    room = _legend_inches(frontier)
    fig, ax = panel(
        f"Quality and depth · {frontier['corpus']}",
        "mean depth (recurrences per token)",
        _DELTA,
        height=4.1 + room,
        bottom=0.5 + room,
    )
    _all_policies(ax, frontier, "mean_depth")
    ax.set_xlim(0.8, frontier["max_depth"] + 0.25)
    _delta_axis(ax, frontier)
    _legends(ax, frontier, 2)
    return fig


def by_compute(frontier: Frontier) -> Figure:
    """Loss above full depth against compute charged for every check, with the cap of depth."""
    full = frontier["max_depth"]
    caps = _caps(frontier)
    room = _legend_inches(frontier) + (len(caps) + 0.5) * _CAP_PT / 72
    fig, ax = panel(
        f"Quality and compute · {frontier['corpus']}",
        f"charged compute (share of uniform depth {full})",
        _DELTA,
        height=4.1 + room,
        bottom=0.54 + room,
    )
    _all_policies(ax, frontier, "charged_share")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    ax.axvline(1.0, color=MUTED, linewidth=0.9)
    _delta_axis(ax, frontier)
    _legends(ax, frontier, 2)
    place: dict[str, Any] = {"xycoords": "axes points", "textcoords": "axes points", "fontsize": 8}
    for i, (text, colour) in enumerate(caps):
        ax.annotate(text, (0, 0), (-38, -46 - _CAP_PT * i), color=colour, **place)
    return fig


def allocation_gain(frontier: Frontier) -> Figure:
    """Uniform depth of the same loss over mean depth, against loss above full depth."""
    room = _legend_inches(frontier)
    fig, ax = panel(
        f"Allocation gain · {frontier['corpus']}",
        _DELTA,
        "allocation gain (ratio)",
        height=3.6 + room,
        bottom=0.5 + room,
    )
    ax.axhline(1.0, color=policy_style("fixed").colour, linewidth=1.4)
    shown, minor = [1.0], facts.minor_rules(frontier)
    for name in in_order(list(frontier["policies"])):
        if name == "fixed":
            continue
        style = policy_style(name)
        points = _inside(frontier["policies"][name].get("replayed", []))
        if points:
            gain = np.array([p["allocation_gain"] for p in points])
            low, high = (np.array([p[k] for p in points]) for k in ("gain_low", "gain_high"))
            x = [p["delta_nats"] for p in points]
            if name not in minor:
                error = np.maximum([gain - low, high - gain], 0)
                ax.errorbar(
                    x, gain, yerr=error, fmt="none", ecolor=style.colour, alpha=0.35, lw=0.8
                )
            ax.plot(x, gain, label=style.label, **_line(style, name in minor))
            shown += gain.tolist()
        live = _inside(frontier["policies"][name].get("live", []))
        if live:
            gains = [p["allocation_gain"] for p in live]
            ax.plot([p["delta_nats"] for p in live], gains, **_live(style))
            shown += gains
    ax.set_xscale("symlog", linthresh=LINEAR_NATS, linscale=1.2)
    ax.set_xticks([0, 0.005, 0.01, 0.02, 0.05, 0.1], ["0", "0.005", "0.01", "0.02", "0.05", "0.1"])
    ax.minorticks_off()
    ax.set_xlim(-0.004, 0.13)
    span = max(max(shown) - min(shown), 0.1)
    ax.set_ylim(min(shown) - 0.08 * span, max(shown) + 0.32 * span)
    note(ax, 0.125, 1.0, "uniform depth", policy_style("fixed").colour, ha="right", va="bottom")
    _legends(ax, frontier, 3)
    return fig


def _all_policies(ax: Any, frontier: Frontier, key: str) -> None:
    uniform, minor = frontier["policies"]["fixed"]["uniform"], facts.minor_rules(frontier)
    style = policy_style("fixed")
    x, y = [p[key] for p in uniform], [p["delta_nats"] for p in uniform]
    ax.plot(x, y, color=style.colour, linewidth=2.0, marker="o", markersize=4, label=style.label)
    for name in in_order(list(frontier["policies"])):
        if name == "fixed":
            continue
        style, kinds = policy_style(name), frontier["policies"][name]
        points = sorted(kinds.get("replayed", []), key=lambda p: p[key])
        if points:
            if name not in minor:
                _bars(ax, points, key, style, 0.35)
            x, y = [p[key] for p in points], [p["delta_nats"] for p in points]
            ax.plot(x, y, label=style.label, **_line(style, name in minor))
        live = kinds.get("live", [])
        if live:
            _bars(ax, live, key, style, 0.9)
            ax.plot([p[key] for p in live], [p["delta_nats"] for p in live], **_live(style))
    if facts.live_tokens(frontier) is not None:
        hollow = {"mfc": "none", "mec": MUTED, "color": MUTED}
        ax.plot([], [], linestyle="", marker="o", markersize=7, label="hollow: live", **hollow)


def _bars(ax: Any, points: list[facts.Point], key: str, style: Style, alpha: float) -> None:
    y = np.array([p["delta_nats"] for p in points])
    low, high = (np.array([p[k] for p in points]) for k in ("delta_low", "delta_high"))
    error = np.maximum([y - low, high - y], 0)
    x = [p[key] for p in points]
    ax.errorbar(x, y, yerr=error, fmt="none", ecolor=style.colour, elinewidth=0.9, alpha=alpha)


def _line(style: Style, minor: bool) -> dict[str, Any]:
    """Thin and behind the others for rules judged by replay alone."""
    look = {"color": style.colour, "marker": style.marker}
    if minor:
        return {**look, "linewidth": 0.7, "markersize": 3, "markevery": 3, "zorder": 1.5}
    return {
        **look,
        "linewidth": 1.4,
        "linestyle": (0, (4, 2)) if style.dashed else "-",
        "markersize": 8 if style.marker == "*" else 3.4,
    }


def _legends(ax: Any, frontier: Frontier, columns: int) -> None:
    """Rules that were run live among the data, the others beneath the axes."""
    handles, labels = ax.get_legend_handles_labels()
    small = {policy_style(name).label for name in facts.minor_rules(frontier)}
    named = list(zip(handles, labels, strict=True))
    legend(ax, columns, handles=[h for h, label in named if label not in small], loc="upper right")
    below = [h for h, label in named if label in small]
    if below:
        legend_below(ax, below, _LEGEND_COLUMNS)


def _legend_inches(frontier: Frontier) -> float:
    """Height that the legend beneath the axes needs."""
    return -(-len(facts.minor_rules(frontier)) // _LEGEND_COLUMNS) * 0.17


def _live(style: Style) -> dict[str, Any]:
    return {
        "linestyle": "",
        "marker": style.marker,
        "markersize": 7,
        "mfc": "none",
        "mec": style.colour,
        "mew": 1.3,
    }


def _delta_axis(ax: Any, frontier: Frontier) -> None:
    """Linear around the budgets, logarithmic beyond; the budgets are drawn."""
    ax.set_yscale("symlog", linthresh=LINEAR_NATS, linscale=1.6)
    points = [
        p for kinds in frontier["policies"].values() for k in _POINTS for p in kinds.get(k, [])
    ]
    low = min(-0.002, *(p["delta_nats"] for p in points))
    high = max(2 * LINEAR_NATS, *(p["delta_nats"] for p in points))
    ticks = [t for t in _TICKS if low <= t <= 1.5 * high]
    ax.set_yticks(ticks, [f"{t:g}".replace("-", words.MINUS) for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(1.4 * low, 6 * high)
    for budget in facts.budgets(frontier):
        ax.axhline(budget, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)


def _caps(frontier: Frontier) -> list[tuple[str, str]]:
    """For each rule that was run live, at the headline budget: its speed-up, and its colour."""
    budget, lines = facts.headline_budget(frontier), []
    for name in facts.headline_rules(frontier):
        point, style = facts.at_budget(frontier, name, "replayed", budget), policy_style(name)
        if point is not None:
            text = (
                f"{style.label} within {budget:g} nats: {words.times(1 / point['charged_share'])} "
                f"in compute, cap {words.times(point['cap'])} ({facts.share_of_cap(point):.0%})"
            )
            lines.append((text, style.colour))
    return lines


def _inside(points: list[facts.Point]) -> list[facts.Point]:
    return [p for p in points if -0.004 <= p["delta_nats"] <= 0.13]


_POINTS = ("uniform", "replayed", "live")
