"""What a policy scored at every recurrence, from a trace: recorded, or from its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwise.errors import TraceError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import Reads
from loopwise.exits.latent_kl import LatentKL
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.trace import Trace

Fitted = Mapping[str, Any]
Scores = NDArray[np.float32]


def recorded_score(trace: Trace, policy: str, fitted: Fitted | None = None) -> Scores:
    """Score of every token after each recurrence, ``(tokens, horizon)``, lower is more settled.

    Scores that were recorded come first. Else they follow from the standard columns, for every
    policy whose score is a function of them: any trace then serves a rule that came later.

    Args:
        policy: a name of the EXITS table.
        fitted: ``policies`` of the checkpoint's ``exits.json``, for ``latent-kl``.
    Raises:
        TraceError: the trace holds neither.
        ExitError: an unknown name, or a policy that is not fitted yet.
    """
    if policy in trace.policies:
        return trace[f"score.{policy}"]
    if policy in _FROM_COLUMNS:
        return _FROM_COLUMNS[policy](trace, fitted or {})
    kind = "looks ahead" if EXITS[policy].reads is Reads.TRUTH else "was not recorded"
    raise TraceError(
        f"the score of {policy!r} {kind} in trace {str(trace.folder)!r} and follows from none of "
        "its columns; measure again with that policy"
    )


def why_unknown(trace: Trace, policy: str, fitted: Fitted) -> str | None:
    """Why :func:`recorded_score` cannot tell, with what to do; None where it can."""
    if policy in trace.policies:
        return None
    if needs_fitting(policy) and policy not in fitted:
        return "it is not fitted to the checkpoint yet; measure the text of the run again"
    if policy not in _FROM_COLUMNS:
        return f"its score was not recorded; measure again with {policy} in measure.live_rules"
    return None


def recorded_asks(trace: Trace, policy: str) -> NDArray[np.bool_] | None:
    """Whose logits a policy asked for, ``(tokens, horizon)``; None for one that takes all or none.

    To be had where its score was recorded.
    """
    return trace[f"read.{policy}"] if EXITS[policy].reads is Reads.HIDDEN else None


def follows_from_columns(policy: str) -> bool:
    """Whether every trace tells the policy's score, so that recording it would say it twice."""
    return policy in _FROM_COLUMNS


def _after_first(scores: NDArray[Any]) -> Scores:
    """Scores from recurrence 2 on, with +inf before them."""
    return np.pad(scores.astype(np.float32), ((0, 0), (1, 0)), constant_values=np.inf)


def _predicted_kl(trace: Trace, fitted: Fitted) -> Scores:
    policy = build_policy(ExitRule(policy="latent-kl"), fitted)
    assert isinstance(policy, LatentKL), "the table says so"
    change, second = (torch.from_numpy(trace[name]) for name in ("change", "second"))
    return policy.predict(change, second, torch.arange(1, trace.horizon + 1)).numpy()


_FROM_COLUMNS: dict[str, Callable[[Trace, Fitted], Scores]] = {
    "fixed": lambda t, _: np.full((t.n_tokens, t.horizon), np.inf, dtype=np.float32),
    "kl": lambda t, _: t["kl_prev"],
    "latent-change": lambda t, _: t["change"],
    "second-difference": lambda t, _: t["second"],
    "margin": lambda t, _: np.asarray(1.0 - t["margin"], dtype=np.float32),
    "entropy": lambda t, _: _after_first(np.abs(np.diff(t["entropy"], axis=1))),
    "argmax": lambda t, _: _after_first(np.diff(t["argmax"], axis=1) != 0),
    "latent-kl": _predicted_kl,
}
