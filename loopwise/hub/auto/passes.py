"""One pass over the tokens of a call: at a uniform depth, or with each token's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.exits.base import Observation, Output
from loopwise.exits.rule import should_exit
from loopwise.hub.auto.plan import Plan
from loopwise.hub.auto.view import BatchView, FrozenView
from loopwise.models.base import LoopedLM
from loopwise.models.layers import row_seeds

CoreStep = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass left.

    Attributes:
        logits: of the tokens asked for, ``(batch, kept, vocab)``.
        exit_depths: recurrences each token ran, ``(batch, seq)`` int64; 0 for padding.
        latents: before the loop and after each recurrence, each ``(batch, seq, d_model)``; only of
            a uniform pass that was asked for them.
    """

    logits: Tensor
    exit_depths: Tensor
    latents: tuple[Tensor, ...] | None = None


def uniform_pass(
    model: LoopedLM,
    token_ids: Tensor,
    view: BatchView,
    depth: int,
    kept: slice | Tensor,
    *,
    core_step: CoreStep,
    keep_latents: bool = False,
) -> Passed:
    """``depth`` recurrences of every token of ``token_ids (batch, seq)``.

    Args:
        kept: which tokens' logits are wanted.
        core_step: ``model.core_step``, or what calls it.
    """
    injection = model.prelude(token_ids, view)
    latent = model.initial_latent(injection, row_seeds(view.inputs.positions))
    latents = [latent]
    for r in range(1, depth + 1):
        latent = core_step(latent, injection, r, view)
        if keep_latents:
            latents.append(latent)
    hidden = model.hidden(latent, depth, view)
    return Passed(
        logits=model.head(hidden[:, kept]),
        exit_depths=view.inputs.live.long() * depth,
        latents=tuple(latents) if keep_latents else None,
    )


@torch.no_grad()
def exit_pass(
    model: LoopedLM, token_ids: Tensor, view: FrozenView, plan: Plan, kept: slice | Tensor
) -> Passed:
    """Every token of ``token_ids (batch, seq)`` until its rule stops it; padding does not run.

    The depths and logits are those of :mod:`loopwise.measure.live` and of decoding token by token.
    """
    rule, policy = plan.rule, plan.policy
    injection = model.prelude(token_ids.flatten(), view)  # (tokens, d_model)
    latent = model.initial_latent(injection, row_seeds(view.inputs.positions.flatten())).clone()
    n, device = token_ids.numel(), token_ids.device
    width = policy.memory_width(model.geometry.vocab_size, injection.shape[-1])
    memory = torch.zeros(n, width, device=device)
    hits = torch.zeros(n, dtype=torch.int64, device=device)
    depth = torch.zeros_like(hits)
    out = latent.new_zeros(n, model.geometry.vocab_size) if plan.runs_coda else None
    real = view.inputs.live.flatten().nonzero().squeeze(-1)
    rows = real
    for r in range(1, rule.max_depth + 1):
        view.select(rows)
        before = latent[rows]
        now = model.core_step(before, injection[rows], r, view)
        latent[rows] = now
        read = Output(model.hidden(now, r, view), model.head) if plan.runs_coda else None
        seen = Observation(r=r, latent=now, previous=before, output=read)
        score, memory[rows] = policy.score(seen, memory[rows])
        stop, hits[rows] = should_exit(rule, score, hits[rows], r)
        depth[rows[stop]] = r
        if out is not None and read is not None:  # the reading at the exit is the output
            out[rows[stop]] = read.read(stop.nonzero().squeeze(-1))
        rows = rows[~stop]
        if rows.numel() == 0:
            break
    view.fill(r + 1)
    if out is None:
        out = _read_once(model, latent, depth, real, view, kept)
    else:
        out = out.unflatten(0, token_ids.shape)[:, kept]
    return Passed(logits=out, exit_depths=depth.view_as(token_ids))


def _read_once(
    model: LoopedLM,
    latent: Tensor,
    depth: Tensor,
    real: Tensor,
    view: FrozenView,
    kept: slice | Tensor,
) -> Tensor:
    """The coda of every token after its last recurrence, the head of those wanted."""
    hidden = torch.zeros_like(latent)
    hidden[real] = model.hidden(latent[real], depth[real], view.select(real))
    return model.head(hidden.unflatten(0, view.shape)[:, kept])
