"""The results as a few tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loopwise.report import facts, words
from loopwise.report.palette import policy_style


def print_summary(results: facts.Results) -> None:
    """Print the summary to standard output."""
    Console().print(summary_table(results))


def print_frontiers(frontiers: list[facts.Results]) -> None:
    """Print what the policies need on each corpus to standard output."""
    Console().print(*(_policy_table(f) for f in frontiers if f["budgets"]))


def summary_table(results: facts.Results) -> RenderableType:
    """Model line, then for each corpus its convergence and what the policies need."""
    parts: list[RenderableType] = [_model_line(results)]
    for convergence in results["convergence"]:
        parts += [Text(), _convergence_table(convergence)]
        reference = facts.reference_of(convergence)
        if reference is not None:
            parts += [Text(words.reference_line(reference)), Text()]
        frontier = facts.frontier_of(results, convergence["corpus"])
        if frontier is not None and frontier["budgets"]:
            parts += [_policy_table(frontier)]
    return Group(*parts)


def _model_line(results: facts.Results) -> Text:
    model, training = results["model"], results["training"]
    layers = "/".join(str(n) for n in model["layers"])
    mean = (training.get("depth") or {}).get("true_mean")
    trained = f"trained at mean depth {words.depth(mean)} " if mean else ""
    return Text(
        f"{model['architecture']}: {words.count(model['parameters'])} parameters, layers {layers}, "
        f"d_model {model['d_model']}; {trained}on {words.count(training.get('tokens_seen'))} "
        f"tokens, seed {training.get('seed', words.DASH)}"
    )


def plain_table(title: str, caption: str | None = None) -> Table:
    """An empty table in the house style; the caption stands below."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _convergence_table(convergence: dict[str, Any]) -> Table:
    table = plain_table(
        f"{convergence['corpus']}: loss in nats at depth r, {convergence['tokens']:,} tokens",
        f"median: settled depth, KL <= {convergence['epsilon']:g} nats up to "
        f"r={convergence['horizon']}; moving: share unsettled at the training mean",
    )
    losses = convergence["loss_nats"]["mean"]
    shown = [d for d in facts.SHOWN_DEPTHS if d <= len(losses)]
    for name in (*(f"r={d}" for d in shown), "saturates", "median", "moving"):
        table.add_column(name, justify="right", no_wrap=True)
    saturation = convergence["saturation"]
    table.add_row(
        *(words.number(losses[d - 1], 3) for d in shown),
        f"{saturation['depth']} ({saturation['low']}-{saturation['high']})",
        words.depth(convergence["settled"]["median"]),
        words.percent(convergence["moving_at_training_mean"], 1),
    )
    return table


def _policy_table(frontier: dict[str, Any]) -> Table:
    full = frontier["max_depth"]
    table = plain_table(
        f"{frontier['corpus']}: shallowest point whose 95% interval is within a budget of depth "
        f"{full}",
        "gain: uniform depth of the same loss / mean depth; cap: largest speed-up at that depth\n"
        f"compute: checks included, share of uniform depth {full}",
    )
    for name in ("budget", "policy", "exits"):
        table.add_column(name, no_wrap=True)
    for name in ("depth", "delta nats", "gain", "compute", "cap"):
        table.add_column(name, justify="right", no_wrap=True)
    last, minor = None, facts.minor_rules(frontier)
    for policy, meaning, budget, point in facts.budget_rows(frontier):
        if last not in (None, budget):
            table.add_section()
        head = "" if budget == last else f"{budget:g}", policy_style(policy).label, meaning
        last, style = budget, "dim" if policy in minor else None
        if point is None:
            table.add_row(*head, "not met", *[words.DASH] * 4, style=style)
            continue
        table.add_row(
            *head,
            words.number(point["mean_depth"]),
            words.signed(point["delta_nats"]),
            words.number(point["allocation_gain"]),
            words.percent(point["charged_share"]),
            f"{words.number(point['cap'])}x",
            style=style,
        )
    return table
