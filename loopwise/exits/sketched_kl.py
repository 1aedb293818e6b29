"""A1 to second order, through a sketch of the head: a few weighted rows for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights, check_ids_fit
from loopwise.exits.short_list_kl import listed_logits

RANK = 64  # rows of the head in a sketch
BEST = 16  # of them the most likely tokens; the others are drawn from the rest


@dataclass(frozen=True, slots=True)
class SketchedKL(ExitPolicy):
    """Estimated KL(p_r || p_{r-1}) in nats: half the variance under p_r of the logits' change.

    That is dh' Cov_p(W) dh / 2, with Cov_p(W) = sum of p_i (w_i - mean) (w_i - mean)' taken over
    RANK rows instead of the vocabulary: the BEST most likely ones by their probability, and rows
    drawn at even steps of the cumulated probability of the rest, which share what is left. The
    sketch is made when the head is read in full, at recurrence 1, and its weights follow the logits
    of its rows from then on. Nothing is drawn at random.

    Attributes:
        head: rows of tokens, ``(vocab, d_model)``.
        cap: of the logits, or None.
    """

    head: Tensor
    cap: float | None

    name = "sketched-kl"
    reads = Reads.HIDDEN
    products = RANK
    needs_weights = True

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> SketchedKL:
        assert weights is not None, "build_policy gives what a policy needs"
        return cls(weights.head_weight.detach(), weights.logit_cap)

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        """Rows of the sketch, what makes a weight of a logit, and the previous logits."""
        check_ids_fit(self.name, vocab_size)
        return 3 * RANK

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Estimated KL(p_r || p_{r-1}) in nats, ``(rows,)`` float32; +inf at recurrence 1.

        Raises:
            ShapeError: the hidden state is missing.
        """
        output = observation.needed_output(self.name)
        hidden, memory = output.hidden.float(), memory.clone()
        first = observation.first()
        rows = first.nonzero().squeeze(1)
        ids, base, before = memory.split(RANK, dim=1)
        if rows.numel():
            drawn, log_weights = sketch(output.read(rows).float())
            ids[rows], base[rows] = drawn.float(), log_weights
        now = listed_logits(hidden, self.head, ids.long(), self.cap)
        base[rows] -= now[rows]
        score = half_variance(now - before, (base + now).softmax(dim=-1))
        before.copy_(now)
        return score.masked_fill(first, torch.inf), memory


def sketch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted tokens that stand for a distribution; the same whatever else is in the call.

    Args:
        logits: ``(rows, vocab)`` float32.
    Returns:
        Token ids ``(rows, RANK)`` int64, some more than once, and the logarithms of their weights,
        which add up to 1; -inf where there is nothing left to stand for.
    """
    p = logits.double().softmax(dim=-1)
    best = p.topk(min(BEST, p.shape[-1]), dim=-1).indices
    cumulated = p.scatter(1, best, 0.0).cumsum(dim=-1)
    n = RANK - best.shape[1]
    steps = (torch.arange(n, dtype=p.dtype, device=p.device) + 0.5) / n
    drawn = torch.searchsorted(cumulated, steps * cumulated[:, -1:], right=True)
    drawn = drawn.clamp_max(p.shape[-1] - 1)
    weights = torch.cat((p.gather(1, best), (cumulated[:, -1:] / n).expand(-1, n)), dim=1)
    return torch.cat((best, drawn), dim=1), weights.log().float()


def half_variance(values: Tensor, weights: Tensor) -> Tensor:
    """Half the variance of ``values (rows, n)`` under ``weights (rows, n)``: ``(rows,)``."""
    mean = (weights * values).sum(dim=-1, keepdim=True)
    return (weights * (values - mean).square()).sum(dim=-1) / 2
