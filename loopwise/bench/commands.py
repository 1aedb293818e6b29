"""``loopwise bench``: the engine beside its alternatives, in one run; the table of benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loopwise.bench.baselines import generate_in_step, generate_padded
from loopwise.bench.common import keep, ratios, record, spread, table
from loopwise.bench.drive import Pass, drive, figures
from loopwise.bench.exits import bench_exits, keep_exits
from loopwise.bench.kv import bench_kv
from loopwise.bench.setup import Bench, BenchOptions
from loopwise.bench.workload import Job, Lengths
from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import ConfigError
from loopwise.exits.rule import build_policy
from loopwise.models.costs import flops_per_token
from loopwise.report.draw import save_png
from loopwise.report.occupancy import rows_by_recurrence

_SHOWN_TICKS = 256


def bench_decode(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Tokens per second with live exits against uniform depth, lockstep and static batches."""
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console)
    quality = bench.quality()
    below, above = _whole_depths(quality.uniform_depth, bench.depth)
    engines = {
        "live exits": bench.first,
        f"uniform {bench.depth}": bench.engine(exit=f"fixed:{bench.depth}"),
        f"uniform {below}": bench.engine(exit=f"fixed:{below}"),
        f"uniform {above}": bench.engine(exit=f"fixed:{above}"),
        "lockstep exits": bench.engine(batching="lockstep"),
        f"static {bench.depth}": bench.engine(exit=f"fixed:{bench.depth}", batching="static"),
    }
    found = bench.timed({name: partial(drive, e, bench.jobs) for name, e in engines.items()})
    found["padded loop"] = _padded(bench)
    rows = [figures(name, each) for name, each in found.items()]
    rows.append(_reference(bench))
    live, full = found["live exits"], found[f"uniform {bench.depth}"]
    seconds = {name: [p.seconds for p in each] for name, each in found.items()}
    part = quality.uniform_depth - below
    equal = [
        (1 - part) * a + part * b
        for a, b in zip(seconds[f"uniform {below}"], seconds[f"uniform {above}"], strict=True)
    ]
    context = sum(bench.lengths.prompt) // 2 + sum(bench.lengths.output) // 4
    costs = flops_per_token(bench.checkpoint.model, context)
    mean_depth = float(np.mean([p.mean_depth for p in live]))
    cap = costs.cap(bench.depth, mean_depth)
    speedup = ratios(seconds[f"uniform {bench.depth}"], seconds["live exits"])
    delta = quality.delta
    pairs = zip(live, full, strict=True)
    table("decode", _shown(rows), bench.console)
    result = {
        **bench.settings(),
        "speedup_vs_uniform": speedup["median"],
        "speedup_vs_uniform_range": [speedup["low"], speedup["high"]],
        "cap": cap,
        "percent_of_cap": 100 * speedup["median"] / cap,
        "speedup_vs_equal_quality": ratios(equal, seconds["live exits"])["median"],
        "speedup_vs_lockstep": ratios(seconds["lockstep exits"], seconds["live exits"])["median"],
        "uniform_vs_padded_loop": ratios(seconds["padded loop"], seconds[f"uniform {bench.depth}"])[
            "median"
        ],
        "nll_delta_nats": delta["mean"],
        "nll_delta_ci": [delta["low"], delta["high"]],
        "nll_by_uniform_depth": quality.curve.tolist(),
        "mean_depth": mean_depth,
        "uniform_depth": quality.uniform_depth,
        "allocation_gain": quality.uniform_depth / float(np.mean(quality.exits.depth)),
        "ttft_ratio": float(
            np.median([np.median(a.ttft_s) / np.median(b.ttft_s) for a, b in pairs])
        ),
        "rows": rows,
        "occupancy": _occupancy(bench, live[-1]),
    }
    _summary(bench, result)
    return record("decode", result)


def bench_prefill(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Time to the first token of long prompts, whose tokens leave the core as they settle."""
    bench = Bench(path, options, Lengths((512, 512), (16, 16)), console)
    quality = bench.quality()
    jobs = [replace(job, new_tokens=1) for job in bench.jobs[: max(4, options.requests // 8)]]
    full = bench.engine(exit=f"fixed:{bench.depth}", slots=1)
    live = bench.engine(slots=1)
    found = bench.timed(
        {
            "live exits": lambda: drive(live, jobs, _one_by_one(jobs)),
            f"uniform {bench.depth}": lambda: drive(full, jobs, _one_by_one(jobs)),
        }
    )
    rows = [figures(name, each) for name, each in found.items()]
    table("prefill", _shown(rows), bench.console)
    mean = [
        [float(p.seconds / len(jobs)) for p in each] for each in found.values()
    ]  # one request at a time: seconds per request is the time to its first token
    ratio = ratios(mean[0], mean[1])
    delta = quality.delta
    result = {
        **bench.settings(),
        "batch": 1,
        "ttft_ratio": ratio["median"],
        "ttft_ratio_range": [ratio["low"], ratio["high"]],
        "ttft_s": spread(mean[0]),
        "uniform_ttft_s": spread(mean[1]),
        "mean_depth": float(np.mean([p.mean_depth for p in found["live exits"]])),
        "uniform_depth": quality.uniform_depth,
        "nll_delta_nats": delta["mean"],
        "nll_delta_ci": [delta["low"], delta["high"]],
        "rows": rows,
    }
    bench.say(
        f"time to first token {result['ttft_ratio']:.3f} of uniform {bench.depth}; "
        f"NLL {delta['mean']:+.4f} ({delta['low']:+.4f} to {delta['high']:+.4f}) nats"
    )
    return record("prefill", result)


def bench_serve(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Requests that arrive at random: latency with live exits against uniform depth."""
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console)
    full = bench.engine(exit=f"fixed:{bench.depth}")
    warm = drive(full, bench.jobs)
    per_s = options.rate * len(bench.jobs) / warm.seconds
    rng = np.random.default_rng(options.seed)
    arrivals = np.cumsum(rng.exponential(1 / per_s, len(bench.jobs))).tolist()
    found = bench.timed(
        {
            "live exits": lambda: drive(bench.first, bench.jobs, arrivals),
            f"uniform {bench.depth}": lambda: drive(full, bench.jobs, arrivals),
        }
    )
    quality = bench.quality()
    rows = [figures(name, each) for name, each in found.items()]
    table("serve", _shown(rows), bench.console)
    live, uniform = found["live exits"], found[f"uniform {bench.depth}"]

    def ratio(share: float) -> float:
        pairs = zip(live, uniform, strict=True)
        return float(
            np.median(
                [np.quantile(a.ttft_s, share) / np.quantile(b.ttft_s, share) for a, b in pairs]
            )
        )

    result = {
        **bench.settings(),
        "arrivals_per_s": per_s,
        "ttft_ratio": ratio(0.5),
        "ttft_p99_ratio": ratio(0.99),
        "gap_p99_ratio": rows[0]["gap_p99_s"] / rows[1]["gap_p99_s"],
        "mean_depth": rows[0]["mean_depth"],
        "uniform_depth": quality.uniform_depth,
        "nll_delta_nats": quality.delta["mean"],
        "nll_delta_ci": [quality.delta["low"], quality.delta["high"]],
        "rows": rows,
    }
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
    "overhead": {"rate", "exit", "judged"} | _OF_EXITS,
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


def _occupancy(bench: Bench, timed: Pass) -> list[list[int]]:
    """Live rows by recurrence in the first ticks of the last pass of live exits."""
    ticks = list(bench.first.occupancy())
    return ticks[max(0, len(ticks) - timed.ticks) :][:_SHOWN_TICKS]


def _whole_depths(depth: float, most: int) -> tuple[int, int]:
    below = min(int(depth), max(1, most - 1))
    return below, min(below + 1, most)


def _one_by_one(jobs: Sequence[Job]) -> list[float]:
    return [0.0] * len(jobs)  # one slot: each starts when the one before has its token


def _padded(bench: Bench) -> list[Pass]:
    """The `transformers`-style loop, batch after batch."""
    pad, size = bench.checkpoint.tokenizer.bos_id, bench.options.batch
    model = bench.checkpoint.model
    out = []
    for _ in range(bench.options.repeats):
        start = time.perf_counter()
        for at in range(0, len(bench.jobs), size):
            generate_padded(model, bench.jobs[at : at + size], bench.depth, pad)
        seconds = time.perf_counter() - start
        made = sum(job.new_tokens for job in bench.jobs)
        fed = made + sum(len(job.prompt) - 1 for job in bench.jobs)
        out.append(
            Pass(
                seconds=seconds,
                new_tokens=made,
                fed=fed,
                row_steps=fed * bench.depth,
                depths=np.full(made, bench.depth),
                ttft_s=np.array([np.nan]),
                gaps_s=np.array([]),
            )
        )
    bench.say(f"padded loop: {out[-1].seconds:.2f} s")
    return out


def _reference(bench: Bench) -> dict[str, Any]:
    """One request, one row at a time, for a few tokens."""
    rule = bench.rule
    policy = build_policy(rule, bench.checkpoint.fitted_policies(), bench.checkpoint.model)
    job = bench.jobs[0]
    decoder = ReferenceDecoder(bench.checkpoint.model, rule, policy)
    start = time.perf_counter()
    steps = list(decoder.generate(job.prompt, job.new_tokens))
    seconds = time.perf_counter() - start
    depths = np.array([s.exit_depth for s in steps])
    rate = len(steps) / seconds  # prompt tokens cost it as much as new ones
    return {
        **dict.fromkeys(("ttft_s", "gap_p50_s", "gap_p99_s", "outside_model"), float("nan")),
        "name": "reference",
        "tokens_per_s": rate,
        "low": rate,
        "high": rate,
        "mean_depth": float(depths.mean()),
        "p95_depth": float(np.quantile(depths, 0.95)),
        "row_steps": int(depths.sum()),
    }


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Narrow enough for a terminal of 80 columns."""
    return [
        {
            "": row["name"],
            "tokens/s": f"{row['tokens_per_s']:.4g} ({row['low']:.4g}-{row['high']:.4g})",
            "TTFT ms": f"{1e3 * row['ttft_s']:.4g}",
            "gap p50, p99 ms": f"{1e3 * row['gap_p50_s']:.3g}, {1e3 * row['gap_p99_s']:.3g}",
            "depth": f"{row['mean_depth']:.2f}",
            "p95": f"{row['p95_depth']:.0f}",
            "row-steps": f"{row['row_steps']:,}",
        }
        for row in rows
    ]


def _summary(bench: Bench, result: dict[str, Any]) -> None:
    low, high = result["nll_delta_ci"]
    bench.say(
        f"{result['rule']}: {result['speedup_vs_uniform']:.2f}x over uniform {bench.depth}, "
        f"{result['percent_of_cap']:.0f}% of the cap {result['cap']:.2f}; "
        f"{result['speedup_vs_equal_quality']:.2f}x over the uniform depth of equal quality "
        f"({result['uniform_depth']:.2f}); mean depth {result['mean_depth']:.2f}; NLL "
        f"{result['nll_delta_nats']:+.4f} ({low:+.4f} to {high:+.4f}) nats against full depth"
    )
