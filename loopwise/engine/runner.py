"""Calls into the model for the rows of an engine: prelude, one recurrence, exits, logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwise.engine.attention import Plan, RowsInPages
from loopwise.engine.kv_cache import Ints, KVCache, Stage
from loopwise.engine.packed import packed, packed_head, state_of
from loopwise.engine.rows import Batch, RowTable
from loopwise.errors import EngineError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.rule import should_exit
from loopwise.models.base import LoopedLM
from loopwise.models.layers import row_seeds


@dataclass(frozen=True, slots=True)
class Exits:
    """Rows that stopped at the recurrence just done.

    Attributes:
        seats: of the rows.
        rows: their numbers in ``output``.
        output: what the coda left for their rule; None under rules whose checks do not run it.
    """

    seats: Ints
    rows: Ints
    output: Output | None


class Runner:
    """Latents of the live rows on the device, and one call per stage of the model.

    Args:
        model: frozen.
        calls: the model's functions.
        seats: rows that can be live at once.

    Attributes:
        coda_rows, head_rows: that went through each, checks and outputs alike.
        model_s: spent in the model's functions; on a GPU, in giving it their work.
    """

    def __init__(
        self,
        model: LoopedLM,
        cache: KVCache,
        table: RowTable,
        calls: Calls,
        *,
        seats: int,
    ) -> None:
        self.model, self.cache, self.table = model, cache, table
        self.device = cache.keys[0].device
        self.rope = model.geometry.rope
        d = model.geometry.d_model
        self._latent = torch.zeros(seats, d, dtype=model.dtype, device=self.device)
        self._previous = torch.zeros_like(self._latent)
        self._injection = torch.zeros_like(self._latent)
        self.policies: list[ExitPolicy] = []
        self._memory: list[Tensor] = []
        self._scratch = torch.empty(2, 0, dtype=model.dtype, device=self.device)
        self._entry = model.geometry.n_kv_heads * model.geometry.head_dim
        self.calls = calls
        self.coda_rows = self.head_rows = 0
        self.model_s = 0.0

    def add_policy(self, policy: ExitPolicy) -> int:
        """The index by which rows name it."""
        g = self.model.geometry
        width = policy.memory_width(g.vocab_size, g.d_model)
        self.policies.append(policy)
        self._memory.append(torch.zeros(self._latent.shape[0], width, device=self.device))
        return len(self.policies) - 1

    @torch.no_grad()
    def enter(self, chunks: list[Ints], token_ids: list[int], seeds: Ints) -> None:
        """Run new rows through the prelude and give them their first latent.

        Args:
            chunks: seats of the rows of one request each, in the order of their positions.
            token_ids, seeds: of all rows, chunk after chunk; the seed is the request's.
        """
        order = np.concatenate(chunks)
        batch = self.table.batch(chunks)
        # It may put rows in another order than the chunks came in.
        place = np.empty(len(self.table.slot), np.int64)
        place[order] = np.arange(len(order))
        back = place[batch.seats]
        self.table.token_id[order] = token_ids
        ids = torch.from_numpy(self.table.token_id[batch.seats]).to(self.device)
        view = self._view(batch, self.cache.prelude)
        injection = self._timed(self.calls.prelude, ids, *view)
        positions = torch.from_numpy(self.table.position[batch.seats])
        row = row_seeds(positions, torch.from_numpy(seeds[back])).to(self.device)
        seats = self._seats(batch.seats)
        self._injection[seats] = injection
        self._latent[seats] = self.model.initial_latent(injection, row)
        for memory in self._memory:
            if memory.shape[1]:
                memory[seats] = 0

    @torch.no_grad()
    def recur(self, chunks: list[Ints]) -> list[Exits]:
        """One recurrence of all live rows, and which of them stop after it.

        Args:
            chunks: seats of the live rows of one request each, in the order of their positions.
        """
        batch = self.table.batch(chunks)
        self.advance(batch)
        asked = np.unique(self.table.policy[batch.seats]).tolist()
        if len(asked) == 1:
            found = [self._judge(asked[0], batch)]
        else:
            of = self.table.policy[[c[0] for c in chunks]].tolist()
            parts = [[c for c, i in zip(chunks, of, strict=True) if i == p] for p in asked]
            found = [self._judge(p, self.table.batch(c)) for p, c in zip(asked, parts, strict=True)]
        return [exits for exits in found if exits is not None]

    @torch.no_grad()
    def advance(self, batch: Batch) -> None:
        """One recurrence of all live rows."""
        self.table.advance(batch.seats)
        seats = self._seats(batch.seats)
        r = torch.from_numpy(self.table.r[batch.seats]).to(self.device)
        before = self._latent.index_select(0, seats)
        injection = self._injection.index_select(0, seats)
        view = self._view(batch, self.cache.core)
        after = self._timed(self.calls.core, before, injection, r, *view)
        self._previous.index_copy_(0, seats, before)
        self._latent.index_copy_(0, seats, after)

    def _judge(self, index: int, batch: Batch) -> Exits | None:
        """Score the rows under one policy; None where all go on."""
        policy, table, rows = self.policies[index], self.table, batch.seats
        score: NDArray[np.float32] = np.full(len(rows), np.inf, np.float32)
        output = None
        if policy.reads is not Reads.NOTHING:
            seats = self._seats(rows)
            if policy.reads.runs_coda:
                output = Output(self._hidden(batch, self.cache.coda), self._head)
            seen = Observation(
                r=torch.from_numpy(table.r[rows]).to(self.device),
                latent=self._latent.index_select(0, seats),
                previous=self._previous.index_select(0, seats),
                output=output,
            )
            memory = self._memory[index]
            if memory.shape[1]:
                found, memory[seats] = policy.score(seen, memory[seats])
            else:
                found, _ = policy.score(seen, memory[: len(rows)])
            score = found.float().cpu().numpy()
        stop, table.hits[rows] = should_exit(
            table.bounds(rows), score, table.hits[rows], table.r[rows]
        )
        return Exits(rows[stop], np.flatnonzero(stop), output) if stop.any() else None

    def finite(self, seats: Ints) -> bool:
        """Whether the latents of these rows are numbers."""
        return bool(self._latent.index_select(0, self._seats(seats)).isfinite().all())

    @torch.no_grad()
    def read(self, chunks: list[Ints], wanted: Ints) -> Tensor:
        """Run the coda for rows that have settled; logits ``(wanted, vocab)`` of some of them.

        Coda layers are the reason to run it for rows whose logits nobody wants: later tokens
        attend to their entries there.
        """
        if self.model.geometry.n_coda_layers == 0:
            chunks = list(wanted.reshape(-1, 1))
            if not len(wanted):
                return self._latent.new_empty(0, self.model.geometry.vocab_size)
        batch = self.table.batch(chunks)
        hidden = self._hidden(batch, self.cache.coda_once)
        place = np.empty(len(self.table.slot), np.int64)
        place[batch.seats] = np.arange(len(batch.seats))
        return self._head(hidden.index_select(0, self._seats(place[wanted])))

    def _head(self, hidden: Tensor) -> Tensor:
        self.head_rows += len(hidden)
        return self._timed(self.calls.head, hidden)

    def _hidden(self, batch: Batch, stage: Stage) -> Tensor:
        self.coda_rows += len(batch.seats)
        latent = self._latent.index_select(0, self._seats(batch.seats))
        r = torch.from_numpy(self.table.r[batch.seats]).to(self.device)
        return self._timed(self.calls.hidden, latent, r, *self._view(batch, stage))

    def _timed(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        start = time.perf_counter()
        out = function(*args)
        self.model_s += time.perf_counter() - start
        return out

    def _seats(self, seats: Ints) -> Tensor:
        return torch.from_numpy(seats).to(self.device)

    def _view(self, batch: Batch, stage: Stage) -> tuple[Plan, list[Tensor], list[Tensor], Tensor]:
        plan = self.table.plan(batch, stage)
        size = self._entry * plan.gathered  # local layers read no more than the others
        if size > self._scratch.shape[1]:
            self._scratch = self._scratch.new_empty(2, size + size // 2)
        return plan, self.cache.keys, self.cache.values, self._scratch


class Calls:
    """The model's functions over rows in pages.

    Args:
        compile: compile each but ``head``, once for any number of rows.
        pack: multiply by packed copies of the weights (see `packed`).
    """

    def __init__(self, model: LoopedLM, *, compile: bool, pack: bool) -> None:
        self.packed = pack
        self._weights = list(model.parameters()) if pack else []
        self._state = state_of(self._weights)
        self.head = packed_head(model) if pack else model.head
        model = packed(model) if pack else model
        rope = model.geometry.rope
        Call = Callable[..., Tensor]

        def prelude(
            ids: Tensor, plan: Plan, keys: list[Tensor], values: list[Tensor], scratch: Tensor
        ) -> Tensor:
            return model.prelude(ids, RowsInPages(rope, plan, keys, values, scratch))

        def core(
            latent: Tensor,
            injection: Tensor,
            r: Tensor,
            plan: Plan,
            keys: list[Tensor],
            values: list[Tensor],
            scratch: Tensor,
        ) -> Tensor:
            view = RowsInPages(rope, plan, keys, values, scratch)
            return model.core_step(latent, injection, r, view)

        def hidden(
            latent: Tensor,
            r: Tensor,
            plan: Plan,
            keys: list[Tensor],
            values: list[Tensor],
            scratch: Tensor,
        ) -> Tensor:
            return model.hidden(latent, r, RowsInPages(rope, plan, keys, values, scratch))

        def ready(function: Call) -> Call:
            if not compile:
                return function
            # Compiled code is looked up by code object, which all models would share.
            function.__code__ = function.__code__.replace()
            return torch.compile(function, dynamic=True, options={"guard_filter_fn": _shapes_only})

        self.prelude, self.core, self.hidden = ready(prelude), ready(core), ready(hidden)

    def check_weights(self) -> None:
        """Refuse a model whose weights are no longer those that were packed.

        Raises:
            EngineError: only its norms and embeddings would be the new ones.
        """
        if state_of(self._weights) != self._state:
            raise EngineError(
                "the model's weights have changed since this engine packed a copy of them; make a "
                "new engine, or make this one with engine.packed=off"
            )


def _shapes_only(guards: Sequence[Any]) -> list[bool]:
    """Which guards of a compiled function stay: only tensors change between calls for one model.

    To check all the others, which name every module and parameter, takes a twentieth of a call.
    """
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]
