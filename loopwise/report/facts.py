"""What page and terminal say, looked up in results or derived from them; no text, no HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError, RunFolderError
from loopwise.models.checkpoint import file_hash, resolve
from loopwise.report.palette import in_order

Results = dict[str, Any]
Point = dict[str, Any]

HEADLINE_BUDGET_NATS = 0.01
_PARTS = {
    "convergence": (
        *("corpus", "tokens", "horizon", "epsilon", "trained_mean_depth", "loss_nats"),
        *("bits_per_byte", "curves", "saturation", "contraction", "first_crossing", "settled"),
        *("moving_at_training_mean", "argmax_final", "loss_optimal", "token_types", "hops"),
    ),
    "frontiers": ("corpus", "max_depth", "check_in_recurrences", "policies", "budgets"),
}
SHOWN_DEPTHS = (1, 2, 4, 8, 16, 32)


def read_results(run: Path) -> Results:
    """Results of a run folder.

    Raises:
        RunFolderError: there are none, or they are not a results file of this format.
    """
    remedy = "make it with 'loopwise study'; one that was stopped goes on with --resume"
    return read_versioned(run, "loopwise-results", _missing, remedy)


def read_versioned(
    run: Path, name: str, missing: Callable[[Results], list[str]], remedy: str
) -> Results:
    """``results.json`` of a folder, checked.

    Args:
        name: of the format, which must be of version 1.
        missing: what a file of that format lacks.
        remedy: closes every refusal.
    Raises:
        RunFolderError: there is no such file, or it is not one of this format.
    """
    file = run / "results.json"
    if not file.is_file():
        raise RunFolderError(f"{str(run)!r} holds no results.json; {remedy}")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise RunFolderError(f"{str(file)!r} is not JSON ({err}); {remedy}") from err
    if not isinstance(results, dict) or results.get("format") != name:
        raise RunFolderError(f"{str(file)!r} is not a results file of loopwise; {remedy}")
    if results.get("version") != 1:
        raise RunFolderError(
            f"{str(file)!r} has version {results.get('version')!r}, this loopwise reads 1; {remedy}"
        )
    lacking = missing(results)
    if lacking:
        raise RunFolderError(f"{str(file)!r} lacks {', '.join(lacking)}; {remedy}")
    return results


def _missing(results: Results) -> list[str]:
    """Keys that every results file of this version has and this one has not."""
    lacking = [k for k in ("model", "training", "convergence", "frontiers") if k not in results]
    for part, keys in _PARTS.items():
        for i, entry in enumerate(results.get(part, [])):
            lacking += [f"{part}[{i}].{k}" for k in keys if k not in entry]
    return lacking


def read_tiers(run: Path) -> dict[str, Any]:
    """Calibrated tiers of a run's newest checkpoint, by name; none where its weights have moved on.

    They are made after the results, so they lie with the checkpoint (``exits.json``).

    Raises:
        CheckpointError: that file is damaged.
    """
    try:
        folder = resolve(run)
    except CheckpointError:  # results outlive their checkpoint
        return {}
    if not (folder / "exits.json").exists():
        return {}
    exits = read_json_object(folder / "exits.json", CheckpointError)
    weights = folder / "model.safetensors"
    same = weights.is_file() and exits.get("weights_hash") == file_hash(weights)
    return exits.get("tiers", {}) if same else {}


def judged(frontiers: list[dict[str, Any]], name: str) -> list[tuple[str, dict[str, Any]]]:
    """What was found of a fitted rule on text it was not fitted on, by corpus."""
    found = [(f["corpus"], f["policies"].get(name, {}).get("judged")) for f in frontiers]
    return [(corpus, j) for corpus, j in found if j]


def at_depth(values: list[float | None], depth: int) -> float | None:
    """Entry of recurrence ``depth`` (from 1), None past the horizon."""
    return values[depth - 1] if 1 <= depth <= len(values) else None


def frontier_of(results: Results, corpus: str) -> dict[str, Any] | None:
    return next((f for f in results["frontiers"] if f["corpus"] == corpus), None)


def rules(frontier: dict[str, Any]) -> list[str]:
    """Policies that could serve: neither A0 nor an oracle."""
    return [
        n
        for n in in_order(list(frontier["policies"]))
        if n != "fixed" and not n.startswith("oracle")
    ]


def headline_rules(frontier: dict[str, Any]) -> list[str]:
    """Rules that were run live; all of them where none was."""
    live = [n for n in rules(frontier) if "live" in frontier["policies"][n]]
    return live or rules(frontier)


def minor_rules(frontier: dict[str, Any]) -> list[str]:
    """Rules that were judged by replay alone beside others that were run live."""
    shown = headline_rules(frontier)
    return [n for n in rules(frontier) if n not in shown]


def budgets(frontier: dict[str, Any]) -> list[float]:
    """Budgets that were asked for, nats, loosest first."""
    return sorted({row["budget_nats"] for row in frontier["budgets"]}, reverse=True)


def headline_budget(frontier: dict[str, Any]) -> float | None:
    known = budgets(frontier)
    if HEADLINE_BUDGET_NATS in known:
        return HEADLINE_BUDGET_NATS
    return known[0] if known else None


def at_budget(
    frontier: dict[str, Any], policy: str, meaning: str, budget: float | None
) -> Point | None:
    """The shallowest point of a policy within a budget; None where it is not met."""
    for row in frontier["budgets"]:
        if (row["policy"], row["meaning"], row["budget_nats"]) == (policy, meaning, budget):
            return row["point"]
    return None


def budget_rows(frontier: dict[str, Any]) -> Iterator[tuple[str, str, float, Point | None]]:
    """``(policy, meaning, budget, point)`` in reading order."""
    known = {(r["policy"], r["meaning"], r["budget_nats"]): r["point"] for r in frontier["budgets"]}
    for budget in budgets(frontier):
        for policy in in_order(list(frontier["policies"])):
            for meaning in ("uniform", "replayed", "live"):
                if (policy, meaning, budget) in known:
                    yield policy, meaning, budget, known[policy, meaning, budget]


def share_of_cap(point: Point) -> float:
    """Speed-up in charged compute over the largest one this mean depth allows."""
    return 1 / point["charged_share"] / point["cap"]


def live_tokens(frontier: dict[str, Any]) -> int | None:
    """Tokens the live points were measured on."""
    for name in rules(frontier):
        for point in frontier["policies"][name].get("live", []):
            return point.get("tokens")
    return None


def reference_of(convergence: dict[str, Any]) -> dict[str, Any] | None:
    """The reference that was measured on the same text; results of before had none."""
    return convergence.get("reference")


def falls_until(losses: list[float], tolerance: float = 0.0) -> int:
    """Depth up to which each recurrence lowers the mean loss."""
    for i in range(1, len(losses)):
        if losses[i] >= losses[i - 1] + tolerance:
            return i
    return len(losses)


def mean_depth_of_type(convergence: dict[str, Any], name: str) -> float | None:
    return next((t["mean"] for t in convergence["token_types"] if t["type"] == name), None)


def has_recurrence(convergence: dict[str, Any]) -> bool:
    return convergence["horizon"] > 1
