"""Loss at fixed depths: the one scoring core used by training, the command line and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.data import PackedBlocks, TokenBatch
from loopwise.errors import DepthError, ShapeError
from loopwise.models.base import LoopedLM
from loopwise.models.layers import row_seeds
from loopwise.models.views import PackedView


def check_depths(model: LoopedLM, depths: Iterable[int]) -> None:
    """Refuse recurrence counts the model cannot run.

    Raises:
        DepthError: a depth below 1 or above what the weights allow.
    """
    limit = model.geometry.max_depth
    for depth in depths:
        if depth < 1:
            raise DepthError(f"depth {depth} is not allowed; depths start at 1")
        if limit is not None and depth > limit:
            raise DepthError(f"depth {depth} is past this model's limit of {limit}")


def check_length(model: LoopedLM, tokens: int) -> None:
    """Refuse texts past the positions a model has learned.

    Raises:
        ShapeError: naming both lengths.
    """
    limit = model.geometry.max_positions
    if limit is not None and tokens > limit:
        raise ShapeError(
            f"{tokens} tokens are past this model's limit of {limit}; give shorter blocks"
        )


def trajectory(
    model: LoopedLM,
    batch: TokenBatch,
    horizon: int,
    core_step: Callable[..., Tensor] | None = None,
) -> Iterator[tuple[int, Tensor, PackedView]]:
    """Run every token of ``batch`` to ``horizon``; yields ``(r, latent (batch, seq, d), view)``.

    Args:
        core_step: a compiled ``model.core_step``, if there is one.
    Raises:
        ShapeError: see :func:`check_length`.
    """
    check_length(model, batch.token_ids.shape[-1])
    view = PackedView(
        model.geometry.rope, batch.positions, batch.document_ids, model.dtype, batch.token_ids
    )
    injection = model.prelude(batch.token_ids, view)
    latent = model.initial_latent(injection, row_seeds(batch.positions))
    step = core_step or model.core_step
    for r in range(1, horizon + 1):
        latent = step(latent, injection, r, view)
        yield r, latent, view


def latents_at(model: LoopedLM, batch: TokenBatch, recurrences: Iterable[int]) -> dict[int, Tensor]:
    """Latents ``(batch, seq, d_model)`` after the asked recurrences; no other is kept.

    Raises:
        DepthError: a recurrence the model cannot run.
    """
    wanted = set(recurrences)
    check_depths(model, wanted)
    run = trajectory(model, batch, max(wanted, default=0))
    return {r: latent for r, latent, _ in run if r in wanted}


def batches(blocks: PackedBlocks, size: int, limit: int | None = None) -> Iterator[TokenBatch]:
    """The blocks of epoch 0 in order, ``size`` at a time, at most ``limit`` blocks."""
    total = blocks.n_blocks if limit is None else min(limit, blocks.n_blocks)
    for first in range(0, total, size):
        yield blocks.batch(first, min(size, total - first))


@torch.no_grad()
def loss_by_depth(
    model: LoopedLM,
    batches: Iterable[TokenBatch],
    depths: Sequence[int],
    core_step: Callable[..., Tensor] | None = None,
) -> dict[int, float]:
    """Mean next-token loss at each depth, nats per target.

    Raises:
        DepthError: a depth the model cannot run.
    """
    check_depths(model, depths)
    sums = dict.fromkeys(sorted(set(depths)), 0.0)
    count = 0
    for batch in batches:
        count += batch.n_targets
        for r, latent, view in trajectory(model, batch, max(sums), core_step):
            if r in sums:
                logits = model.coda(latent, r, view).flatten(0, -2).float()
                sums[r] += F.cross_entropy(
                    logits, batch.targets.flatten(), ignore_index=-100, reduction="sum"
                ).item()
    return {r: s / count if count else math.nan for r, s in sums.items()}
