"""Text that exit rules are compared on: other documents for each seed, traced at full depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.data import (
    Document,
    PackedBlocks,
    ReadOptions,
    ReadReport,
    TokenBatch,
    document_hash,
    read_documents,
    tokenize,
)
from loopwise.data.sketch import DocumentSketch
from loopwise.errors import DataError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import Reads
from loopwise.exits.rule import ExitRule, build_policy, why_not_built
from loopwise.measure.evaluate import batches
from loopwise.measure.frontier import Yardstick
from loopwise.measure.scores import follows_from_columns, recorded_asks, recorded_score
from loopwise.measure.trace import Trace, TraceInfo, write_trace
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.costs import flops_per_token
from loopwise.study.measuring import block_length, fit_policy
from loopwise.tokenizer import Tokenizer

_BATCH_BLOCKS = 8
_BLOCK_STRIDE = 1_000_000  # keeps the blocks of different seeds apart

Say = Callable[[str], None]


@dataclass(frozen=True)
class Samples:
    """One trace per seed, and all of them as one.

    Attributes:
        blocks: the text of each seed.
        traces: of the same blocks, in the same order.
        limit: blocks of each seed.
    """

    blocks: Sequence[PackedBlocks]
    traces: Sequence[Trace]
    limit: int

    def __getitem__(self, column: str) -> NDArray[Any]:
        return np.concatenate([trace[column] for trace in self.traces])

    @property
    def seed(self) -> NDArray[np.int64]:
        """Which seed drew each token, from 0, ``(tokens,)``."""
        return np.repeat(np.arange(len(self.traces)), [t.n_tokens for t in self.traces])

    def yardstick(self, checkpoint: Checkpoint, depth: int) -> Yardstick:
        """Uniform depth on the tokens of all seeds; blocks of different seeds are different."""
        costs = flops_per_token(checkpoint.model, context=self.blocks[0].seq // 2)
        block = self["block"].astype(np.int64) + _BLOCK_STRIDE * self.seed
        return Yardstick(self["loss"][:, :depth], self["argmax"][:, :depth], block, costs)

    def score(self, policy: str, fitted: dict[str, Any]) -> NDArray[np.float32]:
        """What a policy scored, ``(tokens, depth)``."""
        return np.concatenate([recorded_score(t, policy, fitted) for t in self.traces])

    def asked(self, policy: str) -> NDArray[np.bool_] | None:
        """Whose logits it asked for, where it takes neither all nor none."""
        parts = [asked for t in self.traces if (asked := recorded_asks(t, policy)) is not None]
        return np.concatenate(parts) if parts else None

    def batches(self) -> Iterator[TokenBatch]:
        """The tokens in the order of the traces."""
        for blocks in self.blocks:
            yield from batches(blocks, _BATCH_BLOCKS, self.limit)


def decides(policy: str) -> bool:
    """Whether a rule of the table is neither uniform depth nor an oracle."""
    return EXITS[policy].reads not in (Reads.NOTHING, Reads.TRUTH)


def deal(
    documents: Sequence[Document], tokenizer: Tokenizer, parts: int, tokens: int, seed: int
) -> list[list[Document]]:
    """Different documents for each part, about ``tokens`` of them where the text is long enough.

    Dealt one by one, so that a short text makes equally short parts.

    Raises:
        DataError: fewer documents than parts.
    """
    if len(documents) < parts:
        raise DataError(
            f"{len(documents)} documents are too few to deal to {parts} parts; give more text "
            "with --data or fewer --seeds"
        )
    order = np.random.default_rng(seed).permutation(len(documents))
    dealt: list[list[Document]] = [[] for _ in range(parts)]
    held = [0] * parts
    for i in order:
        part = min(range(parts), key=held.__getitem__)
        if held[part] >= tokens:
            break
        dealt[part].append(documents[i])
        held[part] += len(tokenizer.encode(documents[i].text)) + 2  # begin and end of text
    return dealt


def fresh_documents(checkpoint: Checkpoint, sources: Sequence[str]) -> list[Document]:
    """The documents of ``sources`` that no rule of the checkpoint was fitted on, each once.

    Raises:
        DataError: there is none.
    """
    fitted_on = set(checkpoint.exits.get("fitted_on", []))
    read = read_documents(list(sources), ReadOptions(), ReadReport())
    documents = {document_hash(d): d for d in read}
    fresh = [d for h, d in documents.items() if h not in fitted_on]
    if not fresh:
        raise DataError("all of this text was used to fit exit rules; give other text with --data")
    return fresh


def why_not_new(checkpoint: Checkpoint, documents: Sequence[Document]) -> str | None:
    """How many of the documents the model was trained on; None for none, or where nobody knows."""
    sketch = DocumentSketch.of_training(checkpoint.training)
    told, known = (0, frozenset[str]()) if sketch is None else sketch.compare(documents)
    if not known:
        return None
    return (
        f"the model was trained on {len(known)} of the {told} of these {len(documents)} documents "
        "that can be told; on text it has not seen, exits may cost more"
    )


def unfitted(checkpoint: Checkpoint) -> list[str]:
    """Fitted rules that the checkpoint lacks."""
    fitted = checkpoint.fitted_policies()
    return [name for name in EXITS if needs_fitting(name) and name not in fitted]


def with_fits(
    checkpoint: Checkpoint, documents: list[Document], tokens: int, depth: int, say: Say
) -> Checkpoint:
    """The checkpoint with every rule fitted that it lacks, on ``documents``; nothing is stored."""
    seq = block_length(checkpoint)
    parts = list(batches(pack(documents, checkpoint, "fitting"), _BATCH_BLOCKS, -(-tokens // seq)))
    states = dict(checkpoint.fitted_policies())
    for name in unfitted(checkpoint):
        say(f"{name} is not fitted to this checkpoint: fitting it on other text, not stored")
        states[name] = fit_policy(name, checkpoint, parts, depth)
    exits = {**checkpoint.exits, "policies": states, "weights_hash": checkpoint.weights_hash}
    return replace(checkpoint, exits=exits)


def pack(documents: list[Document], checkpoint: Checkpoint, what: str) -> PackedBlocks:
    """Documents in their order as blocks of the length the checkpoint was trained on.

    Raises:
        DataError: they do not fill one.
    """
    seq, store = block_length(checkpoint), tokenize(documents, checkpoint.tokenizer)
    if store.n_tokens <= seq:
        raise DataError(
            f"the text for {what} has {store.n_tokens} tokens, one block needs {seq + 1}; give "
            "more text with --data or fewer --seeds"
        )
    return PackedBlocks(store, seq, seed=0, shuffle=False)


def left_out(checkpoint: Checkpoint) -> dict[str, str]:
    """Rules that this checkpoint cannot run, with the reason."""
    fitted = checkpoint.fitted_policies()
    reasons = {n: why_not_built(n, fitted, checkpoint.model) for n in EXITS if decides(n)}
    return {name: why for name, why in reasons.items() if why is not None}


def trace_samples(
    checkpoint: Checkpoint,
    parts: Sequence[list[Document]],
    tokens: int,
    depth: int,
    folder: Path,
    say: Say,
    rules: Iterable[str] = EXITS,
) -> Samples:
    """Trace each part to ``depth``, with the scores of the ``rules`` the checkpoint can run."""
    unknown, fitted = left_out(checkpoint), checkpoint.fitted_policies()
    policies = [
        build_policy(ExitRule(policy=name), fitted, checkpoint.model)
        for name in rules
        if decides(name) and name not in unknown and not follows_from_columns(name)
    ]
    limit = max(1, tokens // block_length(checkpoint))
    blocks = [pack(part, checkpoint, f"seed {i}") for i, part in enumerate(parts)]
    traces = []
    for i, of_one in enumerate(blocks):
        say(f"tracing seed {i}")
        info = TraceInfo(
            checkpoint=str(checkpoint.path),
            weights_hash=checkpoint.weights_hash,
            corpus=f"seed-{i}",
            text_hash=of_one.store.text_hash,
            trained_mean_depth=checkpoint.trained_mean_depth,
            trained_depths=checkpoint.trained_depths,
        )
        traces.append(
            write_trace(
                checkpoint.model,
                of_one,
                folder / info.corpus,
                info,
                horizon=depth,
                limit=limit,
                policies=policies,
            )
        )
    return Samples(blocks, traces, limit)
