"""The training forward pass: random depth, truncated back-propagation, summed cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from loopwise.data import TokenBatch
from loopwise.models.base import KVView, LoopedLM
from loopwise.models.views import PackedView
from loopwise.train.diagnostics import Diagnostics

LossOn = Literal["last", "every", "last-third"]


class LoopedLoss:
    """Cross-entropy of a batch at a drawn depth.

    The three pieces are compiled one by one (the core *step*, never the loop), so that any sequence
    of depths reuses the same code.

    Args:
        model: whose weights learn.
        backprop_depth: recurrences at the end that gradients flow through; the ones before run
            without a graph (truncated back-propagation through depth).
        loss_on: which recurrences are read: the last, every one that learns, or the last third of
            the depth; their losses are averaged.
        diagnostics: told of every recurrence that learns; None costs nothing.
        checkpoint_recurrences: keep one latent per recurrence and recompute the rest backwards.
        compiled: use torch.compile, with this ``backend``.
    """

    def __init__(
        self,
        model: LoopedLM,
        *,
        backprop_depth: int,
        loss_on: LossOn = "last",
        diagnostics: Diagnostics | None = None,
        checkpoint_recurrences: bool = False,
        compiled: bool = False,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.model = model
        self.backprop_depth = backprop_depth
        self.loss_on = loss_on
        self.diagnostics = diagnostics
        self.checkpoint_recurrences = checkpoint_recurrences
        self.prelude: Callable[..., Tensor] = model.prelude
        self.core_step: Callable[..., Tensor] = model.core_step
        self.read: Callable[..., Tensor] = self._read
        if compiled:
            self.prelude = torch.compile(self.prelude, dynamic=False, backend=backend)
            # Sizes never change, but r does: past its first value it becomes a symbol, so that a
            # model which reads r compiles once for recurrence 1 and once for all later ones.
            self.core_step = torch.compile(self.core_step, dynamic=None, backend=backend)
            self.read = torch.compile(self.read, dynamic=False, backend=backend)

    def __call__(self, batch: TokenBatch, depth: int, seeds: Tensor | None = None) -> Tensor:
        """Summed cross-entropy in nats over the batch's targets, float32 scalar.

        Args:
            batch: see :class:`loopwise.data.TokenBatch`.
            depth: recurrences, at least 1.
            seeds: ``(batch, seq)`` int64 for models that start from noise.
        """
        view = PackedView(
            self.model.geometry.rope, batch.positions, batch.document_ids, self.model.dtype
        )
        injection = self.prelude(batch.token_ids, view)
        latent = self.model.initial_latent(injection, seeds)
        free = max(depth - self.backprop_depth, 0)
        with torch.no_grad():
            for r in range(1, free + 1):
                latent = self.core_step(latent, injection, r, view)
        if not latent.requires_grad:
            # One kind of latent for every recurrence that learns: one compiled variant, not two.
            latent = latent.detach().requires_grad_()
        first_read = self._first_read(depth, free)
        losses = []
        for r in range(free + 1, depth + 1):
            latent = self.learning_step(latent, injection, r, view)
            if self.diagnostics is not None:
                self.diagnostics.watch(latent, r)
            if r >= first_read:
                losses.append(self.read(latent, r, view, batch.targets))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _first_read(self, depth: int, free: int) -> int:
        """The first recurrence that is read; those that learn nothing are not."""
        if self.loss_on == "last":
            return depth
        wanted = 1 if self.loss_on == "every" else depth - math.ceil(depth / 3) + 1
        return max(wanted, free + 1)

    def learning_step(self, latent: Tensor, injection: Tensor, r: int, view: KVView) -> Tensor:
        if self.checkpoint_recurrences:
            return checkpoint(
                self.core_step,
                latent,
                injection,
                r,
                view,
                use_reentrant=False,
                determinism_check="none",
            )
        return self.core_step(latent, injection, r, view)

    def _read(self, latent: Tensor, r: int, view: KVView, targets: Tensor) -> Tensor:
        logits = self.model.coda(latent, r, view)
        return F.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=-100, reduction="sum"
        )
