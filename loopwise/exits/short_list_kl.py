"""A1 over a short list of tokens: some rows of the head instead of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads, Weights, check_ids_fit
from loopwise.exits.kl import step_kl

LISTED = 128  # tokens
_GATHERED = 2**22  # numbers of the head that are copied at once


@dataclass(frozen=True, slots=True)
class ShortListKL(ExitPolicy):
    """KL between consecutive outputs over the tokens that were best when the head was last read.

    The head is read in full at recurrence 1. From then on a check takes the coda and LISTED rows of
    the head, and compares the two distributions over the list alone. :meth:`bracket` bounds how far
    that can be from the KL over the vocabulary; the upper bound holds for any tail and so is far
    above what tails do, which is why it is not the score.

    Source: the short list of Liu et al. 2025 (SpecEE), arXiv:2504.08850, taken to A1.

    Attributes:
        head: rows of tokens, ``(vocab, d_model)``.
        cap: of the logits, or None.
        centre: subtracted from every row, which changes no distribution, ``(d_model,)``; zero
            where a cap makes it change one.
        radius: largest distance of a row from the centre.
    """

    head: Tensor
    cap: float | None
    centre: Tensor
    radius: float

    name = "short-list-kl"
    reads = Reads.HIDDEN
    products = LISTED
    needs_weights = True

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> ShortListKL:
        assert weights is not None, "build_policy gives what a policy needs"
        head, cap = weights.head_weight.detach(), weights.logit_cap
        centre, distances = centred_rows(head, cap)
        return cls(head, cap, centre, float(distances.max()))

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        """The list, its logits, the log of the tail's sum, and the hidden states of the full read
        and of the previous recurrence."""
        check_ids_fit(self.name, vocab_size)
        return 2 * min(LISTED, vocab_size) + 1 + 2 * d_model

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """KL(p_r || p_{r-1}) over the list in nats, ``(rows,)`` float32; +inf at recurrence 1.

        Raises:
            ShapeError: the hidden state is missing.
        """
        output = observation.needed_output(self.name)
        hidden, memory = output.hidden.float(), memory.clone()
        first = observation.first()
        rows = first.nonzero().squeeze(1)
        ids, logits, tail, read, previous = self._parts(memory)
        if rows.numel():
            best = output.read(rows).float()
            if self.cap is None:
                best = best - (hidden[rows] @ self.centre)[:, None]
            listed = best.topk(ids.shape[1], dim=-1).indices
            rest = best.scatter(1, listed, -torch.inf)
            ids[rows], tail[rows] = listed.float(), rest.logsumexp(dim=-1, keepdim=True)
            read[rows] = hidden[rows]
        now = self._listed(hidden, ids)
        kl = step_kl(now.log_softmax(dim=-1), logits.log_softmax(dim=-1))
        logits.copy_(now)
        previous.copy_(hidden)
        return kl.masked_fill(first, torch.inf), memory

    def bracket(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of KL(p_r || p_{r-1}) over the vocabulary, nats, ``(rows,)`` each.

        For rows past recurrence 1, with the memory that :meth:`score` is given.
        """
        hidden = observation.needed_output(self.name).hidden.float()
        ids, before, tail, read, previous = self._parts(memory)
        return kl_bracket(
            self._listed(hidden, ids),
            before,
            tail.squeeze(1),
            self.radius * (hidden - read).norm(dim=-1),
            self.radius * (previous - read).norm(dim=-1),
            self.radius * (hidden - previous).norm(dim=-1),
        )

    def _parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        m, d = min(LISTED, self.head.shape[0]), self.head.shape[1]
        return memory.split((m, m, 1, d, d), dim=1)

    def _listed(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = listed_logits(hidden, self.head, ids.long(), self.cap)
        return logits if self.cap is not None else logits - (hidden @ self.centre)[:, None]


def centred_rows(head: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """The centre of the rows ``(d_model,)`` float32 and their distances from it, ``(vocab,)``.

    What all logits have in common changes no distribution, so the centre may be taken off every
    row; under a cap it does change one, and the centre is zero.
    """
    rows = head.detach().float()
    centre = rows.mean(dim=0) if cap is None else rows.new_zeros(rows.shape[1])
    return centre, (rows - centre).norm(dim=-1)


def listed_logits(hidden: Tensor, head: Tensor, ids: Tensor, cap: float | None) -> Tensor:
    """Logits of each row's own tokens.

    Args:
        hidden: ``(rows, d_model)``.
        head: ``(vocab, d_model)``.
        ids: ``(rows, listed)`` int64.
    Returns:
        ``(rows, listed)``, dtype of ``hidden``.
    """
    size = max(1, _GATHERED // max(1, ids.shape[1] * head.shape[1]))  # copies of rows are large
    parts = [
        (head[some].to(hidden.dtype) @ h.unsqueeze(2)).squeeze(2)
        for h, some in zip(hidden.split(size), ids.split(size), strict=True)
    ]
    logits = torch.cat(parts)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def kl_bracket(
    now: Tensor,
    before: Tensor,
    log_tail: Tensor,
    since_read: Tensor,
    since_read_before: Tensor,
    moved: Tensor,
) -> tuple[Tensor, Tensor]:
    """Bounds of a KL over the vocabulary from a list of tokens and how far the others can move.

    By the chain rule it is KL(list or tail) + p(list) KL(within the list) + p(tail) KL(within the
    tail). The second is known but for p(list). A tail whose logits move by at most c each changes
    its log-sum by at most c, and its inner KL is at most :func:`largest_kl`; a KL of two outcomes
    is at most half the squared change of their log-odds times the largest variance on the way.

    Args:
        now, before: logits of the list, ``(rows, listed)``.
        log_tail: log of the sum of exp(logit) over the others at an earlier reading, ``(rows,)``.
        since_read, since_read_before: most that any logit moved from that reading to now, and to
            before, ``(rows,)``.
        moved: most that any logit moved from before to now, ``(rows,)``.
    Returns:
        Lower and upper bound in nats, ``(rows,)`` each.
    """
    log_now, log_before = now.logsumexp(dim=-1), before.logsumexp(dim=-1)
    most_now = torch.sigmoid(log_tail + since_read - log_now)  # of the tail's share
    most_before = torch.sigmoid(log_tail + since_read_before - log_before)
    least_now = torch.sigmoid(log_tail - since_read - log_now)
    share = torch.maximum(most_now, most_before)
    variance = torch.where(share < 0.5, share * (1 - share), 0.25)
    odds = (log_now - log_before).abs() + moved
    within = step_kl(now.log_softmax(dim=-1), before.log_softmax(dim=-1))
    high = odds.square() / 2 * variance + (1 - least_now) * within + most_now * largest_kl(moved)
    no_tail = log_tail == -math.inf
    return (1 - most_now) * within, torch.where(no_tail, within, high)


def largest_kl(moved: Tensor) -> Tensor:
    """Most nats between two distributions whose logits differ by at most ``moved`` each.

    c^2 / 2, by Hoeffding's lemma for changes within an interval of 2 c. Two halves of the mass that
    move by a small c against each other come as near to it as one likes.
    """
    return moved.square() / 2
