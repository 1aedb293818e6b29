"""How deep a call runs: a uniform number of recurrences, or an exit rule for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwise.errors import ConfigError, DepthError, ExitError
from loopwise.exits.base import ExitPolicy, Reads
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.evaluate import check_depths
from loopwise.models.base import Geometry, LoopedLM

Named = Callable[[str, int], tuple[ExitRule, Mapping[str, Any]]]  # tier or rule, and fitted state


@dataclass(frozen=True, slots=True)
class Plan:
    """A rule with the policy that scores for it."""

    rule: ExitRule
    policy: ExitPolicy

    @property
    def uniform(self) -> bool:
        """Every token runs ``rule.max_depth`` recurrences."""
        return self.rule.policy == "fixed"

    @property
    def runs_coda(self) -> bool:
        """Whether the rule looks at what the coda makes of every recurrence."""
        return self.policy.reads.runs_coda

    @property
    def coda_entries(self) -> int:
        """Entries a coda layer keeps of a token."""
        return self.rule.max_depth if self.runs_coda else 1


def make_plan(
    model: LoopedLM,
    num_loops: int | None,
    exit: str | ExitRule | Plan | None,
    usual: int,
    named: Named,
) -> Plan:
    """What a call asks for.

    Args:
        num_loops, exit: of the call; at most one of them.
        usual: recurrences where neither is given, and the most where a rule gives none.
        named: finds a calibrated tier, or reads a rule.
    Raises:
        ConfigError: both are given, or one of the wrong type.
        ExitError: no such rule or tier, or one that cannot decide live.
        DepthError: a depth the model cannot run.
    """
    if num_loops is not None and exit is not None:
        raise ConfigError(
            f"num_loops={num_loops!r} and exit={str(exit)!r} contradict each other; give one of "
            "them (a rule's largest depth is written kl:1e-3,max=8)"
        )
    fitted: Mapping[str, Any] = {}
    if isinstance(exit, Plan):
        return exit
    if exit is None:
        rule = _uniform(usual if num_loops is None else num_loops)
    elif isinstance(exit, ExitRule):
        rule = exit
    elif isinstance(exit, str):
        rule, fitted = named(exit, usual)
    else:
        raise ConfigError(
            f"exit={exit!r} must be an exit rule such as 'kl:1e-3' or the name of a tier"
        )
    policy = build_policy(rule, fitted, model)
    if policy.reads is Reads.TRUTH:
        raise ExitError(f"exit rule {policy.name!r} needs later recurrences; it cannot run live")
    check_depths(model, [rule.max_depth])
    return Plan(rule, policy)


def asked_by(
    num_loops: int | None, exit: str | ExitRule | None, configs: Sequence[Any]
) -> tuple[int | None, str | ExitRule | None]:
    """``num_loops`` and ``exit`` of a generation: its arguments, else what a config of it says.

    Args:
        configs: transformers' ``GenerationConfig`` objects, the nearest first; None is none. That
            of an assistant is a copy of the other model's and says nothing of its depth.
    """
    if num_loops is not None or exit is not None:
        return num_loops, exit
    for config in configs:
        if config is None:
            continue
        if config.is_assistant:
            break
        said = (getattr(config, "num_loops", None), getattr(config, "exit", None))
        if said != (None, None):
            return said
    return None, None


def _uniform(depth: int) -> ExitRule:
    if not isinstance(depth, int) or isinstance(depth, bool):
        raise ConfigError(f"num_loops={depth!r} must be a whole number of recurrences")
    if depth < 1:
        raise DepthError(f"num_loops={depth} must be at least 1")
    return ExitRule(policy="fixed", max_depth=depth)


def rule_only(text: str, max_depth: int) -> tuple[ExitRule, Mapping[str, Any]]:
    """A `Named` for models that come from no checkpoint: there are no tiers."""
    return parse_rule(text, max_depth), {}


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """Where the entries of each layer and recurrence lie, in a cache that has a layer for each.

    Prelude layers first, then the core's of recurrence 1, 2 ..., then the coda's.
    """

    geometry: Geometry
    depth: int
    coda_entries: int = 1

    @property
    def count(self) -> int:
        extra = (self.coda_entries - 1) * self.geometry.n_coda_layers
        return self.geometry.effective_layers(self.depth) + extra

    def of(self, layer: int, r: int) -> int:
        """Place of ``layer`` at recurrence ``r``, from 1; any ``r`` where the coda runs once."""
        g = self.geometry
        if layer < g.n_prelude_layers:
            return layer
        if g.is_core(layer):
            return layer + (r - 1) * g.n_core_layers
        past_core = layer + (self.depth - 1) * g.n_core_layers
        return past_core + (0 if self.coda_entries == 1 else (r - 1) * g.n_coda_layers)
