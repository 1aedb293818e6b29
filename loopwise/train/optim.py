"""Optimisers, the learning-rate schedule, and float32 masters for low-precision weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Muon for matrices (Jordan et al. 2024) with AdamW for the rest, or AdamW alone."""

    name: Literal["muon", "adamw"] = "muon"
    lr: float = 3e-3  # Muon's is scaled so that its updates have AdamW's RMS
    embedding_lr: float = 3e-3  # embedding, head and norms
    weight_decay: float = 0.05  # matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # Muon
    grad_clip: float = 1.0
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.4  # of all steps, at the end, linear
    final_lr_fraction: float = 0.02

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("lr", "embedding_lr", "grad_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be above 0 and finite")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be in [0, 1]")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optim.weight_decay={self.weight_decay} must be 0 or more, finite")
        for name in ("beta1", "beta2", "momentum"):
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


class Optimizer:
    """The optimisers of one model behind one face, stepping on float32 masters.

    The model may compute in bfloat16; its weights are then copies of the float32 masters kept here,
    refreshed after every step. In float32 the parameters are their own masters.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.params = dict(model.named_parameters())
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
            for name, p in self.params.items()
        }
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, master in self.masters.items():
            is_matrix = master.ndim == 2 and "embedding" not in name
            (matrices if is_matrix else others).append(master)
        betas = (config.beta1, config.beta2)
        self.parts: list[tuple[float, torch.optim.Optimizer]] = []
        if config.name == "muon":
            muon = torch.optim.Muon(
                matrices,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append((config.lr, muon))
        else:
            adamw = torch.optim.AdamW(
                matrices, lr=config.lr, betas=betas, weight_decay=config.weight_decay
            )
            self.parts.append((config.lr, adamw))
        rest = torch.optim.AdamW(others, lr=config.embedding_lr, betas=betas, weight_decay=0.0)
        self.parts.append((config.embedding_lr, rest))

    def collect_gradients(self) -> Tensor:
        """Move gradients onto the masters; their global L2 norm before clipping, float32 scalar."""
        for name, p in self.params.items():
            master = self.masters[name]
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def step(self, norm: Tensor, factor: float) -> None:
        """Clip by the measured ``norm``, update at ``factor`` times the base rates, refresh."""
        torch.nn.utils.clip_grads_with_norm_(
            self.masters.values(), max_norm=self.config.grad_clip, total_norm=norm
        )
        for base, part in self.parts:
            for group in part.param_groups:
                group["lr"] = base * factor
            part.step()
        self.zero_grad()
        self._refresh()

    def zero_grad(self) -> None:
        for p in (*self.params.values(), *self.masters.values()):
            p.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for _, part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]], masters: dict[str, Tensor]) -> None:
        """Restore optimiser state and masters, then refresh the model's weights."""
        for (_, part), part_state in zip(self.parts, state, strict=True):
            part.load_state_dict(part_state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(masters[name])
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])
