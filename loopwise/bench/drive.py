"""One timed pass of a workload through an engine, and what quality its exits cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwise.bench.workload import Job
from loopwise.engine import Engine, Request
from loopwise.engine.request import SamplingParams
from loopwise.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Pass:
    """Figures of one pass.

    Attributes:
        seconds: wall time.
        new_tokens: made.
        fed: tokens that went through the core, padding included.
        row_steps: core row-steps executed.
        slot_ticks: recurrences of every request in flight, whether its row ran or waited for the
            deepest beside it. A chunk of a prompt counts once.
        depths: exit depth of each new token.
        ttft_s: of each request, from when it came in.
        gaps_s: between tokens of the same request.
        busy_s: part of the wall time that was not spent waiting for requests.
        ticks: of the engine; 0 of what has none.
        outside_model: share of the ticks' time that was not spent in the model's functions; None
            of what has none.
    """

    seconds: float
    new_tokens: int
    fed: int
    row_steps: int
    slot_ticks: int
    depths: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    gaps_s: NDArray[np.float64]
    busy_s: float
    ticks: int = 0
    outside_model: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def mean_depth(self) -> float:
        """Recurrences per token fed, prompts included."""
        return self.row_steps / self.fed


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    arrivals_s: Sequence[float] | None = None,
    alone: bool = False,
) -> Pass:
    """Decode all jobs greedily to their full length.

    Args:
        arrivals_s: when each job comes in, rising; None: all at once.
        alone: each comes in when the one before is finished.
    """
    before = engine.stats()
    due = [0.0] * len(jobs) if arrivals_s is None else list(arrivals_s)
    start = time.perf_counter()
    came: dict[Request, float] = {}
    seen: dict[Request, tuple[int, float]] = {}
    finished: list[Request] = []
    ttft: list[float] = []
    gaps: list[float] = []
    next_job = 0
    while next_job < len(jobs) or seen:
        now = time.perf_counter() - start
        while next_job < len(jobs) and due[next_job] <= now and not (alone and seen):
            job = jobs[next_job]
            params = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True)
            request = engine.submit(job.prompt, params)
            came[request] = now if alone else due[next_job]
            seen[request] = 0, came[request]
            next_job += 1
        if engine.idle:
            time.sleep(max(0.0, due[next_job] - now))
            continue
        engine.step()
        now = time.perf_counter() - start
        for request, (n, last) in list(seen.items()):
            made = len(request.choices[0].outputs)
            if made > n:
                (gaps if n else ttft).append(now - (last if n else came[request]))
                seen[request] = made, now
            if request.finished:
                del seen[request]
                finished.append(request)
    seconds = time.perf_counter() - start
    after = engine.stats()
    done = [r.generation().completions[0] for r in finished]
    busy_s = after["busy_s"] - before["busy_s"]
    return Pass(
        seconds=seconds,
        new_tokens=sum(len(c.token_ids) for c in done),
        fed=after["prelude_rows"] - before["prelude_rows"],
        row_steps=after["core_row_steps"] - before["core_row_steps"],
        slot_ticks=after["slot_ticks"] - before["slot_ticks"],
        depths=np.concatenate([c.exit_depths for c in done]),
        ttft_s=np.array(ttft),
        gaps_s=np.array(gaps),
        busy_s=busy_s,
        ticks=after["ticks"] - before["ticks"],
        outside_model=1 - (after["model_s"] - before["model_s"]) / busy_s,
    )


@dataclass(frozen=True, slots=True)
class Forced:
    """Teacher-forced continuations under live exits.

    Attributes:
        nll: of each token, nats; job after job.
        depth: recurrences of the token it was read from.
        job: which job it is of.
        argmax: the likeliest token in its place; empty where not asked for.
    """

    nll: NDArray[np.float64]
    depth: NDArray[np.int64]
    job: NDArray[np.int64]
    argmax: NDArray[np.int64]


def force(engine: Engine, jobs: Sequence[Job], exit: str, argmax: bool = False) -> Forced:
    """Score the jobs' continuations as decoding would, under the engine's KV policy."""
    params = SamplingParams(logprobs=1) if argmax else None
    requests = [engine.submit(j.prompt, params, exit=exit, forced=j.continuation) for j in jobs]
    while not engine.idle:
        engine.step()
    made = [r.generation().completions[0] for r in requests]
    return Forced(
        nll=-np.concatenate([c.logprobs for c in made]),
        depth=np.concatenate([c.exit_depths for c in made]),
        job=np.repeat(np.arange(len(jobs)), [len(c.token_ids) for c in made]),
        argmax=np.array([top[0][0] for c in made for top in c.top_logprobs], np.int64),
    )


def figures(name: str, passes: Sequence[Pass]) -> dict[str, Any]:
    """One row of a table: medians over repeats; None where there is nothing to measure."""
    if not passes:
        raise ShapeError(f"no pass of {name!r} was timed")
    rate = [p.tokens_per_s for p in passes]
    gaps = np.concatenate([p.gaps_s for p in passes])
    depths = np.concatenate([p.depths for p in passes])
    outside = [p.outside_model for p in passes if p.outside_model is not None]
    return {
        "name": name,
        "repeats": len(passes),
        "tokens_per_s": float(np.median(rate)),
        "low": float(np.min(rate)),
        "high": float(np.max(rate)),
        "ttft_s": float(np.median([np.median(p.ttft_s) for p in passes])),
        "gap_p50_s": float(np.quantile(gaps, 0.5)) if len(gaps) else None,
        "gap_p99_s": float(np.quantile(gaps, 0.99)) if len(gaps) else None,
        "mean_depth": float(np.mean(depths)),
        "p95_depth": float(np.quantile(depths, 0.95)),
        "mean_depth_with_prompts": float(np.mean([p.mean_depth for p in passes])),
        "row_steps": int(np.median([p.row_steps for p in passes])),
        "slot_ticks": int(np.median([p.slot_ticks for p in passes])),
        "outside_model": float(np.median(outside)) if outside else None,
    }
