"""What a policy scored at every recurrence, from a trace: recorded, or from its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loopwise.errors import TraceError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.exits.latent_kl import LatentKL
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.trace import Trace


def recorded_score(
    trace: Trace, policy: str, fitted: Mapping[str, Any] | None = None
) -> NDArray[np.float32]:
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
    if policy == "fixed":
        return np.full((trace.n_tokens, trace.horizon), np.inf, dtype=np.float32)
    if policy in _COLUMNS:
        return trace[_COLUMNS[policy]]
    if policy == "margin":
        return np.asarray(1.0 - trace["margin"], dtype=np.float32)
    if policy == "entropy":
        return _after_first(np.abs(np.diff(trace["entropy"], axis=1)))
    if policy == "argmax":
        return _after_first(np.diff(trace["argmax"], axis=1) != 0)
    if policy == "latent-kl":
        return _predicted_kl(trace, fitted)
    kind = "looks ahead" if EXITS[policy].reads is Reads.TRUTH else "was not recorded"
    raise TraceError(
        f"the score of {policy!r} {kind} in trace {str(trace.folder)!r} and follows from none of "
        "its columns; measure again with that policy"
    )


_COLUMNS = {"kl": "kl_prev", "latent-change": "change", "second-difference": "second"}


def _after_first(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Scores from recurrence 2 on, with +inf before them."""
    return np.pad(scores.astype(np.float32), ((0, 0), (1, 0)), constant_values=np.inf)


def _predicted_kl(trace: Trace, fitted: Mapping[str, Any] | None) -> NDArray[np.float32]:
    policy = build_policy(ExitRule(policy="latent-kl"), fitted)
    assert isinstance(policy, LatentKL), "the table says so"
    change, second = (torch.from_numpy(trace[name]) for name in ("change", "second"))
    return policy.predict(change, second, torch.arange(1, trace.horizon + 1)).numpy()
