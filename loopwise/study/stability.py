"""The stability lab: a grid of variants, loops, rates and seeds, trained under diagnostics.

A grid folder holds ``grid.json`` (what is run, and the collapse rule), one run folder per cell
below ``cells/``, and ``results.json``. A finished cell has ``cell.json``; one without is resumed or
done again, never counted.
"""

from __future__ import annotations

import itertools
import json
import math
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
from loopwise.settings import RunConfig, build_config, differing, preset_table, resolved_table
from loopwise.study.folders import require_free
from loopwise.study.results import write_results
from loopwise.study.training import Prepared, check_memory, prepare, train_stage, warn_of_shared
from loopwise.tokenizer import TOKENIZER_FILE, write_tokenizer
from loopwise.train.metrics import finite
from loopwise.writing import make_folder, write_whole, writing

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
_CELL_KEYS = {"cell", "variant", "loops", "lr", "seed", "status", "step", "reason"}
_SURVIVOR_KEYS = {"final_loss_nats", "loss_nats_by_depth", "spectrum"}


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
        if any(not 0 < lr < math.inf for lr in self.lrs):
            raise ConfigError(f"lrs={list(self.lrs)} must each be above 0 and finite")


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
        ConfigError: another architecture, or settings that cannot be run.
        DataError: text that cannot be read; no folder is made.
        RunFolderError: the folder holds something else: a grid of another configuration, say, or
            a broken cell.
        WriteError: the disk refuses.
    """
    name = asked.get("architecture", "looped")
    if name != "looped":
        raise ConfigError(f"the stability lab trains architecture 'looped', not {name!r}")
    base = build_config(asked, base=preset_table("flt-tiny"))
    cells = list(cells_of(grid, base.optim.lr))
    configs = [cell_config(cell, grid, base) for cell in cells]
    table = _as_stored(grid, base)
    _require_same(folder, table)
    # Every record is read here, so that a broken one is refused before others are trained.
    finished = [_finished_cell(folder, cell) is not None for cell in cells]
    to_train = [config for config, done in zip(configs, finished, strict=True) if not done]
    for config in {(c.depth.mean, c.model["inject"]): c for c in to_train}.values():
        check_memory(config)
    prepared = prepare(base, folder if (folder / TOKENIZER_FILE).is_file() else None)
    _claim(folder, table, prepared)
    warn_of_shared(prepared, emit)
    floor = unigram_nats(prepared.train.store)
    done = []
    for index, (cell, config) in enumerate(zip(cells, configs, strict=True)):
        record = _finished_cell(folder, cell)
        fresh = record is None
        if record is None:
            record = _run_cell(cell, config, grid.collapse, prepared, floor, folder, emit)
        done.append(record)
        emit(
            {
                "event": "cell",
                "index": index + 1,
                "cells": len(cells),
                "kept": not fresh,
                **record,
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
    write_results(folder, results)
    return results


def cells_of(grid: GridConfig, lr: float) -> Iterator[Cell]:
    """The cells in an order that shows contrasts early: seeds outermost."""
    for seed, loops, rate, variant in itertools.product(
        range(grid.seeds), grid.loops, grid.lrs or (lr,), grid.variants
    ):
        yield Cell(variant, loops, rate, seed)


def _run_cell(
    cell: Cell,
    config: RunConfig,
    rule: CollapseRule,
    base: Prepared,
    floor: float,
    grid_folder: Path,
    emit: Emit,
) -> Event:
    """Train one cell to its end or its collapse, then write ``cell.json``; what that holds."""
    folder = grid_folder / "cells" / cell.name
    prepared = replace(
        base,
        config=config,
        train=PackedBlocks(base.train.store, config.train.seq, cell.seed),
    )
    watch = CollapseWatch(rule, floor, config.model["d_model"])

    def on_event(event: Event) -> None:
        reason = None
        if event["event"] == "step":
            reason = watch.see_loss(event["step"], event["loss_nats"])
        elif event["event"] == "diagnostics":
            norms = event.get("latent_norm", {})
            reason = watch.see_latents(event["step"], {int(r): norms[r] for r in norms})
        emit({**event, "cell": cell.name})
        if reason is not None:
            raise Collapsed(event["step"], reason)

    make_folder(folder)
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
    record = finite({"cell": cell.name, **cell.__dict__, **outcome})
    write_whole(folder / "cell.json", json.dumps(record, indent=1, allow_nan=False))
    return record


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
    """Held-out loss at 1 .. 2K loops, at least 32, and the spectrum of the trained core."""
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


def _finished_cell(folder: Path, cell: Cell) -> Event | None:
    """What ``cell.json`` of a grid folder holds; None where that cell is not finished.

    Raises:
        RunFolderError: it is broken.
    """
    file = folder / "cells" / cell.name / "cell.json"
    if not file.is_file():
        return None
    remedy = "delete that file, and the cell is finished again"
    try:
        record = read_json_object(file, RunFolderError)
    except RunFolderError as err:
        raise RunFolderError(f"{err}; {remedy}") from None
    wanted = _CELL_KEYS | (_SURVIVOR_KEYS if record.get("status") == "survived" else set())
    missing = sorted(wanted - record.keys())
    if missing:
        raise RunFolderError(f"{str(file)!r} lacks {missing[0]!r}; {remedy}")
    return record


def _as_stored(grid: GridConfig, base: RunConfig) -> Event:
    """What ``grid.json`` says of a grid, as it reads back."""
    table = {"grid": to_table(grid), "settings": resolved_table(base)}
    return json.loads(json.dumps(table))


def _require_same(folder: Path, table: Event) -> None:
    """Refuse a folder that holds another grid, or something else; nothing is written.

    Raises:
        RunFolderError: naming what differs.
    """
    file = folder / "grid.json"
    if file.is_file():
        stored = read_json_object(file, RunFolderError)
        if {k: stored.get(k) for k in table} != table:
            other = differing(stored, table) or ["settings of another version"]
            raise RunFolderError(
                f"{str(folder)!r} holds a grid of another configuration: {'; '.join(other[:3])}; "
                "ask for the same, or choose another --out"
            )
    else:
        require_free(folder, "choose another name with --out")


def _claim(folder: Path, table: Event, prepared: Prepared) -> None:
    """Begin a grid folder, or go on with it.

    ``grid.json`` comes first: a folder that has it can be gone on with, whatever else it lacks.

    Raises:
        WriteError: the disk refuses; the same command goes on once it does not.
    """
    make_folder(folder)
    if not (folder / "grid.json").is_file():
        text = json.dumps({"loopwise": loopwise.__version__, **table}, indent=2)
        write_whole(folder / "grid.json", text + "\n")
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        try:
            with writing(file):
                write_tokenizer(folder, prepared.tokenizer)
        except BaseException:  # a part of it would be read when the grid goes on
            file.unlink(missing_ok=True)
            raise
