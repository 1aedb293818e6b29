"""What a rule's checks cost beside the recurrences it ran, and the last reading, which all pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.exits.base import ExitPolicy, Reads
from loopwise.measure.live import LiveResult
from loopwise.models.costs import Costs


@dataclass(frozen=True, slots=True)
class Checks:
    """Work of the checks of one token, on average.

    Attributes:
        codas, heads: passes before the exit; that at the exit is the output.
        products: over d_model besides.
    """

    codas: float = 0.0
    heads: float = 0.0
    products: float = 0.0

    def flops(self, costs: Costs, depth: float) -> float:
        """FLOPs of one token at a mean ``depth`` with these checks."""
        return costs.forward(depth, self.codas, self.heads, self.products)

    def one_in_recurrences(self, policy: type[ExitPolicy], costs: Costs) -> float:
        """Price of one check of ``policy`` in recurrences, head passes in the share asked here."""
        coda = head = 0.0
        if policy.reads.runs_coda:
            asked = self.heads / self.codas if self.codas else 1.0
            coda, head = costs.coda, costs.head * asked
        return (coda + head + policy.products * costs.row) / costs.core


def replayed_checks(
    policy: type[ExitPolicy], depth: NDArray[np.int64], asked: NDArray[Any] | None = None
) -> Checks:
    """The checks of tokens that stop at these depths.

    Args:
        depth: ``(tokens,)``.
        asked: ``read.NAME`` of the trace, ``(tokens, horizon)``, for a policy that asks for the
            logits of some rows.
    """
    mean = float(depth.mean())
    codas = mean - 1 if policy.reads.runs_coda else 0.0
    heads = codas
    if policy.reads is Reads.HIDDEN:
        assert asked is not None, "traces record which rows such a policy asked for"
        before = np.arange(1, asked.shape[1] + 1) < depth[:, None]
        heads = float((asked.astype(bool) & before).sum(axis=1).mean())
    return Checks(codas, heads, policy.products * mean)


def live_checks(policy: ExitPolicy, found: LiveResult) -> Checks:
    """The checks of the tokens of a live run."""
    mean = float(found.exit_depth.double().mean())
    codas = mean - 1 if policy.reads.runs_coda else 0.0
    heads = float(found.head_reads.double().mean()) - 1
    return Checks(codas, heads, policy.products * mean)
