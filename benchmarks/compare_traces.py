"""Traces side by side: loss, output change and agreement by recurrence, as tables and a picture.

Of several models on the same text, such as one before and after training. ``NAME=FOLDER`` each,
folders as ``loopwise measure`` writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import finish, parser, table
from loopwise.measure.convergence import loss_by_recurrence
from loopwise.measure.trace import Trace
from loopwise.report.draw import save_png
from loopwise.report.palette import CORPUS_COLOURS


def figures(trace: Trace) -> dict[str, list[float]]:
    """By recurrence: mean loss, mean KL to the previous output, argmax as at the last."""
    return {
        "loss, nats": loss_by_recurrence(trace["loss"], trace["block"])["mean"],
        "KL to previous, nats": trace["kl_prev"].mean(axis=0).tolist(),
        "argmax of the last": (trace["argmax"] == trace["argmax"][:, -1:]).mean(axis=0).tolist(),
    }


def picture(found: dict[str, dict[str, list[float]]]) -> Figure:
    figure = Figure(figsize=(7.2, 3.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, what in zip(axes, ("loss, nats", "KL to previous, nats"), strict=True):
        for i, (name, of) in enumerate(found.items()):
            y = np.array(of[what])
            r = np.arange(1, len(y) + 1)[np.isfinite(y)]
            colour = CORPUS_COLOURS[i % len(CORPUS_COLOURS)]
            ax.plot(r, y[np.isfinite(y)], marker=".", color=colour, label=name)
        ax.set(xlabel="depth r (recurrences)", title=what)
        ax.grid(alpha=0.25)
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False, labelcolor="linecolor")
    return figure


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("traces", nargs="+", help="NAME=FOLDER")
    args.add_argument("--picture", type=Path, help="PNG file to write")
    options = args.parse_args()
    found = {}
    for text in options.traces:
        name, _, folder = text.partition("=")
        found[name] = figures(Trace(Path(folder)))
    for what in next(iter(found.values())):
        rows: list[dict[str, Any]] = []
        for name, of in found.items():
            values = {f"r={r}": v for r, v in enumerate(of[what], start=1) if np.isfinite(v)}
            rows.append({"trace": name, **values})
        table(what, rows)
    if options.picture is not None:
        save_png(picture(found), options.picture)
    finish("compare-traces", {"traces": found}, options.save)


if __name__ == "__main__":
    main()
