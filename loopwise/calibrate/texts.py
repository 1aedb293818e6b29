"""Text to calibrate on: nothing the model or a fitted rule has seen, divided into units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopwise.calibrate.options import CalibrateOptions, Emit, progress, warning
from loopwise.config import from_table, read_json_object
from loopwise.data import Document, TokenStore, document_hash, load_or_tokenize
from loopwise.data.sketch import DocumentSketch
from loopwise.errors import ConfigError, DataError, LoopwiseError, RunFolderError
from loopwise.measure.calibrate import clip_for, level_of_each, units_needed
from loopwise.measure.units import Span, Units, unit_spans
from loopwise.models.checkpoint import Checkpoint
from loopwise.settings import RunConfig, build_config
from loopwise.study.measuring import block_length
from loopwise.study.texts import Texts, cache_folder, read_corpora, read_texts

_PROPOSING = 60  # units that thresholds are proposed on, at most, and at most a quarter of all
_WATCHED = 24  # of them, whose convergence is watched beyond full depth
_JUDGING = 3  # times the fewest units a guarantee needs are judged on, where there are so many
_SEEN_SHARE = 0.1  # of the text that may be training text: left out; above it everything is refused
_REMEDY = "give text it has not seen, or insist with --allow-training-data"


@dataclass(frozen=True)
class FreshText:
    """What was given, without documents that the training has seen.

    Attributes:
        seen: numbers of the documents that a rule was fitted on; they may propose, not judge.
    """

    documents: list[Document]
    seen: frozenset[int]
    sources: list[str]
    left_out: dict[str, int]  # documents by reason

    def store(self, checkpoint: Checkpoint) -> TokenStore:
        return load_or_tokenize(lambda: self.documents, checkpoint.tokenizer, cache_folder())


def read_fresh_text(
    checkpoint: Checkpoint,
    sources: Sequence[str] | None,
    options: CalibrateOptions,
    asked: dict[str, Any],
    emit: Emit,
) -> FreshText:
    """Read what is given, or what the run of the checkpoint held out, without training text.

    Raises:
        ConfigError: nothing is given and the checkpoint is not part of a run.
        DataError: text that cannot be read, or that the model was trained on.
    """
    settings = _run_settings(checkpoint.path)
    texts = None if settings is None or sources is not None else _run_text(settings, emit)
    if sources is not None:
        below = None if settings is None else {"data": settings.get("data", {})}
        corpora = read_corpora(list(sources), build_config(asked, base=below).data)
    elif texts is not None:
        corpora = texts.held_out
    else:
        raise ConfigError(
            f"{str(checkpoint.path)!r} is not part of a run whose text is here; say what to "
            "calibrate on with --data"
        )
    given = [d for of_one in corpora.values() for d in of_one]
    documents = list({document_hash(d): d for d in given}.values())
    left_out = {"repeated": len(given) - len(documents)}
    if not options.allow_training_data:
        kept = _not_trained_on(documents, checkpoint, texts, emit)
        left_out["trained on"] = len(documents) - len(kept)
        documents = kept
    fitted_on = set(checkpoint.exits.get("fitted_on", []))
    seen = frozenset(i for i, d in enumerate(documents) if document_hash(d) in fitted_on)
    left_out = {reason: n for reason, n in left_out.items() if n}
    if left_out:
        said = ", ".join(f"{n} {reason}" for reason, n in left_out.items())
        emit(warning(f"of {len(given)} documents are left out: {said}"))
    if len(seen) == len(documents):
        raise DataError("all of this text was used to fit exit rules; give other text with --data")
    return FreshText(documents, seen, list(sources or corpora), left_out)


def _run_settings(checkpoint: Path) -> dict[str, Any] | None:
    """Settings of the run a checkpoint is part of, None where it is part of none."""
    file = checkpoint.parent.parent / "config.json"
    if checkpoint.parent.name != "checkpoints" or not file.is_file():
        return None
    settings = read_json_object(file, RunFolderError).get("settings")
    return settings if isinstance(settings, dict) else None


def _run_text(settings: dict[str, Any], emit: Emit) -> Texts | None:
    """The text of the run, where it can still be read."""
    emit(progress("reading the training text", 0, 1))
    try:
        config = from_table(RunConfig, settings)
        texts = read_texts(config.data, config.seed)
    except LoopwiseError as err:
        emit(warning(f"the text of the run cannot be read: {err}"))
        return None
    emit(progress("reading the training text", 1, 1))
    return texts


def _not_trained_on(
    documents: list[Document], checkpoint: Checkpoint, texts: Texts | None, emit: Emit
) -> list[Document]:
    """Documents without those of the training, by the checkpoint's sketch of what it has seen.

    Args:
        texts: of the run, where they are read anyway; they know all that the run itself has seen,
            which the sketch of many documents does not.
    Raises:
        DataError: those are more than a few, or some are and which others nobody knows.
    """
    own = set() if texts is None else {document_hash(d) for d in texts.train}
    sketch, known = DocumentSketch.of_training(checkpoint.training), frozenset[str]()
    if sketch is not None:
        told, known = sketch.compare(documents)
        found = len(known - own)
        if found and not sketch.whole:
            raise DataError(
                f"the model was trained on {found} of the {told} among these {len(documents)} "
                f"documents that can be told, so on about {found / told:.0%} of all; {_REMEDY}"
            )
    elif texts is None:
        unknown = (
            "this checkpoint does not say what it was trained on; that the text is new to it is "
            "taken on trust"
        )
        emit(warning(unknown))
    kept = [d for d in documents if document_hash(d) not in own | known]
    n = len(documents) - len(kept)
    if n > _SEEN_SHARE * len(documents):
        raise DataError(
            f"the model was trained on {n} of these {len(documents)} documents; {_REMEDY}"
        )
    return kept


@dataclass(frozen=True)
class Split:
    """Units that propose thresholds and units that judge them, of different documents.

    Attributes:
        watched: the first of the proposing units.
        proposing_documents: hashes of the documents that propose.
        text_hash: of all of them.
        unit_tokens: of a unit, at most.
        level: error allowed to each sequence of candidates.
        clip: nats that the excess of a unit counts for, at most.
    """

    watched: Units
    proposing: Units
    judging: Units
    proposing_documents: tuple[str, ...]
    text_hash: str
    unit_tokens: int
    level: float
    clip: float


def divide(
    text: FreshText, checkpoint: Checkpoint, options: CalibrateOptions, sequences: int
) -> Split:
    """Divide the text at random, the same way for the same seed.

    Args:
        sequences: of candidates that are tested side by side.
    Raises:
        ConfigError: fewer units are asked for than the guarantee needs.
        DataError: there are fewer.
    """
    level = level_of_each(options.confidence, sequences)
    clip = clip_for(options.budgets)
    needed = units_needed(min(options.budgets), level, clip)
    needs = _needs(options, needed, level)
    if options.units is not None and options.units < needed:
        raise ConfigError(f"--units {options.units} is too few: {needs}")
    store, seq = text.store(checkpoint), block_length(checkpoint)
    rng = np.random.default_rng(options.seed)
    spans = [
        unit_spans(store, [int(document)], seq, options.unit)
        for document in rng.permutation(store.n_documents)
    ]
    spans.sort(key=lambda of_one: of_one[0].document not in text.seen)  # what was seen proposes
    assert store.n_documents == len(text.documents), "blank ones were skipped when they were read"
    proposing, judging = _part(spans, len(text.seen))
    if len(judging) < needed:
        raise DataError(_too_short(text, store, options, sum(map(len, spans)), seq, needed, needs))
    chosen = rng.permutation(len(judging))[: options.units or _JUDGING * needed]
    return Split(
        watched=Units.of(store, proposing[:_WATCHED]),
        proposing=Units.of(store, proposing),
        judging=Units.of(store, [judging[i] for i in chosen]),
        proposing_documents=tuple(
            document_hash(text.documents[i]) for i in sorted({s.document for s in proposing})
        ),
        text_hash=store.text_hash,
        unit_tokens=seq,
        level=level,
        clip=clip,
    )


def _part(spans: list[list[Span]], seen: int) -> tuple[list[Span], list[Span]]:
    """Units by document into those that propose and those that judge.

    Args:
        seen: of the documents, the first, may not judge; those that do not propose are not used.
    """
    wanted = min(_PROPOSING, max(1, sum(map(len, spans)) // 4))
    proposing: list[Span] = []
    taken = 0
    while len(proposing) < wanted:
        proposing += spans[taken]
        taken += 1
    rest = spans[max(taken, seen) :]
    return proposing[:_PROPOSING], [span for of_one in rest for span in of_one]


def _needs(options: CalibrateOptions, needed: int, level: float) -> str:
    smallest = min(options.budgets)
    alone = units_needed(smallest, level, clip_for([smallest]))
    beside = f" beside the others, {alone} by itself" if alone < needed else ""
    return (
        f"{smallest:g} nats at {options.confidence:g} confidence takes at least {needed} "
        f"{options.unit}s to judge{beside}"
    )


def _too_short(
    text: FreshText,
    store: TokenStore,
    options: CalibrateOptions,
    total: int,
    seq: int,
    needed: int,
    needs: str,
) -> str:
    in_all = needed + min(_PROPOSING, -(-needed // 3))
    remedy = "give more text, a larger --budget, fewer --rules or less --confidence"
    blocks = store.n_tokens // seq
    if options.unit == "document" and store.n_documents > 3 and blocks >= in_all:
        remedy += (
            "; or, where the parts of a document are as good as unrelated, --unit block, of which "
            f"there are about {blocks}"
        )
    of = f" of {store.n_documents} documents" if options.unit == "block" else ""
    return (
        f"{', '.join(text.sources)}: {total} {options.unit}s{of} are too few; {needs}, and "
        f"{in_all - needed} to propose: {remedy}"
    )
