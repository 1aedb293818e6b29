"""Tiers: calibrated exit rules by name, stored in a checkpoint's ``exits.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError, ConfigError, ExitError
from loopwise.exits import EXITS
from loopwise.exits.rule import ExitRule, parse_rule
from loopwise.models.checkpoint import Checkpoint, write_exits
from loopwise.registry import did_you_mean

_NAMES = {1: ("balanced",), 2: ("high", "fast"), 3: ("high", "balanced", "fast")}


def tier_names(budgets: Sequence[float], names: Sequence[str] = ()) -> list[str]:
    """A name for each budget, in the order given.

    By default one is ``balanced``, two are ``high`` and ``fast``, three ``high``, ``balanced`` and
    ``fast``, more ``tier-1``, ``tier-2`` ..., always from the smallest budget on.

    Raises:
        ConfigError: names that are too few, twice, or already mean something else.
    """
    if names:
        if len(names) != len(budgets):
            raise ConfigError(
                f"--names gives {len(names)} for {len(budgets)} budgets; give one for each"
            )
        for name in names:
            if name in EXITS or not name.replace("-", "").replace("_", "").isalnum():
                raise ConfigError(
                    f"tier name {name!r} must be of letters, digits, - and _, and no exit rule's"
                )
        if len(set(names)) < len(names):
            raise ConfigError(f"--names {','.join(names)} gives a name twice")
        return list(names)
    usual = _NAMES.get(len(budgets)) or [f"tier-{i + 1}" for i in range(len(budgets))]
    by_budget = dict(zip(sorted(budgets), usual, strict=True))
    return [by_budget[b] for b in budgets]


def tiers_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What is stored for each tier, by name.

    Raises:
        ExitError: ``exits.json`` was made for other weights, or holds something else.
    """
    checkpoint.fitted_policies()  # refuses what was fitted on other weights
    tiers = checkpoint.exits.get("tiers", {})
    if not isinstance(tiers, Mapping) or not all(
        isinstance(t, Mapping) and isinstance(t.get("rule"), str) for t in tiers.values()
    ):
        raise ExitError(
            f"the tiers in exits.json of {str(checkpoint.path)!r} are damaged; make them again "
            "with `loopwise calibrate`"
        )
    return tiers


def tier_rule(checkpoint: Checkpoint, name: str) -> ExitRule:
    """The exit rule of a calibrated tier.

    Raises:
        ExitError: no such tier; names those there are.
    """
    return _tier_rule(tiers_of(checkpoint), name)


def _tier_rule(tiers: Mapping[str, Any], name: str) -> ExitRule:
    if name not in tiers:
        hint = did_you_mean(name, [*tiers, *EXITS]) or ";"
        known = f"tiers: {', '.join(tiers)}" if tiers else "no tier yet (`loopwise calibrate`)"
        raise ExitError(
            f"no tier or exit rule named {name!r}{hint} this checkpoint has {known}; "
            f"exit rules: {', '.join(EXITS)}"
        )
    return parse_rule(tiers[name]["rule"])


def named_rule(checkpoint: Checkpoint, text: str, max_depth: int) -> ExitRule:
    """A tier by its name, or an exit rule as :func:`parse_rule` reads it."""
    return parse_rule(text, max_depth) if is_rule(text) else tier_rule(checkpoint, text.strip())


def rule_among(tiers: Mapping[str, Any], text: str, max_depth: int) -> ExitRule:
    """`named_rule` where the tiers have been read: what :func:`tiers_of` gave."""
    return parse_rule(text, max_depth) if is_rule(text) else _tier_rule(tiers, text.strip())


def is_rule(text: str) -> bool:
    """Whether ``text`` is written as an exit rule; anything else can only be a tier."""
    return ":" in text or text.strip() in EXITS


def write_tiers(checkpoint: Checkpoint, tiers: Mapping[str, Any]) -> Checkpoint:
    """Store tiers beside what ``exits.json`` holds by now; one of the same name is replaced."""
    file = checkpoint.path / "exits.json"
    stored = read_json_object(file, CheckpointError) if file.is_file() else {}
    checkpoint = replace(checkpoint, exits=stored)
    return write_exits(checkpoint, {**stored, "tiers": {**tiers_of(checkpoint), **tiers}})


def why_not_promised(checkpoint: Checkpoint, name: str | None, kv_policy: str) -> str | None:
    """Why a tier's budget says nothing about decoding under ``kv_policy``; None where it does."""
    return why_unpromised(tiers_of(checkpoint), name, kv_policy)


def why_unpromised(tiers: Mapping[str, Any], name: str | None, kv_policy: str) -> str | None:
    """`why_not_promised` where the tiers have been read."""
    tier = tiers.get(name or "")
    judged = None if tier is None else tier.get("kv_policy", kv_policy)
    if judged is None or judged == kv_policy:
        return None
    return f"tier {name!r} was calibrated under {judged}; under {kv_policy} nothing is promised"
