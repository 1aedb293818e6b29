"""What exits cost in quality, and the uniform depth that would be as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        uniform: at each uniform depth from 1 to full depth.
    """

    exits: Forced
    uniform: tuple[Forced, ...]

    @property
    def curve(self) -> NDArray[np.float64]:
        """Mean NLL at each uniform depth from 1, nats."""
        return np.array([found.nll.mean() for found in self.uniform])

    def delta(self, of: Forced) -> dict[str, float]:
        """Mean NLL above full depth, with a paired 95% interval over jobs."""
        return mean_with_interval(of.nll - self.uniform[-1].nll, of.job)

    def agreement(self, of: Forced) -> float:
        """Share of the judged tokens in whose place the likeliest token is that of full depth."""
        return agreement(of, self.uniform[-1])

    @property
    def uniform_depth(self) -> float:
        """Uniform depth of equal NLL, linear between depths (see `measure.frontier`)."""
        return float(equal_depth(np.array([self.exits.nll.mean()]), self.curve[None])[0])


def agreement(ours: Forced, theirs: Forced) -> float:
    """Share of tokens in whose place both find the same likeliest token."""
    return float((ours.argmax == theirs.argmax).mean())


def judge(engine: Engine, jobs: Sequence[Job], rule: str, say: Callable[[str], None]) -> Quality:
    """Score the jobs' continuations under ``rule`` and at every uniform depth."""
    uniform = []
    for depth in range(1, engine.config.max_depth + 1):
        say(f"quality at uniform depth {depth}")
        uniform.append(force(engine, jobs, f"fixed:{depth}", argmax=True))
    say(f"quality under {rule}")
    return Quality(force(engine, jobs, rule, argmax=True), tuple(uniform))
