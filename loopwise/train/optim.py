"""Optimisers, the learning-rate schedule, and the float32 numbers behind a model's weights."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import LoopedLM
from loopwise.train.low_rank import LowRank, factorise, matrices_to_adapt
from loopwise.train.muon import Muon


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Muon for matrices (Jordan et al. 2024) with AdamW for the rest, or AdamW alone."""

    name: Literal["muon", "adamw"] = "muon"
    lr: float = 3e-3  # of matrices
    # match-rms: Muon's updates get the RMS of AdamW's, so that rates carry over; original: as first
    # published, sqrt(max(1, rows / columns)).
    muon_scale: Literal["match-rms", "original"] = "match-rms"
    embedding_lr: float = 3e-3  # and of norms
    head_lr: float | None = None  # of an untied head; None: that of the embedding
    weight_decay: float = 0.05  # matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95  # Muon
    momentum_start: float = 0.95  # rises linearly to `momentum` over the warm-up steps
    momentum_warmup_steps: int = 0
    grad_clip: float = 1.0
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.4  # of all steps, at the end, linear
    final_lr_fraction: float = 0.02

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("lr", "embedding_lr", "head_lr", "grad_clip", "eps"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be above 0 and finite")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be in [0, 1]")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optim.weight_decay={self.weight_decay} must be 0 or more, finite")
        for name in ("beta1", "beta2", "momentum", "momentum_start"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be in [0, 1)")


def lr_factor(config: OptimConfig, step: int, steps: int) -> float:
    """Share of the base rate at optimiser step ``step`` (from 0): warm-up, stable, linear decay."""
    warmup = config.warmup_fraction * steps
    decay = config.decay_fraction * steps
    rise = (step + 1) / warmup if warmup >= 1 else 1.0
    fall = (steps - step) / decay if decay >= 1 else 1.0
    low = config.final_lr_fraction
    return min(1.0, rise, low + (1 - low) * min(fall, 1.0))


def momentum_at(config: OptimConfig, step: int) -> float:
    """Muon's momentum at optimiser step ``step`` (from 0)."""
    if step >= config.momentum_warmup_steps:
        return config.momentum
    part = step / config.momentum_warmup_steps
    return config.momentum_start + part * (config.momentum - config.momentum_start)


def learn_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name fits none of the patterns; no pattern freezes none.

    Raises:
        ConfigError: a pattern that fits no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"train.only: no parameter fits {pattern!r}; the first are {', '.join(names[:4])}"
            )
    for name, p in model.named_parameters():
        p.requires_grad_(not patterns or any(fnmatch.fnmatch(name, x) for x in patterns))


class Optimizer:
    """The optimisers of one model behind one face, stepping on float32 masters.

    The model may compute in bfloat16; its weights are then copies of the float32 masters kept here,
    refreshed after every step. In float32 the parameters are their own masters. The master of a
    matrix with factors follows from them, and AdamW steps on the factors.

    Args:
        factors: matrices that learn through them alone, by name.
    Attributes:
        masters: float32, of every parameter: what checkpoints hold.
        learned: what is stepped on, by name: masters, or factors in their place.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, factors: Mapping[str, LowRank] | None = None
    ) -> None:
        self.config = config
        self.factors = dict(factors or {})
        self.params = dict(model.named_parameters())
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
            for name, p in self.params.items()
        }
        self.learned: dict[str, nn.Parameter] = {}
        matrices: list[nn.Parameter] = []
        head: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, master in self.masters.items():
            if not self.params[name].requires_grad or name in self.factors:
                continue
            self.learned[name] = master
            if "unembedding" in name:
                head.append(master)
            elif master.ndim == 2 and "embedding" not in name:
                matrices.append(master)
            else:
                others.append(master)
        self.parts: list[tuple[float, torch.optim.Optimizer]] = []
        if matrices and config.name == "muon":
            muon = Muon(
                matrices,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw" if config.muon_scale == "match-rms" else "original",
            )
            self.parts.append((config.lr, muon))
        elif matrices:
            self.parts.append((config.lr, self._adamw(matrices, config.lr, config.weight_decay)))
        if others:
            self.parts.append((config.embedding_lr, self._adamw(others, config.embedding_lr, 0.0)))
        if head:
            head_lr = config.head_lr or config.embedding_lr
            self.parts.append((head_lr, self._adamw(head, head_lr, 0.0)))
        if self.factors:
            thin = {f"{n}.up": f.up for n, f in self.factors.items()}
            thin |= {f"{n}.down": f.down for n, f in self.factors.items()}
            self.learned |= thin
            adamw = self._adamw(list(thin.values()), config.lr, config.weight_decay)
            self.parts.append((config.lr, adamw))

    def _adamw(self, params: list[nn.Parameter], lr: float, decay: float) -> torch.optim.AdamW:
        betas = (self.config.beta1, self.config.beta2)
        return torch.optim.AdamW(
            params, lr=lr, betas=betas, eps=self.config.eps, weight_decay=decay
        )

    @property
    def n_learned(self) -> int:
        """Numbers that are stepped on."""
        return sum(p.numel() for p in self.learned.values())

    def collect_gradients(self) -> Tensor:
        """Move gradients onto what learns; their global L2 norm before clipping, float32 scalar."""
        for name, p in self.params.items():
            if name in self.factors and p.grad is not None:
                self.factors[name].take_gradient(p.grad.float())
                p.grad = None
            elif self.masters[name] is not p:
                self.masters[name].grad = None if p.grad is None else p.grad.float()
                p.grad = None
        grads = [p.grad for p in self.learned.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def step(self, norm: Tensor, factor: float, step: int = 0) -> None:
        """Clip by the measured ``norm``, update, refresh the model's weights.

        Args:
            factor: share of the base rates to update at.
            step: optimiser step, from 0, for the momentum's warm-up.
        """
        torch.nn.utils.clip_grads_with_norm_(
            self.learned.values(), max_norm=self.config.grad_clip, total_norm=norm
        )
        for base, part in self.parts:
            for group in part.param_groups:
                group["lr"] = base * factor
                if "momentum" in group:
                    group["momentum"] = momentum_at(self.config, step)
            part.step()
        self.zero_grad()
        self._refresh()

    def zero_grad(self) -> None:
        for p in (*self.params.values(), *self.masters.values(), *self.learned.values()):
            p.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for _, part in self.parts]

    def factor_state(self) -> dict[str, Tensor]:
        """Base and factors of every matrix that has them, by name."""
        return {
            f"{name}.{part}": tensor
            for name, factor in self.factors.items()
            for part, tensor in factor.tensors().items()
        }

    def load_state_dict(
        self,
        state: list[dict[str, Any]],
        masters: dict[str, Tensor],
        factors: Mapping[str, Tensor],
    ) -> None:
        """Restore optimiser state, masters and factors, then refresh the model's weights."""
        for (_, part), part_state in zip(self.parts, state, strict=True):
            part.load_state_dict(part_state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(masters[name])
            for name, tensor in self.factor_state().items():
                tensor.copy_(factors[name])
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for name, factor in self.factors.items():
                self.masters[name].copy_(factor.merged())
            for name, p in self.params.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])


def make_optimizer(
    model: LoopedLM,
    config: OptimConfig,
    dtype: torch.dtype,
    *,
    only: Sequence[str] = (),
    low_rank: int | None = None,
    seed: int = 0,
) -> Optimizer:
    """Move ``model`` to ``dtype`` for training; masters keep the float32 values it was made with.

    Args:
        only: names of what learns, ``*`` and ``?`` allowed; empty: all.
        low_rank: of the factors that learn in place of matrices, drawn by ``seed``.
    Raises:
        ConfigError: a pattern that fits nothing, or a rank that does not fit.
    """
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    factors: dict[str, LowRank] = {}
    if low_rank is None:
        learn_only(model, only)
    else:
        names = matrices_to_adapt(model, only, low_rank)
        factors = factorise(exact, names, low_rank, seed)
        learn_only(model, names)
    model.to(dtype)
    optimizer = Optimizer(model, config, factors)
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            master.copy_(exact[name])
    return optimizer
