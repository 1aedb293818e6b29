"""What exits cost in quality, and the uniform depth that would be as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.bench.drive import Forced, force
from loopwise.bench.workload import Job
from loopwise.engine import Engine
from loopwise.measure.frontier import equal_depth
from loopwise.measure.statistics import mean_with_interval


@dataclass(frozen=True, slots=True)
class Quality:
    """Teacher-forced on the same tokens under the same live exits and KV policy.

    Attributes:
        exits: under the rule.
        curve: mean NLL at each uniform depth from 1, nats.
        full: NLL of each token at the last of them.
    """

    exits: Forced
    curve: NDArray[np.float64]
    full: NDArray[np.float64]

    @property
    def delta(self) -> dict[str, Any]:
        """Mean NLL above full depth, with a paired 95% interval over jobs."""
        return mean_with_interval(self.exits.nll - self.full, self.exits.job)

    @property
    def uniform_depth(self) -> float:
        """Uniform depth of equal NLL, linear between depths (see `measure.frontier`)."""
        return float(equal_depth(np.array([self.exits.nll.mean()]), self.curve[None])[0])


def judge(engine: Engine, jobs: Sequence[Job], rule: str, say: Callable[[str], None]) -> Quality:
    """Score the jobs' continuations under ``rule`` and at every uniform depth."""
    curve = []
    for depth in range(1, engine.config.max_depth + 1):
        say(f"quality at uniform depth {depth}")
        full = force(engine, jobs, f"fixed:{depth}")
        curve.append(full.nll.mean())
    say(f"quality under {rule}")
    return Quality(force(engine, jobs, rule), np.array(curve), full.nll)
