"""Figures of training and convergence, one function each, from plain results."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from loopwise.report import words
from loopwise.report.draw import end_labels, legend, legend_below, note, panel
from loopwise.report.palette import CORPUS_COLOURS, INK, MUTED, SHADES

Convergence = dict[str, Any]
Event = dict[str, Any]

_DEPTH = "depth r (recurrences)"
_LONGEST_NAME = 28  # characters of a corpus name beside figures
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))
_LEVELS = [SHADES[r][0] for r in ("corpus-2", "probe", "corpus-4", "oracle", "kl", "corpus-1")]


def corpus_colour(index: int) -> str:
    return CORPUS_COLOURS[index % len(CORPUS_COLOURS)]


def training_loss(steps: list[Event], evals: list[Event]) -> Figure:
    """Training loss at the drawn depth of each step; held-out loss at fixed depths."""
    fig, ax = panel("Training", "optimiser step", "loss (nats per token)", right=0.85)
    shown = [e for e in steps if e["loss_nats"] is not None]
    x = np.array([e["step"] for e in shown])
    y = np.array([e["loss_nats"] for e in shown], dtype=float)
    if len(x):
        ax.plot(x, y, color=MUTED, linewidth=0.7, alpha=0.45)
        window = max(1, len(y) // 25)
        smooth = np.convolve(y, np.ones(window) / window, mode="valid")
        ax.plot(x[window - 1 :], smooth, color=INK, linewidth=1.4)
    labels = []
    depths = sorted({int(d) for e in evals for d in e["loss_nats_by_depth"]})
    for i, depth in enumerate(depths):
        curve = [
            (e["step"], e["loss_nats_by_depth"][str(depth)])
            for e in evals
            if e["loss_nats_by_depth"].get(str(depth)) is not None
        ]
        if not curve:
            continue
        colour = _LEVELS[min(i, len(_LEVELS) - 1)]
        ax.plot(*zip(*curve, strict=True), color=colour, linewidth=1.3, marker=".", markersize=5)
        labels.append((curve[-1][1], f"held out r={depth}", colour))
    tail = [*y[len(y) // 20 :], *(e for e, _, _ in labels)]
    if tail:
        ax.set_ylim(min(tail) - 0.1, max(tail) + 0.1)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    end_labels(ax, labels)
    if len(x):
        note(ax, 0.98, 0.96, "training, moving mean", INK, **_inside(ax, "right"))
    return fig


def loss_by_depth(convergences: list[Convergence]) -> Figure:
    """Mean loss above each corpus's best depth, saturation depth and training mean marked.

    Corpora lie whole nats apart and depths hundredths, so each is held against its own best depth,
    whose loss the legend says.
    """
    room = len(convergences) * 0.17
    fig, ax = panel(
        "Loss by depth",
        _DEPTH,
        "loss above best depth (nats)",
        height=3.1 + room,
        bottom=0.5 + room,
    )
    highest = within = convergences[0]["saturation"]["within_nats"]
    for i, c in enumerate(convergences):
        loss, colour, at = c["loss_nats"], corpus_colour(i), c["saturation"]["depth"]
        mean = np.array(loss["mean"], dtype=float)
        best = int(np.nanargmin(mean))
        above = mean - mean[best]
        highest = max(highest, above[0])
        name = words.shortened(c["corpus"], _LONGEST_NAME)
        text = f"{name}: best {mean[best]:.3f} at r={best + 1}, saturates at r={at}"
        line: dict[str, Any] = {"linewidth": 1.6, "linestyle": _DASHES[i % 4], "marker": "."}
        ax.plot(np.arange(1, len(above) + 1), above, color=colour, label=text, **line)
        ax.plot(at, above[at - 1], "o", markersize=9, mfc="none", mec=colour, mew=1.6)
    _nats_above(ax, within, highest)
    _log_depth(ax, max(len(c["loss_nats"]["mean"]) for c in convergences))
    _mark_mean(ax, convergences[0], at=0.93)
    legend_below(ax, ax.get_legend_handles_labels()[0], 1)
    return fig


def bits_by_depth(convergences: list[Convergence]) -> Figure:
    """Bits per byte at every uniform depth, and each corpus's reference as a dashed line."""
    room = 2 * len(convergences) * 0.17
    fig, ax = panel(
        "Bits per byte by depth",
        _DEPTH,
        "bits per byte of text",
        height=3.1 + room,
        bottom=0.5 + room,
    )
    for i, c in enumerate(convergences):
        bits, colour, reference = c["bits_per_byte"], corpus_colour(i), c["reference"]
        best, level = reference["best_bits_per_byte"]["mean"], reference["bits_per_byte"]["mean"]
        name = words.shortened(c["corpus"], _LONGEST_NAME)
        text = f"{name}: best {words.number(best, 3)} at r={reference['best_depth']}"
        line: dict[str, Any] = {"linewidth": 1.6, "marker": "."}
        ax.plot(np.arange(1, len(bits) + 1), bits, color=colour, label=text, **line)
        own = words.recurrences(reference["depth"])
        text = f"{words.shortened(reference['name'], _LONGEST_NAME)}, {own}: "
        dashed: dict[str, Any] = {"linewidth": 1.3, "linestyle": _DASHES[1]}
        ax.axhline(level, color=colour, label=text + words.number(level, 3), **dashed)
    _log_depth(ax, max(len(c["bits_per_byte"]) for c in convergences))
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.05 * (high - low), high)
    _mark_mean(ax, convergences[0], at=0.93)
    legend_below(ax, ax.get_legend_handles_labels()[0], 1)
    return fig


def kl_by_recurrence(c: Convergence) -> Figure:
    """KL to the previous and to the last recurrence: mean, median and the middle 80%."""
    fig, ax = panel(f"Output change · {c['corpus']}", _DEPTH, "KL (nats)", right=0.95)
    labels = []
    for key, text, colour in (
        ("kl_prev", "to previous", SHADES["kl"][0]),
        ("kl_last", "to last", SHADES["oracle-kl"][0]),
    ):
        labels += _spread(ax, c["curves"][key], text, colour)
    ax.axhline(c["epsilon"], color=INK, linewidth=0.9, linestyle=_DASHES[1])
    _log_depth(ax, c["horizon"])
    _log_values(ax, [c["curves"][k] for k in ("kl_prev", "kl_last")])
    note(ax, 1, c["epsilon"], f"epsilon {c['epsilon']:g}", INK, va="bottom")
    _mark_mean(ax, c)
    end_labels(ax, labels)
    return fig


def latent_change(c: Convergence) -> Figure:
    """Relative change of the latent and its second difference, with the contraction rate."""
    fig, ax = panel(
        f"Latent change · {c['corpus']}", _DEPTH, "relative to the latent's norm", right=1.05
    )
    labels = []
    for key, text, colour in (
        ("change", "change", SHADES["latent"][0]),
        ("second", "second diff.", SHADES["probe"][0]),
    ):
        labels += _spread(ax, c["curves"][key], text, colour)
    _log_depth(ax, c["horizon"])
    _log_values(ax, [c["curves"][k] for k in ("change", "second")])
    rate = c["contraction"]["rate"]
    if rate is not None:
        used = c["contraction"]["recurrences_used"]
        over = f", r={used[0]} to {used[-1]}" if used else ""
        note(
            ax,
            0.97,
            0.95,
            f"{words.TIMES}{rate:.2f} per recurrence{over}",
            INK,
            **_inside(ax, "right"),
        )
    _mark_mean(ax, c)
    end_labels(ax, labels)
    return fig


def settled_distribution(c: Convergence) -> Figure:
    """Share of tokens by settled depth, first crossing and depth of the final argmax."""
    fig, ax = panel(f"Settled depth · {c['corpus']}", _DEPTH, "share of tokens")
    horizon = c["horizon"]
    shown = (
        ("argmax_final", "argmax is final", SHADES["oracle"][0]),
        ("first_crossing", "first crossing", SHADES["other"][0]),
        ("settled", "settled for good", SHADES["kl"][0]),
    )
    used = [i for key, _, _ in shown for i, s in enumerate(c[key]["share"][:horizon]) if s > 2e-3]
    last = min(horizon, max(used, default=0) + 2)
    for i, (key, text, colour) in enumerate(shown):
        d = c[key]
        r = np.arange(1, last + 1)
        unsettled = d["unsettled_share"]
        ax.bar(
            np.append(r, last + 1.6) + (i - 1) * 0.28,
            [*d["share"][:last], unsettled],
            width=0.27,
            color=colour,
            label=f"{text}, median {d['median']:g}",
        )
    ticks = [r for r in range(1, last + 1) if last <= 12 or r == 1 or r % 4 == 0]
    ax.set_xticks([*ticks, last + 1.6], [*map(str, ticks), f">{horizon}"])
    ax.axvline(last + 0.8, ymax=0.7, color=MUTED, linewidth=0.6)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(False, axis="x")
    ax.set_ylim(0, ax.get_ylim()[1] * 1.3)
    legend(ax, loc="upper right", bbox_to_anchor=(1.0, 1.0))
    return fig


def token_types(convergences: list[Convergence]) -> Figure | None:
    """Mean settled depth of each kind of token with 95% intervals, corpora side by side."""
    order: dict[str, list[float]] = {}
    for c in convergences:
        for row in c["token_types"]:
            order.setdefault(row["type"], []).append(row["mean"])
    if not order:
        return None
    names = sorted(order, key=lambda name: -float(np.mean(order[name])))
    place = {name: i for i, name in enumerate(names)}
    height = 1.2 + len(names) * (0.14 + 0.16 * len(convergences))
    x = "mean settled depth (recurrences)"
    fig, ax = panel("Token types", x, "", height=height, left=1.45, right=0.4)
    width = 0.84 / len(convergences)
    for i, c in enumerate(convergences):
        rows = c["token_types"]
        y = [place[row["type"]] + (len(convergences) / 2 - 0.5 - i) * width for row in rows]
        mean, low, high = (np.array([row[k] for row in rows]) for k in ("mean", "low", "high"))
        ax.barh(y, mean, width * 0.9, color=corpus_colour(i), label=c["corpus"])
        error = np.maximum([mean - low, high - mean], 0)
        ax.errorbar(mean, y, xerr=error, fmt="none", ecolor=INK, elinewidth=1.1)
        for at, end, value in zip(y, high, mean, strict=True):
            ax.annotate(
                f"{value:.1f}",
                (end, at),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=corpus_colour(i),
            )
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.grid(False, axis="y")
    legend(ax, len(convergences), loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return fig


def calibration(judged: list[tuple[str, dict[str, Any]]]) -> Figure:
    """How often the argmax still changes, against what the probe says.

    Args:
        judged: ``(corpus, judgement)``.
    """
    fig, ax = panel(
        "Probe calibration", "predicted probability of a change", "observed share of changes"
    )
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=_DASHES[1])
    note(ax, 0.98, 0.9, "calibrated", ha="right")
    for i, (corpus, judgement) in enumerate(judged):
        rows = judgement["calibration"]
        area = [12 + 220 * row["share"] for row in rows]
        x, y = [row["predicted"] for row in rows], [row["observed"] for row in rows]
        auroc = judgement["auroc"]
        text = corpus if auroc is None else f"{corpus}, AUROC {auroc:.2f}"
        ax.plot(x, y, color=corpus_colour(i), linewidth=1.3, linestyle=_DASHES[i % 4], label=text)
        ax.scatter(x, y, s=area, color=corpus_colour(i), alpha=0.75, linewidths=0)
    ax.set_xlim(-0.03, 1.03)
    ax.set_ylim(-0.03, 1.03)
    legend(ax, loc="upper left")
    return fig


def hops_depth(c: Convergence) -> Figure:
    """Settled depth, and what depth is worth, by the look-ups an answer needs."""
    rows = c["hops"]
    fig, ax = panel(f"Depth by hops · {c['corpus']}", "look-ups (hops)", _DEPTH, right=0.7)
    x = [row["hops"] for row in rows]
    mean = np.array([row["settled_depth"]["mean"] for row in rows])
    low = np.array([row["settled_depth"]["low"] for row in rows])
    high = np.array([row["settled_depth"]["high"] for row in rows])
    depth_colour, gain_colour = SHADES["kl"][0], SHADES["probe"][0]
    error = np.maximum([mean - low, high - mean], 0)
    ax.errorbar(x, mean, yerr=error, color=depth_colour, marker="o", markersize=5, capsize=2)
    ax.set_ylabel("mean settled depth (recurrences)", color=depth_colour)
    ax.set_xticks(x)
    other = ax.twinx()
    other.plot(x, [row["depth_gain_nats"] for row in rows], color=gain_colour, marker="^", ls="--")
    other.set_ylabel("worth of depth (nats per answer)", color=gain_colour, fontsize=9)
    other.tick_params(colors=MUTED, labelsize=8.5, length=0)
    other.set_ylim(bottom=0)
    for spine in other.spines.values():
        spine.set_visible(False)
    return fig


def hops_accuracy(c: Convergence) -> Figure:
    """Share of answer tokens that are right, by depth, for each number of look-ups."""
    fig, ax = panel(f"Accuracy by hops · {c['corpus']}", _DEPTH, "answers right", right=0.7)
    labels = []
    for i, row in enumerate(c["hops"]):
        accuracy = row["accuracy_by_depth"]
        colour = _LEVELS[i % len(_LEVELS)]
        ax.plot(range(1, len(accuracy) + 1), accuracy, color=colour, linewidth=1.5, marker=".")
        labels.append((accuracy[-1], f"{row['hops']} hop{'s' * (row['hops'] > 1)}", colour))
    _log_depth(ax, c["horizon"])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylim(0, min(1.02, max(0.1, ax.get_ylim()[1] * 1.1)))
    _mark_mean(ax, c)
    end_labels(ax, labels)
    return fig


def _spread(
    ax: Any, curve: dict[str, list[float | None]], text: str, colour: str
) -> list[tuple[float, str, str]]:
    """Mean, median and 10-90% band of one quantity; returns its label for the end of the line."""
    # a log axis has no place for zero, nor for the negative rounding of a KL
    table = {k: np.array([v if v and v > 0 else np.nan for v in row]) for k, row in curve.items()}
    r = np.arange(1, len(table["mean"]) + 1)
    low = np.where(np.isfinite(table["p10"]), table["p10"], 1e-12)
    ax.fill_between(r, low, table["p90"], color=colour, alpha=0.15, linewidth=0)
    ax.plot(r, table["mean"], color=colour, linewidth=1.6, marker=".")
    ax.plot(r, table["median"], color=colour, linewidth=1.0, linestyle=_DASHES[2])
    drawn = table["mean"][np.isfinite(table["mean"])]
    return [(float(drawn[-1]), text, colour)] if len(drawn) else []


def _log_depth(ax: Any, horizon: int) -> None:
    """Depth on a doubling axis, because most happens in the first recurrences."""
    ax.set_xscale("log", base=2)
    ticks = [2**i for i in range(10) if 2**i <= horizon]
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
    ax.set_xlim(0.93, max(horizon * 1.06, 1.1))


def _log_values(ax: Any, curves: list[dict[str, list[float | None]]]) -> None:
    ax.set_yscale("log")
    means = [v for c in curves for v in (*c["mean"], *c["p90"]) if v and v > 0]
    if means:
        ax.set_ylim(max(min(means) / 4, 1e-10), max(means) * 4)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: "1" if v == 1 else words.small(v).replace(".0", ""))
    )
    ax.minorticks_off()


def _nats_above(ax: Any, within: float, highest: float) -> None:
    """Linear up to the tolerance, which is drawn, and logarithmic beyond."""
    ax.set_yscale("symlog", linthresh=within, linscale=0.8)
    ticks = [0.0, within, *(t for t in (0.01, 0.1, 1.0, 10.0) if within < t <= 2 * highest)]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(-0.25 * within, max(2 * highest, 4 * within))
    ax.axhline(within, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)


def _mark_mean(ax: Any, c: Convergence, at: float = 0.02) -> None:
    mean = c["trained_mean_depth"]
    if mean and mean <= c["horizon"]:
        ax.axvline(mean, color=MUTED, linewidth=0.9, linestyle=_DASHES[2], zorder=0)
        note(ax, mean, at, f" training mean {mean:.3g}", transform=ax.get_xaxis_transform())


def _inside(ax: Any, side: str) -> dict[str, Any]:
    return {"transform": ax.transAxes, "ha": side, "va": "top"}
