"""Pieces of text that can be drawn independently: one row of a batch each, nothing packed.

Packing cuts documents where others happen to end, which ties pieces to their neighbours. Here what
a piece loses depends on that piece alone, which is what a guarantee over pieces rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loopwise.data import TokenBatch, TokenStore
from loopwise.data.packing import NO_TARGET
from loopwise.exits.base import ExitPolicy, Reads
from loopwise.measure.trace import trace_batch
from loopwise.models.base import LoopedLM

UnitKind = Literal["document", "block"]
UNITS: tuple[UnitKind, ...] = ("document", "block")
_BATCH_ROWS = 2048  # tokens of one batch, padding included


@dataclass(frozen=True, slots=True)
class Span:
    """Where a unit stands in a token store: ``token_ids[start:end]``, of one document."""

    document: int
    start: int
    end: int

    @property
    def n_targets(self) -> int:
        return self.end - self.start - 1


def unit_spans(store: TokenStore, documents: Iterable[int], seq: int, kind: UnitKind) -> list[Span]:
    """The units of some documents.

    ``document``: its first ``seq`` tokens. ``block``: every run of ``seq`` tokens, each starting
    afresh; an end shorter than half of that is left out unless it is the whole document.
    """
    spans = []
    for document in documents:
        first, end = int(store.offsets[document]), int(store.offsets[document + 1])
        starts = range(first, end - 1, seq) if kind == "block" else [first]
        for start in starts:
            span = Span(document, start, min(start + seq + 1, end))
            if start == first or 2 * span.n_targets >= seq:
                spans.append(span)
    return spans


@dataclass(frozen=True)
class Units:
    """Units as batches of one row each.

    Attributes:
        batches: of similar lengths.
        unit: of each target in the order of the batches, from 0, ``(tokens,)`` int64.
    """

    batches: list[TokenBatch]
    unit: NDArray[np.int64]

    @property
    def n_units(self) -> int:
        return int(self.unit.max()) + 1

    @property
    def n_tokens(self) -> int:
        return len(self.unit)

    @classmethod
    def of(cls, store: TokenStore, spans: Sequence[Span]) -> Units:
        """Units number as ``spans`` do from 0; there must be one."""
        order = sorted(range(len(spans)), key=lambda i: spans[i].n_targets)
        batches, waiting = [], list[int]()
        for i in order:
            if waiting and (len(waiting) + 1) * spans[i].n_targets > _BATCH_ROWS:
                batches.append(_batch(store, [spans[j] for j in waiting]))
                waiting = []
            waiting.append(i)
        batches.append(_batch(store, [spans[j] for j in waiting]))
        lengths = [spans[i].n_targets for i in order]
        return cls(batches, np.repeat(np.array(order, dtype=np.int64), lengths))


def _batch(store: TokenStore, spans: list[Span]) -> TokenBatch:
    shape = len(spans), max(span.n_targets for span in spans)
    ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, NO_TARGET)
    document_ids = torch.full(shape, -1, dtype=torch.int32)
    for row, span in enumerate(spans):
        tokens = torch.from_numpy(store.token_ids[span.start : span.end].astype(np.int64))
        ids[row, : span.n_targets] = tokens[:-1]
        targets[row, : span.n_targets] = tokens[1:]
        document_ids[row, : span.n_targets] = 0
    positions = torch.arange(shape[1], dtype=torch.int32).expand(shape).contiguous()
    return TokenBatch(ids, targets, document_ids, positions, torch.zeros(shape, dtype=torch.uint8))


@torch.no_grad()
def trace_units(
    model: LoopedLM,
    units: Units,
    depth: int,
    columns: Sequence[str],
    policies: Sequence[ExitPolicy] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Some columns of a trace, and policies' scores, in memory: ``(tokens, depth)`` each.

    With ``read.NAME`` of policies that ask for the logits of some rows.

    Raises:
        DepthError: a depth the model cannot run.
        DivergenceError: a latent stopped being finite.
    """
    wanted = [*columns, *(f"score.{p.name}" for p in policies)]
    wanted += [f"read.{p.name}" for p in policies if p.reads is Reads.HIDDEN]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in wanted}
    for done, batch in enumerate(units.batches, start=1):
        traced = trace_batch(model, batch, depth, policies)
        for name in wanted:
            parts[name].append(traced[name])
        if progress is not None:
            progress(done, len(units.batches))
    return {name: torch.cat(part).numpy() for name, part in parts.items()}
