"""A1: the KL divergence between a token's consecutive output distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from loopwise.errors import ShapeError
from loopwise.exits.base import ExitPolicy, Observation, Reads


class StepKL(ExitPolicy):
    """Settled once another recurrence stops moving the next-token distribution.

    Source: Logan 2026, arXiv:2607.14427 (A1); Geiping et al. 2025, arXiv:2502.05171.
    """

    name = "kl"
    reads = Reads.LOGITS

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return vocab_size  # log-probabilities after the previous recurrence

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """KL(p_r || p_{r-1}) in nats, ``(rows,)``; +inf at recurrence 1.

        Raises:
            ShapeError: logits are missing, or disagree with the memory.
        """
        now = remembered_log_p(self.name, observation, memory)
        kl = step_kl(now, memory, observation.needed_logits(self.name).softmax(dim=-1))
        return kl.masked_fill(observation.first(), float("inf")), now


def remembered_log_p(policy: str, observation: Observation, memory: Tensor) -> Tensor:
    """Log-probabilities now, ``(rows, vocab)`` float32, checked against those of before.

    Raises:
        ShapeError: logits are missing, or disagree with the memory.
    """
    logits = observation.needed_logits(policy)
    if logits.shape != memory.shape:
        raise ShapeError(
            f"{policy} reads logits {tuple(logits.shape)} but remembers {tuple(memory.shape)}"
        )
    return logits.log_softmax(dim=-1)


def step_kl(log_p: Tensor, log_q: Tensor, p: Tensor | None = None) -> Tensor:
    """KL(p || q) in nats from log-probabilities ``(rows, vocab)``: ``(rows,)``, not below 0.

    Args:
        p: ``log_p.exp()``, where the caller has it already.
    """
    p = log_p.exp() if p is None else p
    return torch.linalg.vecdot(p, log_p - log_q).clamp_min(0.0)
