"""The exit rules of one engine: by name or tier, checked, each policy built once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loopwise.engine.settings import EngineConfig
from loopwise.errors import DepthError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.tiers import rule_among, why_unpromised
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import why_extrapolated

log = logging.getLogger(__name__)


class Rules:
    """What requests may ask to exit by.

    Args:
        add: takes a policy to the runner and gives its index there.
        fitted: state of fitted policies by name (``exits.json``).
        tiers: calibrated rules by name (``exits.json``).
        training: how the model was trained (``training.json``).

    Attributes:
        index: of each policy in the runner, by name.
        warnings: what is not known to hold for rules that were asked for, each once.
    """

    def __init__(
        self,
        model: LoopedLM,
        config: EngineConfig,
        add: Callable[[ExitPolicy], int],
        *,
        fitted: Mapping[str, Any],
        tiers: Mapping[str, Any],
        training: Mapping[str, Any],
    ) -> None:
        self._model, self._config, self._add = model, config, add
        self._fitted, self._tiers, self._training = fitted, tiers, training
        self.index: dict[str, int] = {}
        self.warnings: list[str] = []

    def find(self, exit: str | ExitRule) -> ExitRule:
        """The rule that is meant, ready to run.

        Args:
            exit: a rule, a text that `parse_rule` reads, or the name of a tier.
        Raises:
            ExitError: unknown, not fitted, or it cannot decide token by token.
            DepthError: past the engine's ``max_depth``.
        """
        most = self._config.max_depth
        rule = rule_among(self._tiers, exit, most) if isinstance(exit, str) else exit
        if rule.max_depth > most:
            raise DepthError(
                f"exit rule {rule} goes to {rule.max_depth} recurrences, this engine holds "
                f"{most}; lower it or raise engine.max_depth"
            )
        if rule.policy not in self.index:
            self.index[rule.policy] = self._add(self._built(rule))
        if isinstance(exit, str):
            self._warn(why_unpromised(self._tiers, exit.strip(), self._config.kv_policy))
        self._warn(why_extrapolated(self._training, rule.max_depth))
        return rule

    def _built(self, rule: ExitRule) -> ExitPolicy:
        policy = build_policy(rule, self._fitted, self._model)
        if policy.reads is Reads.TRUTH:
            raise ExitError(f"exit rule {policy.name!r} needs later recurrences; it cannot decode")
        if policy.reads.runs_coda and not self._config.logits_exits:
            raise ExitError(
                f"exit rule {policy.name!r} reads logits or what they are made of; this engine "
                "was made with engine.logits_exits=false"
            )
        _try(policy, self._model)
        return policy

    def _warn(self, text: str | None) -> None:
        if text is not None and text not in self.warnings:
            self.warnings.append(text)
            log.warning("%s", text)


def _try(policy: ExitPolicy, model: LoopedLM) -> None:
    """Score one row of zeros, so that what was fitted to another model is refused here."""
    g = model.geometry
    latent = torch.zeros(1, g.d_model)
    output = Output.known(torch.zeros(1, g.vocab_size), latent)
    seen = Observation(r=torch.ones(1).long(), latent=latent, previous=latent, output=output)
    policy.score(seen, torch.zeros(1, policy.memory_width(g.vocab_size, g.d_model)))
