"""The sections of the stability page, in the order a reader asks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from loopwise.report import stability_maps, stability_tables, words
from loopwise.report.depth_sections import Draw
from loopwise.report.markup import (
    Html,
    details,
    element,
    facts_list,
    figures,
    join,
    paragraph,
    section,
)
from loopwise.report.stability_facts import TAIL_SHARE, Lab, Run
from loopwise.report.stability_plots import Quantity, against_index, against_loops, against_steps

_TAIL = f"the last {TAIL_SHARE:.0%} of the steps a run made"
_SEEDS = "Line: median over the seeds that got there; band: smallest to largest."
_CROSS = "A cross marks where a collapsed run stopped; × after a name: no seed survived."
_NO_LOG = paragraph("The logs of the cells hold no such measurement.", css="note")


def everything(lab: Lab, draw: Draw) -> list[Html]:
    """The body of the page."""
    return [
        heading(lab),
        what_was_run(lab),
        who_survived(lab, draw),
        loss_curves(lab, draw),
        gradient_norms(lab, draw),
        latent_norms(lab, draw),
        through_recurrences(lab, draw),
        layers(lab, draw),
        test_time(lab, draw),
        spectrum(lab, draw),
        section("Every number", "numbers", *stability_tables.everything(lab)),
    ]


def heading(lab: Lab) -> Html:
    kept = sum(run.survived for run in lab.runs)
    return join(
        (
            element("h1", "Stability of the loop"),
            paragraph(
                f"{', '.join(lab.variants)} at {_listed(lab.loops)} loops, {len(lab.runs)} "
                f"training runs: {kept} survived, {len(lab.runs) - kept} collapsed.",
                css="lead",
            ),
        )
    )


def what_was_run(lab: Lab) -> Html:
    model, grid = lab.results["settings"]["model"], lab.results["grid"]
    drawn = grid.get("random_depth", False)
    tokens = lab.steps * lab.tokens_per_step
    pairs = [
        ("Variants", ", ".join(lab.variants)),
        ("Loops K in training", _listed(lab.loops) + (" on average, drawn" if drawn else "")),
        ("Learning rates of matrices", _listed(lab.rates)),
        ("Seeds", f"{grid['seeds']}"),
        ("Steps of a run", f"{lab.steps:,}"),
        ("Tokens", f"{tokens:,} a run, {lab.tokens_per_step:,} a step"),
        ("Shape", ", ".join(f"{k} {model[k]}" for k in ("n_layers", "d_model") if k in model)),
        ("Text", ", ".join(lab.results["settings"].get("data", {}).get("sources", [])) or "–"),
        ("Unigram entropy of the text", f"{lab.floor:.3f} nats per token"),
        ("Made with", f"loopwise {lab.results.get('loopwise', words.DASH)}"),
    ]
    every = json.dumps({k: lab.results[k] for k in ("grid", "settings")}, indent=2)
    return section(
        "What was run",
        "run",
        facts_list(pairs),
        paragraph(element("b", "Collapse, as stated before the runs: "), rule_in_words(lab)),
        details("All settings", element("pre", every)),
    )


def rule_in_words(lab: Lab) -> str:
    rule, d_model = lab.rule, lab.results["settings"]["model"].get("d_model")
    norm = f", a norm of {rule.max_latent_rms * math.sqrt(d_model):,.0f}" if d_model else ""
    unable = ""
    if lab.steps <= max(rule.grace_steps, rule.window - 1):
        unable = " These runs are too short for the first clause to apply."
    return (
        f"after step {rule.grace_steps:,}, the mean loss of the last {rule.window} steps is not "
        f"below {rule.floor_share * lab.floor:.3f} nats ({rule.floor_share:g} {words.TIMES} the "
        "unigram entropy: what a model without context reaches); or, at any step, the latent's "
        f"root mean square per channel passes {rule.max_latent_rms:g}{norm}; or loss or gradient "
        f"is not finite. A collapsed run stops there.{unable}"
    )


def who_survived(lab: Lab, draw: Draw) -> Html:
    caption = (
        "Bold: seeds that survived. Beneath: mean held-out loss of those seeds at K loops, nats "
        "per token; × the step at which the others collapsed, median. The box is filled by the "
        "share that survived. Thick line: where the majority turns."
    )
    if len(lab.rates) > 1:
        made = [
            draw(f"verdict-{v}", stability_maps.verdicts_by_rate(lab, v), caption)
            for v in lab.variants
        ]
    else:
        made = [draw("verdict", stability_maps.verdicts_by_variant(lab, lab.main_rate), caption)]
    lines = [element("li", sentence) for sentence in _reach(lab)]
    return section("Who survived", "verdict", element("ul", *lines), figures(made))


def _reach(lab: Lab) -> Iterable[str]:
    """For each variant, the loops at which every seed survived."""
    for variant in lab.variants:
        parts = []
        for rate in lab.rates:
            groups = {k: lab.select(variant, k, rate) for k in lab.loops}
            safe = [k for k, runs in groups.items() if runs and all(r.survived for r in runs)]
            at = f" (lr {rate:g})" if len(lab.rates) > 1 else ""
            parts.append((f"K = {_listed(safe)}" if safe else "no K") + at)
        yield f"{variant}: every seed survived at {'; '.join(parts)}."


def loss_curves(lab: Lab, draw: Draw) -> Html:
    what = Quantity("Training loss", "loss (nats per token)", lambda run: run.loss, log=False)
    caption = (
        f"Training loss by step. {_SEEDS} {_means(lab)} {_CROSS} Losses far above the unigram "
        "entropy (dashed) are cut off."
    )
    return _panels(lab, draw, "Loss", "loss", [("loss", what, caption)])


def gradient_norms(lab: Lab, draw: Draw) -> Html:
    norm = Quantity("Gradient norm", "L2 norm of the gradient", lambda run: run.grad_norm)
    swing = Quantity("Gradient oscillation", "std of the norm", lab.oscillation)
    first = (
        f"Norm of the gradient of all parameters, before clipping. {_SEEDS} {_means(lab)} {_CROSS}"
    )
    second = (
        f"Oscillation: running standard deviation of the gradient norm over the last {lab.window} "
        f"steps. {_SEEDS} {_means(lab)} {_CROSS}"
    )
    kinds = [("gradient", norm, first), ("oscillation", swing, second)]
    return _panels(lab, draw, "Gradient norm and its oscillation", "gradient", kinds)


def latent_norms(lab: Lab, draw: Draw) -> Html:
    loops, parts = lab.loops[-1], []
    for rate in _rates(lab):
        groups = {v: lab.select(v, loops, rate) for v in lab.variants}
        limits = _limits(lab, groups.values())
        if limits is None:
            continue
        at = f" · lr {rate:g}" if len(lab.rates) > 1 else ""
        caption = (
            f"Norm of the latent after each recurrence, by step, at K = {loops}: L2 norm, mean "
            f"over tokens, geometric mean over the seeds still running. {_means(lab)} Colour is "
            "logarithmic and shared between variants. Vertical lines with a cross: collapses."
        )
        made = [
            draw(f"latent-{v}-lr{rate:g}", drawing, caption)
            for v, runs in groups.items()
            if (drawing := stability_maps.latent_map(lab, runs, f"{v} · K = {loops}{at}", limits))
        ]
        parts.append(_kept_short(lab, rate, figures(made)))
    what = Quantity("Growth of the latent", "norm at r = K / norm at r = 1", lambda run: run.growth)
    caption = (
        f"Latent norm after recurrence K over that after the first, mean over {_TAIL}. Marks: "
        "seeds, a cross for a collapsed one; line: median. Dashed: no growth."
    )
    grown = _by_rate(lab, draw, "growth", caption, lambda rate: against_loops(lab, rate, what))
    parts += [figures(grown)] if grown else []
    return section("Latent norm", "latent", *(parts or [_NO_LOG]))


def through_recurrences(lab: Lab, draw: Draw) -> Html:
    what = Quantity(
        "Gradient at each recurrence",
        "L2 norm of the gradient",
        lambda run: run.tail(run.latent_grad),
    )
    caption = (
        "Norm of the loss gradient with respect to the output of each recurrence, mean over "
        f"{_TAIL}. {_SEEDS} Dashed line, ×: no seed survived."
    )
    drawn = _index_panels(lab, draw, "recurrence-gradient", what, "recurrence r", caption)
    return section("Gradient through the recurrences", "recurrences", *drawn)


def layers(lab: Lab, draw: Draw) -> Html:
    parts: list[Html] = []
    kinds = (
        ("attention", "Attention gradient", lambda run: run.tail(run.attn)),
        ("mlp", "MLP gradient", lambda run: run.tail(run.mlp)),
    )
    for name, title, of in kinds:
        what = Quantity(title, "L2 norm of the gradient", of)
        caption = (
            f"Norm of the gradient of the {name if name != 'mlp' else 'MLP'} parameters of each "
            f"layer, mean over {_TAIL}. {_SEEDS} Dashed line, ×: no seed survived."
        )
        parts += _index_panels(lab, draw, f"layers-{name}", what, "layer of the core", caption)
    parts = [p for p in parts if p is not _NO_LOG] or [_NO_LOG]
    return section("Gradient norm by layer", "layers", *parts)


def test_time(lab: Lab, draw: Draw) -> Html:
    what = Quantity("Held-out loss", "loss (nats per token)", lambda r: r.loss_by_depth, log=False)
    caption = (
        "Held-out loss of the trained model at 1 to 2K loops; dotted: the loops of training. "
        f"{_SEEDS} Collapsed runs are not judged; losses above the unigram entropy are cut off."
    )
    drawn = _index_panels(lab, draw, "test-time", what, "loops at test time", caption, mark=True)
    if drawn == [_NO_LOG]:
        drawn = [paragraph("No run survived to be judged.", css="note")]
    return section("More or fewer loops at test time", "test-time", *drawn)


def spectrum(lab: Lab, draw: Draw) -> Html:
    made: list[Html] = []
    meanings = {
        "radius": "Spectral radius of the core's Jacobian at the latent after K loops, by power "
        "iteration: below 1 (dashed) small disturbances die out.",
        "norm": "Largest singular value of the same Jacobian: the most that one recurrence "
        "stretches a small disturbance.",
    }
    for key, meaning in meanings.items():
        what = Quantity(f"Spectral {key}", f"spectral {key}", partial(Run.spectrum, key=key))
        caption = f"{meaning} Marks: seeds that survived; line: median."
        plot = partial(against_loops, lab, what=what)
        made += _by_rate(lab, draw, f"spectral-{key}", caption, plot)
    empty = paragraph("No run survived to be measured.", css="note")
    return section("Spectrum of the trained core", "spectrum", figures(made) if made else empty)


def _panels(
    lab: Lab, draw: Draw, title: str, anchor: str, kinds: list[tuple[str, Quantity, str]]
) -> Html:
    """Figures by step: for each learning rate, a panel for each number of loops."""
    parts = []
    for rate in _rates(lab):
        made = [
            draw(f"{name}-k{loops}-lr{rate:g}", drawing, caption)
            for loops in lab.loops
            for name, what, caption in kinds
            if (drawing := against_steps(lab, loops, rate, what))
        ]
        if made:
            parts.append(_kept_short(lab, rate, figures(made)))
    return section(title, anchor, *(parts or [_NO_LOG]))


def _index_panels(
    lab: Lab, draw: Draw, name: str, what: Quantity, x: str, caption: str, mark: bool = False
) -> list[Html]:
    parts = []
    for rate in _rates(lab):
        made = [
            draw(f"{name}-k{k}-lr{rate:g}", drawing, caption)
            for k in lab.loops
            if (drawing := against_index(lab, k, rate, what, x, k if mark else None))
        ]
        if made:
            parts.append(_kept_short(lab, rate, figures(made)))
    return parts or [_NO_LOG]


def _by_rate(
    lab: Lab, draw: Draw, name: str, caption: str, plot: Callable[[float], Figure | None]
) -> list[Html]:
    """One figure for each learning rate."""
    made = [
        draw(f"{name}-lr{rate:g}", drawing, caption)
        for rate in _rates(lab)
        if (drawing := plot(rate))
    ]
    return made


def _kept_short(lab: Lab, rate: float, body: Html) -> Html:
    """The main learning rate in the open, the others folded away."""
    return body if rate == lab.main_rate else details(f"Learning rate {rate:g}", body)


def _rates(lab: Lab) -> list[float]:
    return [lab.main_rate, *(rate for rate in lab.rates if rate != lab.main_rate)]


def _limits(lab: Lab, groups: Iterable[list[Run]]) -> tuple[float, float] | None:
    tables = [stability_maps.log_latents(lab, runs) for runs in groups]
    logs = [table for table in tables if table is not None]
    if not logs:
        return None
    low = math.exp(min(float(np.nanmin(table)) for table in logs))
    high = math.exp(max(float(np.nanmax(table)) for table in logs))
    return low, max(high, low * 1.01)


def _means(lab: Lab) -> str:
    return f"Points are means of {lab.bin} steps." if lab.bin > 1 else "Every step is drawn."


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)
