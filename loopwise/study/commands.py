"""The stages as commands over run folders."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import loopwise
from loopwise.config import from_table, merge, read_json_object
from loopwise.data import Document
from loopwise.data.wikitext import articles, begins_with_title
from loopwise.errors import ConfigError, RunFolderError
from loopwise.measure.perplexity import Protocol, perplexity
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.report import write_report
from loopwise.report.facts import read_results
from loopwise.settings import (
    MeasureConfig,
    RunConfig,
    build_config,
    differing,
    resolved_table,
)
from loopwise.study.allocating import frontier_stage
from loopwise.study.folders import require_free
from loopwise.study.measuring import (
    block_length,
    blocks_to_trace,
    fit_stage,
    horizon_of,
    measure_stage,
    plan_corpora,
)
from loopwise.study.reference import open_reference, reference_stage, with_whole_path
from loopwise.study.results import add_references, collect_results, write_results
from loopwise.study.texts import read_corpora, read_texts
from loopwise.study.training import (
    Prepared,
    check_memory,
    prepare,
    settings_from,
    train_stage,
    warn_of_shared,
)
from loopwise.tokenizer import TOKENIZER_FILE
from loopwise.train.lock import only_trainer
from loopwise.writing import make_folder, write_whole

Event = dict[str, Any]
Asked = dict[str, Any]
Emit = Callable[[Event], None]
_TAKEN = "go on with --resume or choose another name with --out"


def run_study(asked: Asked, folder: Path, emit: Emit, resume: bool = False) -> Event:
    """The main job: every stage in turn, into one run folder; finished stages are kept.

    Args:
        asked: settings, as :func:`loopwise.settings.explicit_table` gives them.
    Returns:
        The paths of what was made, and the results.
    """
    asked = with_whole_path(asked)
    prepared = _begin(asked, folder, emit, resume, to_measure=True)
    config = prepared.config
    train_stage(prepared, folder, emit, resume)
    checkpoint = _load(folder, config.measure)
    traces = _finished_traces(folder / "traces", checkpoint)
    if traces is None:
        shutil.rmtree(folder / "traces", ignore_errors=True)
        traces_folder = folder / "traces"
        traces = measure_stage(checkpoint, prepared.corpora, config.measure, traces_folder, emit)
        checkpoint = _load(folder, config.measure)
    else:  # traces of an earlier version: rules that came since are fitted on what others were
        checkpoint = fit_stage(checkpoint, prepared.corpora, config.measure, emit)
    frontiers = [frontier_stage(t, checkpoint, config.measure, emit) for t in traces]
    results = collect_results(checkpoint, traces, frontiers, config)
    write_results(folder, results)  # whatever the reference cannot read
    if config.measure.reference is not None:
        _refer(checkpoint, traces, config.measure, emit)
        add_references(results, traces)
        write_results(folder, results)
    report = write_report(folder)
    return {
        "run": str(folder),
        "report": str(report),
        "checkpoint": str(checkpoint.path),
        "results": results,
    }


def train_command(
    asked: Asked, folder: Path, emit: Emit, resume: bool = False, start: Path | None = None
) -> Event:
    """``loopwise train``; ``start`` is a checkpoint to go on from."""
    asked = with_whole_path(asked)
    if start is not None:
        asked = settings_from(asked, start)
    prepared = _begin(asked, folder, emit, resume, to_measure=False)
    return train_stage(prepared, folder, emit, resume)


def measure_command(
    path: Path, sources: list[str] | None, asked: Asked, out: Path | None, emit: Emit
) -> list[Trace]:
    """``loopwise measure``: the given text, or what the run of the checkpoint held out.

    Where all traces are finished and a reference is asked for, it alone is measured, and added to
    the results of their run.
    """
    asked = with_whole_path(asked)
    config, run = _settings_at(path, asked)
    checkpoint = _load(path, config.measure)
    open_reference(config.measure)  # refused before long work begins
    inside_run = checkpoint.path.parent.name == "checkpoints"
    run_folder = checkpoint.path.parent.parent
    if out is None and not inside_run:
        raise ConfigError(f"{str(path)!r} is not part of a run; say where traces go with --out")
    folder = out or run_folder / "traces"
    if sources:
        corpora = read_corpora(sources, config.data)
    elif run is not None:
        corpora = read_texts(run.data, run.seed).held_out
    else:
        raise ConfigError(f"{str(path)!r} is not a run folder; say what to measure on with --data")
    asked_for = asked.get("measure", {}).get("reference") is not None
    finished = _traces_of(folder, checkpoint, corpora, config.measure) if asked_for else None
    if finished is not None:
        _refer(checkpoint, finished, config.measure, emit)
        own = inside_run and folder.resolve() == (run_folder / "traces").resolve()
        if own and (run_folder / "results.json").is_file():
            results = read_results(run_folder)
            add_references(results, finished)
            write_results(run_folder, results)
        return finished
    for name in corpora:
        if (folder / name / "trace.json").exists():
            raise RunFolderError(
                f"{str(folder / name)!r} holds a finished trace; choose another folder with --out"
            )
    traces = measure_stage(checkpoint, corpora, config.measure, folder, emit)
    _refer(checkpoint, traces, config.measure, emit)
    return traces


def frontier_command(
    paths: list[Path], moved: Path | None, asked: Asked, emit: Emit
) -> list[Event]:
    """``loopwise frontier``: every policy on finished traces."""
    out = []
    for path in paths:
        trace = Trace(path)
        where = moved or Path(trace.header["checkpoint"])
        config, _ = _settings_at(where, asked)
        out.append(frontier_stage(trace, _load(where, config.measure), config.measure, emit))
    return out


def perplexity_command(
    path: Path,
    sources: list[str],
    protocol: Protocol,
    depths: list[int] | None,
    block: int,
    stride: int | None,
    asked: Asked,
    emit: Emit,
) -> Event:
    """``loopwise eval perplexity``: text is read whole; of WikiText an article is a document."""
    whole = {"data": {"read": {"max_document_chars": sys.maxsize}}}
    config, _ = _settings_at(path, merge(whole, asked))
    checkpoint = _load(path, config.measure)
    limit = checkpoint.model.geometry.max_depth
    usual = [1, 2, 4, 8, 16, 32]
    depths = depths or (usual if limit is None else [*(r for r in usual if r < limit), limit])
    out: Event = {}
    for name, documents in read_corpora(sources, config.data).items():
        stage = f"perplexity of {name}"

        def report(done: int, total: int, stage: str = stage) -> None:
            emit({"event": "progress", "stage": stage, "done": done, "total": total})

        out[name] = perplexity(
            checkpoint.model,
            checkpoint.tokenizer,
            _articles(documents) if protocol == "document" else documents,
            protocol,
            depths,
            block=block,
            stride=stride,
            progress=report,
        )
    return out


def _articles(documents: list[Document]) -> list[Document]:
    """WikiText by articles, whether it came whole or line by line; else unchanged.

    Documents of several lines are WikiText only if each begins with a title: the first of others
    may do so by chance, and would swallow those after it.
    """
    lines = [d.text.removesuffix("\n") for d in documents]  # the hub's rows keep theirs
    titled = [begins_with_title(line) for line in lines]
    if any("\n" in line for line in lines):
        if not all(titled):
            return documents
        lines = [line for d in documents for line in d.text.split("\n")]
    elif not titled[0]:
        return documents
    return [Document(text) for text in articles(lines)]


def _begin(asked: Asked, folder: Path, emit: Emit, resume: bool, *, to_measure: bool) -> Prepared:
    """Read everything a run needs, refuse what can be refused, then claim the folder.

    Raises:
        ConfigError: settings that cannot be run, here or at all.
        RunFolderError: the folder holds something else, or no run to resume.
        WriteError: it cannot be made.
    """
    if resume:
        config = _stored_config(folder, asked)
        with only_trainer(folder):  # refused before text is read; training takes it again
            pass
        # A run may have been stopped before it had one.
        tokenizer_folder = folder if (folder / TOKENIZER_FILE).is_file() else None
    else:
        config, tokenizer_folder = build_config(asked), None
        require_free(folder, _TAKEN)
        check_memory(config)
    if to_measure:
        open_reference(config.measure)
    prepared = prepare(config, tokenizer_folder)
    if to_measure:
        depth_limit = config.model_config(config.tokenizer.vocab_size).geometry.max_depth
        to_fit = depth_limit is None or depth_limit > 1
        plan_corpora(
            prepared.corpora,
            prepared.tokenizer,
            config.train.seq,
            config.measure,
            None if to_fit else [],
        )
    if not resume:
        make_folder(folder)
        table = {"loopwise": loopwise.__version__, "settings": resolved_table(config)}
        with only_trainer(folder):
            require_free(folder, _TAKEN)  # another run may have begun there meanwhile
            write_whole(folder / "config.json", json.dumps(table, indent=2) + "\n")
    warn_of_shared(prepared, emit)
    return prepared


def _stored_config(folder: Path, asked: Asked) -> RunConfig:
    """The settings of the run to go on with.

    Raises:
        RunFolderError: there is none, or it is broken.
        ConfigError: other settings were asked for.
    """
    table = _stored_settings(folder)
    if table is None:
        raise RunFolderError(f"{str(folder)!r} holds no run to resume; leave out --resume")
    config = from_table(RunConfig, table)
    other = differing(resolved_table(config), asked)
    if other:
        raise ConfigError(
            f"--resume goes on with the settings of the run, but {other[0]} was asked for; "
            "leave it out, or start a new run with --out"
        )
    return config


def _stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings table of a run folder, None where the folder is not one."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    table = read_json_object(file, RunFolderError)
    if "format" in table and "settings" not in table:  # a checkpoint's config
        return None
    if not isinstance(table.get("settings"), dict):
        raise RunFolderError(f"{str(file)!r} is not the config of a run: it has no settings")
    return table["settings"]


def _settings_at(path: Path, asked: Asked) -> tuple[RunConfig, RunConfig | None]:
    """Settings for working on a checkpoint: its run's, where it is part of one, under ``asked``.

    Returns:
        The settings, and the run's own.
    """
    folders = [path, *([path.parent.parent] if path.parent.name == "checkpoints" else [])]
    for folder in folders:
        table = _stored_settings(folder)
        if table is not None:
            return build_config(asked, base=table), from_table(RunConfig, table)
    return build_config(asked), None


def _refer(checkpoint: Checkpoint, traces: list[Trace], config: MeasureConfig, emit: Emit) -> None:
    """Measure the reference where there is one; it is in memory only meanwhile."""
    reference = open_reference(config)
    if reference is not None:
        reference_stage(reference, checkpoint.tokenizer, traces, emit)


def _load(path: Path, config: MeasureConfig) -> Checkpoint:
    return load_checkpoint(path, torch.float32 if config.dtype == "fp32" else torch.bfloat16)


def _traces_of(
    folder: Path, checkpoint: Checkpoint, corpora: dict[str, list[Document]], config: MeasureConfig
) -> list[Trace] | None:
    """Finished traces of these very weights, texts and depths, if all of them are there."""
    if not all((folder / name / "trace.json").is_file() for name in corpora):
        return None
    fitted_on = checkpoint.exits.get("fitted_on", [])
    plans = plan_corpora(corpora, checkpoint.tokenizer, block_length(checkpoint), config, fitted_on)
    traces = [Trace(folder / name) for name in corpora]
    texts = {name: plan.measured.store.text_hash for name, plan in plans.items()}
    ours = checkpoint.weights_hash
    same = [t.header["weights_hash"] == ours for t in traces]
    same += [t.header.get("text_hash") == texts[t.folder.name] for t in traces]
    same += [t.horizon == horizon_of(checkpoint, config) for t in traces]
    wanted = blocks_to_trace(config, block_length(checkpoint))
    whole = [min(wanted, plans[t.folder.name].measured.n_blocks) for t in traces]
    same += [t.header.get("n_blocks") == n for t, n in zip(traces, whole, strict=True)]
    return traces if all(same) else None


def _finished_traces(folder: Path, checkpoint: Checkpoint) -> list[Trace] | None:
    """Traces of these very weights that an earlier run finished, if it finished all of them."""
    wanted = checkpoint.training.get("data", {}).get("held_out_corpora", [])
    if not wanted or not all((folder / name / "trace.json").is_file() for name in wanted):
        return None
    traces = [Trace(folder / name) for name in wanted]
    ours = checkpoint.weights_hash
    return traces if all(t.header["weights_hash"] == ours for t in traces) else None
