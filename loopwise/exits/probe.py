"""A2: a linear probe on the latent that predicts whether the argmax will still change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights


@dataclass(frozen=True, slots=True)
class Probe(ExitPolicy):
    """Probability that a later recurrence changes the token's argmax, read from the latent.

    Source: Logan 2026, arXiv:2607.14427 (A2). Logistic regression on the standardised latent,
    fitted by :mod:`loopwise.measure.probe_fit` on the frozen model's own trace.

    Attributes:
        weight, bias: over the standardised latent, ``(d_model,)`` float32 and a float.
        mean, std: of each latent channel on the fitting split, ``(d_model,)`` float32.
    """

    weight: Tensor
    bias: float
    mean: Tensor
    std: Tensor

    name = "probe"
    reads = Reads.LATENT
    products = 1
    needs_fitting = True
    watches_movement = False

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> Probe:
        assert state is not None, "build_policy gives what a policy needs"
        return cls.from_state(state)

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted probability in [0, 1], ``(rows,)`` float32."""
        return self.probability(observation.latent), memory

    def probability(self, latent: Tensor) -> Tensor:
        """``(..., d_model)`` to ``(...)`` float32.

        Raises:
            ExitError: the probe was fitted on a model of another width.
        """
        if latent.shape[-1] != self.weight.shape[0]:
            raise ExitError(
                f"probe was fitted at d_model {self.weight.shape[0]}, the model has "
                f"{latent.shape[-1]}; fit it again with `loopwise measure`"
            )
        mean, std, weight = (t.to(latent.device) for t in (self.mean, self.std, self.weight))
        return torch.sigmoid((latent.float() - mean) / std @ weight + self.bias)

    def to_state(self) -> dict[str, Any]:
        """Plain values for ``exits.json``."""
        return {
            "weight": self.weight.tolist(),
            "bias": self.bias,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Probe:
        return cls(
            weight=torch.tensor(state["weight"]),
            bias=float(state["bias"]),
            mean=torch.tensor(state["mean"]),
            std=torch.tensor(state["std"]),
        )
