"""The stages as commands over run folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import loopwise
from loopwise.config import from_table
from loopwise.data import Document
from loopwise.errors import ConfigError, RunFolderError
from loopwise.measure.perplexity import Protocol, perplexity
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.report import write_report
from loopwise.settings import MeasureConfig, RunConfig, resolved_table
from loopwise.study.allocating import frontier_stage
from loopwise.study.measuring import measure_stage
from loopwise.study.results import collect_results, write_results
from loopwise.study.texts import read_corpora, read_texts
from loopwise.study.training import train_stage

Event = dict[str, Any]
Emit = Callable[[Event], None]


def run_study(config: RunConfig, folder: Path, emit: Emit, resume: bool = False) -> Event:
    """The main job: every stage in turn, into one run folder; finished stages are kept.

    Returns:
        The paths of what was made, and the results.
    """
    config = open_run(folder, config, resume)
    train_stage(config, folder, emit, resume)
    checkpoint = _load(folder, config.measure)
    traces = _finished_traces(folder / "traces", checkpoint)
    if traces is None:
        shutil.rmtree(folder / "traces", ignore_errors=True)
        corpora = read_texts(config.data, config.seed).held_out
        traces = measure_stage(checkpoint, corpora, config.measure, folder / "traces", emit)
        checkpoint = _load(folder, config.measure)
    frontiers = [frontier_stage(t, checkpoint, config.measure, emit) for t in traces]
    results = collect_results(checkpoint, traces, frontiers, config)
    write_results(folder, results)
    report = write_report(folder)
    return {
        "run": str(folder),
        "report": str(report),
        "checkpoint": str(checkpoint.path),
        "results": results,
    }


def train_command(config: RunConfig, folder: Path, emit: Emit, resume: bool = False) -> Event:
    """``loopwise train``."""
    return train_stage(open_run(folder, config, resume), folder, emit, resume)


def measure_command(
    path: Path, sources: list[str] | None, config: RunConfig, out: Path | None, emit: Emit
) -> list[Trace]:
    """``loopwise measure``: the given text, or what the run of the checkpoint held out."""
    checkpoint = _load(path, config.measure)
    folder = out or checkpoint.path.parent.parent / "traces"
    corpora = read_corpora(sources, config.data) if sources else _held_out_of(path)
    for name in corpora:
        if (folder / name / "trace.json").exists():
            raise RunFolderError(
                f"{str(folder / name)!r} holds a finished trace; choose another folder with --out"
            )
    return measure_stage(checkpoint, corpora, config.measure, folder, emit)


def frontier_command(
    paths: list[Path], moved: Path | None, config: RunConfig, emit: Emit
) -> list[Event]:
    """``loopwise frontier``: every policy on finished traces."""
    out = []
    for path in paths:
        trace = Trace(path)
        checkpoint = _load(moved or Path(trace.header["checkpoint"]), config.measure)
        out.append(frontier_stage(trace, checkpoint, config.measure, emit))
    return out


def perplexity_command(
    path: Path,
    sources: list[str],
    protocol: Protocol,
    depths: list[int] | None,
    block: int,
    stride: int | None,
    config: RunConfig,
    emit: Emit,
) -> Event:
    """``loopwise eval perplexity``."""
    checkpoint = _load(path, config.measure)
    limit = checkpoint.model.geometry.max_depth
    depths = depths or ([1, 2, 4, 8, 16, 32] if limit is None else [limit])
    out: Event = {}
    for name, documents in read_corpora(sources, config.data).items():
        stage = f"perplexity of {name}"

        def report(done: int, total: int, stage: str = stage) -> None:
            emit({"event": "progress", "stage": stage, "done": done, "total": total})

        out[name] = perplexity(
            checkpoint.model,
            checkpoint.tokenizer,
            documents,
            protocol,
            depths,
            block=block,
            stride=stride,
            progress=report,
        )
    return out


def open_run(folder: Path, config: RunConfig, resume: bool) -> RunConfig:
    """Claim a run folder, or go on with the one that is there.

    Returns:
        The settings to use: when resuming, those the folder was started with.
    Raises:
        RunFolderError: the folder holds another run, or nothing to resume.
    """
    file = folder / "config.json"
    if resume:
        if not file.is_file():
            raise RunFolderError(f"{str(folder)!r} holds no run to resume; leave out --resume")
        table = json.loads(file.read_text(encoding="utf-8"))
        return from_table(RunConfig, table["settings"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(
            f"{str(folder)!r} is not empty; go on with --resume or choose another name with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    table = {"loopwise": loopwise.__version__, "settings": resolved_table(config)}
    file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return config


def _load(path: Path, config: MeasureConfig) -> Checkpoint:
    return load_checkpoint(path, torch.float32 if config.dtype == "fp32" else torch.bfloat16)


def _finished_traces(folder: Path, checkpoint: Checkpoint) -> list[Trace] | None:
    """Traces of these very weights that an earlier run finished, if it finished all of them."""
    wanted = checkpoint.training.get("data", {}).get("held_out_corpora", [])
    if not wanted or not all((folder / name / "trace.json").is_file() for name in wanted):
        return None
    traces = [Trace(folder / name) for name in wanted]
    ours = checkpoint.weights_hash
    return traces if all(t.header["weights_hash"] == ours for t in traces) else None


def _held_out_of(path: Path) -> dict[str, list[Document]]:
    """What the run at ``path`` held out."""
    file = path / "config.json"
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "settings" not in table:
        raise ConfigError(f"{str(path)!r} is not a run folder; say what to measure on with --data")
    config = from_table(RunConfig, table["settings"])
    return read_texts(config.data, config.seed).held_out
