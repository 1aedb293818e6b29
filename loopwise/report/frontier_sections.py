"""Sections on what exits cost in quality and save in depth and compute, and on the probe."""

from __future__ import annotations

import math
from typing import Any

from loopwise.report import facts, frontier_plots, plots, words
from loopwise.report.depth_sections import Draw
from loopwise.report.markup import (
    Html,
    card,
    details,
    element,
    figures,
    paragraph,
    section,
    table,
)
from loopwise.report.palette import policy_style


def quality(frontiers: list[dict[str, Any]], draw: Draw) -> Html:
    lead = paragraph(
        element("b", "Replayed:"),
        "exits decided on full-depth trajectories, as paper 1 does; every other token still runs "
        "all its recurrences.",
        element("b", "Live:"),
        "a settled token's latent is frozen, so later tokens attend to its frozen entries; this "
        "is what serving does.",
        "Oracles know later recurrences and bound what a rule can reach; nothing can serve them. "
        "Compute is counted in FLOPs; wall time is not measured here.",
    )
    drawn = [_frontier_figures(f, draw) for f in frontiers]
    made = [part for of_one_kind in zip(*drawn, strict=True) for part in of_one_kind]
    tables = [part for f in frontiers for part in (_frontier_table(f), _minor_table(f))]
    return section(
        "Quality against depth and compute",
        "frontier",
        lead,
        *tables,
        figures(made),
        *(_left_out(f) for f in frontiers),
    )


def probe(frontiers: list[dict[str, Any]], draw: Draw) -> Html:
    judged = facts.judged(frontiers, "probe")
    if not judged:
        return Html("")
    caption = (
        "Predicted probability that the argmax changes in a later recurrence against how often it "
        "does, on text the probe was not fitted on; area: share of predictions."
    )
    rows = [
        [
            corpus,
            words.number(j["auroc"], 3),
            words.number(j["calibration_error"], 3),
            words.percent(j["positive_share"], 1),
        ]
        for corpus, j in judged
    ]
    head = ["corpus", "AUROC", "calibration error", "argmax still changes"]
    drawing = draw("calibration", plots.calibration(judged), caption)
    return section("Probe (A2)", "probe", figures([drawing]), table(head, rows))


def predicted_kl(frontiers: list[dict[str, Any]]) -> Html:
    """How well the latent rule predicts the KL that it stands for."""
    judged = facts.judged(frontiers, "latent-kl")
    if not judged:
        return Html("")
    rows = [
        [corpus, words.number(j["r2"], 3), words.times(_factor(j["rms_log"])), *_ends(j)]
        for corpus, j in judged
    ]
    lead = (
        "Predicted KL to the previous recurrence against the KL itself, on text the rule was not "
        "fitted on, recurrences 2 to the full depth. R²: of the logarithm. Typical error: the "
        "factor that the root mean square error of the logarithm stands for. Tenth of tokens: the "
        "KL, predicted / observed, of the most and the least settled tenth."
    )
    head = ["corpus", "R²", "typical error", "most settled tenth, nats", "least settled, nats"]
    return section(
        "Predicted KL (latent KL)", "predicted-kl", table(head, rows, text_columns=1, note=lead)
    )


def certificates(frontiers: list[dict[str, Any]]) -> Html:
    """How often the certified rule promises an answer, and how often the promise is broken."""
    judged = facts.judged(frontiers, "certified")
    if not judged:
        return Html("")
    rows = [
        [
            corpus,
            words.percent(facts.at_depth(j["fires"], -(-len(j["fires"]) // 2)), 1),
            words.percent(j["fires"][-1], 1),
            f"{j['certified']:,}",
            f"{j['broken']:,}",
            words.percent(j["broken"] / j["certified"] if j["certified"] else None, 2),
        ]
        for corpus, j in judged
    ]
    full = len(judged[0][1]["fires"])
    lead = (
        "The rule stops a token once its most likely next token cannot change any more, if steps "
        "shrink at the fitted rate. Broken: it changed at a later recurrence all the same, on text "
        "the rate was not fitted on."
    )
    head = [
        "corpus",
        f"certified by r={-(-full // 2)}",
        f"by r={full}",
        "tokens",
        "broken",
        "share broken",
    ]
    return section("Certificates (certified)", "certificates", table(head, rows, note=lead))


def tiers(stored: dict[str, Any]) -> Html:
    """Exit rules calibrated to a budget, as they are stored with the checkpoint."""
    if not stored:
        return Html("")
    rows = []
    for name, tier in stored.items():
        risk, live, of = (tier.get(part, {}) for part in ("risk", "live", "guarantee"))
        measured = words.interval(risk.get("low"), risk.get("high"), 4)
        rows.append(
            [
                name,
                tier["rule"],
                f"{tier['budget_nats']:g}",
                f"{words.signed(risk.get('mean'))} ({measured})",
                words.number(risk.get("upper_bound"), 4),
                words.number(live.get("mean_depth")),
                words.percent(live.get("charged_share")),
                f"{of.get('units', words.DASH)} {of.get('unit', '')}s",
            ]
        )
    first = next(iter(stored.values()))
    lead = (
        f"Loss above depth {first['full_depth']} under live exits, on text nothing had seen, with "
        f"{words.percent(first['confidence'])} confidence that it is no more than guaranteed. "
        "Compute: checks included, share of full depth."
    )
    head = [
        *("tier", "rule", "budget, nats", "measured, nats (95%)", "guaranteed"),
        *("mean depth", "compute", "judged on"),
    ]
    return section("Calibrated tiers", "tiers", table(head, rows, text_columns=2, note=lead))


def _factor(rms_log: float | None) -> float | None:
    return None if rms_log is None else math.exp(rms_log)


def _ends(judged: dict[str, Any]) -> list[str]:
    rows = judged["calibration"]
    return [
        f"{words.small(row['predicted'])} / {words.small(row['observed'])}"
        for row in (rows[0], rows[-1])
    ]


def rule_cards(frontiers: list[dict[str, Any]]) -> list[Html]:
    depth, gain = [], []
    budget = facts.headline_budget(frontiers[0])
    if budget is None:
        return []
    for f in frontiers:
        point = facts.at_budget(f, "kl", "replayed", budget)
        if point is None:
            depth.append((f["corpus"], "not met"))
            gain.append((f["corpus"], words.DASH))
            continue
        depth.append((f["corpus"], words.number(point["mean_depth"])))
        gain.append((f["corpus"], words.times(point["allocation_gain"])))
    name = policy_style("kl").label
    return [
        card(
            f"{name}: mean depth within {budget:g} nats",
            depth,
            f"replayed; 95% interval of the loss within {budget:g} nats of uniform depth "
            f"{frontiers[0]['max_depth']}",
        ),
        card(
            f"{name}: allocation gain there",
            gain,
            "uniform depth of the same loss over mean depth; 1 saves nothing",
        ),
    ]


def _frontier_table(f: dict[str, Any]) -> Html:
    """Uniform depth, the rules that were run live, and the oracles."""
    return _budget_table(f, leave_out=facts.minor_rules(f), note=_what_is_shown(f))


def _minor_table(f: dict[str, Any]) -> Html:
    """The rules that were judged by replay alone, folded away."""
    minor = facts.minor_rules(f)
    if not minor:
        return Html("")
    shown = [name for name in f["policies"] if name not in minor]
    names = ", ".join(policy_style(name).label for name in minor)
    return details(
        f"{f['corpus']}: rules judged by replay alone ({names})", _budget_table(f, shown)
    )


def _left_out(f: dict[str, Any]) -> Html:
    """Rules without a figure, and why; results of earlier versions name none."""
    why = [f"{policy_style(n).label}: {text}." for n, text in f.get("left_out", {}).items()]
    return paragraph(f"Left out on {f['corpus']}.", *why, css="note") if why else Html("")


def _budget_table(f: dict[str, Any], leave_out: list[str], note: str = "") -> Html:
    rows, last = [], None
    for policy, meaning, budget, p in facts.budget_rows(f):
        if policy in leave_out:
            continue
        head = ["" if budget == last else f"{budget:g}", policy_style(policy).label, meaning]
        last = budget
        if p is None:
            rows.append([*head, "not met", *[words.DASH] * 7])
            continue
        rows.append(
            [
                *head,
                words.number(p["mean_depth"]),
                words.number(p["p95_depth"], 0),
                f"{words.signed(p['delta_nats'])} "
                f"({words.interval(p['delta_low'], p['delta_high'], 4)})",
                words.percent(p["argmax_agreement"], 1),
                words.number(p["allocation_gain"]),
                words.percent(p["charged_share"]),
                words.times(p["cap"]),
                words.percent(facts.share_of_cap(p)),
            ]
        )
    head = [
        "budget, nats",
        "policy",
        "exits",
        "mean depth",
        "p95",
        "loss above full, nats (95%)",
        "argmax as full",
        "gain",
        "compute",
        "cap",
        "of cap",
    ]
    return table(head, rows, text_columns=3, note=note)


def _what_is_shown(f: dict[str, Any]) -> str:
    return (
        f"{f['corpus']}: the shallowest point whose 95% interval lies within the budget of uniform "
        f"depth {f['max_depth']}. Gain: uniform depth of the same loss over mean depth. Compute: "
        f"share of uniform depth {f['max_depth']}, a reading of the logits charged at "
        f"{words.number(f['check_in_recurrences'])} recurrences. Cap: the largest speed-up that "
        "mean depth allows, checks free."
    )


def _frontier_figures(f: dict[str, Any], draw: Draw) -> list[Html]:
    live = facts.live_tokens(f)
    bars = "Bars: paired 95% intervals by blocks of text; dotted lines: the budgets."
    hollow = f" Hollow: live exits, on {live:,} tokens." if live else ""
    hollow += " Thin: rules judged by replay alone." if facts.minor_rules(f) else ""
    corpus = f["corpus"]
    return [
        draw(
            f"frontier-depth-{corpus}",
            frontier_plots.by_mean_depth(f),
            f"Loss above uniform depth {f['max_depth']} against mean depth, over thresholds; lower "
            f"left is better, the grey line is one depth for all. {bars}{hollow}",
        ),
        draw(
            f"frontier-compute-{corpus}",
            frontier_plots.by_compute(f),
            "The same points against compute: coda and head are charged at each recurrence where a "
            f"rule reads logits. Cap: speed-up if checks were free. {bars}{hollow}",
        ),
        draw(
            f"allocation-gain-{corpus}",
            frontier_plots.allocation_gain(f),
            "Uniform depth of the same loss, linear between depths, over the rule's mean depth; "
            "above 1 depth per token wins. Bars: replayed gain at the ends of the loss's 95% "
            "interval. Near zero, differences within noise decide which depth has the same loss."
            f"{hollow}",
        ),
    ]
