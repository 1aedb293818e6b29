"""Exit rules in wall clock: one check beside one recurrence, and each rule in an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from loopwise.bench.common import interleaved, ratios
from loopwise.bench.drive import drive, figures
from loopwise.bench.setup import Bench
from loopwise.data import TokenBatch
from loopwise.exits.base import ExitPolicy, Observation, Output
from loopwise.exits.rule import ExitRule
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM

FULL = "full depth"


@torch.no_grad()
def timed_checks(
    model: LoopedLM, policies: Mapping[str, ExitPolicy], rows: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds of one check over seconds of one recurrence, on as many rows as an engine holds.

    Each check runs right after a recurrence of the same rows, so that a drifting machine cancels.
    A check that runs the coda is timed with coda and, for the rows it asks for, head.
    """
    zeros = torch.zeros(rows, 1, dtype=torch.int64)
    ids = torch.arange(rows).remainder(model.geometry.vocab_size).unsqueeze(1)
    batch = TokenBatch(ids, ids, zeros.int(), zeros.int(), zeros.to(torch.uint8))
    (_, before, view), (_, latent, _) = trajectory(model, batch, 2)
    injection = model.prelude(batch.token_ids, view)

    def recurrence() -> None:
        model.core_step(before, injection, 2, view)

    def check(policy: ExitPolicy, memory: torch.Tensor) -> None:
        output = None
        if policy.reads.runs_coda:
            output = Output(model.hidden(latent, 2, view).flatten(0, -2), model.head)
        seen = Observation(
            r=2, latent=latent.flatten(0, -2), previous=before.flatten(0, -2), output=output
        )
        policy.score(seen, memory)

    found = {}
    for name, policy in policies.items():
        width = policy.memory_width(model.geometry.vocab_size, latent.shape[-1])
        memory = torch.zeros(rows, width)
        runs: dict[str, Callable[[], object]] = {
            "recurrence": recurrence,
            "check": partial(check, policy, memory),
        }
        seconds = interleaved(runs, repeats)
        found[name] = ratios(seconds["check"], seconds["recurrence"])
    return found


def timed_rules(
    bench: Bench, rules: Mapping[str, ExitRule], beside: str
) -> dict[str, dict[str, Any]]:
    """Tokens per second of each rule in an engine of its own, in turns on the same requests.

    Args:
        beside: the rule whose seconds ``speedup_vs_a1`` divides; ``speedup_vs_full`` takes those
            of uniform full depth, which runs in the same turns under the name FULL.
    """
    engines = {name: bench.engine(exit=str(rule)) for name, rule in rules.items()}
    engines[FULL] = bench.engine(exit=f"fixed:{bench.depth}")
    found = bench.timed({name: partial(drive, e, bench.jobs) for name, e in engines.items()})
    seconds = {name: [p.seconds for p in passes] for name, passes in found.items()}
    return {
        name: {
            **figures(name, passes),
            "speedup_vs_a1": ratios(seconds[beside], seconds[name]),
            "speedup_vs_full": ratios(seconds[FULL], seconds[name]),
        }
        for name, passes in found.items()
    }
