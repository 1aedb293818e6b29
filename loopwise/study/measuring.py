"""The measuring stage: a frozen model and text in, a fitted probe and traces out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwise.data import Document, PackedBlocks, TokenBatch, load_or_tokenize
from loopwise.errors import DataError
from loopwise.exits.base import ExitPolicy
from loopwise.exits.latent_change import LatentChange
from loopwise.exits.probe import Probe
from loopwise.measure.evaluate import batches
from loopwise.measure.probe_fit import fit_probe, probe_examples
from loopwise.measure.trace import Trace, TraceInfo, write_trace
from loopwise.models.checkpoint import Checkpoint, write_exits
from loopwise.settings import MeasureConfig
from loopwise.study.texts import cache_folder, document_hash
from loopwise.tokenizer import Tokenizer

Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Plan:
    """What of a corpus the probe is fitted on, and what is measured; no document is in both."""

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
        fitted_on: hashes of the documents a probe was fitted on already; None where it is yet to
            be fitted, on the first documents of each corpus.
    Raises:
        DataError: too little text.
    """
    fits: dict[str, list[Document]] = {name: [] for name in corpora}
    seen = set(fitted_on or ())
    if fitted_on is None:
        for name, documents in corpora.items():
            fits[name] = _first_documents(documents, config.fit_tokens, name, tokenizer)
            seen |= {document_hash(d) for d in fits[name]}
    plans = {}
    for name, documents in corpora.items():
        fresh = [d for d in documents if document_hash(d) not in seen]
        if not fresh:
            raise DataError(f"all text of {name!r} was used to fit the probe; give other text")
        plans[name] = Plan(fits[name], _blocks(fresh, tokenizer, seq))
    return plans


def measure_stage(
    checkpoint: Checkpoint,
    corpora: dict[str, list[Document]],
    config: MeasureConfig,
    folder: Path,
    emit: Emit,
) -> list[Trace]:
    """Fit the probe where the checkpoint has none, then trace each corpus.

    The probe is fitted on the first documents of each corpus; those are never measured, now or in
    any later measurement of this checkpoint.

    Args:
        corpora: held-out documents by name.
        folder: gets one trace folder per corpus.
    """
    model, seq = checkpoint.model, block_length(checkpoint)
    horizon = min(config.horizon, model.geometry.max_depth or config.horizon)
    _warn_past_training(checkpoint, horizon, emit)
    to_fit = horizon > 1 and "probe" not in checkpoint.fitted_policies()
    fitted_on = None if to_fit else checkpoint.exits.get("fitted_on", [])
    plans = plan_corpora(corpora, checkpoint.tokenizer, seq, config, fitted_on)
    if to_fit:
        checkpoint = _fit_probe(checkpoint, plans, horizon, config, emit)
    policies: list[ExitPolicy] = [LatentChange()]
    if "probe" in checkpoint.fitted_policies():
        policies.append(Probe.from_state(checkpoint.fitted_policies()["probe"]))
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
            limit=max(1, config.tokens // seq),
            policies=policies,
            byte_lengths=checkpoint.tokenizer.byte_lengths(),
            progress=report,
        )
        traces.append(trace)
    return traces


def block_length(checkpoint: Checkpoint) -> int:
    """Tokens of the blocks a checkpoint was trained on."""
    return int(checkpoint.training.get("seq", 256))


def _fit_probe(
    checkpoint: Checkpoint,
    plans: dict[str, Plan],
    horizon: int,
    config: MeasureConfig,
    emit: Emit,
) -> Checkpoint:
    """Fit A2 on the first documents of each corpus and store it with the checkpoint."""
    emit({"event": "progress", "stage": "fitting the probe", "done": 0, "total": 1})
    seq = block_length(checkpoint)
    limit = max(1, config.fit_tokens // seq)

    def parts() -> Iterator[TokenBatch]:
        for plan in plans.values():
            yield from batches(_blocks(plan.fit, checkpoint.tokenizer, seq), config.batch, limit)

    max_depth = min(round(checkpoint.trained_mean_depth or horizon), horizon)
    latents, labels = probe_examples(checkpoint.model, parts(), horizon, max_depth)
    exits = {
        "policies": {"probe": fit_probe(latents, labels).to_state()},
        "fitted_on": [document_hash(d) for plan in plans.values() for d in plan.fit],
    }
    emit({"event": "progress", "stage": "fitting the probe", "done": 1, "total": 1})
    return write_exits(checkpoint, {**checkpoint.exits, **exits})


def _first_documents(
    documents: list[Document], tokens: int, name: str, tokenizer: Tokenizer
) -> list[Document]:
    """Documents from the start that hold about ``tokens``, at most half of them."""
    if len(documents) < 2:
        raise DataError(
            f"{name!r} is one document: too little to fit a probe on one part and measure on "
            "another; give more text, or cut it with --set data.read.max_document_chars=2000"
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
