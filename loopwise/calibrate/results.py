"""What a calibration found: tiers as they are stored, and as they are told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from loopwise.calibrate.options import Event
from loopwise.calibrate.running import Calibration
from loopwise.calibrate.texts import FreshText
from loopwise.calibrate.timing import race
from loopwise.errors import ExitError
from loopwise.exits.rule import ExitRule
from loopwise.measure.calibrate import Choice, Judged, Verdict, choose, p_value, upper_bound
from loopwise.measure.tiers import tier_names

# What live exits in parallel compute. Under approximate policies full depth itself has other
# outputs, which are found token by token alone, so nothing is promised there.
KV_POLICY = "per-loop"


def make_tiers(
    run: Calibration, verdicts: dict[str, Verdict], convergence: Event, text: FreshText
) -> dict[str, Event]:
    """What is stored for each budget, the smallest first; finalists are timed on the way.

    Raises:
        ExitError: nothing cheaper than full depth meets a budget.
    """
    options = run.options
    names = dict(zip(options.budgets, tier_names(options.budgets, options.names), strict=True))
    choices = {budget: choose(verdicts, budget) for budget in run.budgets}
    unmet = [b for b, choice in choices.items() if _recommended(choice).charged_flops >= run.cost]
    if unmet:
        raise ExitError(_unmet(run, verdicts, unmet))
    races = _races(run, choices, text) if options.wall else {}
    return {
        names[b]: _tier(run, verdicts, b, choice, races.get(b), convergence, text)
        for b, choice in choices.items()
    }


def _recommended(choice: Choice) -> Judged:
    assert choice.cheaper is not None, "full depth keeps every budget"
    return choice.cheaper


def _races(
    run: Calibration, choices: Mapping[float, Choice], text: FreshText
) -> dict[float, Event]:
    """Of each budget that an exit rule keeps; the same two are timed once."""
    known: dict[tuple[ExitRule, ExitRule], Event] = {}
    races = {}
    for budget, choice in choices.items():
        if choice.rule is None or choice.uniform is None:
            continue
        pair = choice.rule.rule, choice.uniform.rule
        if pair not in known:
            known[pair] = race(run, text, *pair)
        races[budget] = known[pair]
    return races


def _tier(
    run: Calibration,
    verdicts: dict[str, Verdict],
    budget: float,
    choice: Choice,
    wall: Event | None,
    convergence: Event,
    text: FreshText,
) -> Event:
    choice = replace(choice, speedup=None if wall is None else wall["speedup"])
    chosen, uniform = _recommended(choice), choice.uniform
    assert uniform is not None, "full depth keeps every budget"
    candidates = {name: v.cheapest(budget) for name, v in verdicts.items() if name != "fixed"}
    split, options = run.split, run.options
    return {
        "rule": str(chosen.rule),
        "policy": chosen.rule.policy,
        "threshold": chosen.rule.threshold,
        "min_depth": chosen.rule.min_depth,
        "max_depth": chosen.rule.max_depth,
        "patience": chosen.rule.patience,
        "budget_nats": budget,
        "full_depth": run.full,
        "confidence": options.confidence,
        "kv_policy": KV_POLICY,
        "convergence": convergence,
        "says": _says(run.full, choice, offered=bool(candidates)),
        "decided_by": "wall clock" if choice.by_wall_clock else "charged compute",
        "wall": wall,
        **_figures(run, chosen, budget),
        "uniform": _short(run, uniform, budget),
        "candidates": {
            name: None if j is None else _short(run, j, budget) for name, j in candidates.items()
        },
        "guarantee": {
            "test": "betting p-values, fixed sequence of candidates, Bonferroni over rules",
            "unit": options.unit,
            "unit_tokens": split.unit_tokens,
            "units": split.judging.n_units,
            "units_proposing": split.proposing.n_units,
            "tokens": split.judging.n_tokens,
            "level": split.level,
            "clip_nats": split.clip,
        },
        "data": {
            "sources": text.sources,
            "text_hash": split.text_hash,
            "documents": len(text.documents),
            "left_out": text.left_out,
            "seed": options.seed,
        },
    }


def _figures(run: Calibration, judged: Judged, budget: float) -> Event:
    split = run.split
    bound = upper_bound(judged.excess, split.level, split.clip)
    beyond = judged.excess > split.clip
    return {
        **judged.figures,
        "risk": {
            **judged.figures["live"]["excess_nats"],
            "upper_bound": bound if math.isfinite(bound) else None,
            "p_value": p_value(judged.excess, budget, split.clip),
            "clipped_units": int(beyond.sum()),
            "clipped_nats": float((judged.excess - split.clip)[beyond].sum() / len(beyond)),
        },
    }


def _short(run: Calibration, judged: Judged, budget: float) -> Event:
    return {"rule": str(judged.rule), **_figures(run, judged, budget)}


def _says(full: int, choice: Choice, offered: bool) -> str:
    """Which of the two is recommended, in one plain line.

    Args:
        offered: exit rules competed.
    """
    rule, uniform = choice.rule, choice.uniform
    assert uniform is not None, "full depth keeps every budget"
    share = f"{uniform.figures['live']['charged_share']:.0%} of the compute of depth {full}"
    plain = f"uniform depth {uniform.rule.max_depth} ({share})"
    if rule is None:
        why = "no exit rule keeps the budget" if offered else "exit rules are not offered"
        return f"{plain}; {why}"
    live = rule.figures["live"]
    exits = (
        f"{rule.rule} (mean depth {live['mean_depth']:.2f}, {live['charged_share']:.0%}, "
        f"allocation gain {live['allocation_gain']:.2f})"
    )
    if choice.cheaper is uniform:
        how = "is faster than" if choice.by_wall_clock else "keeps the budget at no more cost than"
        return f"{plain} {how} {exits}: uniform is recommended"
    how = "is faster than" if choice.by_wall_clock else "costs less than"
    return f"{exits} {how} {plain}: the exit rule is recommended"


def _unmet(run: Calibration, verdicts: dict[str, Verdict], unmet: list[float]) -> str:
    split = run.split
    tried = [j for v in verdicts.values() for j in v.tried if j.charged_flops < run.cost]
    bounds = [(upper_bound(j.excess, split.level, split.clip), j) for j in tried]
    bound, closest = min(bounds, key=lambda x: (x[0], float(x[1].excess.mean())))
    said = f"nothing below {split.clip:g}" if math.isinf(bound) else f"at most {bound:.2g}"
    listed = ", ".join(f"{b:g}" for b in unmet)
    met = [b for b in run.budgets if b not in unmet]
    also = f"; {', '.join(f'{b:g}' for b in met)} can be met: ask for that alone" if met else ""
    return (
        f"nothing cheaper than depth {run.full} keeps a budget of {listed} nats with "
        f"{run.options.confidence:g} confidence on {split.judging.n_units} {run.options.unit}s; "
        f"the closest is {closest.rule}: {closest.excess.mean():.2g} nats measured, {said} "
        f"guaranteed; give a larger --budget or more text{also}"
    )


def summary_lines(found: Event) -> list[str]:
    """What the command prints: one line for the model, three for each tier."""
    convergence = found["convergence"]
    word = "converges" if convergence["converges"] else "does not converge"
    if convergence["converges"] and not convergence["settled"]:
        word = "converges, but not by full depth"
    lines = [f"model {word}: {'; '.join(convergence['evidence'])}"]
    for name, tier in found["tiers"].items():
        risk, guarantee = tier["risk"], tier["guarantee"]
        lines += [
            f"{name}: {tier['says']}",
            f"  at most {tier['budget_nats']:g} nats above depth {tier['full_depth']} with "
            f"{tier['confidence']:.0%} confidence; measured {risk['mean']:.4f} "
            f"({risk['low']:.4f} to {risk['high']:.4f}), guaranteed {risk['upper_bound']:.4f}, on "
            f"{guarantee['units']} {guarantee['unit']}s of up to {guarantee['unit_tokens']} tokens"
            + _clipped(risk, guarantee),
            f"  {_decided(tier)}",
        ]
    return [*lines, f"stored in {found['exits']}"]


def _decided(tier: Event) -> str:
    """Which measure decided, and what wall clock says of exit rule and uniform depth."""
    wall, by = tier["wall"], f"decided by {tier['decided_by']}"
    if wall is None:
        return f"{by}; nothing was timed"
    rate, times = wall["tokens_per_s"], wall["speedup"]
    return (
        f"{by}: {rate['exit_rule']['median']:.0f} tokens/s by exit rule, "
        f"{rate['uniform']['median']:.0f} by uniform depth, ratio {times['median']:.2f} "
        f"({times['low']:.2f} to {times['high']:.2f} over {wall['repeats']} repeats)"
    )


def _clipped(risk: Event, guarantee: Event) -> str:
    if not risk["clipped_units"]:
        return ""
    return (
        f"; {risk['clipped_units']} of them lose more than {guarantee['clip_nats']:g} nats and "
        "count as that much"
    )
