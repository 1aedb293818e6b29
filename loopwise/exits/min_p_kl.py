"""A1 without the tail: KL between consecutive outputs, over the likely tokens only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.kl import remembered_log_p


@dataclass(frozen=True, slots=True)
class MinPKL(ExitPolicy):
    """Settled once another recurrence stops moving the probabilities of the likely tokens.

    A token is kept where its probability is at least ``min_p`` times the largest, before or after.
    Both distributions are renormalised over the kept tokens; the mass of the others is left out of
    both, so shifts within the tail, or between it and the kept tokens, cost nothing, and where one
    token alone is kept the score is 0.

    Source: Geiping et al. 2025, arXiv:2502.05171 (min-p KL). Their code filters each distribution
    by itself, gives every filtered token 1 / vocab, and takes the KL the other way round, so its
    threshold of 1e-5 is not one of this rule.

    Attributes:
        min_p: share of the largest probability, above 0 and at most 1.
    """

    min_p: float = 0.1  # as published

    name = "min-p-kl"
    reads = Reads.LOGITS

    def __post_init__(self) -> None:
        if not 0 < self.min_p <= 1:
            raise ExitError(f"min_p={self.min_p} must be above 0 and at most 1")

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return vocab_size  # log-probabilities after the previous recurrence

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """KL(p_r || p_{r-1}) over the kept tokens in nats, ``(rows,)``; +inf at recurrence 1.

        Raises:
            ShapeError: logits are missing, or disagree with the memory.
        """
        now = remembered_log_p(self.name, observation, memory)
        kept = self._likely(now) | self._likely(memory)
        kl = kl_within(now, memory, kept)
        return kl.masked_fill(observation.first(), float("inf")), now

    def _likely(self, log_p: Tensor) -> Tensor:
        return log_p >= log_p.amax(dim=-1, keepdim=True) + math.log(self.min_p)


def kl_within(log_p: Tensor, log_q: Tensor, kept: Tensor) -> Tensor:
    """KL(p || q) in nats of both renormalised over ``kept`` ``(rows, vocab)`` bool: ``(rows,)``."""

    def renormalised(log_values: Tensor) -> Tensor:
        return log_values.masked_fill(~kept, float("-inf")).log_softmax(dim=-1)

    log_p, log_q = renormalised(log_p), renormalised(log_q)
    difference = (log_p - log_q).masked_fill(~kept, 0.0)  # -inf less -inf is not a number
    return torch.linalg.vecdot(log_p.exp(), difference).clamp_min(0.0)
