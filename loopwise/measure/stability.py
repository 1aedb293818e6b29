"""Does a loop break, and how: oscillation, explosion, the collapse rule, the core's spectrum.

Source: Fu et al. 2026, arXiv:2605.18797. Everything but :func:`core_spectrum` is a pure function of
logged numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwise.config import check_choices
from loopwise.data import TokenBatch, TokenStore
from loopwise.errors import ConfigError
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM

_NUDGE = 1e-3  # of the state's norm, for differences


@dataclass(frozen=True, kw_only=True, slots=True)
class CollapseRule:
    """When a training run counts as collapsed; stated before the run, applied by the program.

    Attributes:
        window: steps of the running mean of the loss.
        grace_steps: steps before the loss is judged.
        floor_share: the running mean must be below this share of the unigram entropy: a model that
            has learned anything from context is.
        max_latent_rms: root mean square of a latent channel, past which the state has exploded.
    """

    window: int = 50
    grace_steps: int = 200
    floor_share: float = 1.0
    max_latent_rms: float = 1e3

    def __post_init__(self) -> None:
        check_choices(self)
        if self.window < 1 or self.grace_steps < 0:
            raise ConfigError(
                f"window={self.window} must be at least 1 and grace_steps={self.grace_steps} at "
                "least 0"
            )
        if not 0 < self.floor_share < math.inf or not 0 < self.max_latent_rms < math.inf:
            raise ConfigError(
                f"floor_share={self.floor_share} and max_latent_rms={self.max_latent_rms} must be "
                "above 0 and finite"
            )


class CollapseWatch:
    """Applies a rule to a run, step by step.

    Args:
        floor_nats: unigram entropy of the training text.
        d_model: turns latent norms into root mean squares.
    """

    def __init__(self, rule: CollapseRule, floor_nats: float, d_model: int) -> None:
        self.rule, self.floor_nats, self.d_model = rule, floor_nats, d_model
        self._losses: deque[float] = deque(maxlen=rule.window)

    def see_loss(self, step: int, loss_nats: float) -> str | None:
        """The reason for collapse after this step's loss, or None."""
        if not math.isfinite(loss_nats):
            return f"loss is not finite at step {step}"
        self._losses.append(loss_nats)
        limit = self.rule.floor_share * self.floor_nats
        if step > self.rule.grace_steps and len(self._losses) == self.rule.window:
            mean = sum(self._losses) / self.rule.window
            if mean >= limit:
                return (
                    f"mean loss of {self.rule.window} steps is {mean:.3f} nats at step {step}, "
                    f"not below {limit:.3f} (unigram entropy x {self.rule.floor_share:g})"
                )
        return None

    def see_latents(self, step: int, norms: Mapping[int, float]) -> str | None:
        """The reason for collapse after this step's latent norms by recurrence, or None."""
        for r, norm in sorted(norms.items()):
            rms = norm / math.sqrt(self.d_model)
            if not rms <= self.rule.max_latent_rms:
                return (
                    f"latent RMS is {rms:.3g} after recurrence {r} at step {step}, "
                    f"above {self.rule.max_latent_rms:g}"
                )
        return None


def unigram_nats(store: TokenStore) -> float:
    """Entropy of the token frequencies: the loss of the best model without context."""
    counts = np.bincount(store.token_ids)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def running_std(values: NDArray, window: int) -> NDArray[np.float64]:
    """Standard deviation over the last ``window`` values; NaN before there are as many.

    The oscillation of a gradient norm, or of a loss.
    """
    values = np.asarray(values, dtype=np.float64)
    out = np.full(len(values), np.nan)
    if len(values) >= window:
        views = np.lib.stride_tricks.sliding_window_view(values, window)
        out[window - 1 :] = views.std(axis=1)
    return out


def core_spectrum(
    model: LoopedLM, batch: TokenBatch, depth: int, iterations: int = 30
) -> dict[str, float]:
    """Size of the core's linearisation at the latent after ``depth`` recurrences.

    Power iteration with J alone gives the spectral radius (which decides whether the loop
    converges); with J^T J the norm (the most one recurrence can stretch).

    Returns:
        ``radius`` and ``norm``.
    """
    with torch.no_grad():
        *_, (_, state, view) = trajectory(model, batch, depth)
        injection = model.prelude(batch.token_ids, view)

    limit = model.geometry.max_depth
    following = depth + 1 if limit is None else min(depth + 1, limit)

    def step(x: Tensor) -> Tensor:
        return model.core_step(x, injection, following, view)

    @torch.no_grad()
    def forwards(v: Tensor) -> Tensor:
        # A central difference: fused attention has no forward-mode derivative.
        nudge = _NUDGE * state.norm() / v.norm()
        return (step(state + nudge * v) - step(state - nudge * v)) / (2 * nudge)

    def backwards(v: Tensor) -> Tensor:
        at = state.detach().requires_grad_()
        return torch.autograd.grad(step(at), at, v)[0]

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(state.shape, generator=generator).to(state)
    return {
        "radius": _growth(forwards, start, iterations),
        "norm": math.sqrt(_growth(lambda v: backwards(forwards(v)), start, iterations)),
    }


def _growth(apply: Callable[[Tensor], Tensor], v: Tensor, iterations: int) -> float:
    """Geometric mean growth of ``v`` over the last half of a power iteration."""
    logs = []
    v = v / v.norm()
    for _ in range(iterations):
        v = apply(v)
        size = v.norm()
        if not bool(size.isfinite()) or size == 0:
            return float(size)
        logs.append(math.log(float(size)))
        v = v / size
    half = logs[len(logs) // 2 :]
    return math.exp(sum(half) / len(half))
