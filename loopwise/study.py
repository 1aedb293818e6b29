"""The main job in stages over files: train, measure, frontier, report; ``study`` chains them.

A run folder holds ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``traces/<corpus>/``,
``results.json``, ``report.html`` and ``plots/``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loopwise
from loopwise.config import from_table
from loopwise.data import (
    Document,
    PackedBlocks,
    ReadOptions,
    ReadReport,
    TokenBatch,
    load_or_tokenize,
    read_documents,
    split_held_out,
)
from loopwise.errors import ConfigError, DataError, RunFolderError
from loopwise.exits.base import ExitPolicy
from loopwise.exits.latent_change import LatentChange
from loopwise.exits.probe import Probe
from loopwise.exits.rule import ExitRule
from loopwise.measure import frontier as fr
from loopwise.measure.convergence import summarise
from loopwise.measure.evaluate import batches
from loopwise.measure.live import run_live
from loopwise.measure.probe_fit import fit_probe, judge_probe, probe_examples
from loopwise.measure.trace import Trace, TraceInfo, target_bytes, write_trace
from loopwise.models import MODELS
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, write_exits
from loopwise.models.costs import flops_per_token, parameters
from loopwise.settings import MeasureConfig, RunConfig, TokenizerConfig, resolved_table
from loopwise.tokenizer import BPETokenizer, Tokenizer, load_tokenizer
from loopwise.train.loop import Trainer
from loopwise.train.machine import pick_device

Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Texts:
    """Documents to learn from, and to measure on by corpus name."""

    train: list[Document]
    held_out: dict[str, list[Document]]
    report: ReadReport


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
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(
            f"{str(folder)!r} is not empty; go on with --resume or choose another name with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    table = {"loopwise": loopwise.__version__, "settings": resolved_table(config)}
    file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return config


def read_texts(config: RunConfig) -> Texts:
    """Read every source and set aside what is measured."""
    report = ReadReport()
    data = config.data

    def read(source: str) -> list[Document]:
        documents = read_documents([source], data.read, report)
        return list(itertools.islice(documents, data.max_documents))

    train: list[Document] = []
    held_out: dict[str, list[Document]] = {}
    for source in data.sources:
        documents = read(source)
        if not data.held_out:
            documents, aside = split_held_out(documents, data.held_out_fraction, config.seed)
            held_out[corpus_name(source, held_out)] = aside
        train += documents
    for source in data.held_out:
        held_out[corpus_name(source, held_out)] = read(source)
    return Texts(train, held_out, report)


def corpus_name(source: str, taken: Iterable[str]) -> str:
    """A short name for a source, usable as a folder, that is not taken yet."""
    stem = source.removeprefix("builtin:").removeprefix("hub:")
    stem = re.sub(r"(\.(txt|jsonl|parquet))?(\.(gz|xz|zst))?$", "", Path(stem).name)
    name = base = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "corpus"
    for n in itertools.count(2):
        if name not in taken:
            return name
        name = f"{base}-{n}"
    raise AssertionError("count never ends")


def make_tokenizer(config: TokenizerConfig, train: list[Document]) -> Tokenizer:
    if config.kind != "bpe":
        return load_tokenizer(config.kind)
    budget = int(config.train_megabytes * 1_000_000)

    def sample() -> Iterable[str]:
        used = 0
        for document in train:
            if used > budget:
                return
            used += len(document.text)
            yield document.text

    return BPETokenizer.train(sample(), config.vocab_size)


def cache_folder() -> Path:
    """Where token files are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "loopwise" / "tokens"


def train_stage(config: RunConfig, folder: Path, emit: Emit, resume: bool = False) -> Event:
    """Train into ``folder``.

    Returns:
        The trainer's final event.
    """
    device = pick_device(config.device)
    texts = read_texts(config)
    tokenizer_file = folder / "tokenizer.json"
    if resume and tokenizer_file.is_file():
        tokenizer = load_tokenizer(tokenizer_file)
    else:
        tokenizer = make_tokenizer(config.tokenizer, texts.train)
        tokenizer_file.write_text(tokenizer.to_json(), encoding="utf-8")
    store = load_or_tokenize(lambda: texts.train, tokenizer, cache_folder())
    aside = [d for documents in texts.held_out.values() for d in documents]
    held_out = load_or_tokenize(lambda: aside, tokenizer, cache_folder())
    seq = config.train.seq
    info = {
        "sources": list(config.data.sources),
        "text_hash": store.text_hash,
        "held_out_text_hash": held_out.text_hash,
        "documents": store.n_documents,
        "tokens": store.n_tokens,
        "held_out_tokens": held_out.n_tokens,
        "read": texts.report.summary(),
        "held_out_corpora": list(texts.held_out),
    }
    emit({"event": "data", **info})
    torch.manual_seed(config.seed)
    model_class = MODELS[config.architecture]
    trainer = Trainer(
        model_class(config.model_config(tokenizer.vocab_size)),
        tokenizer,
        PackedBlocks(store, seq, config.seed),
        PackedBlocks(held_out, seq, config.seed, shuffle=False),
        config=config.train,
        optim=config.optim,
        depth=config.depth,
        seed=config.seed,
        folder=folder,
        data_info=info,
        device=device,
        on_event=emit,
    )
    return trainer.run(resume=resume)


def measure_stage(
    checkpoint: Checkpoint,
    corpora: dict[str, list[Document]],
    config: MeasureConfig,
    folder: Path,
    emit: Emit,
    seq: int | None = None,
) -> list[Trace]:
    """Fit the probe on the first part of each corpus, then trace the rest of it.

    The two parts share no block, so no probe sees what it is judged on.

    Args:
        corpora: held-out documents by name.
        folder: gets one trace folder per corpus.
        seq: block length; the trained one by default.
    """
    model = checkpoint.model
    seq = seq or int(checkpoint.training.get("seq", 256))
    horizon = min(config.horizon, model.geometry.max_depth or config.horizon)
    _warn_past_training(checkpoint, horizon, emit)
    parts = {name: _two_parts(docs, checkpoint, seq, config) for name, docs in corpora.items()}
    fitting = [fit for fit, _ in parts.values()]
    probe = _fit_probe(checkpoint, fitting, horizon, config, emit)
    policies: list[ExitPolicy] = [LatentChange()]
    if probe is not None:
        policies.append(probe)
    traces = []
    for name, (_, blocks) in parts.items():
        limit = max(1, config.tokens // seq)
        info = TraceInfo(
            checkpoint=str(checkpoint.path),
            weights_hash=checkpoint.weights_hash,
            corpus=name,
            text_hash=blocks.store.text_hash,
            trained_mean_depth=checkpoint.trained_mean_depth,
            n_bytes=target_bytes(blocks, checkpoint.tokenizer.byte_lengths(), limit),
        )

        def report(done: int, total: int, name: str = name) -> None:
            emit({"event": "progress", "stage": f"tracing {name}", "done": done, "total": total})

        traces.append(
            write_trace(
                model,
                blocks,
                folder / name,
                info,
                horizon=horizon,
                limit=limit,
                policies=policies,
                progress=report,
            )
        )
    return traces


def frontier_stage(
    trace: Trace, checkpoint: Checkpoint, config: MeasureConfig, emit: Emit
) -> dict[str, Any]:
    """Every policy's frontier on one trace: replayed at all thresholds, live at some."""
    costs = flops_per_token(checkpoint.model, context=trace.header["seq"] // 2)
    mean = trace.header["trained_mean_depth"] or trace.horizon
    max_depth = max(1, min(round(mean), trace.horizon))
    yardstick = fr.Yardstick.of(trace, max_depth, costs)
    base = ExitRule(policy="kl", max_depth=max_depth)
    scores = {"kl": trace["kl_prev"], "latent-change": trace["score.latent-change"]}
    if "probe" in trace.policies:
        scores["probe"] = trace["score.probe"]
    policies: dict[str, Any] = {
        "fixed": {"uniform": fr.uniform_points(yardstick)},
        "oracle": {"replayed": [_oracle_point(trace, yardstick)]},
        "oracle-kl": {"replayed": _bound_points(trace["kl_last"], base, yardstick)},
    }
    for name, score in scores.items():
        rule = ExitRule(policy=name, max_depth=max_depth)
        thresholds = fr.spread_thresholds(score, rule)
        replayed = fr.replayed_points(score, rule, yardstick, thresholds)
        live = _live_points(trace, checkpoint, rule, replayed, yardstick, config, emit)
        policies[name] = {"replayed": replayed, "live": live}
    if "probe" in scores:
        answers = trace["argmax"]
        later = np.maximum.accumulate((answers != answers[:, -1:])[:, ::-1], axis=1)[:, ::-1]
        policies["probe"]["judged"] = judge_probe(
            scores["probe"][:, :max_depth].ravel(), later[:, :max_depth].ravel()
        )
    return {
        "corpus": trace.header["corpus"],
        "max_depth": max_depth,
        "check_in_recurrences": costs.check_in_recurrences,
        "policies": policies,
        "budgets": _budgets(policies),
    }


def collect_results(
    checkpoint: Checkpoint,
    config: RunConfig | None,
    convergence: list[Event],
    frontiers: list[Event],
) -> dict[str, Any]:
    """Everything a report shows, as plain values."""
    costs = flops_per_token(checkpoint.model, context=int(checkpoint.training.get("seq", 256)) // 2)
    geometry = checkpoint.model.geometry
    return {
        "format": "loopwise-results",
        "version": 1,
        "loopwise": loopwise.__version__,
        "model": {
            "architecture": checkpoint.model.name,
            "parameters": parameters(checkpoint.model),
            "d_model": geometry.d_model,
            "vocab_size": geometry.vocab_size,
            "layers": [geometry.n_prelude_layers, geometry.n_core_layers, geometry.n_coda_layers],
            "flops_per_token": {
                "prelude": costs.prelude,
                "core": costs.core,
                "coda": costs.coda,
                "head": costs.head,
            },
        },
        "training": checkpoint.training,
        "settings": resolved_table(config) if config is not None else None,
        "convergence": convergence,
        "frontiers": frontiers,
    }


def measured_results(
    checkpoint: Checkpoint, traces: list[Trace], config: RunConfig, emit: Emit
) -> dict[str, Any]:
    """Summaries and frontiers of finished traces."""
    epsilon = config.measure.epsilon
    convergence = []
    for trace in traces:
        emit(
            {
                "event": "progress",
                "stage": "summaries",
                "done": len(convergence),
                "total": len(traces),
            }
        )
        convergence.append(
            {
                **summarise(trace, checkpoint.tokenizer, epsilon),
                "passage": passage(trace, checkpoint.tokenizer, epsilon),
            }
        )
    frontiers = [frontier_stage(t, checkpoint, config.measure, emit) for t in traces]
    return collect_results(checkpoint, config, convergence, frontiers)


def passage(trace: Trace, tokenizer: Tokenizer, epsilon: float, tokens: int = 160) -> list[Event]:
    """The start of the trace's text with each token's settled depth, for people to read."""
    from loopwise.measure.convergence import settled_depth

    depth = settled_depth(trace["kl_prev"][:tokens], epsilon)
    target = trace["target"][:tokens]
    return [
        {"text": tokenizer.decode([int(t)]), "depth": int(d)}
        for t, d in zip(target, depth, strict=True)
    ]


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    """Write ``results.json`` in one move; numbers that are not finite become null."""
    from loopwise.train.metrics import finite

    aside, path = folder / ".results.json", folder / "results.json"
    aside.write_text(json.dumps(finite(results), indent=1, allow_nan=False), encoding="utf-8")
    aside.replace(path)
    return path


def held_out_of(checkpoint: Checkpoint, config: RunConfig) -> dict[str, list[Document]]:
    """The held-out documents of the run that made a checkpoint."""
    return read_texts(config).held_out


def documents_of(
    sources: list[str], read: ReadOptions, max_documents: int | None = None
) -> dict[str, list[Document]]:
    """Documents of each source, by corpus name."""
    out: dict[str, list[Document]] = {}
    for source in sources:
        documents = read_documents([source], read, ReadReport())
        out[corpus_name(source, out)] = list(itertools.islice(documents, max_documents))
    return out


def load_for_measure(path: Path, config: MeasureConfig) -> Checkpoint:
    return load_checkpoint(path, torch.float32 if config.dtype == "fp32" else torch.bfloat16)


def _two_parts(
    documents: list[Document], checkpoint: Checkpoint, seq: int, config: MeasureConfig
) -> tuple[PackedBlocks, PackedBlocks]:
    """Blocks to fit on and blocks to judge on, from different documents."""
    rate = max(
        1.0, sum(len(d.text) for d in documents[:50]) / max(1, _count(documents[:50], checkpoint))
    )
    wanted, used, cut = config.fit_tokens * rate, 0.0, 0
    while cut < len(documents) // 2 and used < wanted:
        used += len(documents[cut].text)
        cut += 1
    if cut == 0:
        raise DataError(
            f"{len(documents)} document is too little to fit a probe on one part and measure on "
            "another; give more text, or cut it up with data.read.max_document_chars"
        )
    stores = [
        load_or_tokenize(lambda part=part: part, checkpoint.tokenizer, cache_folder())
        for part in (documents[:cut], documents[cut:])
    ]
    fit, judge = (PackedBlocks(store, seq, 0, shuffle=False) for store in stores)
    return fit, judge


def _count(documents: list[Document], checkpoint: Checkpoint) -> int:
    return sum(len(ids) for ids in checkpoint.tokenizer.encode_batch([d.text for d in documents]))


def _fit_probe(
    checkpoint: Checkpoint,
    fitting: list[PackedBlocks],
    horizon: int,
    config: MeasureConfig,
    emit: Emit,
) -> Probe | None:
    """Fit A2 and store it with the checkpoint; None for a model of one recurrence."""
    if horizon < 2:
        return None
    emit({"event": "progress", "stage": "fitting the probe", "done": 0, "total": 1})
    mean = checkpoint.trained_mean_depth or horizon
    max_depth = min(round(mean), horizon)

    def blocks() -> Iterable[TokenBatch]:
        for part in fitting:
            limit = max(1, config.fit_tokens // part.seq)
            yield from batches(part, config.batch, limit)

    latents, labels = probe_examples(checkpoint.model, blocks(), horizon, max_depth)
    probe = fit_probe(latents, labels)
    write_exits(checkpoint, {"policies": {"probe": probe.to_state()}})
    return probe


def _live_points(
    trace: Trace,
    checkpoint: Checkpoint,
    rule: ExitRule,
    replayed: list[Event],
    yardstick: fr.Yardstick,
    config: MeasureConfig,
    emit: Emit,
) -> list[Event]:
    """Run some thresholds again with frozen entries, on the first blocks of the trace."""
    from dataclasses import replace

    from loopwise.exits.base import Reads
    from loopwise.exits.rule import build_policy
    from loopwise.models.checkpoint import read_json

    blocks = trace.blocks()
    n_blocks = max(1, min(config.live_tokens // trace.header["seq"], len(blocks.token_ids)))
    of = trace["block"] < n_blocks
    local = fr.Yardstick(
        yardstick.loss[of], yardstick.argmax[of], yardstick.block[of], yardstick.costs
    )
    exits = checkpoint.path / "exits.json"
    fitted = read_json(exits).get("policies") if exits.is_file() else None
    policy = build_policy(rule, fitted)
    picks = np.linspace(0, len(replayed) - 1, min(config.live_thresholds, len(replayed)))
    points = []
    for i in sorted({int(round(p)) for p in picks}):
        threshold = replayed[i]["threshold"]
        emit(
            {
                "event": "progress",
                "stage": f"live {rule.policy}",
                "done": len(points),
                "total": len(picks),
            }
        )
        parts = (
            _slice(blocks, a, min(a + config.batch, n_blocks))
            for a in range(0, n_blocks, config.batch)
        )
        result = run_live(checkpoint.model, parts, replace(rule, threshold=threshold), policy)
        point = fr.score_point(
            result.exit_depth.numpy(),
            result.loss.numpy(),
            result.argmax.numpy(),
            local,
            policy.reads is Reads.LOGITS,
        )
        points.append({"threshold": threshold, "tokens": len(result.loss), **point})
    return points


def _slice(blocks: TokenBatch, first: int, last: int) -> TokenBatch:
    return TokenBatch(
        *(
            t[first:last]
            for t in (
                blocks.token_ids,
                blocks.targets,
                blocks.document_ids,
                blocks.positions,
                blocks.hops,
            )
        )
    )


def _oracle_point(trace: Trace, yardstick: fr.Yardstick) -> Event:
    """The argmax oracle: earliest recurrence whose argmax is final, within the largest depth."""
    from loopwise.measure.convergence import argmax_final_depth

    depth = argmax_final_depth(yardstick.argmax)
    at = np.arange(len(depth)), depth - 1
    point = fr.score_point(depth, yardstick.loss[at], yardstick.argmax[at], yardstick, False)
    return {"threshold": None, **point}


def _bound_points(score: np.ndarray, base: ExitRule, yardstick: fr.Yardstick) -> list[Event]:
    """An oracle that knows the KL to the final output; it pays for no check."""
    from dataclasses import replace

    rule = replace(base, policy="latent-change")  # charged for no reading
    return fr.replayed_points(score, rule, yardstick, fr.spread_thresholds(score, rule))


def _budgets(policies: dict[str, Any], budgets: tuple[float, ...] = (0.001, 0.01)) -> list[Event]:
    """For each rule and meaning: the shallowest point within each budget."""
    rows = []
    for name, kinds in policies.items():
        for meaning in ("uniform", "replayed", "live"):
            for budget in budgets:
                if meaning in kinds:
                    point = fr.depth_at_budget(kinds[meaning], budget)
                    rows.append(
                        {"policy": name, "meaning": meaning, "budget_nats": budget, "point": point}
                    )
    return rows


def _warn_past_training(checkpoint: Checkpoint, horizon: int, emit: Emit) -> None:
    trained = checkpoint.trained_max_depth
    if trained is not None and horizon > trained:
        text = (
            f"measuring to depth {horizon}; 99% of training steps ran at most {trained} "
            "recurrences, so what lies beyond is extrapolation"
        )
        emit({"event": "warning", "text": text})


def require_same_weights(trace: Trace, checkpoint: Checkpoint) -> None:
    """Refuse to mix a trace with other weights.

    Raises:
        ConfigError: the trace was taken of another checkpoint.
    """
    if trace.header["weights_hash"] != checkpoint.weights_hash:
        raise ConfigError(
            f"trace {str(trace.folder)!r} was taken of other weights than {str(checkpoint.path)!r}; "
            "measure again"
        )


def run_study(config: RunConfig, folder: Path, emit: Emit, resume: bool = False) -> Event:
    """The main job: every stage in turn, into one run folder.

    Returns:
        The paths and headline figures.
    """
    from loopwise.report import print_summary, write_report

    config = open_run(folder, config, resume)
    train_stage(config, folder, emit, resume)
    checkpoint = load_for_measure(folder, config.measure)
    traces_folder = folder / "traces"
    finished = [Trace(p.parent) for p in sorted(traces_folder.glob("*/trace.json"))]
    if finished and all(t.header["weights_hash"] == checkpoint.weights_hash for t in finished):
        traces = finished
    else:
        shutil.rmtree(traces_folder, ignore_errors=True)
        corpora = held_out_of(checkpoint, config)
        traces = measure_stage(checkpoint, corpora, config.measure, traces_folder, emit)
    results = measured_results(checkpoint, traces, config, emit)
    write_results(folder, results)
    report = write_report(folder)
    print_summary(results)
    return {"run": str(folder), "report": str(report), "checkpoint": str(checkpoint.path)}


def measure_command(
    path: Path, sources: list[str] | None, config: RunConfig, out: Path | None, emit: Emit
) -> list[Trace]:
    """``loopwise measure``: the given text, or what the run held out."""
    checkpoint = load_for_measure(path, config.measure)
    if sources:
        corpora = documents_of(sources, config.data.read, config.data.max_documents)
    else:
        run = path / "config.json"
        table = json.loads(run.read_text(encoding="utf-8")) if run.is_file() else {}
        if "settings" not in table:
            raise ConfigError("give --data, or a run folder whose held-out text can be used")
        corpora = held_out_of(checkpoint, from_table(RunConfig, table["settings"]))
    folder = out or checkpoint.path.parent.parent / "traces"
    return measure_stage(checkpoint, corpora, config.measure, folder, emit)


def frontier_command(
    paths: list[Path], moved: Path | None, config: RunConfig, emit: Emit
) -> list[Event]:
    """``loopwise frontier``: every policy on finished traces."""
    out = []
    for path in paths:
        trace = Trace(path)
        checkpoint = load_for_measure(moved or Path(trace.header["checkpoint"]), config.measure)
        require_same_weights(trace, checkpoint)
        out.append(frontier_stage(trace, checkpoint, config.measure, emit))
    return out
