"""Live exits in parallel: the whole sequence at once, with each token's latent frozen at its exit.

Under the `per-loop` KV policy a later token at recurrence i reads an earlier token's entry min(i,
last one); moving all live tokens one recurrence at a time does exactly that, so the depths and
losses found here are those of decoding token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.largest import likeliest
from loopwise.exits.rule import ExitRule, should_exit
from loopwise.measure.evaluate import check_depths, check_length
from loopwise.models.base import LoopedLM
from loopwise.models.layers import row_seeds
from loopwise.models.views import RowsView


@dataclass(frozen=True, slots=True)
class LiveResult:
    """One row per target in reading order.

    Attributes:
        exit_depth: recurrences each token ran, ``(tokens,)`` int64.
        loss: next-token cross-entropy at the exit, nats, ``(tokens,)`` float32.
        argmax: most likely token at the exit, ``(tokens,)`` int64.
        head_reads: times each went through the head, the output included, ``(tokens,)`` int64.
        core_row_steps: rows that went through the core, over all recurrences and positions,
            padding left out.
        coda_row_steps, head_row_steps: rows that went through coda and head.
    """

    exit_depth: Tensor
    loss: Tensor
    argmax: Tensor
    head_reads: Tensor
    core_row_steps: int
    coda_row_steps: int
    head_row_steps: int


@torch.no_grad()
def run_live(
    model: LoopedLM,
    batches: Iterable[TokenBatch],
    rule: ExitRule,
    policy: ExitPolicy,
    progress: Callable[[int], None] | None = None,
) -> LiveResult:
    """Teacher-forced scoring under live exits.

    Raises:
        ExitError: the rule cannot decide live.
        DepthError: ``max_depth`` is past the model's limit.
    """
    if policy.reads is Reads.TRUTH:
        raise ExitError(f"exit rule {policy.name!r} needs later recurrences; it cannot run live")
    check_depths(model, [rule.max_depth])
    results = []
    for index, batch in enumerate(batches):
        results.append(_run_batch(model, batch, rule, policy))
        if progress is not None:
            progress(index + 1)
    if not results:
        raise DataError("there is no text to run; give at least one block")
    return LiveResult(
        exit_depth=torch.cat([r.exit_depth for r in results]),
        loss=torch.cat([r.loss for r in results]),
        argmax=torch.cat([r.argmax for r in results]),
        head_reads=torch.cat([r.head_reads for r in results]),
        core_row_steps=sum(r.core_row_steps for r in results),
        coda_row_steps=sum(r.coda_row_steps for r in results),
        head_row_steps=sum(r.head_row_steps for r in results),
    )


def _run_batch(
    model: LoopedLM, batch: TokenBatch, rule: ExitRule, policy: ExitPolicy
) -> LiveResult:
    check_length(model, batch.token_ids.shape[-1])
    view = RowsView(
        model.geometry.rope, batch.positions, batch.document_ids, model.dtype, batch.token_ids
    )
    targets = batch.targets.flatten()
    n = targets.numel()
    injection = model.prelude(batch.token_ids.flatten(), view)  # (rows, d_model)
    latent = model.initial_latent(injection, row_seeds(batch.positions.flatten())).clone()
    width = policy.memory_width(model.geometry.vocab_size, injection.shape[-1])
    memory = torch.zeros(n, width, device=latent.device)
    hits = torch.zeros(n, dtype=torch.int64, device=latent.device)
    depth, reads = torch.zeros_like(hits), torch.zeros_like(hits)
    loss, argmax = torch.zeros(n, device=latent.device), torch.zeros_like(hits)
    real = (batch.document_ids.flatten() >= 0).nonzero().squeeze(-1)  # padding is not work
    rows = real
    core_steps = coda_steps = 0
    for r in range(1, rule.max_depth + 1):
        view.select(rows)
        before = latent[rows]
        now = model.core_step(before, injection[rows], r, view)
        latent[rows] = now
        core_steps += rows.numel()
        output = None
        if policy.reads.runs_coda:
            output = Output(model.hidden(now, r, view), model.head)
            coda_steps += rows.numel()
        seen = Observation(r=r, latent=now, previous=before, output=output)
        score, memory[rows] = policy.score(seen, memory[rows])
        stop, hits[rows] = should_exit(rule, score, hits[rows], r)
        gone = rows[stop]
        depth[gone] = r
        if output is not None:  # what was read at the exit is the output; nothing is run twice
            logits = output.read(stop.nonzero().squeeze(1))
            loss[gone], argmax[gone] = _score(logits, targets[gone])
            reads[rows] += output.asked
        rows = rows[~stop]
        if rows.numel() == 0:
            break
    if not policy.reads.runs_coda:
        view.select(real)
        loss[real], argmax[real] = _score(
            model.coda(latent[real], depth[real], view), targets[real]
        )
        coda_steps = real.numel()
        reads[real] = 1
    kept = targets != NO_TARGET
    return LiveResult(
        exit_depth=depth[kept],
        loss=loss[kept],
        argmax=argmax[kept],
        head_reads=reads[kept],
        core_row_steps=core_steps,
        coda_row_steps=coda_steps,
        head_row_steps=int(reads.sum()),
    )


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(dim=-1)
    loss = -log_p.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    return loss, likeliest(log_p)
