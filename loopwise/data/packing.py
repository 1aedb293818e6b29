"""Token ids to training blocks that lose and repeat nothing.

An epoch lays all documents end to end in its own order and
cuts that stream every ``seq`` tokens. Input ``p`` of the stream predicts token ``p + 1`` if both
belong to one document, and nothing otherwise. So every token but the bos of each document is a
target exactly once per epoch, no target crosses documents, and the token at a cut is a target of
the block before it and an input of the block after it. The last block of an epoch is padded.

Blocks have global numbers: block ``k`` is block ``k % n_blocks`` of epoch ``k // n_blocks``, a pure
function of the store, ``seq``, ``seed`` and ``k``. Resuming, ranks and workers rest on that alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from loopwise.data.store import TokenStore
from loopwise.errors import ConfigError, DataError

NO_TARGET = -100  # what torch's cross entropy ignores


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Blocks side by side, ready for a model.

    Attributes:
        token_ids: inputs, ``(batch, seq)`` int64; 0 at padding.
        targets: the token each input predicts, ``(batch, seq)`` int64; -100 for none.
        document_ids: which document of its block, from 0, ``(batch, seq)`` int32; -1 at padding.
        positions: place in the document, or in what this block holds of it, ``(batch, seq)`` int32.
        hops: of the target, see `TokenStore`, ``(batch, seq)`` uint8.
    """

    token_ids: Tensor
    targets: Tensor
    document_ids: Tensor
    positions: Tensor
    hops: Tensor

    @property
    def n_targets(self) -> int:
        """How many targets there are; a mean loss divides by it."""
        return int((self.targets != NO_TARGET).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on another device."""
        moved = (getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self))
        return type(self)(*moved)

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, for copies that overlap compute."""
        return type(self)(*(getattr(self, field.name).pin_memory() for field in fields(self)))


class PackedBlocks:
    """A store as numbered blocks of ``seq`` inputs; see the module for what a block holds.

    Args:
        store: the corpus.
        seq: inputs per block, at least 2.
        seed: with the epoch, decides the order of the documents.
        shuffle: False keeps the order of the store in every epoch, for evaluation.
        remedy: what to do, besides adding text, where the corpus does not fill one block.
    Raises:
        ConfigError: ``seq`` below 2.
        DataError: the corpus does not fill one block.
    """

    def __init__(
        self, store: TokenStore, seq: int, seed: int, shuffle: bool = True, *, remedy: str = ""
    ) -> None:
        if seq < 2:
            raise ConfigError(f"seq={seq} must be at least 2 tokens")
        n_inputs = store.n_tokens - 1  # the very last token predicts nothing
        if n_inputs < seq:
            raise DataError(
                f"the corpus has {store.n_tokens} tokens in {store.n_documents} documents, one "
                f"block needs {seq + 1}; add text" + (f", or {remedy}" if remedy else "")
            )
        self.store = store
        self.seq = seq
        self.seed = seed
        self.shuffle = shuffle
        self.n_blocks = -(-n_inputs // seq)
        self._epoch_order: tuple[int, np.ndarray, np.ndarray] | None = None

    def block(self, epoch: int, index: int) -> TokenBatch:
        """One block as a batch of one.

        Raises:
            DataError: ``index`` outside ``0 .. n_blocks - 1`` or a negative epoch.
        """
        if epoch < 0 or not 0 <= index < self.n_blocks:
            raise DataError(f"no block {index} of epoch {epoch}; blocks are 0..{self.n_blocks - 1}")
        return _to_batch([self._arrays(epoch, index)])

    def batch(self, first: int, count: int) -> TokenBatch:
        """Global blocks ``first .. first + count - 1``, across epochs where they end.

        Raises:
            DataError: a negative ``first``, or ``count`` below 1.
        """
        if first < 0 or count < 1:
            raise DataError(f"no blocks {first}..{first + count - 1}; ask for 1 or more, from 0")
        numbers = (divmod(k, self.n_blocks) for k in range(first, first + count))
        return _to_batch([self._arrays(epoch, index) for epoch, index in numbers])

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch in order, and where each starts in its stream."""
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = np.arange(self.store.n_documents)
            if self.shuffle:
                order = np.random.default_rng((self.seed, epoch)).permutation(order)
            lengths = np.diff(self.store.offsets)[order]
            starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            self._epoch_order = (epoch, order, starts)
        return self._epoch_order[1:]

    def _arrays(self, epoch: int, index: int) -> _Arrays:
        order, starts = self._order(epoch)
        low = index * self.seq
        high = min(low + self.seq + 1, self.store.n_tokens)
        # One longer than the block: the extra column is the target of the last input.
        ids = np.zeros(self.seq + 1, dtype=np.int64)
        hops = np.zeros(self.seq + 1, dtype=np.uint8)
        document_ids = np.full(self.seq + 1, -1, dtype=np.int32)
        positions = np.zeros(self.seq + 1, dtype=np.int32)
        place = int(np.searchsorted(starts, low, side="right")) - 1
        at = low
        for local in itertools.count():
            if at == high:
                break
            end = min(int(starts[place + 1]), high)
            source = int(self.store.offsets[order[place]]) + at - int(starts[place])
            here = slice(at - low, end - low)
            ids[here] = self.store.token_ids[source : source + end - at]
            hops[here] = self.store.hops[source : source + end - at]
            document_ids[here] = local
            positions[here] = np.arange(end - at)
            at, place = end, place + 1
        same = (document_ids[1:] == document_ids[:-1]) & (document_ids[1:] >= 0)
        targets = np.where(same, ids[1:], NO_TARGET)
        return ids[:-1], targets, document_ids[:-1], positions[:-1], np.where(same, hops[1:], 0)


def micro_batch_loader(
    blocks: PackedBlocks,
    *,
    start_step: int = 0,
    micro_batch: int,
    accumulation: int = 1,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
) -> Iterator[list[TokenBatch]]:
    """Without end, from step ``start_step`` on, the micro-batches of this rank for each step.

    Step ``s`` is made of global blocks ``[s * G, (s + 1) * G)``, ``G = micro_batch * accumulation *
    world_size``; every rank takes its turn at ``micro_batch`` of them. Nothing else decides what a
    step sees, so a resumed run reads on exactly, with any number of workers.

    Args:
        blocks: the corpus.
        start_step: first step to yield.
        micro_batch: blocks in one forward pass.
        accumulation: micro-batches of one rank in one step, the length of each list.
        rank: this process, from 0.
        world_size: processes that share a step.
        workers: processes that prepare batches ahead; 0 prepares them here.
    Raises:
        ConfigError: a count below 1, a negative start or number of workers, or a rank outside.
    """
    if min(micro_batch, accumulation, world_size) < 1 or min(start_step, workers) < 0:
        raise ConfigError(
            f"micro_batch={micro_batch}, accumulation={accumulation}, world_size={world_size} must "
            f"be at least 1, start_step={start_step} and workers={workers} at least 0"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is outside 0..{world_size - 1} (world_size={world_size})")
    steps = _Steps(blocks, micro_batch, accumulation, rank, world_size)
    # A sampler only has to iterate; DataLoader's annotation also wants a length, which steps lack.
    sampler = cast(Any, _CountFrom(start_step))
    return iter(DataLoader(steps, sampler=sampler, batch_size=None, num_workers=workers))


class _Steps(Dataset[list[TokenBatch]]):
    """Step number to the micro-batches of one rank."""

    def __init__(
        self, blocks: PackedBlocks, micro_batch: int, accumulation: int, rank: int, world_size: int
    ) -> None:
        self.blocks = blocks
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size

    def __getitem__(self, step: int) -> list[TokenBatch]:
        turns = range(step * self.accumulation, (step + 1) * self.accumulation)
        firsts = [(turn * self.world_size + self.rank) * self.micro_batch for turn in turns]
        return [self.blocks.batch(first, self.micro_batch) for first in firsts]


@dataclass(frozen=True, slots=True)
class _CountFrom:
    start: int

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start)


_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _to_batch(blocks: list[_Arrays]) -> TokenBatch:
    return TokenBatch(*(torch.from_numpy(np.stack(column)) for column in zip(*blocks, strict=True)))
