"""Greedy exit with a certificate: the answer is further ahead than what is left can move it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights
from loopwise.exits.largest import likeliest
from loopwise.exits.short_list_kl import centred_rows

_SMALLEST = 1e-30  # in place of zero, which in the memory means that nothing was read yet


@dataclass(frozen=True, slots=True)
class Certified(ExitPolicy):
    """Distance the hidden state may still go, over the distance that could change the argmax.

    ``certified:1`` stops a token where the first is at most the second. Its most likely token then
    stays that of every later recurrence, wherever later steps of the hidden state (what the head
    reads) shrink at least by the fitted rate: what is still to go is at most ||dh|| rate / (1 -
    rate). Two logits differ by at least their gap after a move shorter than gap / ||w_i - w_j||,
    and that norm is at most the largest distance between two rows of the head, and at most the sum
    of both rows' distances from the centre of all.

    The head is read only where it may say yes: when the distance to go falls below one that a
    quarter of the tokens may go at full depth, then again when it falls below what the reading
    allowed. The reading that says yes is the output. A threshold above 1 certifies nothing.

    Source: arXiv:2608.18222, proposition 1 (displacement below the margin keeps the token).

    Attributes:
        rate: by which later steps shrink, above 0 and below 1.
        diameter: largest distance between two rows of the head.
        first_read: distance to go below which the head is read for the first time.
        distances: of each row of the head from the centre of all, ``(vocab,)``.
    """

    rate: float
    diameter: float
    first_read: float
    distances: Tensor

    name = "certified"
    reads = Reads.HIDDEN
    needs_fitting = True
    needs_weights = True

    def __post_init__(self) -> None:
        if not (0 < self.rate < 1 and self.diameter >= 0 and self.first_read >= 0):
            raise ExitError(
                "the fitted state of 'certified' is damaged: it needs a rate between 0 and 1 and "
                "distances of at least 0; fit it again with `loopwise measure`"
            )

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> Certified:
        """Raises ExitError where the state is not that of a fit."""
        assert state is not None and weights is not None, "build_policy gives what a policy needs"
        _, distances = centred_rows(weights.head_weight, cap=None)
        rate, diameter, first_read = (float(state[k]) for k in ("rate", "diameter", "first_read"))
        return cls(rate, diameter, first_read, distances)

    def to_state(self) -> dict[str, Any]:
        """Plain values for ``exits.json``; the distances are the head's."""
        return {"rate": self.rate, "diameter": self.diameter, "first_read": self.first_read}

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return d_model + 1  # the previous hidden state, and what the last reading allowed

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Distance to go over distance allowed, ``(rows,)`` float32; +inf at recurrence 1.

        Above 1 where the head was not read.

        Raises:
            ShapeError: the hidden state is missing.
        """
        output = observation.needed_output(self.name)
        hidden, first = output.hidden.float(), observation.first()
        previous, allowed = memory[:, :-1], memory[:, -1]
        ahead = self.ahead((hidden - previous).norm(dim=-1)).masked_fill(first, torch.inf)
        believed = torch.where(allowed > 0, allowed, self.first_read)
        rows = (ahead <= believed).nonzero().squeeze(1)
        if rows.numel():
            found = allowed_distance(output.read(rows).float(), self.distances, self.diameter)
            found = found.clamp_min(_SMALLEST)
            allowed, believed = allowed.index_copy(0, rows, found), believed.clone()
            believed[rows] = found
        score = ahead / believed.clamp_min(_SMALLEST)
        return score.masked_fill(first, torch.inf), torch.cat((hidden, allowed[:, None]), dim=1)

    def ahead(self, step: Tensor) -> Tensor:
        """What is still to go after steps of this length that shrink by the rate."""
        return step * (self.rate / (1 - self.rate))


def allowed_distance(logits: Tensor, distances: Tensor, diameter: float) -> Tensor:
    """How far the hidden state may move before the argmax can change, ``(rows,)``.

    Under a cap logits are closer together than they were before it, so that this is less.

    Args:
        logits: ``(rows, vocab)``.
        distances: of each row of the head from some centre, ``(vocab,)``.
        diameter: largest distance between two rows of the head.
    """
    best = likeliest(logits).unsqueeze(1)
    gap = logits.gather(1, best) - logits
    apart = (distances[best] + distances).clamp_max(diameter)
    allowed = gap / apart.clamp_min(_SMALLEST)
    return allowed.scatter(1, best, torch.inf).amin(dim=-1)
