"""Other ways to decode the same weights, to be timed beside the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.bench.drive import Pass
from loopwise.bench.workload import Job
from loopwise.engine import Engine
from loopwise.engine.reference import ReferenceDecoder
from loopwise.models.base import LoopedLM, Rope


class GrowingView:
    """Keys and values of a padded batch, grown by concatenation, as `transformers` caches do.

    Args:
        positions, token_ids: ``(batch, seq)`` of the new tokens; padding has negative positions.
    """

    def __init__(
        self, rope: Rope, positions: Tensor, token_ids: Tensor, dtype: torch.dtype
    ) -> None:
        self._rope, self._dtype = rope, dtype
        self._past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._seen = positions[:, :0]
        self.extend(positions, token_ids)

    def extend(self, positions: Tensor, token_ids: Tensor) -> None:
        """The next calls bring these tokens at these positions."""
        self.positions, self.token_ids = positions.clamp_min(0), token_ids
        local = self._rope.local
        self._phase = self._rope.tables(self.positions, self._dtype)
        self._seen = torch.cat((self._seen, positions), dim=1)
        visible = self._seen[:, None] <= positions[..., None]
        visible &= (self._seen >= 0)[:, None] | (self._seen[:, None] == positions[..., None])
        self._mask = self._bias(visible)
        if local is not None:
            self._local_phase = local.rope.tables(self.positions, self._dtype)
            visible &= self._seen[:, None] > positions[..., None] - local.window
            self._local_mask = self._bias(visible)

    def _bias(self, visible: Tensor) -> Tensor:
        low = torch.finfo(self._dtype).min / 2
        return torch.zeros(visible.shape, dtype=self._dtype).masked_fill(~visible, low)

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        phase, mask = self._phase, self._mask
        if self._rope.is_local(layer):
            phase, mask = self._local_phase, self._local_mask
        q, k = self._rope.at(layer).turn(q, k, *phase, scale)
        if (layer, int(r)) in self._past:
            before_k, before_v = self._past[layer, int(r)]
            k, v = torch.cat((before_k, k), dim=1), torch.cat((before_v, v), dim=1)
        self._past[layer, int(r)] = k, v
        groups = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return mixed.transpose(1, 2)


@torch.no_grad()
def padded_steps(model: LoopedLM, jobs: Sequence[Job], depth: int, pad: int) -> Iterator[Tensor]:
    """Greedy decoding as a `transformers` loop does it: left-padded, up to the longest end.

    Yields:
        The next token of every job, ``(batch,)``.
    """
    width = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[pad] * (width - len(j.prompt)) + list(j.prompt) for j in jobs])
    starts = torch.tensor([[width - len(j.prompt)] for j in jobs])
    positions = torch.arange(width)[None] - starts
    view = GrowingView(model.geometry.rope, positions, ids, model.dtype)
    for step in range(max(job.new_tokens for job in jobs)):
        if step:
            view.extend(positions, ids)
        injection = model.prelude(ids, view)
        latent = model.initial_latent(injection)
        for r in range(1, depth + 1):
            latent = model.core_step(latent, injection, r, view)
        # The whole block goes through the coda, whose entries later tokens read; the head does not.
        ids = model.head(model.hidden(latent, depth, view)[:, -1:]).argmax(dim=-1)
        yield ids[:, 0]
        positions = positions[:, -1:] + 1


def generate_padded(model: LoopedLM, jobs: Sequence[Job], depth: int, pad: int) -> list[list[int]]:
    """What :func:`padded_steps` makes of every job."""
    rows = torch.stack(list(padded_steps(model, jobs, depth, pad)), dim=1).tolist()
    return [row[: job.new_tokens] for row, job in zip(rows, jobs, strict=True)]


def drive_padded(
    model: LoopedLM, jobs: Sequence[Job], depth: int, pad: int, batch_size: int
) -> Pass:
    """One pass of the padded loop, batch after batch; what it runs for padding is counted."""
    start = time.perf_counter()
    ttft: list[float] = []
    gaps: list[float] = []
    fed = slot_ticks = 0
    for at in range(0, len(jobs), batch_size):
        batch = jobs[at : at + batch_size]
        last = None
        for step, ids in enumerate(padded_steps(model, batch, depth, pad)):
            ids.tolist()  # the tokens are here
            now = time.perf_counter() - start
            wanting = sum(job.new_tokens > step for job in batch)
            if last is None:
                ttft += [now] * len(batch)
            else:
                gaps += [now - last] * wanting
            last = now
        steps = max(job.new_tokens for job in batch)
        fed += len(batch) * (max(len(job.prompt) for job in batch) + steps - 1)
        slot_ticks += len(batch) * steps * depth
    seconds = time.perf_counter() - start
    made = sum(job.new_tokens for job in jobs)
    return Pass(
        seconds=seconds,
        new_tokens=made,
        fed=fed,
        row_steps=fed * depth,
        slot_ticks=slot_ticks,
        depths=np.full(made, depth),
        ttft_s=np.array(ttft),
        gaps_s=np.array(gaps),
        busy_s=seconds,
    )


def drive_reference(decoder: ReferenceDecoder, job: Job) -> Pass:
    """One job in the reference decoder: one row at a time, prompt tokens too."""
    start = time.perf_counter()
    depths: list[int] = []
    times: list[float] = []
    for token in decoder.generate(job.prompt, job.new_tokens - 1):  # the last one is not fed
        depths.append(token.exit_depth)
        times.append(time.perf_counter() - start)
    times = times[len(job.prompt) - 1 :]  # when each new token can be read
    return Pass(
        seconds=times[-1],
        new_tokens=job.new_tokens,
        fed=len(depths),
        row_steps=sum(depths),
        slot_ticks=sum(depths),
        depths=np.array(depths[len(job.prompt) - 1 :]),
        ttft_s=np.array(times[:1]),
        gaps_s=np.diff(times),
        busy_s=times[-1],
    )


@torch.no_grad()
def generate_in_step(engine: Engine, jobs: Sequence[Job], depth: int) -> list[list[int]]:
    """Greedy decoding of equally long jobs in step: the engine's kernels without its scheduler."""
    runner, table, cache = engine.runner, engine.table, engine.cache
    n, prompt, new = len(jobs), len(jobs[0].prompt), jobs[0].new_tokens
    size = cache.shape.page_size
    per_slot = -(-(prompt + new) // size)
    for slot in range(n):
        for i in range(per_slot):
            table.place(slot, i * size, slot * per_slot + i + 1)
        table.seat(np.array([slot]), slot, 0, engine.default_rule)
    seats, seeds = np.arange(n), np.zeros(n, np.int64)
    made: list[list[int]] = [[] for _ in jobs]
    singles = [seats[i : i + 1] for i in range(n)]
    batch = table.batch(singles)
    for at in range(prompt + new - 1):
        table.position[:n], table.r[:n] = at, 0
        ids = [job.prompt[at] if at < prompt else made[i][-1] for i, job in enumerate(jobs)]
        runner.enter(singles, ids, seeds)
        for _ in range(depth):
            runner.advance(batch)
        logits = runner.read(singles, seats if at >= prompt - 1 else seats[:0])
        if at >= prompt - 1:
            for row, token_id in zip(made, logits.argmax(dim=-1).tolist(), strict=True):
                row.append(token_id)
    return made
