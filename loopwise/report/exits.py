"""What a comparison of exit rules found, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from loopwise.report import words
from loopwise.report.terminal import plain_table

Found = dict[str, Any]


def exits_table(found: Found) -> Table:
    """One row per rule; what the columns are stands below."""
    budget = found["budget_nats"]
    table = plain_table(
        f"exit rules: {found['tokens']:,} tokens of {found['seeds']} seeds, full depth "
        f"{found['full_depth']}",
        "check: in recurrences. = depth, = compute: NLL beside A1 in 1/1000 nat, ± half its 95%\n"
        f"interval, at mean depth {words.number(found['equal_depth'])} and at "
        f"{words.percent(found['equal_compute'])} of the compute of full depth, where A1\n"
        f"meets {budget:g} nats. depth, FLOPs, gain: where a rule meets them. argmax, loss:\n"
        "AUROC for what still changes. live, NLL, speed: as served, the whole interval within\n"
        "the budget (* is not): mean depth, 1/1000 nat above full depth, engine over A1.",
    )
    table.padding = 0  # the lines between columns, drawn as blanks, are room enough
    table.add_column("rule", no_wrap=True)
    compared = ("check", "= depth", "= compute", "depth", "FLOPs", "gain", "argmax", "loss")
    for name in (*compared, "live", "NLL", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(row["name"], *_compared(row), *_served(row))
    return table


def summary_lines(found: Found) -> list[str]:
    """The default rule, the loss-optimal oracle, and what is missing from the table."""
    low, high = found["nll_delta_ci"]
    timed = ""
    if found["speedup_vs_a1"] is not None:
        timed = (
            f"; in the engine {words.times(found['speedup_vs_a1'])} A1 and "
            f"{words.times(found['speedup_vs_full'])} full depth, a check takes "
            f"{words.percent(found['check_in_wall_recurrences'], 1)} of the time of a recurrence"
        )
    lines = [
        f"{found['rule']}: mean depth {words.number(found['mean_depth'])}, NLL "
        f"{words.signed(found['nll_delta_nats'])} ({words.signed(low)} to {words.signed(high)}) "
        f"nats, allocation gain {words.number(found['allocation_gain'])}; "
        f"{words.signed(found['recurrences_beyond_a1'], 2)} recurrences beside A1 at equal NLL"
        + timed,
        _optimal(found["loss_optimal"]),
    ]
    if found["fitted_here"]:
        lines.append(f"fitted for this comparison alone: {', '.join(found['fitted_here'])}")
    return lines + [f"without {name}: {why}" for name, why in found["left_out"].items()]


def _compared(row: Found) -> list[str]:
    equal, served, ranking = row["equal_nll"], row["served"], row["auroc"]
    aurocs = [None, None]
    if ranking is not None:
        aurocs = [ranking[k]["auroc"] for k in ("argmax_changes", "loss_improves")]
    return [
        words.DASH if served is None else words.number(served["check_price_recurrences"]),
        *(_difference(row[place]) for place in ("equal_depth", "equal_compute")),
        words.number(equal["mean_depth"]),
        words.percent(equal["charged_share"]),
        words.number(equal["allocation_gain"]),
        *(words.number(x) for x in aurocs),
    ]


def _served(row: Found) -> list[str]:
    served, speed = row["served"], row["speed"]
    if served is None:
        return [words.DASH] * 3
    return [
        words.number(served["mean_depth"]),
        words.signed(1000 * served["delta_nats"], 1) + " *"[not served["within_budget"]],
        words.times(None if speed is None else speed["speedup_vs_a1"]["median"]),
    ]


def _difference(place: Found | None) -> str:
    if place is None:
        return words.DASH
    found = place["vs_a1_nats"]
    mean, half = 1000 * found["mean"], 500 * (found["high"] - found["low"])
    digits = 0 if max(abs(mean), half) >= 10 else 1
    return f"{words.signed(mean, digits)} ±{words.number(half, digits)}"


def _optimal(found: Found) -> str:
    over = found["over_null_nats"]
    return (
        f"loss-optimal oracle: {words.number(found['headroom_nats'], 3)} nats below the best "
        f"uniform depth at mean depth {words.number(found['mean_depth'])}; "
        f"{words.number(found['null_headroom_nats'], 3)} by chance, "
        f"{words.signed(over['mean'], 3)} ({words.signed(over['low'], 3)} to "
        f"{words.signed(over['high'], 3)}) above it"
    )
