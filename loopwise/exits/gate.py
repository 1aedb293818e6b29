"""The model's own learned gate, where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights


@dataclass(frozen=True, slots=True)
class Gate(ExitPolicy):
    """Probability that the gate lets a token go on past this recurrence.

    With l_r the gate's probability of stopping at r, what is left is (1 - l_1) .. (1 - l_r); a
    token stops once that is small, which is when the sum of the chances to have stopped is large.

    Source: Zhu et al. 2025, arXiv:2510.25741 (Ouro; exit at a quantile q is a threshold of 1 - q).

    Attributes:
        weight, bias: of the gate, ``(d_model,)`` and ``()``.
    """

    weight: Tensor
    bias: Tensor

    name = "gate"
    reads = Reads.LATENT
    products = 1
    needs_weights = True
    watches_movement = False

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> Gate:
        """Raises ExitError where the model has no gate."""
        assert weights is not None, "build_policy gives what a policy needs"
        if weights.exit_gate is None:
            raise ExitError(
                "exit rule 'gate' reads a gate that was trained with the model, and this model has "
                "none; use a rule that watches it settle, such as latent-kl"
            )
        weight, bias = weights.exit_gate
        return cls(weight.detach(), bias.detach())

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return 1  # logarithm of what was left before

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What is left, in [0, 1] and never rising from one recurrence to the next: ``(rows,)``."""
        logit = observation.latent.float() @ self.weight.float() + self.bias.float()
        log_left = memory[:, 0] + F.logsigmoid(-logit)
        return log_left.exp(), log_left.unsqueeze(1)
