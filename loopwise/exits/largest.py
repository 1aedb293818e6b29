"""The likeliest tokens of each row, found group by group.

On a CPU ``argmax`` and ``topk`` go through a vocabulary one logit at a time and cost several times
what a maximum does. So the maxima of groups come first, and only the best groups are searched.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """Id of the largest logit ``(rows, vocab)``, the first of equal ones: ``(rows,)`` int64."""
    groups = logits.unflatten(-1, (-1, _group_size(logits.shape[-1])))
    best = groups.amax(dim=-1).argmax(dim=-1)
    inside = groups[torch.arange(len(logits), device=logits.device), best].argmax(dim=-1)
    return best * groups.shape[-1] + inside


def top_tokens(logits: Tensor) -> Tensor:
    """Ids of the two largest logits ``(rows, vocab)``, best first: ``(rows, 2)`` int64.

    One column where the vocabulary is one token. Exact ties fall as ``topk`` lets them.
    """
    size = _group_size(logits.shape[-1])
    groups = logits.unflatten(-1, (-1, size))
    best = _top_two(groups.amax(dim=-1))
    few = groups.gather(1, best.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    at = _top_two(few)
    return best.gather(1, at // size) * size + at % size


def _top_two(x: Tensor) -> Tensor:
    return x.topk(min(2, x.shape[-1]), dim=-1).indices


@lru_cache
def _group_size(vocab: int) -> int:
    """The divisor nearest the root, so that groups are as many as they are long; 1 of a prime."""
    divisors = [d for d in range(1, vocab + 1) if vocab % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d * d / vocab)))
