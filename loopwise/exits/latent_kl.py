"""A1 without the head: the KL to the previous output, predicted from how the latent moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights
from loopwise.exits.latent_change import latent_size, relative_norm
from loopwise.exits.second_difference import remembered_step

_SMALLEST, _LARGEST = 1e-12, 1e12  # of a relative move, so that its logarithm is finite
_MAX_LOG_KL = 60.0  # either way; e**60 is far inside float32


@dataclass(frozen=True, slots=True)
class Ramp:
    """A piecewise-linear function that never falls; its end slopes go on for ever.

    Attributes:
        knots: where the slope changes, increasing, ``(pieces + 1,)`` float32; 0 at the first.
        slopes: between them, not negative, ``(pieces,)`` float32.
    """

    knots: Tensor
    slopes: Tensor
    _pieces: tuple[Tensor, Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shapes_fit = self.knots.ndim == 1 and len(self.knots) == len(self.slopes) + 1 >= 2
        finite = shapes_fit and bool(self.knots.isfinite().all() and self.slopes.isfinite().all())
        if not finite or bool((self.knots.diff() <= 0).any() or (self.slopes < 0).any()):
            raise ExitError(
                "the fitted state of 'latent-kl' is damaged: it needs increasing knots and one "
                "slope of at least 0 between each two; fit it again with `loopwise measure`"
            )
        # Every tick of an engine asks, and to make these takes longer than to use them.
        object.__setattr__(self, "_pieces", pieces_between(self.knots))

    def __call__(self, x: Tensor) -> Tensor:
        """``(...)`` to ``(...)``; finite for finite ``x``."""
        low, high, start = (t.to(x.device) for t in self._pieces)
        along = x.unsqueeze(-1).clamp(low, high).sub_(start)
        return along.mul_(self.slopes.to(x.device)).sum(dim=-1)


def pieces_between(knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower end, upper end and starting knot of each piece, ``(pieces,)`` each.

    How far x has come along a piece is x, clamped between its ends, less its start. The first piece
    reaches down to -inf and the last up to +inf, so a sum of these with fixed slopes is linear
    beyond the knots.
    """
    low, high = knots[:-1].clone(), knots[1:].clone()
    low[0], high[-1] = -torch.inf, torch.inf
    return low, high, knots[:-1]


@dataclass(frozen=True, slots=True)
class LatentKL(ExitPolicy):
    """Predicted KL(p_r || p_{r-1}) in nats, from three reductions over d_model and no vocabulary.

    log KL = change(log of the relative latent change) + second(log of the relative second
    difference) + an offset per recurrence: additive, never falling in either. Fitted by
    :mod:`loopwise.measure.latent_kl_fit` on the frozen model's own trace by least squares of the
    logarithm, so it predicts the geometric mean of the KL and a threshold means what it means for
    ``kl``.

    Attributes:
        change, second: the two ramps, from logarithm to log nats.
        offsets: log nats at recurrences 2, 3, ...; the last one serves all that follow.
    """

    change: Ramp
    second: Ramp
    offsets: Tensor

    name = "latent-kl"
    reads = Reads.LATENT
    needs_fitting = True

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> LatentKL:
        assert state is not None, "build_policy gives what a policy needs"
        return cls.from_state(state)

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or not len(self.offsets) or not self.offsets.isfinite().all():
            raise ExitError(
                "the fitted state of 'latent-kl' is damaged: it needs a finite offset for each "
                "recurrence from 2 on; fit it again with `loopwise measure`"
            )

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return d_model  # the previous step

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted KL(p_r || p_{r-1}) in nats, ``(rows,)`` float32; +inf at recurrence 1.

        Raises:
            ShapeError: the memory is not of the latent's shape.
        """
        step = remembered_step(self.name, observation, memory)
        moves = torch.stack((step, step - memory))
        change, second = relative_norm(moves, latent_size(observation.latent.float()))
        second = second.masked_fill(observation.first(), float("inf"))
        return self.predict(change, second, observation.r), step

    def predict(self, change: Tensor, second: Tensor, r: int | Tensor) -> Tensor:
        """Nats for recorded moves, ``(...)`` float32; +inf where a move is not finite.

        Args:
            change: relative latent change, ``(...)``.
            second: relative second difference, ``(...)``; +inf at recurrence 1.
            r: recurrence, from 1; broadcasts against them.
        """
        at = torch.as_tensor(r, device=change.device).clamp(2, len(self.offsets) + 1) - 2
        log_kl = self.change(log_of(change)) + self.second(log_of(second))
        kl = (log_kl + self.offsets.to(change.device).take(at)).clamp(-_MAX_LOG_KL, _MAX_LOG_KL)
        # Of two moves, which are not negative, the difference is a number where both are.
        return kl.exp_().masked_fill_((change - second).isfinite().logical_not_(), torch.inf)

    def to_state(self) -> dict[str, Any]:
        """Plain values for ``exits.json``."""
        ramps = {"change": self.change, "second": self.second}
        return {
            **{
                name: {"knots": ramp.knots.tolist(), "slopes": ramp.slopes.tolist()}
                for name, ramp in ramps.items()
            },
            "offsets": self.offsets.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LatentKL:
        """Raises ExitError where the values are not those of a fit."""

        def ramp(values: Mapping[str, Any]) -> Ramp:
            return Ramp(
                knots=torch.tensor(values["knots"], dtype=torch.float32),
                slopes=torch.tensor(values["slopes"], dtype=torch.float32),
            )

        return cls(
            change=ramp(state["change"]),
            second=ramp(state["second"]),
            offsets=torch.tensor(state["offsets"], dtype=torch.float32),
        )


def log_of(move: Tensor) -> Tensor:
    """Natural logarithm of a relative move, finite unless it is not a number."""
    return move.clamp(_SMALLEST, _LARGEST).log()
