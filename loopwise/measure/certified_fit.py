"""Fitting ``certified``: how far hidden states go after a step, and how wide the head is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError
from loopwise.exits.certified import Certified, allowed_distance
from loopwise.exits.short_list_kl import centred_rows
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM

HELD = 0.99  # share of tokens and recurrences for which the fitted rate is to hold
EASY = 0.25  # share of tokens that may go further than the distance the head is first read for
FLOOR = 1e-4  # of the hidden state's size; a step at or below it is rounding
_CHUNK_ROWS = 256  # tokens whose distances between all recurrences are held at once
_BLOCK = 256  # rows of the head that are held against the others at once

Floats = NDArray[np.float32]


@torch.no_grad()
def reach_examples(
    model: LoopedLM, batches: Iterable[TokenBatch], horizon: int, max_depth: int
) -> tuple[Floats, Floats]:
    """How far hidden states go after a step, in steps; and how far they may without a new argmax.

    Returns:
        The largest distance to any later recurrence up to ``horizon`` over the length of the step
        before it, for steps to recurrences 2 to ``max_depth``, ``(examples,)``; and the distance
        allowed at ``max_depth``, ``(tokens,)``.
    """
    reaches, allowed = [], []
    _, distances = centred_rows(model.head_weight, cap=None)
    diameter = head_diameter(model.head_weight)
    for batch in batches:
        rows = (batch.targets.flatten() != NO_TARGET).nonzero().squeeze(-1)
        run = trajectory(model, batch, horizon)
        hidden = torch.stack(
            [model.hidden(h, r, view).flatten(0, -2)[rows] for r, h, view in run], dim=1
        )  # (rows, horizon, d_model)
        reaches += [_reaches(some.float(), max_depth) for some in hidden.split(_CHUNK_ROWS)]
        logits = model.head(hidden[:, max_depth - 1]).float()
        allowed.append(allowed_distance(logits, distances, diameter))
    if not reaches:
        raise DataError("no text to fit 'certified' on; give more held-out data")
    return torch.cat(reaches).numpy(), torch.cat(allowed).numpy()


def _reaches(hidden: Tensor, max_depth: int) -> Tensor:
    """Of ``hidden (rows, horizon, d_model)``: ``(examples,)``."""
    out = []
    for r in range(2, min(max_depth, hidden.shape[1] - 1) + 1):
        here = hidden[:, r - 1]
        step = (here - hidden[:, r - 2]).norm(dim=-1)
        furthest = (hidden[:, r:] - here.unsqueeze(1)).norm(dim=-1).amax(dim=1)
        out.append((furthest / step)[step > FLOOR * here.norm(dim=-1)])
    return torch.cat(out) if out else hidden.new_zeros(0)


def fit_certified(reaches: Floats, allowed: Floats, head: Tensor) -> Certified:
    """The rate that holds for HELD of the examples, and the width of the head.

    Steps that shrink by ``rate`` go at most rate / (1 - rate) times the last one.

    Args:
        reaches, allowed: of :func:`reach_examples`.
        head: rows of tokens, ``(vocab, d_model)``.
    Raises:
        DataError: no step was longer than rounding.
    """
    if not len(reaches):
        raise DataError(
            "no hidden state moves at recurrence 2 or later, so there is no rate to fit for "
            "'certified'; measure to a larger horizon"
        )
    reach = max(float(np.quantile(reaches, HELD)), 1e-6)
    return Certified(
        rate=reach / (1 + reach),
        diameter=head_diameter(head),
        first_read=float(np.quantile(allowed, 1 - EASY)),
        distances=centred_rows(head, cap=None)[1],
    )


def head_diameter(head: Tensor) -> float:
    """Largest distance between two rows of ``head (vocab, d_model)``.

    Rows are taken from the outermost in, and held only against those that could be further away
    than the widest pair so far.
    """
    _, distances = centred_rows(head, cap=None)
    distances, order = distances.double().sort(descending=True)
    rows, widest = head.detach()[order].double(), 0.0
    for at in range(0, len(rows), _BLOCK):
        if 2 * float(distances[at]) <= widest:
            break
        n = int((distances + distances[at] >= widest).sum())
        apart = torch.cdist(rows[at : at + _BLOCK], rows[:n])
        widest = max(widest, float(apart.max()))
    return widest


def judge_certified(score: NDArray[Any], argmax: NDArray[Any]) -> dict[str, Any]:
    """How often the certificate is given, and whether it was kept, on text not fitted on.

    Args:
        score: of the rule, ``(tokens, max_depth)``.
        argmax: ``(tokens, horizon)``.
    Returns:
        ``fires``: share of tokens certified by each recurrence; ``certified`` tokens in all, and
        those ``broken`` among them: their argmax is another one at some later recurrence.
    """
    certified = np.maximum.accumulate(score <= 1, axis=1)
    fired = certified[:, -1]
    at = certified.argmax(axis=1)
    answer = argmax[np.arange(len(argmax)), at]
    later = np.arange(argmax.shape[1]) > at[:, None]
    broken = ((argmax != answer[:, None]) & later).any(axis=1) & fired
    return {
        "fires": certified.mean(axis=0).tolist(),
        "certified": int(fired.sum()),
        "broken": int(broken.sum()),
    }
