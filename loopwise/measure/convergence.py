"""How a trace converges: pure functions from recorded trajectories to numbers.

Axes are ``(tokens, horizon)``; column r - 1 holds recurrence r. Depths count from 1. A token that
does not settle within the horizon gets depth horizon + 1.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.measure.statistics import BlockSums, block_sums, mean_with_interval
from loopwise.measure.token_types import TOKEN_TYPES, classify_targets
from loopwise.measure.trace import Trace
from loopwise.tokenizer import Tokenizer

SATURATION_NATS = 0.005
MOVING_CHANGE = 0.01  # relative change of the latent; above it a token has not stopped
CONVERGING_RATE = 0.97


def first_crossing(score: NDArray, epsilon: float) -> NDArray[np.int64]:
    """First recurrence whose score is at most ``epsilon``, ``(tokens,)``."""
    hit = score <= epsilon
    return np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, score.shape[1] + 1)


def settled_depth(score: NDArray, epsilon: float) -> NDArray[np.int64]:
    """First recurrence from which the score stays at most ``epsilon`` up to the horizon."""
    hit = score <= epsilon
    streak = hit[:, ::-1].cumprod(axis=1).sum(axis=1)  # hits in a row, counted from the end
    return score.shape[1] - streak + 1


def argmax_final_depth(argmax: NDArray) -> NDArray[np.int64]:
    """Earliest recurrence whose argmax is that of every later one: the argmax oracle's depth."""
    return settled_depth((argmax != argmax[:, -1:]).astype(np.float32), 0.0)


def loss_by_recurrence(loss: NDArray, block: NDArray) -> dict[str, list[float]]:
    """Mean loss at each recurrence in nats, with 95% intervals by block."""
    sums = block_sums(loss, block)
    low, high = sums.interval()
    return {"mean": sums.mean.tolist(), "low": low.tolist(), "high": high.tolist()}


def byte_sums(trace: Trace, tokenizer: Tokenizer) -> BlockSums:
    """Loss in nats and bytes of each block, over the targets that are text.

    Whether a document ends is no part of its bytes: such targets are left out.
    """
    size = tokenizer.byte_lengths()[trace["target"]]
    block, text = trace["block"], size > 0
    blocks = int(block.max(initial=-1)) + 1
    sums = np.zeros((blocks, trace.horizon))
    np.add.at(sums, block[text], trace["loss"][text].astype(np.float64))
    return BlockSums(sums=sums, counts=np.bincount(block, size, blocks).astype(np.int64))


def is_monotone(means: list[float], tolerance: float = 1e-3) -> bool:
    """Whether loss never rises by more than ``tolerance`` nats from one depth to the next."""
    return all(b <= a + tolerance for a, b in itertools.pairwise(means))


def saturation_depth(
    loss: NDArray, block: NDArray, within: float = SATURATION_NATS
) -> dict[str, int | float]:
    """Smallest depth whose mean loss is within ``within`` nats of the best, with 95% interval."""
    sums = block_sums(loss, block)

    def smallest(means: NDArray) -> NDArray[np.int64]:
        return (means <= means.min(axis=-1, keepdims=True) + within).argmax(axis=-1) + 1

    low, high = np.quantile(smallest(sums.resampled_means()), [0.025, 0.975])
    return {
        "depth": int(smallest(sums.mean)),
        "low": int(low),
        "high": int(high),
        "within_nats": within,
    }


def contraction(change: NDArray, floor: float = 1e-4) -> dict[str, Any]:
    """How fast the steps of most tokens shrink, and how many tokens do not stop.

    ``rate`` is the geometric mean, from recurrence 3 on, of the ratios of successive median
    relative changes, over recurrences whose median is above ``floor`` (below it, rounding moves the
    latent); below 1 the loop contracts, and the distance left is about step x rate / (1 - rate).
    The median, because a few tokens that cycle would carry the mean: ``moving_share`` counts tokens
    whose change at the horizon is still above MOVING_CHANGE. Where the median is below ``floor``
    from recurrence 3 on there is no rate (NaN): the model ``arrives_at_once``, and converges.
    """
    typical = np.median(change, axis=0)
    ratios = typical[1:] / np.maximum(typical[:-1], 1e-30)  # ratios[i] leads to recurrence i + 2
    used = [i for i in range(1, len(ratios)) if typical[i + 1] > floor]
    rate = math.exp(float(np.mean(np.log(ratios[used])))) if used else math.nan
    at_once = not used and bool(len(ratios) > 1)
    return {
        "rate": rate,
        "ratios": ratios.tolist(),
        "recurrences_used": [i + 2 for i in used],
        "arrives_at_once": at_once,
        "converges": at_once or (bool(used) and rate < CONVERGING_RATE),
        "moving_share": float((change[:, -1] > MOVING_CHANGE).mean()),
        "moving_change": MOVING_CHANGE,
    }


def loss_optimal(loss: NDArray, null_loss: NDArray, block: NDArray) -> dict[str, Any]:
    """The loss-optimal depth, and how much of its headroom is chance.

    Headroom is the mean loss at the best uniform depth minus the mean of each token's lowest loss.
    An oracle that picks minima finds headroom in noise too. The null exchanges each true next token
    for a draw from the model's own last distribution: the trajectories stay, and what headroom
    remains comes from the luck of the draw, not from a token's need for depth.

    Args:
        loss, null_loss: ``(tokens, horizon)`` nats, of the true and of the drawn next tokens.
        block: ``(tokens,)`` unit of resampling for the 95% interval.
    """

    def headroom(values: NDArray) -> NDArray:
        return values[:, values.mean(axis=0).argmin()] - values.min(axis=1)  # (tokens,)

    ours, null = headroom(loss), headroom(null_loss)
    return {
        "mean_depth": float((loss.argmin(axis=1) + 1).mean()),
        "headroom_nats": float(ours.mean()),
        "null_headroom_nats": float(null.mean()),
        "over_null_nats": mean_with_interval(ours - null, block),
    }


def depth_distribution(depth: NDArray, horizon: int) -> dict[str, Any]:
    """Histogram over 1 .. horizon and "never within the horizon", with mean and quantiles."""
    counts = np.bincount(depth, minlength=horizon + 2)[1 : horizon + 2]
    return {
        "share": (counts / counts.sum()).tolist(),
        "mean": float(depth.mean()),
        "median": float(np.median(depth)),
        "p90": float(np.quantile(depth, 0.9)),
        "unsettled_share": float((depth > horizon).mean()),
    }


def by_token_type(trace: Trace, tokenizer: Tokenizer, depth: NDArray) -> list[dict[str, Any]]:
    """Settled depth of each kind of token, shallowest first."""
    kinds = classify_targets(tokenizer, trace["token"], trace["target"])
    block = trace["block"]
    rows = []
    for i, name in enumerate(TOKEN_TYPES):
        of = kinds == i
        if of.sum() >= 30:
            rows.append(
                {"type": name, "tokens": int(of.sum()), **mean_with_interval(depth[of], block[of])}
            )
    return sorted(rows, key=lambda row: row["mean"])


def by_hops(trace: Trace, depth: NDArray, loss: NDArray, argmax: NDArray) -> list[dict[str, Any]]:
    """Does depth follow difficulty? For answer tokens, by the look-ups the answer needs."""
    hops, block, target = trace["hops"], trace["block"], trace["target"]
    rows = []
    for n in range(1, int(hops.max(initial=0)) + 1):
        of = hops == n
        if of.sum() < 30:
            continue
        curve = loss[of].mean(axis=0)
        rows.append(
            {
                "hops": n,
                "tokens": int(of.sum()),
                "settled_depth": mean_with_interval(depth[of], block[of]),
                "loss_nats_by_depth": curve.tolist(),
                "accuracy_by_depth": (argmax[of] == target[of, None]).mean(axis=0).tolist(),
                "depth_gain_nats": float(curve[0] - curve.min()),
            }
        )
    return rows


def summarise(trace: Trace, tokenizer: Tokenizer, epsilon: float) -> dict[str, Any]:
    """Everything a report says about convergence, from one trace.

    Args:
        epsilon: of the KL criterion, nats; a token has settled once KL to the previous recurrence
            stays at or below it.
    """
    loss, kl, block, argmax = trace["loss"], trace["kl_prev"], trace["block"], trace["argmax"]
    depth = settled_depth(kl, epsilon)
    mean_depth = trace.header["trained_mean_depth"]
    at_mean = min(round(mean_depth), trace.horizon) if mean_depth else trace.horizon
    in_bytes = byte_sums(trace, tokenizer)
    no_text = [math.nan] * trace.horizon
    losses = loss_by_recurrence(loss, block)
    return {
        "corpus": trace.header["corpus"],
        "tokens": trace.n_tokens,
        "horizon": trace.horizon,
        "epsilon": epsilon,
        "trained_mean_depth": mean_depth,
        "loss_nats": losses,
        "trained_depths": trace.header["trained_depths"],
        "monotone_to_training_mean": is_monotone(losses["mean"][:at_mean]),
        "monotone_to_horizon": is_monotone(losses["mean"]),
        "rise_after_best_nats": losses["mean"][-1] - min(losses["mean"]),
        "bits_per_byte": (in_bytes.mean / math.log(2)).tolist()
        if in_bytes.counts.any()
        else no_text,
        "curves": _curves(trace),
        "argmax_agreement": (argmax == argmax[:, -1:]).mean(axis=0).tolist(),
        "saturation": saturation_depth(loss, block),
        "contraction": contraction(trace["change"]),
        "first_crossing": depth_distribution(first_crossing(kl, epsilon), trace.horizon),
        "settled": depth_distribution(depth, trace.horizon),
        "moving_at_training_mean": float((depth > at_mean).mean()),
        "argmax_final": depth_distribution(argmax_final_depth(argmax), trace.horizon),
        "loss_optimal": loss_optimal(loss, trace["null_loss"], block),
        "token_types": by_token_type(trace, tokenizer, depth),
        "hops": by_hops(trace, depth, loss, argmax),
    }


def _curves(trace: Trace) -> dict[str, dict[str, list[float | None]]]:
    """Mean, median and 10-90% range of each quantity at each recurrence; null where undefined."""
    out = {}
    for name in ("kl_prev", "kl_last", "rms", "change", "second", "cosine", "margin", "entropy"):
        values = trace[name].astype(np.float64)
        values[~np.isfinite(values)] = np.nan
        defined = np.isfinite(values).any(axis=0)
        table = np.full((4, values.shape[1]), np.nan)
        table[0, defined] = np.nanmean(values[:, defined], axis=0)
        table[1:, defined] = np.nanquantile(values[:, defined], [0.5, 0.1, 0.9], axis=0)
        rows = [[None if math.isnan(x) else float(x) for x in row] for row in table]
        out[name] = dict(zip(("mean", "median", "p10", "p90"), rows, strict=True))
    return out
