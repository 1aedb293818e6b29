"""Paper 1's published figures beside the measured ones; reasons depend on what was measured.

Source: arXiv:2607.14427. The paper's figures are text to compare with and enter no computation.
"""

from __future__ import annotations

import math
from typing import Any

from loopwise.report import facts, words
from loopwise.report.palette import policy_style

PAPER_UNIQUE_PARAMETERS = 57.3e6
PAPER_TOKENS = 12.9e9
PAPER_VOCABULARY = 49_152
PAPER_MEAN_DEPTH = 8
PAPER_KL = {2: 3.9e-1, 16: 8.5e-6}

Row = tuple[str, str, str, str]
Convergence = dict[str, Any]


def comparison(results: facts.Results) -> list[Row]:
    """``(what, paper, here, why they differ)``, one row for each finding and corpus."""
    looped = [c for c in results["convergence"] if facts.has_recurrence(c)]
    found = [facts.frontier_of(results, c["corpus"]) for c in looped]
    frontiers = [f for f in found if f is not None]
    rows = [_loss(c, results["model"]["vocab_size"]) for c in looped]
    for finding in (_kl, _settled, _moving, _saturation, _types):
        rows += [finding(c) for c in looped]
    flips = _flip(looped)
    rows += [flips] if flips else []
    for policy in ("kl", "probe"):
        rows += [_rule(f, policy) for f in frontiers]
    return rows


def scale(results: facts.Results) -> str:
    """How much smaller or larger this run is than the paper's."""
    parameters, tokens = results["model"]["parameters"], results["training"].get("tokens_seen")
    text = (
        f"The paper's model has {words.count(PAPER_UNIQUE_PARAMETERS)} unique parameters (135M "
        f"class) and saw {words.count(PAPER_TOKENS)} tokens of FineWeb-Edu; this one has "
        f"{words.count(parameters)} ({_ratio(parameters / PAPER_UNIQUE_PARAMETERS)} the size)"
    )
    if not tokens:
        return f"{text}."
    return f"{text} and saw {words.count(tokens)} ({_ratio(tokens / PAPER_TOKENS)} the tokens)."


def _ratio(value: float) -> str:
    return f"{value:.3g} times" if value >= 1 else f"1/{1 / value:,.0f} of"


def _loss(c: Convergence, vocab_size: int) -> Row:
    loss = c["loss_nats"]["mean"]
    until = facts.falls_until(loss)
    best = min(range(len(loss)), key=lambda i: loss[i]) + 1
    rest = loss[-1] - loss[until - 1]
    here = (
        f"falls at every recurrence up to {until}, {words.number(loss[0], 3)} to "
        f"{words.number(loss[until - 1], 3)} nats; changes by {words.signed(rest)} from there to "
        f"{len(loss)} (lowest at {best})"
    )
    why = []
    if vocab_size != PAPER_VOCABULARY:
        why.append(
            f"levels cannot be compared: a vocabulary of {vocab_size:,}, not {PAPER_VOCABULARY:,}"
        )
    if abs(rest) > c["saturation"]["within_nats"]:
        why.append("not flat: depth beyond it still moves the loss by more than the tolerance")
    return (
        _what("Loss by depth", c),
        "falls monotonically from 1 to 8, flat (3.20 nats) to 32",
        here,
        _sentence(why),
    )


def _kl(c: Convergence) -> Row:
    curve = c["curves"]["kl_prev"]["mean"]
    two, deep = facts.at_depth(curve, 2), facts.at_depth(curve, 16)
    ratio = PAPER_KL[2] / PAPER_KL[16]
    paper = f"{words.small(PAPER_KL[2])} at 2, {words.small(PAPER_KL[16])} at 16: {ratio:,.0f}-fold"
    why = ""
    if two and deep and deep > 0:
        here = f"{words.small(two)} at 2, {words.small(deep)} at 16: {two / deep:,.0f}-fold"
        per = (deep / two) ** (1 / 14)
        theirs = (PAPER_KL[16] / PAPER_KL[2]) ** (1 / 14)
        why = (
            f"from 2 to 16 KL shrinks to {per:.2f} of itself per recurrence here, {theirs:.2f} in "
            f"the paper: {_pace(per, theirs)}; at {c['horizon']} it is {words.small(curve[-1])}"
        )
    else:
        here = f"{words.small(two)} at 2; horizon {c['horizon']}"
        why = "16 recurrences were not measured" if deep is None else "no change left at 16"
    return _what("KL to the previous recurrence", c), paper, here, _sentence([why])


def _pace(ours: float, theirs: float) -> str:
    if abs(ours - theirs) < 0.01:
        return "the same pace"
    return f"this loop contracts {'faster' if ours < theirs else 'more slowly'}"


def _settled(c: Convergence) -> Row:
    settled = c["settled"]
    here = (
        f"median {words.depth(settled['median'])}, mean {words.number(settled['mean'])}, "
        f"90% by {words.depth(settled['p90'])}; first crossing median "
        f"{words.depth(c['first_crossing']['median'])}"
    )
    why = (
        f"the paper's epsilon is not known; here KL stays at or below {c['epsilon']:g} nats "
        f"up to recurrence {c['horizon']}"
    )
    return _what("Settled depth", c), "median token by recurrence 6", here, _sentence([why])


def _moving(c: Convergence) -> Row:
    mean = c["trained_mean_depth"]
    at = f"depth {words.depth(round(mean))}" if mean else "full depth"
    share = c["moving_at_training_mean"]
    why = ["depends on epsilon, and the paper's is not known"]
    if mean and round(mean) != PAPER_MEAN_DEPTH:
        why.append(f"trained at mean {words.depth(mean)}, not {PAPER_MEAN_DEPTH}")
    return (
        _what("Still moving at the training mean", c),
        "about 10% at 8",
        f"{words.percent(share, 1)} at {at}",
        _sentence(why),
    )


def _saturation(c: Convergence) -> Row:
    s, mean = c["saturation"], c["trained_mean_depth"]
    here = (
        f"depth {s['depth']} (95% {s['low']} to {s['high']}), within {s['within_nats']:g} nats of "
        "the best"
    )
    if not mean:
        why = "the training mean is not known"
    elif s["low"] <= round(mean) <= s["high"]:
        why = f"agrees with the hypothesis at mean {words.depth(mean)}"
    elif s["high"] < mean:
        why = (
            f"saturated before its training mean of {words.depth(mean)}, so the hypothesis does "
            "not hold for this run"
        )
    else:
        why = f"saturates beyond its training mean of {words.depth(mean)}"
    return (
        _what("Saturation depth", c),
        "at the training mean (4 at mean 4, 8 at mean 8)",
        here,
        _sentence([why]),
    )


def _types(c: Convergence) -> Row:
    order = [row["type"] for row in c["token_types"]]
    why = []
    if order and "whitespace" in order and order[0] != "whitespace":
        why.append(f"{order[0]} settles before whitespace here")
    if order and "content word" in order and order[-1] != "content word":
        after = order[order.index("content word") + 1 :]
        why.append(f"{', '.join(after)} later than content words")
        if "subword continuation" in after:
            why.append("word pieces are a class of their own here")
    if not why and {"whitespace", "content word"} <= set(order):
        why.append("same order")
    return (
        _what("Order of token types", c),
        "whitespace first, content words last",
        ", ".join(order) if order else "too few tokens of any type",
        _sentence(why),
    )


def _rule(frontier: dict[str, Any], policy: str) -> Row:
    full = frontier["max_depth"]
    label = policy_style(policy).label
    what = f"{label} at the quality of uniform depth · {frontier['corpus']}"
    paper = {"kl": f"4.94 of 8 ({words.MINUS}38%)", "probe": "7.99 of 8: saves nothing"}[policy]
    if policy not in frontier["policies"]:
        return what, paper, "not measured", ""
    parts, why = [], []
    for budget in facts.budgets(frontier):
        point = facts.at_budget(frontier, policy, "replayed", budget)
        if point is None:
            parts.append(f"within {budget:g} nats: not met")
            continue
        saved = point["mean_depth"] / full - 1
        parts.append(
            f"within {budget:g} nats: {words.number(point['mean_depth'])} of {full} "
            f"({words.signed(100 * saved, 0)}%), gain {words.number(point['allocation_gain'])}"
        )
        uniform = facts.at_budget(frontier, "fixed", "uniform", budget)
        if uniform is not None and uniform["mean_depth"] < full:
            less = words.signed(100 * (uniform["mean_depth"] / full - 1), 0)
            why.append(
                f"within {budget:g} nats uniform depth {words.depth(uniform['mean_depth'])} "
                f"({less}%) is enough for every token"
            )
    if not why:
        why.append("no shallower uniform depth is as good")
    return what, paper, "; ".join(parts), _sentence(why)


def _flip(convergences: list[Convergence]) -> Row | None:
    """Does the order of digits and words change between corpora?"""
    signs = {}
    for c in convergences:
        digit, word = (facts.mean_depth_of_type(c, t) for t in ("digit", "content word"))
        if digit is not None and word is not None and not math.isclose(digit, word):
            signs[c["corpus"]] = "digits first" if digit < word else "words first"
    if len(signs) < 2:
        return None
    flipped = len(set(signs.values())) > 1
    return (
        "Digits against content words",
        "the order flips between TinyStories and FineWeb-Edu",
        "; ".join(f"{corpus}: {order}" for corpus, order in signs.items()),
        "Flips here too." if flipped else "No flip between these corpora.",
    )


def _what(name: str, c: Convergence) -> str:
    return f"{name} · {c['corpus']}"


def _sentence(parts: list[str]) -> str:
    text = "; ".join(p for p in parts if p)
    return f"{text[0].upper()}{text[1:]}." if text else ""
