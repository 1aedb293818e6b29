"""``loopwise bench exits``: every exit rule of the table on one checkpoint, on the same tokens.

Frontiers are replayed on traces of several seeds, each of other documents; intervals are paired
and resample blocks of all seeds. The rule that serves is then run live, since that is what decoding
does, and timed in an engine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from loopwise.bench.common import record
from loopwise.bench.compare import A0, A1, DEFAULT, IMPROVES_NATS, ORACLES, Comparison, Row
from loopwise.bench.exit_speed import FULL, timed_checks, timed_rules
from loopwise.bench.samples import (
    Samples,
    deal,
    fresh_documents,
    left_out,
    trace_samples,
    unfitted,
    why_not_new,
    with_fits,
)
from loopwise.bench.setup import Bench, BenchOptions
from loopwise.bench.workload import Lengths
from loopwise.errors import ConfigError, ExitError
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.report.draw import save_png
from loopwise.report.exits import exits_table, summary_lines
from loopwise.report.frontier_plots import by_compute
from loopwise.report.palette import in_order
from loopwise.study.measuring import block_length
from loopwise.train.metrics import finite
from loopwise.writing import make_folder, write_whole, writing

_FIT_TOKENS = 10_000
_PRICE_REPEATS = 5  # of a check beside a recurrence, for each repeat of the engines
_TABLE_WIDTH = 100


def bench_exits(path: Path, options: BenchOptions, console: Console) -> dict[str, Any]:
    """Quality at equal depth and compute, depth at equal quality, price and speed of all rules."""
    bench = Bench(path, options, Lengths((16, 48), (32, 96)), console, usual=None)
    if bench.depth < 2:
        raise ConfigError(
            f"at a full depth of {bench.depth} recurrence there is nothing to compare; give a "
            "checkpoint that runs more, or a larger --depth"
        )
    lacking = unfitted(bench.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        samples = _samples(bench, Path(folder))
        found = Comparison.of(bench.checkpoint, samples, bench.depth, options.budget)
    rows = [_row(found, name, bench) for name in in_order(list(found.curves))]
    full = _time(bench, rows)
    result = {
        **bench.settings(),
        **_headline({row["name"]: row for row in rows}),
        **_compared_on(found),
        "tokens_by_seed": [trace.n_tokens for trace in samples.traces],
        "fitted_here": lacking,
        "left_out": left_out(bench.checkpoint),
        "full_depth_speed": full,
        "rows": rows,
        "frontier": found.frontier(rows),
    }
    # A pipe is taken for 80 columns, where numbers would lose their ends.
    width = max(console.width, _TABLE_WIDTH)
    Console(file=console.file, quiet=console.quiet, width=width).print(exits_table(result))
    for line in summary_lines(result):
        bench.say(line)
    return record("exits", result)


def keep_exits(found: Mapping[str, Any], folder: Path) -> None:
    """Write ``results.json``, frontiers included, and the picture ``exits.png``.

    Raises:
        WriteError: the disk refuses.
    """
    make_folder(folder)
    text = json.dumps(finite(dict(found)), indent=1, allow_nan=False)
    write_whole(folder / "results.json", text + "\n")
    with writing(folder / "exits.png"):
        save_png(by_compute(found["frontier"]), folder / "exits.png")


def _samples(bench: Bench, folder: Path) -> Samples:
    """Deal the text, fit what the checkpoint lacks on a part of its own, trace the rest."""
    options, checkpoint = bench.options, bench.checkpoint
    fit = bool(unfitted(checkpoint))
    tokens = max(options.tokens, 0 if options.smoke or not fit else _FIT_TOKENS)
    tokens = max(tokens, block_length(checkpoint) + 1)
    documents = fresh_documents(checkpoint, options.data)
    bench.warn(why_not_new(checkpoint, documents))
    parts = deal(documents, checkpoint.tokenizer, options.seeds + fit, tokens, options.seed)
    if fit:
        checkpoint = with_fits(checkpoint, parts.pop(), tokens, bench.depth, bench.say)
        bench.checkpoint = checkpoint  # the engines, too, take what was fitted
    why = left_out(checkpoint).get(DEFAULT)
    if why is not None:
        raise ExitError(why)
    return trace_samples(checkpoint, parts, options.tokens, bench.depth, folder, bench.say)


def _row(found: Comparison, name: str, bench: Bench) -> Row:
    bench.say(f"judging {name}")
    served = None if name in ORACLES else found.served(name, bench.say)
    return {**found.row(name), "served": served}


def _time(bench: Bench, rows: list[Row]) -> Row | None:
    """Add to each row the price of its check and the speed of the rule that serves.

    Returns:
        The speed of uniform full depth, None where nothing is timed.
    """
    options, checkpoint = bench.options, bench.checkpoint
    rules = {r["name"]: parse_rule(r["served"]["rule"]) for r in rows if r["served"] is not None}
    prices: Row = {}
    speeds: Row = {}
    if options.wall:
        fitted, model = checkpoint.fitted_policies(), checkpoint.model
        policies = {n: build_policy(r, fitted, model) for n, r in rules.items() if n != A0}
        repeats = _PRICE_REPEATS * options.repeats
        prices = timed_checks(model, policies, options.batch, repeats)
        speeds = timed_rules(bench, rules, beside=A1)
    for row in rows:
        row["check_in_wall_recurrences"] = prices.get(row["name"])
        row["speed"] = speeds.get(row["name"])
    return speeds.get(FULL)


def _compared_on(found: Comparison) -> Row:
    """Where rules are compared: at the cost of A1 at the budget."""
    full = found.yardstick.costs.forward(found.yardstick.max_depth)
    return {
        "budget_nats": found.budget,
        "equal_depth": found.equal_depth,
        "equal_compute": found.equal_flops / full,
        "improves_nats": IMPROVES_NATS,
        "loss_optimal": found.optimal,
        "seeds": int(found.seed.max()) + 1,
        "tokens": len(found.seed),
    }


def _headline(rows: Mapping[str, Row]) -> Row:
    """What the default rule comes to."""
    row, a1 = rows[DEFAULT], rows[A1]
    served, wall = row["served"], row["check_in_wall_recurrences"]
    over_a1, over_full = (
        None if row["speed"] is None else row["speed"][key]
        for key in ("speedup_vs_a1", "speedup_vs_full")
    )
    return {
        "rule": served["rule"],
        "check_price_recurrences": served["check_price_recurrences"],
        "check_in_wall_recurrences": None if wall is None else wall["median"],
        "speedup_vs_a1": None if over_a1 is None else over_a1["median"],
        "speedup_vs_a1_range": None if over_a1 is None else [over_a1["low"], over_a1["high"]],
        "speedup_vs_full": None if over_full is None else over_full["median"],
        "mean_depth": served["mean_depth"],
        "nll_delta_nats": served["delta_nats"],
        "nll_delta_ci": [served["delta_low"], served["delta_high"]],
        "allocation_gain": served["allocation_gain"],
        "recurrences_beyond_a1": row["equal_nll"]["mean_depth"] - a1["equal_nll"]["mean_depth"],
    }
