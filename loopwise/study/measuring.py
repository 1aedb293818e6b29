"""The measuring stage: a frozen model and text in, a fitted probe and traces out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

Event = dict[str, Any]
Emit = Callable[[Event], None]


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
    model = checkpoint.model
    horizon = min(config.horizon, model.geometry.max_depth or config.horizon)
    _warn_past_training(checkpoint, horizon, emit)
    if horizon > 1 and "probe" not in checkpoint.fitted_policies():
        checkpoint = _fit_probe(checkpoint, corpora, horizon, config, emit)
    policies: list[ExitPolicy] = [LatentChange()]
    if "probe" in checkpoint.fitted_policies():
        policies.append(Probe.from_state(checkpoint.fitted_policies()["probe"]))
    seen = set(checkpoint.exits.get("fitted_on", ()))
    seq = _block_length(checkpoint)
    limit = max(1, config.tokens // seq)
    traces = []
    for name, documents in corpora.items():
        fresh = [d for d in documents if document_hash(d) not in seen]
        if not fresh:
            raise DataError(f"all text of {name!r} was used to fit the probe; give other text")
        blocks = _blocks(fresh, checkpoint)
        info = TraceInfo(
            checkpoint=str(checkpoint.path),
            weights_hash=checkpoint.weights_hash,
            corpus=name,
            text_hash=blocks.store.text_hash,
            trained_mean_depth=checkpoint.trained_mean_depth,
            trained_depths=checkpoint.trained_depths,
        )

        def report(done: int, total: int, name: str = name) -> None:
            emit({"event": "progress", "stage": f"tracing {name}", "done": done, "total": total})

        trace = write_trace(
            model,
            blocks,
            folder / name,
            info,
            horizon=horizon,
            limit=limit,
            policies=policies,
            byte_lengths=checkpoint.tokenizer.byte_lengths(),
            progress=report,
        )
        traces.append(trace)
    return traces


def _fit_probe(
    checkpoint: Checkpoint,
    corpora: dict[str, list[Document]],
    horizon: int,
    config: MeasureConfig,
    emit: Emit,
) -> Checkpoint:
    """Fit A2 on the first documents of each corpus and store it with the checkpoint."""
    emit({"event": "progress", "stage": "fitting the probe", "done": 0, "total": 1})
    fitting = {
        name: _first_documents(docs, config.fit_tokens, name, checkpoint)
        for name, docs in corpora.items()
    }
    limit = max(1, config.fit_tokens // _block_length(checkpoint))

    def parts() -> Iterator[TokenBatch]:
        for documents in fitting.values():
            yield from batches(_blocks(documents, checkpoint), config.batch, limit)

    max_depth = min(round(checkpoint.trained_mean_depth or horizon), horizon)
    latents, labels = probe_examples(checkpoint.model, parts(), horizon, max_depth)
    exits = {
        "policies": {"probe": fit_probe(latents, labels).to_state()},
        "fitted_on": [document_hash(d) for docs in fitting.values() for d in docs],
    }
    emit({"event": "progress", "stage": "fitting the probe", "done": 1, "total": 1})
    return write_exits(checkpoint, {**checkpoint.exits, **exits})


def _first_documents(
    documents: list[Document], tokens: int, name: str, checkpoint: Checkpoint
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
        tokens -= len(checkpoint.tokenizer.encode(document.text))
        if tokens <= 0:
            break
    return taken


def _blocks(documents: list[Document], checkpoint: Checkpoint) -> PackedBlocks:
    store = load_or_tokenize(lambda: documents, checkpoint.tokenizer, cache_folder())
    return PackedBlocks(store, _block_length(checkpoint), seed=0, shuffle=False)


def _block_length(checkpoint: Checkpoint) -> int:
    return int(checkpoint.training.get("seq", 256))


def _warn_past_training(checkpoint: Checkpoint, horizon: int, emit: Emit) -> None:
    trained = checkpoint.trained_max_depth
    if trained is not None and horizon > trained:
        text = (
            f"measuring to depth {horizon}; 99% of training steps ran at most {trained} "
            "recurrences, so what lies beyond is extrapolation"
        )
        emit({"event": "warning", "text": text})
