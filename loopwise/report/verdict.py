"""Whether depth per token beat the best uniform depth, said as the results have it."""

from __future__ import annotations

from typing import Any

from loopwise.report import facts, words
from loopwise.report.palette import policy_style

Frontier = dict[str, Any]


def answer(frontier: Frontier, policy: str) -> str:
    """Did the rule beat the best uniform depth at the headline budget? One short line."""
    budget = facts.headline_budget(frontier)
    name = policy_style(policy).label
    point = facts.at_budget(frontier, policy, "replayed", budget)
    if point is None:
        return f" {name} shows no saving."
    replayed = _beats(point)
    live = facts.at_budget(frontier, policy, "live", budget)
    lived = "not met or not measured" if live is None else _beats(live)
    uniform = facts.at_budget(frontier, "fixed", "uniform", budget)
    cheaper = uniform is None or point["charged_share"] < uniform["charged_share"]
    return (
        f" does {name} beat the best uniform depth? Replayed: {replayed}. Live: {lived}. In "
        f"compute (replayed, checks included): {_yes(cheaper)}."
    )


def sentences(frontier: Frontier, policy: str) -> list[str]:
    """The figures behind the answer: depth replayed, depth live, compute."""
    budget = facts.headline_budget(frontier)
    name, full = policy_style(policy).label, frontier["max_depth"]
    if policy not in frontier["policies"] or budget is None:
        return [f"{name} was not measured."]
    point = facts.at_budget(frontier, policy, "replayed", budget)
    uniform = facts.at_budget(frontier, "fixed", "uniform", budget)
    if point is None:
        return [f"{name} never came within {budget:g} nats of uniform depth {full}."]
    low, high = point["gain_low"], point["gain_high"]
    depth = [
        f"{name} stays within {budget:g} nats of uniform depth {full} at "
        f"{words.number(point['mean_depth'])} recurrences on average (replayed);",
        f"the same loss takes {words.number(point['equal_uniform_depth'])} from every token, an "
        f"allocation gain of {words.number(point['allocation_gain'])} "
        f"({words.interval(low, high)} 95% interval).",
    ]
    return [*depth, *_live(frontier, policy, budget), *_compute(frontier, point, uniform)]


def _beats(point: dict[str, Any]) -> str:
    """Whether the 95% interval of the allocation gain lies on one side of 1."""
    if point["gain_low"] > 1:
        return "yes"
    return "no" if point["gain_high"] < 1 else "too close to tell"


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"


def _live(frontier: Frontier, policy: str, budget: float) -> list[str]:
    points = frontier["policies"][policy].get("live", [])
    if not points:
        return ["Live exits were not measured."]
    tried = f"{len(points)} thresholds on {facts.live_tokens(frontier) or 0:,} tokens were tried"
    point = facts.at_budget(frontier, policy, "live", budget)
    if point is None:
        return [f"With live exits the budget was not met ({tried})."]
    return [
        f"With live exits it takes {words.number(point['mean_depth'])}, allocation gain "
        f"{words.number(point['allocation_gain'])} "
        f"({words.interval(point['gain_low'], point['gain_high'])}; {tried})."
    ]


def _compute(frontier: Frontier, point: facts.Point, uniform: facts.Point | None) -> list[str]:
    share, full = point["charged_share"], frontier["max_depth"]
    line = (
        f"Charged for every check, that is {words.percent(share)} of the compute of uniform depth "
        f"{full}"
    )
    if uniform is None:
        return [f"{line}; no uniform depth meets the budget."]
    other = uniform["charged_share"]
    what = f"uniform depth {words.depth(uniform['mean_depth'])}, which also meets the budget, takes"
    if share < other:
        end = "so the rule costs less"
    elif point["mean_depth"] < uniform["mean_depth"]:
        end = "so its checks cost more than the depth they save"
    else:
        end = "so the rule costs no less"
    return [f"{line}; {what} {words.percent(other)}, {end}."]


def cheapest_rule(frontier: Frontier) -> str:
    """Which rule needs the least charged compute at the headline budget, against A0."""
    budget = facts.headline_budget(frontier)
    uniform = facts.at_budget(frontier, "fixed", "uniform", budget)
    best = []
    for meaning in ("replayed", "live"):
        found = [
            (point["charged_share"], policy_style(name).label)
            for name in facts.rules(frontier)
            if (point := facts.at_budget(frontier, name, meaning, budget)) is not None
        ]
        if found:
            share, name = min(found)
            best.append(f"{name} at {words.percent(share)} ({meaning})")
    if not best or uniform is None:
        return ""
    return (
        f"Cheapest within {budget:g} nats, checks included: {' and '.join(best)}; "
        f"A0 takes {words.percent(uniform['charged_share'])}."
    )
