"""An exit rule: a policy's name with the caller's threshold, patience and depth bounds.

The one place where a score becomes a verdict; replay, live measurement, the reference decoder and
the engine all decide through :func:`should_exit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from loopwise.errors import DepthError, ExitError
from loopwise.exits import EXITS
from loopwise.exits.base import ExitPolicy, Weights
from loopwise.registry import did_you_mean

Rows = Tensor | NDArray[Any]
_FIELDS = {"min": "min_depth", "max": "max_depth", "patience": "patience"}
MAX_DEPTH = 256  # recurrences; far past any trained range, so a typing error is not run for hours


class Bounds(Protocol):
    """The numbers of an exit rule, or of one rule per row."""

    @property
    def threshold(self) -> Any: ...

    @property
    def patience(self) -> Any: ...

    @property
    def min_depth(self) -> Any: ...

    @property
    def max_depth(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRule:
    """When a token stops.

    Attributes:
        policy: a name of the EXITS table.
        threshold: a score at or below it is a hit.
        patience: consecutive hits that end the token.
        min_depth, max_depth: recurrences; at ``max_depth`` a token stops whatever its score.
    """

    policy: str = "fixed"
    threshold: float = 0.0
    patience: int = 1
    min_depth: int = 1
    max_depth: int = 8

    def __post_init__(self) -> None:
        if self.policy not in EXITS:
            EXITS[self.policy]  # raises, with the nearest name
        if math.isnan(self.threshold):
            raise ExitError(f"threshold of exit rule {self.policy!r} is not a number")
        if self.patience < 1:
            raise ExitError(f"patience={self.patience} must be at least 1")
        if not 1 <= self.min_depth <= self.max_depth:
            raise DepthError(
                f"depths min={self.min_depth} max={self.max_depth} must satisfy 1 <= min <= max"
            )
        if self.max_depth > MAX_DEPTH:
            raise DepthError(f"depth {self.max_depth} is past the limit of {MAX_DEPTH} recurrences")

    def __str__(self) -> str:
        if self.policy == "fixed":
            return f"fixed:{self.max_depth}"
        extra = f",min={self.min_depth}" if self.min_depth > 1 else ""
        extra += f",patience={self.patience}" if self.patience > 1 else ""
        return f"{self.policy}:{self.threshold!r}{extra},max={self.max_depth}"


def parse_rule(text: str, max_depth: int = 8) -> ExitRule:
    """Read ``fixed:8``, ``kl:1e-3`` or ``kl:1e-3,min=2,max=16,patience=2``.

    Args:
        max_depth: used where the text gives none.
    Raises:
        ExitError: an unknown name or field, or a threshold that is not a number, is infinite, or is
            below every score; -inf, as frontiers write it, checks and never stops.
        DepthError: a depth out of range.
    """
    name, _, rest = text.strip().partition(":")
    if name not in EXITS:
        EXITS[name]
    first, *fields = [part.strip() for part in rest.split(",")]
    if not first:
        raise ExitError(
            f"exit rule {text!r} has no threshold; write for example kl:1e-3 or fixed:8"
        )
    if name == "fixed":
        rule = ExitRule(policy=name, max_depth=_whole(text, first))
    else:
        rule = ExitRule(policy=name, threshold=_number(text, first), max_depth=max_depth)
    changes: dict[str, Any] = {}
    for field in fields:
        key, _, value = field.partition("=")
        if key not in _FIELDS:
            hint = did_you_mean(key, _FIELDS) or ";"
            raise ExitError(
                f"exit rule {text!r} has no field {key!r}{hint} known: min, max, patience"
            )
        if _FIELDS[key] in changes or (name == "fixed" and key == "max"):
            raise ExitError(f"exit rule {text!r} gives {key} twice; leave one out")
        changes[_FIELDS[key]] = _whole(text, value)
    return replace(rule, **changes)


def build_policy(
    rule: ExitRule, fitted: Mapping[str, Any] | None = None, weights: Weights | None = None
) -> ExitPolicy:
    """The policy object of ``rule``.

    Args:
        fitted: ``policies`` of the checkpoint's ``exits.json``, for policies with fitted state.
        weights: the model, for policies that are made of its weights.
    Raises:
        ExitError: the policy must be fitted first, or the model has not what it needs.
    """
    policy_class = EXITS[rule.policy]
    state = (fitted or {}).get(rule.policy) if policy_class.needs_fitting else None
    if policy_class.needs_fitting and state is None:
        raise ExitError(
            f"exit rule {rule.policy!r} must be fitted to the checkpoint first: loopwise measure"
        )
    if policy_class.needs_weights and weights is None:
        raise ExitError(f"exit rule {rule.policy!r} is made of a model's weights; give the model")
    return policy_class.build(state, weights if policy_class.needs_weights else None)


def why_not_built(
    policy: str, fitted: Mapping[str, Any] | None = None, weights: Weights | None = None
) -> str | None:
    """Why :func:`build_policy` refuses a policy; None where it does not."""
    try:
        build_policy(ExitRule(policy=policy), fitted, weights)
    except ExitError as err:
        return str(err)
    return None


def should_exit(rule: Bounds, score: Rows, hits: Rows, r: int | Rows) -> tuple[Any, Any]:
    """Turn scores into verdicts; tensors or arrays.

    Args:
        rule: an :class:`ExitRule`, or its numbers as arrays of one per row (float32 thresholds, as
            scores are).
        score: ``(rows,)`` float32 after recurrence ``r``.
        hits: ``(rows,)`` int64, consecutive hits so far.
        r: recurrence of each row, from 1.
    Returns:
        Which rows stop now ``(rows,)`` bool, and the new ``hits``.
    """
    hits = (hits + 1) * (score <= rule.threshold)
    stop = (hits >= rule.patience) & (r >= rule.min_depth)
    return stop | (r >= rule.max_depth), hits


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ExitError(f"exit rule {text!r}: {value!r} is not a number; write for example kl:1e-3")
    # No score is negative: see ExitPolicy.score. Frontiers end in one that checks and never stops.
    if not (0 <= number < math.inf or number == -math.inf):
        early = "no token stops early" if number < 0 else "every token stops at once"
        raise ExitError(
            f"exit rule {text!r}: at a threshold of {value} {early}; it must be finite and at "
            "least 0, as scores are; write for example kl:1e-3, or fixed:8 for one depth"
        )
    return number


def _whole(text: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ExitError(
            f"exit rule {text!r}: {value!r} is not a whole number of recurrences"
        ) from None
    if number < 1:
        raise DepthError(f"exit rule {text!r}: {number} must be at least 1")
    return number
