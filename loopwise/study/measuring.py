"""The measuring stage: a frozen model and text in, fitted exit rules and traces out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loopwise.data import Document, PackedBlocks, TokenBatch, document_hash, load_or_tokenize
from loopwise.data.files import how_to_cut
from loopwise.errors import DataError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import ExitPolicy, Reads
from loopwise.exits.certified import Certified
from loopwise.exits.latent_kl import LatentKL
from loopwise.exits.probe import Probe
from loopwise.exits.rule import ExitRule, build_policy, why_not_built
from loopwise.measure.certified_fit import fit_certified, reach_examples
from loopwise.measure.evaluate import batches
from loopwise.measure.latent_kl_fit import fit_latent_kl
from loopwise.measure.probe_fit import fit_probe, probe_examples
from loopwise.measure.scores import follows_from_columns
from loopwise.measure.trace import Trace, TraceInfo, trace_batch, write_trace
from loopwise.models.checkpoint import Checkpoint, write_exits
from loopwise.settings import MeasureConfig
from loopwise.study.texts import cache_folder
from loopwise.tokenizer import Tokenizer

_FEW_PRODUCTS = 64  # over d_model; what a recorded score may take at every recurrence
Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Plan:
    """What of a corpus rules are fitted on, and what is measured; no document is in both."""

    fit: list[Document]
    measured: PackedBlocks


def plan_corpora(
    corpora: dict[str, list[Document]],
    tokenizer: Tokenizer,
    seq: int,
    config: MeasureConfig,
    fitted_on: Sequence[str] | None,
) -> dict[str, Plan]:
    """Divide each corpus, and refuse what is too small before any work.

    Args:
        fitted_on: hashes of the documents rules were fitted on already; None where none was yet,
            and it will be on the first documents of each corpus.
    Raises:
        DataError: too little text.
    """
    seen = set(fitted_on or ())
    if fitted_on is None:
        fits = {
            name: _first_documents(documents, config.fit_tokens, name, tokenizer)
            for name, documents in corpora.items()
        }
        seen = {document_hash(d) for of_one in fits.values() for d in of_one}
    else:
        fits = {
            name: [d for d in documents if document_hash(d) in seen]
            for name, documents in corpora.items()
        }
    plans = {}
    for name, documents in corpora.items():
        fresh = [d for d in documents if document_hash(d) not in seen]
        if not fresh:
            raise DataError(f"all text of {name!r} was used to fit exit rules; give other text")
        plans[name] = Plan(fits[name], _blocks(fresh, tokenizer, seq))
    return plans


def measure_stage(
    checkpoint: Checkpoint,
    corpora: dict[str, list[Document]],
    config: MeasureConfig,
    folder: Path,
    emit: Emit,
) -> list[Trace]:
    """Fit what the checkpoint lacks, then trace each corpus.

    Rules are fitted on the first documents of each corpus; those are never measured, now or in any
    later measurement of this checkpoint.

    Args:
        corpora: held-out documents by name.
        folder: gets one trace folder per corpus.
    """
    model, seq = checkpoint.model, block_length(checkpoint)
    horizon = horizon_of(checkpoint, config)
    _warn_past_training(checkpoint, horizon, emit)
    checkpoint, plans = _fit_missing(checkpoint, corpora, config, emit)
    policies = _policies_to_record(checkpoint, config) if horizon > 1 else []
    traces = []
    for name, plan in plans.items():
        info = TraceInfo(
            checkpoint=str(checkpoint.path),
            weights_hash=checkpoint.weights_hash,
            corpus=name,
            text_hash=plan.measured.store.text_hash,
            trained_mean_depth=checkpoint.trained_mean_depth,
            trained_depths=checkpoint.trained_depths,
        )

        def report(done: int, total: int, name: str = name) -> None:
            emit({"event": "progress", "stage": f"tracing {name}", "done": done, "total": total})

        trace = write_trace(
            model,
            plan.measured,
            folder / name,
            info,
            horizon=horizon,
            limit=blocks_to_trace(config, seq),
            policies=policies,
            byte_lengths=checkpoint.tokenizer.byte_lengths(),
            progress=report,
        )
        traces.append(trace)
    return traces


def fit_stage(
    checkpoint: Checkpoint, corpora: dict[str, list[Document]], config: MeasureConfig, emit: Emit
) -> Checkpoint:
    """Fit what the checkpoint lacks of the fitted rules, and store it with the checkpoint.

    What comes later is fitted on the documents the first rule was fitted on and on no others, so
    that no trace of this checkpoint, however old, holds text that a rule has seen.
    """
    return _fit_missing(checkpoint, corpora, config, emit)[0]


def block_length(checkpoint: Checkpoint) -> int:
    """Tokens of the blocks a checkpoint was trained on."""
    return int(checkpoint.training.get("seq", 256))


def blocks_to_trace(config: MeasureConfig, seq: int) -> int:
    """Of each corpus, at most."""
    return max(1, config.tokens // seq)


def horizon_of(checkpoint: Checkpoint, config: MeasureConfig) -> int:
    """Recurrences to trace, as asked and within what the weights allow."""
    return min(config.horizon, checkpoint.model.geometry.max_depth or config.horizon)


def _fit_missing(
    checkpoint: Checkpoint, corpora: dict[str, list[Document]], config: MeasureConfig, emit: Emit
) -> tuple[Checkpoint, dict[str, Plan]]:
    """The checkpoint with every fitted rule it can have, and the corpora divided."""
    fitted, horizon = checkpoint.fitted_policies(), horizon_of(checkpoint, config)
    wanted = [name for name in EXITS if needs_fitting(name)] if horizon > 1 else []
    missing = [name for name in wanted if name not in fitted]
    to_begin = bool(missing) and not fitted
    fitted_on = None if to_begin else checkpoint.exits.get("fitted_on", [])
    seq = block_length(checkpoint)
    plans = plan_corpora(corpora, checkpoint.tokenizer, seq, config, fitted_on)
    here = [document_hash(d) for plan in plans.values() for d in plan.fit]
    if missing and fitted_on is not None and (not here or set(fitted_on) != set(here)):
        text = (
            f"no fit of {', '.join(missing)}: it takes the documents that {', '.join(fitted)} was "
            "fitted on, and they are not all here; measure that text to get it"
        )
        emit({"event": "warning", "text": text})
        missing = []
    if not missing:
        return checkpoint, plans
    parts = _fit_batches(plans, checkpoint.tokenizer, seq, config)
    states = dict(fitted)
    for name in missing:
        emit({"event": "progress", "stage": f"fitting {name}", "done": 0, "total": 1})
        states[name] = fit_policy(name, checkpoint, parts, horizon)
        emit({"event": "progress", "stage": f"fitting {name}", "done": 1, "total": 1})
    exits = {"policies": states, "fitted_on": here if fitted_on is None else fitted_on}
    done = write_exits(checkpoint, {**checkpoint.exits, **exits})
    emit({"event": "fitted", "rules": missing, "file": str(checkpoint.path / "exits.json")})
    return done, plans


def _fit_batches(
    plans: dict[str, Plan], tokenizer: Tokenizer, seq: int, config: MeasureConfig
) -> list[TokenBatch]:
    limit = max(1, config.fit_tokens // seq)  # blocks of each corpus
    parts: list[TokenBatch] = []
    for plan in plans.values():
        if plan.fit:
            parts += batches(_blocks(plan.fit, tokenizer, seq), config.batch, limit)
    return parts


def _fit_probe(checkpoint: Checkpoint, parts: list[TokenBatch], horizon: int) -> Probe:
    max_depth = min(round(checkpoint.trained_mean_depth or horizon), horizon)
    return fit_probe(*probe_examples(checkpoint.model, parts, horizon, max_depth))


def _fit_latent_kl(checkpoint: Checkpoint, parts: list[TokenBatch], horizon: int) -> LatentKL:
    with torch.no_grad():
        traced = [trace_batch(checkpoint.model, batch, horizon) for batch in parts]
    change, second, kl = (
        torch.cat([columns[name] for columns in traced]).numpy()
        for name in ("change", "second", "kl_prev")
    )
    return fit_latent_kl(change, second, kl, np.arange(1, horizon + 1))


def _fit_certified(checkpoint: Checkpoint, parts: list[TokenBatch], horizon: int) -> Certified:
    max_depth = min(max(round(checkpoint.trained_mean_depth or horizon), 2), horizon)
    examples = reach_examples(checkpoint.model, parts, horizon, max_depth)
    return fit_certified(*examples, checkpoint.model.head_weight)


_Fitted = Probe | LatentKL | Certified
_FITS: dict[str, Callable[[Checkpoint, list[TokenBatch], int], _Fitted]] = {
    "probe": _fit_probe,
    "latent-kl": _fit_latent_kl,
    "certified": _fit_certified,
}


def fit_policy(
    name: str, checkpoint: Checkpoint, parts: list[TokenBatch], horizon: int
) -> dict[str, Any]:
    """The state of one fitted rule, as ``exits.json`` holds it; nothing is stored."""
    return _FITS[name](checkpoint, parts, horizon).to_state()


def _policies_to_record(checkpoint: Checkpoint, config: MeasureConfig) -> list[ExitPolicy]:
    """Rules whose score the standard columns do not tell, where recording it is cheap or asked for.

    A score over d_model adds nothing that could be measured to the time of tracing, and one over
    64 rows of the head (sketched-kl) about a sixth. 128 rows (short-list-kl) take a quarter, and
    further passes over the vocabulary at every recurrence half of it (min-p-kl; vocabularies of
    1,024 and 4,096): these are recorded for live rules alone.
    """
    fitted, model = checkpoint.fitted_policies(), checkpoint.model
    return [
        build_policy(ExitRule(policy=name), fitted, model)
        for name in EXITS
        if not follows_from_columns(name)
        and (_is_cheap(EXITS[name]) or name in config.live_rules)
        and why_not_built(name, fitted, model) is None
    ]


def _is_cheap(policy: type[ExitPolicy]) -> bool:
    return policy.reads in (Reads.LATENT, Reads.HIDDEN) and policy.products <= _FEW_PRODUCTS


def _first_documents(
    documents: list[Document], tokens: int, name: str, tokenizer: Tokenizer
) -> list[Document]:
    """Documents from the start that hold about ``tokens``, at most half of them."""
    if len(documents) < 2:
        raise DataError(
            f"{name!r} is one document: too little to fit exit rules on one part and measure on "
            "another; give more text" + how_to_cut(documents)
        )
    taken: list[Document] = []
    for document in documents[: len(documents) // 2]:
        taken.append(document)
        tokens -= len(tokenizer.encode(document.text))
        if tokens <= 0:
            break
    return taken


def _blocks(documents: list[Document], tokenizer: Tokenizer, seq: int) -> PackedBlocks:
    store = load_or_tokenize(lambda: documents, tokenizer, cache_folder())
    return PackedBlocks(store, seq, seed=0, shuffle=False)


def _warn_past_training(checkpoint: Checkpoint, horizon: int, emit: Emit) -> None:
    trained = checkpoint.trained_max_depth
    if trained is not None and horizon > trained:
        text = (
            f"measuring to depth {horizon}; 99% of training steps ran at most {trained} "
            "recurrences, so what lies beyond is extrapolation"
        )
        emit({"event": "warning", "text": text})
