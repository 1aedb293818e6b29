"""The live rows of an engine: plain numbers on the host, and what attention must be told of them.

A row is one token on its way through the core. It holds a *seat*, an index into every table here
and into the latents on the device, from its prelude until its logits are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loopwise.engine.attention import Plan
from loopwise.engine.kv_cache import Ints, KVCache, Stage
from loopwise.exits.rule import ExitRule
from loopwise.models.base import Rope

# Without the compiled kernel: live rows of a chunk up to which each reads for itself, which spares
# a second pass.
FEW = 4
# With it: rows times tokens times channels of a chunk up to which the kernel is faster than matrix
# products, and the calls around them, on the processor it was measured on.
FEW_WORK = {torch.float32: 2**21, torch.bfloat16: 2**20}


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one call: runs, then groups, each of rows of one request at one recurrence.

    Attributes:
        seats: of all rows, ``(rows,)``.
        runs: sizes of the runs, which are little work; all 1 without the compiled kernel.
        groups: sizes of the groups, which are more.
    """

    seats: Ints
    runs: tuple[int, ...]
    groups: tuple[int, ...] = ()

    @property
    def run_rows(self) -> int:
        """Rows of all runs; those of groups follow."""
        return sum(self.runs)


# So that a bias is never of size 0 or 1, for which compiled code would be made anew.
_FILLER = np.zeros(2, np.float32)


class RowBounds(NamedTuple):
    """An exit rule's numbers, one of each per row; stands in for an :class:`ExitRule`."""

    threshold: NDArray[np.float32]
    patience: Ints
    min_depth: Ints
    max_depth: Ints


class RowTable:
    """Where every row is, when it stops, and where its entries lie.

    Args:
        n_heads: query heads of a layer.
        fused: runs attend through the compiled kernel.

    Attributes:
        slot, position, token_id: of the row's request and token, by seat.
        r: recurrences done, by seat.
        policy, threshold, patience, min_depth, max_depth: of its exit rule, by seat; the policy by
            its number in the runner.
        hits: consecutive scores at or below the threshold, by seat.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        seats: int,
        slots: int,
        max_seq: int,
        rope: Rope,
        n_heads: int,
        fused: bool = False,
    ) -> None:
        self._fused = fused
        if fused:
            channels = n_heads * rope.head_dim
            self._few_reads = FEW_WORK[cache_dtype(cache)] // channels
        self.slot = np.zeros(seats, np.int64)
        self.position = np.zeros(seats, np.int64)
        self.token_id = np.zeros(seats, np.int64)
        self.r = np.zeros(seats, np.int64)
        self.hits = np.zeros(seats, np.int64)
        self.policy = np.zeros(seats, np.int64)
        self.threshold = np.zeros(seats, np.float32)
        self.patience = np.ones(seats, np.int64)
        self.min_depth = np.ones(seats, np.int64)
        self.max_depth = np.ones(seats, np.int64)
        self._cache = cache
        self._n_kv = cache.keys[0].shape[1] if cache.keys else 1
        self._steps = np.arange(max_seq)
        self._heads = np.arange(self._n_kv)[:, None]
        # Address of entry 0 of each token, by slot and position, for stages of each width.
        widths = {s.entries for s in (cache.prelude, cache.core, cache.coda)}
        self._address = {n: np.zeros((slots, max_seq), np.int64) for n in widths | {1}}
        # Latest recurrence of each token, by its address in a stage of one entry.
        self._last = np.zeros((cache.shape.pages + 1) * cache.shape.page_size, np.int64)
        self._window = rope.window
        every, dtype = torch.arange(max_seq), cache_dtype(cache)
        self._phase = rope.tables(every, dtype)
        self._local_phase = (rope.local.rope if rope.local else rope).tables(every, dtype)
        self._device = cache_device(cache)

    def place(self, slot: int, first: int, page: int) -> None:
        """Tokens from position ``first`` of a slot's request lie in ``page``."""
        size = self._cache.shape.page_size
        end = min(first + size, len(self._steps))
        for entries, address in self._address.items():
            address[slot, first:end] = page * size * entries + self._steps[: end - first]

    def copy(self, source: int, page: int) -> None:
        """The tokens of page ``source`` lie in ``page`` as well."""
        size = self._cache.shape.page_size
        self._cache.copy(source, page)
        self._last[page * size :][:size] = self._last[source * size :][:size]

    def seat(self, seats: Ints, slot: int, first: int, rule: ExitRule, policy: int = 0) -> None:
        """Rows of consecutive tokens of one request sit down before recurrence 1."""
        self.policy[seats] = policy
        self.slot[seats] = slot
        self.position[seats] = np.arange(first, first + len(seats))
        self.r[seats] = 0
        self.hits[seats] = 0
        self.threshold[seats] = rule.threshold
        self.patience[seats] = rule.patience
        self.min_depth[seats] = rule.min_depth
        self.max_depth[seats] = rule.max_depth

    def bounds(self, seats: Ints) -> RowBounds:
        return RowBounds(
            self.threshold[seats],
            self.patience[seats],
            self.min_depth[seats],
            self.max_depth[seats],
        )

    def advance(self, seats: Ints) -> None:
        """Rows enter their next recurrence."""
        self.r[seats] += 1
        places = self._address[1][self.slot[seats], self.position[seats]]
        self._last[places] = self.r[seats]

    def batch(self, chunks: list[Ints]) -> Batch:
        """Rows of several requests, given as the seats of each in the order of positions."""
        runs: list[Ints] = []
        groups: list[Ints] = []
        for c in chunks:
            if self._fused:
                small = len(c) == 1 or len(c) * (self.position[c[-1]] + 1) <= self._few_reads
            else:
                small = len(c) <= FEW
            (runs if small else groups).append(c)
        seats = np.concatenate(runs + groups)
        sizes = tuple(map(len, runs)) if self._fused else (1,) * sum(map(len, runs))
        return Batch(seats, sizes, tuple(map(len, groups)))

    def plan(self, batch: Batch, stage: Stage) -> Plan:
        """What the attention layers of ``stage`` must know to run ``batch``."""
        local = None if self._window is None else self._plan(batch, stage, self._window)
        return self._plan(batch, stage, None, local)

    def _plan(
        self, batch: Batch, stage: Stage, window: int | None, local: Plan | None = None
    ) -> Plan:
        seats = batch.seats
        slot, position = self.slot[seats], self.position[seats]
        r = np.maximum(self.r[seats], 1)  # the prelude runs before recurrence 1
        address = self._address[stage.entries]
        index = [address[slot, position] + stage.written[r]]
        bias: list[NDArray[np.float32]] = []
        seen = widest = seen_by_group = 0
        if batch.runs:
            parts, seen = self._runs(stage, batch, slot, r, position, window)
            if not self._fused:  # runs are of one row, which reads from the first entry on
                read, end = parts[0].reshape(-1, seen), parts[-1]
                unseen = self._steps[:seen] >= end[:, None]
                read[unseen] = 0
                parts = [(read[:, None] * self._n_kv + self._heads).ravel()]
                bias.append(_bias(unseen).ravel())
            index += parts
        if batch.groups:
            parts, allowed = self._groups(stage, batch, slot, r, position, window)
            widest, seen_by_group = allowed.shape[1:]
            index += parts
            bias.append(allowed.ravel())
        bias.append(_FILLER)
        header = [len(batch.runs), batch.run_rows, seen, len(batch.groups), widest, seen_by_group]
        at = torch.from_numpy(position)
        cos, sin = self._phase if window is None else self._local_phase
        return Plan(
            header=torch.tensor([*header, self._fused]),
            index=torch.from_numpy(np.concatenate(index)).to(self._device),
            bias=torch.from_numpy(np.concatenate(bias)).to(self._device),
            cos=cos[at].to(self._device),
            sin=sin[at].to(self._device),
            positions=at.to(self._device),
            token_ids=torch.from_numpy(self.token_id[seats]).to(self._device),
            local=local,
        )

    def _read(self, stage: Stage, slot: Ints, r: Ints, first: Ints, seen: int) -> Ints:
        """Entries of ``seen`` tokens from ``first`` on, ``(rows, seen)``; some may not be there."""
        which: tuple[Ints, slice | Ints] = slot, slice(seen)
        if first.any():
            at = first[:, None] + self._steps[:seen]
            which = slot[:, None], np.minimum(at, len(self._steps) - 1)
        read = self._address[stage.entries][which]
        if stage.read is not None:
            last = self._last[self._address[1][which]]
            last += (r * (self._cache.shape.max_depth + 1))[:, None]
            read += stage.read[last]
        return read

    def _runs(
        self,
        stage: Stage,
        batch: Batch,
        slot: Ints,
        r: Ints,
        position: Ints,
        window: int | None,
    ) -> tuple[list[Ints], int]:
        """Entries that runs read, their sizes, first and end of what each row reads; tokens."""
        n, sizes = batch.run_rows, np.array(batch.runs)
        lasts = np.cumsum(sizes) - 1
        first = _first(position[lasts + 1 - sizes], window)
        seen = int((position[lasts] - first).max()) + 1
        read = self._read(stage, slot[lasts], r[lasts], first, seen)
        of_run = np.repeat(first, sizes)
        begin, end = _first(position[:n], window) - of_run, position[:n] + 1 - of_run
        return [read.ravel(), sizes, begin, end], seen

    def _groups(
        self,
        stage: Stage,
        batch: Batch,
        slot: Ints,
        r: Ints,
        position: Ints,
        window: int | None,
    ) -> tuple[list[Ints], NDArray[np.float32]]:
        """Members, their places, and what each group reads; the bias of every member."""
        widest, n = max(batch.groups), len(batch.groups)
        ends = np.cumsum(batch.groups)
        starts = ends - batch.groups
        within = np.minimum(np.arange(widest), np.array(batch.groups)[:, None] - 1)
        members = starts[:, None] + within  # a short group repeats its last row
        places = np.concatenate([i * widest + np.arange(g) for i, g in enumerate(batch.groups)])
        lasts = ends - 1 + batch.run_rows
        # From what the earliest token of a group sees to the latest token.
        first = _first(position[starts + batch.run_rows], window)
        seen = int((position[lasts] - first).max()) + 1
        read = self._read(stage, slot[lasts], r[lasts], first, seen)
        read[first[:, None] + self._steps[:seen] > position[lasts][:, None]] = 0
        read = (read[:, None] * self._n_kv + self._heads).ravel()
        own = position[batch.run_rows :][members][..., None]
        at = first[:, None, None] + self._steps[:seen]
        unseen = at > own
        if window is not None:
            unseen |= at <= own - window
        bias = _bias(unseen)
        assert bias.shape == (n, widest, seen), "one bias row per member"
        return [members.ravel(), places, read], bias


def _first(position: Ints, window: int | None) -> Ints:
    """The earliest token that rows at ``position`` see."""
    return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)


def _bias(unseen: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(unseen, np.float32(-np.inf), np.float32(0.0))


def cache_dtype(cache: KVCache) -> torch.dtype:
    return cache.keys[0].dtype


def cache_device(cache: KVCache) -> torch.device:
    return cache.keys[0].device
