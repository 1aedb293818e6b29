"""The likeliest tokens of each row, found group by group.

On a CPU ``argmax`` and ``topk`` go through a vocabulary one logit at a time and cost several times
what a maximum does. So the maxima of groups come first, and only the best groups are searched, with
what is left over when a vocabulary is divided into as many groups as they are long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FEWEST = 2**17  # logits; ten small operations cost more than a search through fewer


def likeliest(logits: Tensor) -> Tensor:
    """Id of the largest logit ``(rows, vocab)``, the first of equal ones: ``(rows,)`` int64."""
    if not _pays(logits):
        return logits.argmax(dim=-1)
    groups, rest = _divided(logits)
    best = groups.amax(dim=-1).argmax(dim=-1)
    few = torch.cat((groups[torch.arange(len(logits)), best], rest), dim=1)
    return _ids(few.argmax(dim=-1, keepdim=True), best.unsqueeze(1), groups).squeeze(1)


def top_tokens(logits: Tensor) -> Tensor:
    """Ids of the two largest logits ``(rows, vocab)``, best first: ``(rows, 2)`` int64.

    One column where the vocabulary is one token. Exact ties fall as ``topk`` lets them.
    """
    if not _pays(logits):
        return _top_two(logits)
    groups, rest = _divided(logits)
    best = _top_two(groups.amax(dim=-1))
    chosen = groups.gather(1, best.unsqueeze(-1).expand(-1, -1, groups.shape[-1]))
    return _ids(_top_two(torch.cat((chosen.flatten(1), rest), dim=1)), best, groups)


def _pays(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.numel() >= _FEWEST


def _divided(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Groups ``(rows, groups, size)`` and the few logits that fill none, ``(rows, rest)``."""
    size = math.isqrt(logits.shape[-1])
    whole = logits.shape[-1] // size * size
    return logits[:, :whole].unflatten(-1, (-1, size)), logits[:, whole:]


def _ids(at: Tensor, best: Tensor, groups: Tensor) -> Tensor:
    """Token ids of places ``at`` in the ``best`` groups, one after the other, and the rest."""
    n, size = groups.shape[1:]
    of = at // size
    inside = best.gather(1, of.clamp_max(best.shape[1] - 1)) * size + at % size
    past = n * size + at - best.shape[1] * size
    return torch.where(of < best.shape[1], inside, past)


def _top_two(x: Tensor) -> Tensor:
    return x.topk(min(2, x.shape[-1]), dim=-1).indices
