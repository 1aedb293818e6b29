"""The change of the output entropy over one recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads


class EntropyChange(ExitPolicy):
    """Settled once another recurrence leaves the output as sure, or unsure, as it was.

    Blind to a change of the answer that keeps the entropy.

    Source: Geiping et al. 2025, arXiv:2502.05171 (entropy difference; 1e-3 nats in their code).
    """

    name = "entropy"
    reads = Reads.LOGITS

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return 1  # the entropy after the previous recurrence, nats

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """|H(p_r) - H(p_{r-1})| in nats, ``(rows,)`` float32; +inf at recurrence 1.

        Raises:
            ShapeError: logits are missing.
        """
        logits = observation.needed_logits(self.name)
        entropy = output_entropy(logits.log_softmax(dim=-1), logits.softmax(dim=-1))
        change = (entropy - memory[:, 0]).abs()
        return change.masked_fill(observation.first(), float("inf")), entropy.unsqueeze(1)


def output_entropy(log_p: Tensor, p: Tensor) -> Tensor:
    """Entropy in nats from log-probabilities and probabilities ``(rows, vocab)``: ``(rows,)``."""
    return -torch.linalg.vecdot(p, log_p)
