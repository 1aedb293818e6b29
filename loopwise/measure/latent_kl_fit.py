"""Fitting ``latent-kl``: two ramps and offsets, from how latents moved to what the outputs did."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from loopwise.errors import DataError
from loopwise.exits.latent_kl import LatentKL, Ramp, log_of, pieces_between

PIECES = 8  # of each ramp, between quantiles of what it reads
KL_FLOOR = 1e-7  # nats; a float32 KL below it is rounding
_MAX_EXAMPLES = 200_000  # drawn evenly from more, with a fixed seed
_MIN_EXAMPLES = 100
_RIDGE = 1e-9  # of the mean square of the columns; decides between ramps that read the same

Floats = NDArray[np.float64]


def fit_latent_kl(
    change: ArrayLike, second: ArrayLike, kl: ArrayLike, recurrence: ArrayLike
) -> LatentKL:
    """Least squares of log KL with slopes of at least 0; deterministic.

    Slopes are read from tokens of one recurrence against each other, then each recurrence gets the
    offset that centres it. KL below KL_FLOOR counts as KL_FLOOR. Where a value is not finite
    (recurrence 1) there is no example.

    Args:
        change, second: relative latent change and second difference, e.g. ``(tokens, horizon)``.
        kl: KL(p_r || p_{r-1}), nats.
        recurrence: from 1; all four broadcast, so ``1 .. horizon`` serves a trace's columns.
    Raises:
        DataError: too few examples.
    """
    change, second, kl, r = _examples(change, second, kl, recurrence)
    target = np.log(np.maximum(kl, KL_FLOOR))
    moves = [log_of(torch.from_numpy(values)) for values in (change, second)]
    knots = [_knots(values.numpy()) for values in moves]
    columns = np.hstack([_along(x, k) for x, k in zip(moves, knots, strict=True)])
    slopes = _slopes(columns, target, r)
    offsets = _means_by(r, (target - columns @ slopes)[:, None])[2:, 0]
    n_change = len(knots[0]) - 1
    return LatentKL(
        change=Ramp(_float32(knots[0]), _float32(slopes[:n_change])),
        second=Ramp(_float32(knots[1]), _float32(slopes[n_change:])),
        offsets=_float32(offsets),
    )


def judge_latent_kl(predicted: ArrayLike, kl: ArrayLike, bins: int = 10) -> dict[str, Any]:
    """Predictions against what happened, on a split not fitted on.

    Args:
        predicted, kl: nats, of one shape; pairs that are not finite are left out.
    Returns:
        ``r2`` and ``rms_log`` of the natural logarithm, and ``calibration``: geometric means in
        nats by equally filled bins of the prediction.
    """
    predicted, kl = (np.asarray(x, dtype=np.float64).ravel() for x in (predicted, kl))
    known = np.isfinite(predicted) & np.isfinite(kl)
    ours, truth = (np.log(np.maximum(x[known], KL_FLOOR)) for x in (predicted, kl))
    error = ((truth - ours) ** 2).mean()
    parts = np.array_split(np.argsort(ours, kind="stable"), bins)
    rows = [
        {"predicted": float(np.exp(ours[of].mean())), "observed": float(np.exp(truth[of].mean()))}
        for of in parts
        if len(of)
    ]
    spread = truth.var()
    return {
        "r2": float(1 - error / spread) if spread > 0 else float("nan"),
        "rms_log": float(np.sqrt(error)),
        "calibration": rows,
    }


def _examples(*values: ArrayLike) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
    """Change, second difference, KL and recurrence where all are known, ``(examples,)`` each."""
    arrays = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in values))
    flat = np.stack([a.ravel() for a in arrays])
    flat = flat[:, np.isfinite(flat).all(axis=0) & (flat[3] >= 2)]
    if flat.shape[1] < _MIN_EXAMPLES:
        raise DataError(
            f"{flat.shape[1]} examples past recurrence 1 are too few to fit 'latent-kl' on; it "
            f"needs {_MIN_EXAMPLES}: give more held-out data"
        )
    if flat.shape[1] > _MAX_EXAMPLES:
        drawn = np.random.default_rng(0).choice(flat.shape[1], _MAX_EXAMPLES, replace=False)
        flat = flat[:, np.sort(drawn)]
    change, second, kl, r = flat
    return change, second, kl, r.astype(np.int64)


def _knots(values: Floats) -> Floats:
    """Different quantiles of the values, at least two knots."""
    # Rounded to float32 first, which is how they are stored: two may fall together there.
    quantiles = np.quantile(values, np.linspace(0, 1, PIECES + 1)).astype(np.float32)
    knots = np.unique(quantiles).astype(np.float64)
    return knots if len(knots) > 1 else np.array([knots[0], knots[0] + 1.0])


def _along(x: Tensor, knots: Floats) -> Floats:
    """How far ``x (examples,)`` has come along each piece, ``(examples, pieces)``."""
    low, high, start = pieces_between(torch.from_numpy(knots))
    return (x.unsqueeze(-1).clamp(low, high) - start).numpy()


def _slopes(columns: Floats, target: Floats, r: NDArray[np.int64]) -> Floats:
    """Slopes of the pieces ``(examples, pieces)``, whatever the offsets of the recurrences."""
    both = np.column_stack([columns, target])
    both = both - _means_by(r, both)[r]
    design, wanted = both[:, :-1], both[:, -1]
    gram = design.T @ design / len(design)
    ridge = _RIDGE * np.trace(gram) / len(gram)
    return nonnegative_solution(gram + ridge * np.eye(len(gram)), design.T @ wanted / len(design))


def _means_by(r: NDArray[np.int64], values: Floats) -> Floats:
    """Mean of the rows of each recurrence, ``(largest + 1, columns)``; gaps are bridged."""
    counts = np.bincount(r)
    sums = np.stack([np.bincount(r, weights=column) for column in values.T], axis=1)
    present = counts.nonzero()[0]
    means = sums[present] / counts[present, None]
    every = np.arange(len(counts))
    return np.stack([np.interp(every, present, column) for column in means.T], axis=1)


def nonnegative_solution(gram: Floats, moment: Floats) -> Floats:
    """The ``s >= 0`` that minimises ``s' gram s / 2 - moment' s`` (Lawson and Hanson 1974).

    Args:
        gram: symmetric, positive semi-definite, ``(n, n)``.
        moment: ``(n,)``.
    """
    n = len(moment)
    s, free = np.zeros(n), np.zeros(n, dtype=bool)
    tolerance = 1e-12 * max(float(np.abs(moment).max()), 1e-300)
    for _ in range(3 * n):  # each round lets one more in; few are ever put out again
        gain = np.where(free, -np.inf, moment - gram @ s)
        if gain.max() <= tolerance:
            break
        free[gain.argmax()] = True
        s = _settle(gram, moment, s, free)
    return s


def _settle(gram: Floats, moment: Floats, s: Floats, free: NDArray[np.bool_]) -> Floats:
    """Move to the best point over the ``free`` entries, putting out what turns negative."""
    while free.any():
        best = np.zeros_like(s)
        best[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
        if (best[free] > 0).all():
            return best
        falling = np.where(free & (best <= 0), s / (s - best).clip(1e-300), np.inf)
        s = s + falling.min() * (best - s)
        free[falling.argmin()] = False
        free &= s > 0
        s = np.where(free, s, 0.0)
    return s


def _float32(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
