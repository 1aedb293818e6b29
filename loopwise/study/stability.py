"""The stability lab: a grid of variants, loops, rates and seeds, trained under diagnostics.

A grid folder holds ``grid.json`` (what is run, and the collapse rule), one run folder per cell
below ``cells/``, and ``results.json``. A finished cell has ``cell.json``; one without is resumed or
done again, never counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import loopwise
from loopwise.config import read_json_object, to_table
from loopwise.data import PackedBlocks
from loopwise.errors import ConfigError, NonFiniteError, RunFolderError
from loopwise.measure.evaluate import batches, loss_by_depth
from loopwise.measure.stability import CollapseRule, CollapseWatch, core_spectrum, unigram_nats
from loopwise.models.checkpoint import load_checkpoint
from loopwise.settings import RunConfig, build_config, preset_table, resolved_table
from loopwise.study.training import Prepared, prepare, train_stage
from loopwise.tokenizer import TOKENIZER_FILE, write_tokenizer
from loopwise.train.metrics import finite

Event = dict[str, Any]
Emit = Callable[[Event], None]

VARIANTS = {
    "lt": "none",
    "lt-input": "input",
    "lt-attn-first": "attn-first",
    "fla": "residual-all",
    "flt": "attn-all",
}
MAX_LOOPS = 64
_SPECTRUM_BLOCKS = 2
_JUDGED_BLOCKS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConfig:
    """What is run: every combination of variant, loops, learning rate and seed."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    loops: tuple[int, ...] = (6, 9, 12)
    seeds: int = 3
    lrs: tuple[float, ...] = ()  # of matrices; empty: the preset's
    random_depth: bool = False  # depth drawn per step with this mean, instead of fixed loops
    collapse: CollapseRule = field(default_factory=CollapseRule)

    def __post_init__(self) -> None:
        unknown = [v for v in self.variants if v not in VARIANTS]
        if unknown or not self.variants:
            raise ConfigError(
                f"no variant {unknown[0] if unknown else ''!r}; known: {', '.join(VARIANTS)}"
            )
        bad = [k for k in self.loops if not 1 <= k <= MAX_LOOPS]
        if bad or not self.loops:
            raise ConfigError(f"loops={list(self.loops)} must each lie in 1..{MAX_LOOPS}")
        if self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds} must be at least 1")
        if any(not lr > 0 for lr in self.lrs):
            raise ConfigError(f"lrs={list(self.lrs)} must be above 0")


@dataclass(frozen=True)
class Cell:
    """One training run of the grid."""

    variant: str
    loops: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-k{self.loops}-lr{self.lr:g}-s{self.seed}"


class Collapsed(Exception):
    """The collapse rule fired; an outcome, not an error."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


def run_grid(asked: Event, grid: GridConfig, folder: Path, emit: Emit) -> Event:
    """Train every cell that is not finished, and collect the results.

    Args:
        asked: settings of a run, as :func:`loopwise.settings.explicit_table` gives them; the preset
            is ``flt-tiny`` where they name none.
    Raises:
        RunFolderError: the folder holds a grid of another configuration.
    """
    name = asked.get("architecture", "looped")
    if name != "looped":
        raise ConfigError(f"the stability lab trains architecture 'looped', not {name!r}")
    base = build_config(asked, base=preset_table("flt-tiny"))
    _claim(folder, base, grid)
    prepared = prepare(base, folder if (folder / TOKENIZER_FILE).is_file() else None)
    write_tokenizer(folder, prepared.tokenizer)
    floor = unigram_nats(prepared.train.store)
    cells = list(cells_of(grid, base.optim.lr))
    done = []
    for index, cell in enumerate(cells):
        file = folder / "cells" / cell.name / "cell.json"
        fresh = not file.is_file()
        if fresh:
            _run_cell(cell, grid, prepared, floor, file.parent, emit)
        done.append(read_json_object(file, RunFolderError))
        emit(
            {
                "event": "cell",
                "index": index + 1,
                "cells": len(cells),
                "kept": not fresh,
                **done[-1],
            }
        )
    results = {
        "format": "loopwise-stability",
        "version": 1,
        "loopwise": loopwise.__version__,
        "grid": to_table(grid),
        "settings": resolved_table(base),
        "unigram_nats": floor,
        "cells": done,
    }
    aside = folder / ".results.json"
    aside.write_text(json.dumps(finite(results), indent=1, allow_nan=False), encoding="utf-8")
    aside.replace(folder / "results.json")
    return results


def cells_of(grid: GridConfig, lr: float) -> Iterator[Cell]:
    """The cells in an order that shows contrasts early: seeds outermost."""
    for seed, loops, rate, variant in itertools.product(
        range(grid.seeds), grid.loops, grid.lrs or (lr,), grid.variants
    ):
        yield Cell(variant, loops, rate, seed)


def _run_cell(
    cell: Cell, grid: GridConfig, base: Prepared, floor: float, folder: Path, emit: Emit
) -> None:
    """Train one cell to its end or its collapse, then write ``cell.json``."""
    config = cell_config(cell, grid, base.config)
    prepared = replace(
        base,
        config=config,
        train=PackedBlocks(base.train.store, config.train.seq, cell.seed),
    )
    watch = CollapseWatch(grid.collapse, floor, config.model["d_model"])

    def on_event(event: Event) -> None:
        reason = None
        if event["event"] == "step":
            reason = watch.see_loss(event["step"], event["loss_nats"])
        elif event["event"] == "diagnostics":
            norms = event.get("latent_norm", {})
            reason = watch.see_latents(event["step"], [norms[r] for r in sorted(norms, key=int)])
        emit({**event, "cell": cell.name})
        if reason is not None:
            raise Collapsed(event["step"], reason)

    folder.mkdir(parents=True, exist_ok=True)
    resume = (folder / "checkpoints" / "latest").is_file()
    outcome: Event = {"status": "survived", "step": config.train.steps, "reason": None}
    try:
        train_stage(prepared, folder, on_event, resume)
    except Collapsed as err:
        outcome = {"status": "collapsed", "step": err.step, "reason": err.reason}
    except NonFiniteError as err:
        outcome = {"status": "collapsed", "step": None, "reason": str(err)}
    if outcome["status"] == "survived":
        outcome |= _judge(prepared, cell.loops, folder)
    record = {"cell": cell.name, **cell.__dict__, **outcome}
    aside = folder / ".cell.json"
    aside.write_text(json.dumps(finite(record), indent=1, allow_nan=False), encoding="utf-8")
    aside.replace(folder / "cell.json")


def cell_config(cell: Cell, grid: GridConfig, base: RunConfig) -> RunConfig:
    """The settings of one cell: the base with its variant, loops, rate and seed."""
    drawn = grid.random_depth
    # All loops learn, whatever was drawn: where truncation begins is not what is compared.
    through = 4 * cell.loops if drawn else cell.loops
    return replace(
        base,
        seed=cell.seed,
        model={**base.model, "inject": VARIANTS[cell.variant]},
        depth=replace(
            base.depth,
            kind="lognormal" if drawn else "fixed",
            mean=float(cell.loops),
            backprop_depth=through,
        ),
        optim=replace(base.optim, lr=cell.lr),
        train=replace(base.train, diagnostics=True, eval_depths=(cell.loops,)),
    )


def _judge(prepared: Prepared, loops: int, folder: Path) -> Event:
    """Held-out loss at 1 .. 2K loops and the spectrum of the trained core."""
    model = load_checkpoint(folder).model
    depths = list(range(1, max(2 * loops, 32) + 1))
    text = batches(prepared.held_out, 8, _JUDGED_BLOCKS)
    losses = loss_by_depth(model, text, depths)
    some = prepared.held_out.batch(0, min(_SPECTRUM_BLOCKS, prepared.held_out.n_blocks))
    torch.manual_seed(0)
    return {
        "loss_nats_by_depth": {str(r): loss for r, loss in losses.items()},
        "final_loss_nats": losses[loops],
        "spectrum": core_spectrum(model, some, loops),
    }


def _claim(folder: Path, base: RunConfig, grid: GridConfig) -> None:
    """Start a grid folder, or go on with one of the same configuration."""
    file = folder / "grid.json"
    table = {"grid": to_table(grid), "settings": resolved_table(base)}
    table = json.loads(json.dumps(table))
    if file.is_file():
        stored = read_json_object(file, RunFolderError)
        if {k: stored.get(k) for k in table} != table:
            raise RunFolderError(
                f"{str(folder)!r} holds a grid of another configuration; choose another --out"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{str(folder)!r} is not empty; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"loopwise": loopwise.__version__, **table}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")
