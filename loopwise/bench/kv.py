"""``loopwise bench kv``: what KV policies save in memory, and what the approximate ones cost.

Quality is judged on continuations, since a multiple-choice score of a prompt read in one pass
hardly sees what a policy forgets: on the text's own next tokens, and on what ``per-loop`` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loopwise.bench.common import ratios, record, table
from loopwise.bench.drive import Forced, drive, force
from loopwise.bench.quality import agreement
from loopwise.bench.setup import Bench, BenchOptions
from loopwise.bench.workload import Job, Lengths
from loopwise.engine import Engine, SamplingParams
from loopwise.measure.statistics import mean_with_interval

_LEGEND = """\
KiB: entries of one token. speed: ratio to per-loop. NLL: nats a token of the
text above per-loop, ± half its 95% interval. own: the same on what per-loop
wrote. argmax: share of that chosen as per-loop chose. same: tokens until the
text of the policy's own differs."""
POLICIES = ("per-loop", "ring-4", "ring-2", "first-then-last", "last")


def bench_kv(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Memory, speed and quality of every KV policy beside exact ``per-loop``."""
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console, usual=None)
    engines = {name: bench.engine(kv_policy=name) for name in POLICIES}
    found = bench.timed({name: partial(drive, e, bench.jobs) for name, e in engines.items()})
    seconds = {name: [p.seconds for p in passes] for name, passes in found.items()}
    rule = str(bench.rule)
    texts = {name: force(engine, bench.judged, rule) for name, engine in engines.items()}
    exact = engines["per-loop"]
    written = _written(exact, bench.judged)
    again = {name: force(engine, written, rule, argmax=True) for name, engine in engines.items()}
    rows = []
    for name, engine in engines.items():
        bench.say(f"judged {name}")
        own = _written(engine, bench.judged)
        rows.append(
            {
                "name": name,
                "kv_bytes_per_token": engine.cache.bytes_per_token,
                "memory_ratio": engine.cache.bytes_per_token / exact.cache.bytes_per_token,
                "speedup": ratios(seconds["per-loop"], seconds[name])["median"],
                "nll_delta_nats": _delta(texts[name], texts["per-loop"]),
                "nll_delta_on_generated_nats": _delta(again[name], again["per-loop"]),
                "argmax_agreement": agreement(again[name], again["per-loop"]),
                "same_text": float(np.mean([a == b for a, b in zip(own, written, strict=True)])),
                "tokens_until_other": float(np.mean(_agreeing(own, written))),
                "mean_depth": float(texts[name].depth.mean()),
            }
        )
    table("kv", [_shown(row) for row in rows], bench.console)
    bench.say(_LEGEND)
    return record("kv", {**bench.settings(), "rows": rows})


def _written(engine: Engine, jobs: Sequence[Job]) -> list[Job]:
    """The jobs with the engine's own greedy continuations."""
    params = [SamplingParams(max_tokens=j.new_tokens, ignore_eos=True) for j in jobs]
    made = engine.generate([j.prompt for j in jobs], params)
    return [
        replace(j, continuation=g.completions[0].token_ids) for j, g in zip(jobs, made, strict=True)
    ]


def _delta(ours: Forced, exact: Forced) -> dict[str, Any]:
    return mean_with_interval(ours.nll - exact.nll, exact.job)


def _agreeing(ours: Sequence[Job], exact: Sequence[Job]) -> list[int]:
    """Tokens before the first that differs, of each continuation."""
    out = []
    for a, b in zip(ours, exact, strict=True):
        same = np.array(a.continuation) == np.array(b.continuation)
        out.append(int(same.argmin()) if not same.all() else len(same))
    return out


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Narrow enough for a terminal of 80 columns; the record has every figure in full."""
    text, made = row["nll_delta_nats"], row["nll_delta_on_generated_nats"]
    kib = row["kv_bytes_per_token"] / 1024
    return {
        "": row["name"],
        "KiB": f"{kib:.1f}" if kib < 100 else f"{kib:,.0f}",
        "speed": f"{row['speedup']:.2f}x",
        "NLL": f"{text['mean']:+.4f} ±{(text['high'] - text['low']) / 2:.4f}",
        "own": f"{made['mean']:+.4f}",
        "argmax": f"{row['argmax_agreement']:.1%}",
        "same": f"{row['tokens_until_other']:.0f}",
    }
