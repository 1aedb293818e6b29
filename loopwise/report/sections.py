"""The sections of the page, in the order a reader asks."""

from __future__ import annotations

import json
from typing import Any

from loopwise.report import depth_sections, facts, frontier_sections, paper, verdict, words
from loopwise.report.depth_sections import Convergence, Draw, Event
from loopwise.report.markup import (
    Html,
    card,
    details,
    element,
    facts_list,
    join,
    paragraph,
    section,
    table,
)


def everything(
    results: facts.Results,
    tiers: dict[str, Any],
    steps: list[Event],
    evals: list[Event],
    draw: Draw,
) -> list[Html]:
    """The body of the page.

    Args:
        tiers: of `facts.read_tiers`.
    """
    looped = [c for c in results["convergence"] if facts.has_recurrence(c)]
    frontiers = [f for f in results["frontiers"] if f["max_depth"] > 1]
    parts = [
        heading(results),
        what_was_run(results),
        headline(results, looped),
        depth_sections.loss(results, steps, evals, draw),
    ]
    if looped:
        parts += [
            depth_sections.convergence(looped, draw),
            depth_sections.settled(looped, draw),
            depth_sections.types(looped, draw),
            depth_sections.text(looped),
        ]
    if frontiers:
        parts.append(frontier_sections.quality(frontiers, draw))
    if any(c["hops"] for c in looped):
        parts.append(depth_sections.hops(looped, draw))
    parts.append(frontier_sections.probe(frontiers, draw))
    parts.append(frontier_sections.predicted_kl(frontiers))
    parts.append(frontier_sections.certificates(frontiers))
    parts.append(frontier_sections.tiers(tiers))
    if looped:
        parts += [depth_sections.loss_optimal(looped), beside_paper(results)]
    return parts


def heading(results: facts.Results) -> Html:
    corpora = ", ".join(c["corpus"] for c in results["convergence"]) or "no corpus"
    model = results["model"]
    return join(
        (
            element("h1", "Depth per token"),
            paragraph(
                f"{words.count(model['parameters'])} parameters, architecture "
                f"{model['architecture']}, measured on {corpora}.",
                css="lead",
            ),
        )
    )


def what_was_run(results: facts.Results) -> Html:
    model, training = results["model"], results["training"]
    depth, data = training.get("depth") or {}, training.get("data") or {}
    flops = model["flops_per_token"]
    pairs = [
        ("Parameters (tied once)", f"{model['parameters']:,}"),
        ("Layers: prelude / core / coda", " / ".join(str(n) for n in model["layers"])),
        ("Width, vocabulary", f"{model['d_model']:,}, {model['vocab_size']:,} tokens"),
        (
            "FLOPs per token: once / one recurrence",
            f"{words.count(flops['prelude'] + flops['coda'] + flops['head'])} / "
            f"{words.count(flops['core'])}",
        ),
        ("Depth in training", _depth_line(depth)),
        ("Training tokens seen", _seen(training, data)),
        ("Text", ", ".join(data.get("sources", [])) or words.DASH),
        ("Block length, dtype, seed", _trained_with(training)),
        *((f"Measured: {c['corpus']}", _measured(c)) for c in results["convergence"]),
        ("Made with", f"loopwise {results.get('loopwise', words.DASH)}"),
    ]
    settings = json.dumps(
        {"settings": results.get("settings"), "training": training}, indent=2, ensure_ascii=False
    )
    return section(
        "What was run",
        "run",
        facts_list(pairs),
        details("All settings", element("pre", settings)),
    )


def headline(results: facts.Results, looped: list[Convergence]) -> Html:
    if not looped:
        return section(
            "Headline",
            "headline",
            paragraph("This model runs one recurrence: there is no depth to allocate."),
        )
    cards = [
        card(
            "Saturation depth",
            [(c["corpus"], f"{c['saturation']['depth']}") for c in looped],
            "first depth whose loss is within "
            f"{looped[0]['saturation']['within_nats']:g} nats of the best; 95%: "
            + ", ".join(f"{c['saturation']['low']} to {c['saturation']['high']}" for c in looped),
        ),
        card(
            "Median settled depth",
            [(c["corpus"], words.depth(c["settled"]["median"])) for c in looped],
            f"KL to the previous recurrence stays at or below {looped[0]['epsilon']:g} nats up to "
            f"recurrence {looped[0]['horizon']}",
        ),
    ]
    frontiers = [f for f in results["frontiers"] if f["max_depth"] > 1]
    sentences = []
    if frontiers:
        cards += frontier_sections.rule_cards(frontiers)
        sentences = [
            paragraph(
                element("b", f"{f['corpus']}:", verdict.answer(f, "kl")),
                *verdict.sentences(f, "kl"),
                verdict.cheapest_rule(f),
                css="verdict",
            )
            for f in frontiers
        ]
    return section("Headline", "headline", element("div", *cards, css="cards"), *sentences)


def beside_paper(results: facts.Results) -> Html:
    rows = paper.comparison(results)
    body = table(["figure", "paper 1", "this run", "where they differ"], rows, text_columns=4)
    return section(
        "Paper 1 beside ours",
        "paper",
        paragraph("Paper 1 is arXiv:2607.14427. " + paper.scale(results)),
        element("div", body, css="compare"),
    )


def _depth_line(depth: dict[str, Any]) -> str:
    if depth.get("true_mean") is None:
        return words.DASH
    return (
        f"{depth['kind']}, true mean {depth['true_mean']:.2f} (median {depth['median']}, p95 "
        f"{depth['p95']}, max {depth['max']}), gradients through the last "
        f"{depth['backprop_depth']}"
    )


def _seen(training: dict[str, Any], data: dict[str, Any]) -> str:
    seen, unique = training.get("tokens_seen"), data.get("tokens")
    if not seen:
        return words.DASH
    times = f", {seen / unique:.2g} times through {unique:,}" if unique else ""
    return f"{seen:,} in {training.get('step', words.DASH)} steps{times}"


def _trained_with(training: dict[str, Any]) -> str:
    return ", ".join(str(training.get(k, words.DASH)) for k in ("seq", "dtype", "seed"))


def _measured(c: Convergence) -> str:
    return f"{c['tokens']:,} tokens, horizon {c['horizon']}, epsilon {c['epsilon']:g} nats"
