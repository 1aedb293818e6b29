"""Grids of `loopwise stability` as Markdown tables for docs/results.

python -m benchmarks.compare_grids runs/a runs/b ... [--text FILE]

With ``--text`` every surviving cell of the largest K at the main rate is scored on that text too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from benchmarks.compare_runs import markdown
from loopwise.data import ReadOptions, ReadReport, read_documents
from loopwise.measure.perplexity import perplexity
from loopwise.models.checkpoint import load_checkpoint
from loopwise.report.stability_facts import Lab, Run, over_seeds, read_lab

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grids", nargs="+", type=Path)
    parser.add_argument("--text", help="scored in blocks of 1,024 tokens, at K loops")
    parser.add_argument("--seeds", type=int, help="of each place that are scored; default: all")
    options = parser.parse_args()
    labs = [(folder, read_lab(folder)) for folder in options.grids]
    print(markdown([_place(folder, lab, place) for folder, lab in labs for place in lab.places()]))
    print()
    print(markdown([_depths(folder, lab, p) for folder, lab in labs for p in lab.places()]))
    if options.text:
        print()
        rows = [_text(folder, lab, options.text, options.seeds) for folder, lab in labs]
        print(markdown([row for found in rows for row in found]))


Place = tuple[str, int, float, list[Run]]


def _key(folder: Path, lab: Lab, place: Place) -> dict[str, str]:
    variant, loops, rate, _ = place
    depth = "random" if lab.results["grid"]["random_depth"] else "fixed"
    return {
        "grid": folder.name,
        "variant": variant,
        "depth": depth,
        "K": str(loops),
        "lr": f"{rate:g}",
    }


def _place(folder: Path, lab: Lab, place: Place) -> dict[str, str]:
    runs = place[-1]
    survived = [run for run in runs if run.survived]
    stopped = [run.last_step for run in runs if not run.survived]
    return _key(folder, lab, place) | {
        "survived": f"{len(survived)}/{len(runs)}",
        "stopped at": ", ".join(map(str, stopped)) or "-",
        "held-out loss": _spread((run.final_loss for run in survived), 3),
        "gradient norm, std": _spread((lab.typical_oscillation(run) for run in runs), 3),
        "latent norm r=1": _spread((run.latent_ends[0] for run in runs), 1),
        "latent norm r=K": _spread((run.latent_ends[1] for run in runs), 1),
        "spectral radius": _spread((run.spectrum("radius") for run in survived), 2),
    }


def _depths(folder: Path, lab: Lab, place: Place) -> dict[str, str]:
    """Held-out loss at some numbers of loops, median over the seeds that survived."""
    middle, _, _ = over_seeds([run.loss_by_depth for run in place[-1]])
    shown = {f"r={r}": f"{middle[r - 1]:.3f}" for r in DEPTHS if r <= len(middle)}
    return _key(folder, lab, place) | {f"r={r}": shown.get(f"r={r}", "") for r in DEPTHS}


def _text(folder: Path, lab: Lab, text: str, seeds: int | None) -> Iterable[dict[str, str]]:
    documents = list(read_documents([text], ReadOptions(), ReadReport()))
    for place in lab.places():
        _, loops, rate, runs = place
        if loops != lab.loops[-1] or rate != lab.main_rate:
            continue
        found = []
        for run in [run for run in runs if run.survived][:seeds]:
            checkpoint = load_checkpoint(folder / "cells" / run.record["cell"])
            model, tokenizer = checkpoint.model, checkpoint.tokenizer
            scored = perplexity(model, tokenizer, documents, "block", [loops])
            found.append(scored["by_depth"][loops])
        yield _key(folder, lab, place) | {
            "perplexity": _spread((f["perplexity"] for f in found), 1),
            "nats per token": _spread((f["nll_nats"] for f in found), 3),
        }


def _spread(values: Iterable[float], digits: int) -> str:
    """Median and range of the finite ones."""
    good = sorted(v for v in values if math.isfinite(v))
    if not good:
        return "-"
    middle = (good[(len(good) - 1) // 2] + good[len(good) // 2]) / 2
    text = f"{middle:,.{digits}f}"
    return text if len(good) == 1 else f"{text} ({good[0]:,.{digits}f}-{good[-1]:,.{digits}f})"


if __name__ == "__main__":
    main()
