"""``loopwise bench``: the engine beside its alternatives, in one run; the table of benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loopwise.bench.baselines import drive_padded, drive_reference, generate_in_step
from loopwise.bench.common import keep, ratios, record
from loopwise.bench.contest import LIVE, Contest, Way
from loopwise.bench.drive import Forced, drive
from loopwise.bench.exits import bench_exits, keep_exits
from loopwise.bench.kv import bench_kv
from loopwise.bench.setup import Bench, BenchOptions
from loopwise.bench.workload import Job, Lengths
from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import ConfigError
from loopwise.exits.rule import build_policy
from loopwise.models.costs import kv_bytes_per_token
from loopwise.report.draw import save_png
from loopwise.report.occupancy import rows_by_recurrence

_SHOWN_TICKS = 256


def bench_decode(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Tokens per second with live exits against uniform depth, lockstep and static batches.

    In turns with them runs a padded loop; one request in the reference decoder runs once, after
    them, since it is slow.
    """
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console)
    contest = Contest(bench, partial(drive, jobs=bench.jobs))
    exits, full = contest.quality.exits, contest.quality.uniform[-1]
    contest.add_engine("lockstep exits", exits, batching="lockstep")
    uniform = f"fixed:{bench.depth}"
    contest.add_engine(f"static {bench.depth}", full, exit=uniform, batching="static")
    contest.add("padded loop", _padded(bench, full))
    contest.time()
    contest.time_once("reference", _reference(bench, exits))
    result = {
        **contest.result(bench.jobs),
        "speedup_vs_lockstep": contest.ratio("lockstep exits", LIVE)["median"],
        "uniform_vs_padded_loop": contest.ratio("padded loop", contest.full)["median"],
        "occupancy": _occupancy(contest),
    }
    contest.show("decode", result)
    return record("decode", result)


def bench_prefill(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Time to the first token of long prompts, whose tokens leave the core as they settle.

    One request at a time, one new token each: ``speedup_vs_uniform`` is that of whole prompts, and
    the head, which reads one token of each, hardly counts in the cap.
    """
    bench = Bench(path, options, Lengths((512, 512), (16, 16)), console)
    jobs = [replace(job, new_tokens=1) for job in bench.jobs[: max(4, options.requests // 8)]]
    contest = Contest(bench, partial(drive, jobs=jobs, alone=True), slots=1)
    contest.time()
    result = {**contest.result(jobs), "batch": 1}
    contest.show("prefill", result)
    return record("prefill", result)


def bench_serve(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Requests that arrive at random: latency with live exits against uniform depth.

    As long as both keep up they complete the same tokens per second, those that come in. So
    speed-ups here are of the time an engine is at work for the same tokens; idle time is left out.
    """
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console)
    full = bench.engine(exit=f"fixed:{bench.depth}")
    drive(full, bench.jobs)  # warms up
    per_s = options.rate * len(bench.jobs) / drive(full, bench.jobs).seconds
    rng = np.random.default_rng(options.seed)
    arrivals = np.cumsum(rng.exponential(1 / per_s, len(bench.jobs))).tolist()
    run = partial(drive, jobs=bench.jobs, arrivals_s=arrivals)
    contest = Contest(bench, run, seconds=lambda p: p.busy_s)
    contest.time()
    live, uniform = contest.found[LIVE], contest.found[contest.full]
    late = [[float(np.quantile(p.ttft_s, 0.99)) for p in each] for each in (live, uniform)]
    gaps = [[float(np.quantile(p.gaps_s, 0.99)) for p in each] for each in (live, uniform)]
    result = {
        **contest.result(bench.jobs),
        "arrivals_per_s": per_s,
        "ttft_p99_ratio": ratios(*late)["median"],
        "gap_p99_ratio": ratios(*gaps)["median"],
    }
    contest.show("serve", result, "in time at work over")
    return record("serve", result)


def bench_overhead(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """The engine at full depth against the same kernels in a bare loop, on equal jobs."""
    bench = Bench(path, options, Lengths((1, 1), (64, 64)), console)
    new = bench.lengths.output[0]
    bos = bench.checkpoint.tokenizer.bos_id
    jobs = [Job((bos,), (), new) for _ in range(bench.options.batch)]
    engine = bench.engine(exit=f"fixed:{bench.depth}")
    bare = bench.engine(exit=f"fixed:{bench.depth}")
    seconds: dict[str, list[float]] = {"engine": [], "bare loop": []}
    for repeat in range(bench.options.repeats + 1):
        start = time.perf_counter()
        drive(engine, jobs)
        middle = time.perf_counter()
        generate_in_step(bare, jobs, bench.depth)
        if repeat:
            seconds["engine"].append(middle - start)
            seconds["bare loop"].append(time.perf_counter() - middle)
    ratio = ratios(seconds["engine"], seconds["bare loop"])
    bench.say(f"engine / bare loop: {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})")
    return record("overhead", {**bench.settings(), "engine_vs_bare_loop": ratio})


COMMANDS: dict[str, Callable[[Path, BenchOptions, Console], dict[str, Any]]] = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "serve": bench_serve,
    "overhead": bench_overhead,
    "kv": bench_kv,
    "exits": bench_exits,
}

_OF_EXITS = {"seeds", "budget", "tokens", "no-wall"}
_UNUSED = {
    "decode": {"rate"} | _OF_EXITS,
    "prefill": {"rate"} | _OF_EXITS,
    "serve": _OF_EXITS,
    "overhead": {"rate", "exit", "requests", "judged"} | _OF_EXITS,
    "kv": {"rate", "kv"} | _OF_EXITS,
    # Its quality is judged on whole blocks, under the KV policy that forward passes are of.
    "exits": {"rate", "exit", "judged", "kv"},
}


def _keep_decode(found: Mapping[str, Any], folder: Path) -> None:
    """The record, and what the ticks were filled with as ``occupancy.png``."""
    keep(found, folder)
    save_png(rows_by_recurrence(found["occupancy"]), folder / "occupancy.png")


_KEEP: dict[str, Callable[[Mapping[str, Any], Path], object]] = {
    "decode": _keep_decode,
    "exits": keep_exits,
}
_ONLY_KEPT = {"frontier", "occupancy"}  # hundreds of points


def keep_result(found: Mapping[str, Any], folder: Path) -> None:
    """Write what a benchmark found into ``folder``."""
    _KEEP.get(found["benchmark"], keep)(found, folder)


def last_line(found: Mapping[str, Any]) -> dict[str, Any]:
    """What of a result the last line of the output tells."""
    return {name: value for name, value in found.items() if name not in _ONLY_KEPT}


def check_used(command: str, given: Iterable[str]) -> None:
    """Refuse options that this benchmark would not look at.

    Raises:
        ConfigError: naming the first of them.
    """
    for name in given:
        if name in _UNUSED[command]:
            raise ConfigError(f"bench {command} has no use for --{name}; leave it out")


def _occupancy(contest: Contest) -> list[list[int]]:
    """Live rows by recurrence in the first ticks of the last pass of live exits."""
    ticks = list(contest.live.occupancy())
    return ticks[max(0, len(ticks) - contest.found[LIVE][-1].ticks) :][:_SHOWN_TICKS]


def _padded(bench: Bench, full: Forced) -> Way:
    """The `transformers`-style loop at full depth; it knows no KV policy but the exact one."""
    model, pad = bench.checkpoint.model, bench.checkpoint.tokenizer.bos_id
    return Way(
        partial(drive_padded, model, bench.jobs, bench.depth, pad, bench.options.batch),
        full if bench.first.kv_policy.exact else None,
        kv_bytes_per_token(model.geometry, bench.depth, model.dtype.itemsize),
    )


def _reference(bench: Bench, exits: Forced) -> Way:
    """One request, one row at a time."""
    model, rule, engine = bench.checkpoint.model, bench.rule, bench.first
    policy = build_policy(rule, bench.checkpoint.fitted_policies(), model)
    kept, chunk = engine.kv_policy, bench.config.chunk
    decoder = ReferenceDecoder(model, rule, policy, kv_policy=kept, chunk=chunk)
    run = partial(drive_reference, decoder, bench.jobs[0])
    return Way(run, exits, engine.cache.bytes_per_token)
