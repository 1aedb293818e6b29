"""Does reading convergence (A1) beat learning when to stop (A2) at other sizes, depths and seeds?

Cells of ``allocation_grid`` at two sizes and two mean depths, trained where they are not yet; on
each, ``bench_probes`` with few forms: seed by seed other weights, other documents to learn from
and to judge on, and other first weights of the forms. Finished cells are kept. By replay.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.allocation_cells import BASE, FULL_DEPTH, Cell, train
from benchmarks.bench_probes import BUDGETS, PARTS, compared, dealt, scores_of, see
from benchmarks.common import finish, parser, table
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.writing import write_whole

GRID = (BASE, "mean 4", "small", "small, mean 4")
FORMS = ("as published", "improves, mlp", "kl-last", "kl-last, mlp")
SHOWN = (
    *("fixed", "as published", "improves, mlp, from 2", "kl-last", "kl-last, mlp, from 2"),
    *("latent-kl", "oracle-kl"),
)
_TABLE_WIDTH = 160

Row = dict[str, Any]


def compare(checkpoint: Checkpoint, source: str, tokens: int, seed: int) -> list[Row]:
    """Rules, forms and bounds on one model, each form fitted on so many tokens."""
    of_each = -(-tokens // PARTS["learn"])
    texts = dealt(checkpoint, source, of_each, 1, seed)[0]
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            name: see(checkpoint, text, of_each, FULL_DEPTH, Path(folder) / name)
            for name, text in texts.items()
        }
        scores = scores_of(parts, [tokens], seed, FORMS)
        return compared(checkpoint, [parts["judge"]], [scores], FULL_DEPTH)


def shown(cell: Cell, rows: list[Row], budget: float) -> Row:
    """One cell as a line: A1's gain, then what each lost beside A1 at its depth, and its gain."""
    by_name = {row["name"]: row["at"][str(budget)] for row in rows}
    line: Row = {"cell": cell.variant, "seed": cell.seed, "kl (A1)": _gain(by_name["kl"])}
    return line | {name: f"{_lost(by_name[name])}; {_gain(by_name[name])}" for name in SHOWN}


def _lost(at: Row) -> str:
    lost = at["vs_a1_nats"]
    if lost is None:
        return "-"
    return f"{1000 * lost['mean']:+.1f} ±{500 * (lost['high'] - lost['low']):.1f}"


def _gain(at: Row) -> str:
    return f"{at['gain'][0]:.2f}"


def counted(found: Iterable[list[Row]], budget: float) -> list[Row]:
    """In how many cells each loses to A1, wins, or can not be told apart from it."""
    cells = [{row["name"]: row["at"][str(budget)]["vs_a1_nats"] for row in rows} for rows in found]
    out = []
    for name in SHOWN:
        lost = [cell[name] for cell in cells]
        behind = sum(x is None or x["low"] > 0 for x in lost)
        ahead = sum(x is not None and x["high"] < 0 for x in lost)
        rest = len(lost) - behind - ahead
        out.append({"rule": name, "behind A1": behind, "neither": rest, "ahead": ahead})
    return out


def main() -> None:
    args = parser(__doc__ or "", smoke=True)
    args.add_argument("--data", default="builtin:stories:200", help="text to learn from")
    args.add_argument("--held-out", default="builtin:ledgers:400", help="text of the forms")
    args.add_argument("--out", type=Path, default=Path("runs") / "allocation")
    args.add_argument("--cells", nargs="+", choices=list(GRID), help="default: all")
    args.add_argument("--seeds", type=int, default=3)
    args.add_argument("--tokens", type=int, default=16_384, help="to fit on")
    options = args.parse_args()
    tokens = 512 if options.smoke else options.tokens
    seeds = range(1 if options.smoke else options.seeds)
    names = options.cells or (GRID[:1] if options.smoke else GRID)
    found: dict[Cell, list[Row]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.smoke else options.out
        for cell in (Cell(name, seed) for seed in seeds for name in names):
            folder = out / cell.name
            settings = cell.settings(options.data, options.held_out, options.smoke)
            train(cell, folder, settings, lambda text: print(text, flush=True))
            file = folder / "probes.json"
            if not file.is_file():
                checkpoint = load_checkpoint(folder, torch.float32)
                rows = compare(checkpoint, options.held_out, tokens, cell.seed)
                write_whole(file, json.dumps(rows))
            found[cell] = json.loads(file.read_text())
    console = Console(width=_TABLE_WIDTH)
    for budget in BUDGETS:
        title = f"{budget} nats above full depth: thousandths of a nat beside A1; gain"
        table(title, [shown(cell, rows, budget) for cell, rows in found.items()], console)
        table("Cells beside A1 at its depth", counted(found.values(), budget), console)
    cells = [{"cell": c.variant, "seed": c.seed, "rows": rows} for c, rows in found.items()]
    finish("probe-grid", {"data": options.held_out, "tokens": tokens, "cells": cells}, options.save)


if __name__ == "__main__":
    main()
