"""The training forward pass: random depth, truncated back-propagation, summed cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from loopwise.config import check_choices
from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import ConfigError
from loopwise.measure.evaluate import check_length, trajectory
from loopwise.models.base import KVView, LoopedLM
from loopwise.models.views import PackedView
from loopwise.train.diagnostics import Diagnostics

LossOn = Literal["last", "every", "last-third"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """What is learned beside the text's own tokens."""

    distil_weight: float = 0.0  # of KL(teacher || model); the text's own tokens get the rest
    distil_from: str | None = None  # checkpoint of the teacher
    # Of the squared relative change of the latent in the last recurrence: a pull towards a fixed
    # point (arXiv:2608.18222 takes 0.05).
    fixed_point_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 <= self.distil_weight <= 1:
            raise ConfigError(f"objective.distil_weight={self.distil_weight} must be in [0, 1]")
        if (self.distil_weight > 0) != (self.distil_from is not None):
            raise ConfigError(
                f"objective.distil_weight={self.distil_weight} and objective.distil_from="
                f"{self.distil_from!r} go together; set both or neither"
            )
        if not 0 <= self.fixed_point_weight < math.inf:
            raise ConfigError(
                f"objective.fixed_point_weight={self.fixed_point_weight} must be 0 or more, finite"
            )


class Teacher:
    """A frozen model whose next-token distributions are learned from.

    Args:
        model: of the same vocabulary.
        depth: recurrences it runs.
    """

    def __init__(self, model: LoopedLM, depth: int) -> None:
        self.model, self.depth = model.eval().requires_grad_(False), depth

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities ``(batch * seq, vocab)`` float32."""
        *_, (r, latent, view) = trajectory(self.model, batch, self.depth)
        return self.model.coda(latent, r, view).flatten(0, -2).float().log_softmax(dim=-1)


def distillation(logits: Tensor, taught: Tensor, targets: Tensor) -> Tensor:
    """Summed KL(teacher || model) in nats over rows with a target, float32 scalar.

    Args:
        logits: of the model, ``(rows, vocab)`` float32.
        taught: the teacher's log-probabilities, of the same shape.
        targets: ``(rows,)``; NO_TARGET leaves a row out.
    """
    kl = F.kl_div(logits.log_softmax(dim=-1), taught, log_target=True, reduction="none").sum(-1)
    return kl.masked_fill(targets == NO_TARGET, 0.0).sum()


def still_moving(latent: Tensor, previous: Tensor, counts: Tensor) -> Tensor:
    """Squared relative change of a latent, summed over the positions that count.

    Args:
        latent, previous: ``(batch, seq, d_model)``.
        counts: ``(batch, seq)`` bool.
    """
    step = (latent - previous).float().square().sum(-1)
    size = latent.float().square().sum(-1)
    return (step / size.clamp_min(1e-12)).masked_fill(~counts, 0.0).sum()


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
        objective: what is learned beside the text's own tokens.
        teacher: whose distributions are learned from, where the objective has a distil weight.
        diagnostics: told of every recurrence; None costs nothing.
        checkpoint_recurrences: keep one latent per recurrence and recompute the rest backwards.
        compiled: use torch.compile, with this ``backend``.
    """

    def __init__(
        self,
        model: LoopedLM,
        *,
        backprop_depth: int,
        loss_on: LossOn = "last",
        objective: ObjectiveConfig | None = None,
        teacher: Teacher | None = None,
        diagnostics: Diagnostics | None = None,
        checkpoint_recurrences: bool = False,
        compiled: bool = False,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.model = model
        self.backprop_depth = backprop_depth
        self.loss_on = loss_on
        self.objective = ObjectiveConfig() if objective is None else objective
        self.teacher = teacher
        self.diagnostics = diagnostics
        self.checkpoint_recurrences = checkpoint_recurrences
        self.prelude: Callable[..., Tensor] = model.prelude
        self.core_step: Callable[..., Tensor] = model.core_step
        self.read: Callable[..., Tensor] = self._read
        if compiled:
            self.prelude = torch.compile(_of_its_own(self.prelude), dynamic=False, backend=backend)
            # Sizes never change, but r does: past its first value it becomes a symbol, so that a
            # model which reads r compiles once for recurrence 1 and once for all later ones.
            core = _of_its_own(self.core_step)
            self.core_step = torch.compile(core, dynamic=None, backend=backend)
            self.read = torch.compile(_of_its_own(self.read), dynamic=False, backend=backend)

    def __call__(
        self,
        batch: TokenBatch,
        depth: int,
        seeds: Tensor | None = None,
        backprop_depth: int | None = None,
    ) -> Tensor:
        """Summed loss in nats over the batch's targets, float32 scalar.

        Args:
            batch: see :class:`loopwise.data.TokenBatch`.
            depth: recurrences, at least 1.
            seeds: ``(batch, seq)`` int64 for models that start from noise.
            backprop_depth: for this batch, where it is not the usual one.
        """
        check_length(self.model, batch.token_ids.shape[-1])
        view = PackedView(
            self.model.geometry.rope,
            batch.positions,
            batch.document_ids,
            self.model.dtype,
            batch.token_ids,
        )
        injection = self.prelude(batch.token_ids, view)
        latent = self.model.initial_latent(injection, seeds)
        taught = None if self.teacher is None else self.teacher(batch)
        through = self.backprop_depth if backprop_depth is None else backprop_depth
        free = max(depth - through, 0)
        with torch.no_grad():
            for r in range(1, free + 1):
                latent = self.core_step(latent, injection, r, view)
                if self.diagnostics is not None:
                    self.diagnostics.watch(latent, r)
        if not latent.requires_grad:
            # One kind of latent for every recurrence that learns: one compiled variant, not two.
            latent = latent.detach().requires_grad_()
        first_read = self._first_read(depth, free)
        losses = []
        for r in range(free + 1, depth + 1):
            previous = latent
            latent = self.learning_step(latent, injection, r, view)
            if self.diagnostics is not None:
                self.diagnostics.watch(latent, r)
            if r >= first_read:
                losses.append(self.read(latent, r, view, batch.targets, taught))
        loss = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
        if self.objective.fixed_point_weight:
            moved = still_moving(latent, previous, batch.targets != NO_TARGET)
            loss = loss + self.objective.fixed_point_weight * moved
        return loss

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

    def _read(
        self, latent: Tensor, r: int, view: KVView, targets: Tensor, taught: Tensor | None
    ) -> Tensor:
        logits = self.model.coda(latent, r, view).flatten(0, -2).float()
        own = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        if taught is None:
            return own
        weight = self.objective.distil_weight
        return (1 - weight) * own + weight * distillation(logits, taught, targets.flatten())


def _of_its_own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function behind code that no other shares.

    Compiled code is kept by code object, a few versions of each: the models of a grid would share
    one, and the later ones run uncompiled.
    """

    def call(*args: Any) -> Tensor:
        return function(*args)

    call.__code__ = call.__code__.replace()
    return call
