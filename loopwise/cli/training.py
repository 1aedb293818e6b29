"""Commands that train: the main job, one stage of it, the stability lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loopwise.cli.app import app
from loopwise.cli.options import (
    BaselineOption,
    ConfigOption,
    DataOption,
    DebugOption,
    HeldOutOption,
    JsonOption,
    OutOption,
    PresetOption,
    ResumeOption,
    SeedOption,
    SetOption,
    listed,
    settings_table,
)
from loopwise.cli.running import command, run_kept
from loopwise.errors import ConfigError


@app.command()
def study(
    data: DataOption = None,
    held_out: HeldOutOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    seed: SeedOption = None,
    baseline: BaselineOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train, measure how every token converges, allocate depth, report: the whole line."""
    folder = out or Path("runs") / "study"
    with command(as_json, debug, run_kept(folder)) as (display, answer):
        from loopwise.report import print_summary
        from loopwise.study import run_study

        settings = settings_table(preset, config, set_, data, held_out, seed, baseline)
        made = run_study(settings, folder, display, resume)
        display.stop()
        print_summary(made.pop("results"))
        print(f"report: {made['report']}")
        answer(made)


@app.command()
def train(
    data: DataOption = None,
    held_out: HeldOutOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    seed: SeedOption = None,
    baseline: BaselineOption = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Checkpoint to start from: its weights, shape, tokenizer."),
    ] = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Log gradient and latent norms of every step.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a model with random depth; checkpoints and metrics go to --out."""
    folder = out or Path("runs") / "train"
    with command(as_json, debug, run_kept(folder)) as (display, answer):
        from loopwise.config import merge
        from loopwise.study import train_command

        if start is not None and baseline is not None:
            raise ConfigError("--from and --baseline exclude one another; leave one out")
        settings = settings_table(preset, config, set_, data, held_out, seed, baseline)
        if diagnostics:
            settings = merge(settings, {"train": {"diagnostics": True}})
        made = train_command(settings, folder, display, resume, start)
        display.stop()
        print(f"checkpoint: {made['checkpoint']}")
        answer(made)


@app.command()
def stability(
    variants: Annotated[
        str, typer.Option("--variants", help="Comma list: lt,lt-input,lt-attn-first,fla,flt.")
    ] = "lt,lt-input,lt-attn-first,fla,flt",
    loops: Annotated[str, typer.Option("--loops", help="Comma list of loop counts.")] = "6,9,12",
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds of every cell.")] = 3,
    lrs: Annotated[
        str | None, typer.Option("--lrs", help="Comma list of matrix learning rates.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimiser steps of a cell.")] = None,
    random_depth: Annotated[
        bool, typer.Option("--random-depth", help="Draw depths with the loops as their mean.")
    ] = False,
    data: DataOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a grid of looped variants, see which collapse and why; finished cells are kept."""
    folder = out or Path("runs") / "stability"

    def kept() -> str:
        if not (folder / "grid.json").is_file():
            return "nothing was written; run the command again"
        return f"cells in {str(folder)!r} are kept; run the same command again to go on"

    with command(as_json, debug, kept) as (display, answer):
        from loopwise.report import print_stability, write_stability_report
        from loopwise.study.stability import GridConfig, run_grid

        asked = settings_table(preset, config, set_, data, None, None)
        if steps is not None:
            asked.setdefault("train", {})["steps"] = steps
        grid = GridConfig(
            variants=tuple(listed(variants, str, "--variants")),
            loops=tuple(listed(loops, int, "--loops")),
            seeds=seeds,
            lrs=tuple(listed(lrs, float, "--lrs")) if lrs else (),
            random_depth=random_depth,
        )
        results = run_grid(asked, grid, folder, display)
        page = write_stability_report(folder)
        display.stop()
        print_stability(results, folder)
        print(f"report: {page}")
        answer({"report": str(page), "cells": results["cells"]})
