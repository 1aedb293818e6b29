"""Sections on loss, convergence and settled depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from loopwise.report import facts, passage, plots, words
from loopwise.report.markup import Html, element, figures, paragraph, section, table

Draw = Callable[[str, Figure, str], Html]  # (file name, drawing, caption) -> figure on the page
Event = dict[str, Any]
Convergence = dict[str, Any]

_STRAGGLERS = 0.005  # share of tokens still moving at the horizon that is worth a sentence
_DEPTHS = (
    ("settled", "settled for good"),
    ("first_crossing", "first crossing"),
    ("argmax_final", "argmax is final"),
)


def loss(results: facts.Results, steps: list[Event], evals: list[Event], draw: Draw) -> Html:
    made = []
    cs = results["convergence"]
    if cs:
        caption = (
            "Mean next-token loss at every uniform depth above that of the best one, linear up to "
            f"{cs[0]['saturation']['within_nats']:g} nats and logarithmic beyond "
            f"({_tokens(cs)}). Rings: saturation depth, the first within "
            f"{cs[0]['saturation']['within_nats']:g} nats of the best."
        )
        made.append(draw("loss-by-depth", plots.loss_by_depth(cs), caption))
    referred = [c for c in cs if facts.reference_of(c)]
    if referred:
        caption = (
            "Bits per byte at every uniform depth, and of the reference at its own (dashed) on "
            f"the very same text, cut at the same places ({_tokens(referred)})."
        )
        made.append(draw("bits-by-depth", plots.bits_by_depth(referred), caption))
    if steps or evals:
        caption = (
            "Training loss of each step at the depth drawn for it, with a moving mean, and "
            "held-out loss at fixed depths r during training."
        )
        made.append(draw("training", plots.training_loss(steps, evals), caption))
    shown = [d for d in facts.SHOWN_DEPTHS if any(d <= c["horizon"] for c in cs)]
    rows = []
    for c in cs:
        losses, bits = c["loss_nats"], c["bits_per_byte"]
        cells = [_with_interval(losses, d) for d in shown]
        at = min(c["saturation"]["depth"], len(bits))
        rows.append([c["corpus"], *cells, words.number(bits[at - 1], 3)])
    head = ["corpus", *(f"r={d}" for d in shown), "bits per byte at saturation"]
    numbers = table(head, rows, note="Loss in nats per token, 95% interval beneath the mean.")
    return section("Loss by depth", "loss", figures(made), numbers, _beside_reference(referred))


def convergence(looped: list[Convergence], draw: Draw) -> Html:
    made = []
    for c in looped:
        how = f"{c['tokens']:,} tokens, horizon {c['horizon']}."
        made.append(
            draw(
                f"kl-{c['corpus']}",
                plots.kl_by_recurrence(c),
                "KL between a token's next-token distributions, to the previous recurrence and to "
                f"the last one. Solid: mean, dotted: median, band: 10 to 90% of tokens; {how}",
            )
        )
        made.append(
            draw(
                f"latent-{c['corpus']}",
                plots.latent_change(c),
                "Change of the latent in one recurrence and second difference, relative to its "
                f"norm. Solid: mean, dotted: median, band: 10 to 90% of tokens; {how}",
            )
        )
    rows = [
        [
            c["corpus"],
            _rate(c),
            "yes" if c["contraction"]["converges"] else "no",
            words.small(facts.at_depth(c["curves"]["kl_prev"]["mean"], 2)),
            words.small(facts.at_depth(c["curves"]["kl_prev"]["mean"], 8)),
            words.small(facts.at_depth(c["curves"]["kl_prev"]["mean"], 16)),
        ]
        for c in looped
    ]
    head = ["corpus", "contraction per recurrence", "converges", "KL at 2", "at 8", "at 16"]
    caption = (
        "Contraction: geometric mean of the ratios of successive median latent changes from "
        "recurrence 3 on, while the change is above rounding. KL in nats, to the previous."
    )
    numbers = table(head, rows, note=caption)
    stragglers = paragraph(*(_stragglers(c) for c in looped))
    return section("Convergence", "convergence", figures(made), numbers, stragglers)


def settled(looped: list[Convergence], draw: Draw) -> Html:
    made = [
        draw(
            f"settled-{c['corpus']}",
            plots.settled_distribution(c),
            f"Share of {c['tokens']:,} tokens. Settled: KL to the previous recurrence stays at or "
            f"below {c['epsilon']:g} nats up to recurrence {c['horizon']}; first crossing: is so "
            f"once; argmax is final: its most likely token is the one at {c['horizon']} from there "
            "on. The last group did not settle.",
        )
        for c in looped
    ]
    rows = []
    for c in looped:
        for key, name in _DEPTHS:
            d = c[key]
            rows.append(
                [
                    c["corpus"],
                    name,
                    words.number(d["mean"]),
                    words.depth(d["median"]),
                    words.depth(d["p90"]),
                    words.percent(d["unsettled_share"], 1),
                ]
            )
        rows.append(
            [
                c["corpus"],
                "still moving at the training mean",
                *[""] * 3,
                words.percent(c["moving_at_training_mean"], 1),
            ]
        )
    head = ["corpus", "criterion", "mean", "median", "90% of tokens by", "share unsettled"]
    return section("Settled depth", "settled", figures(made), table(head, rows, text_columns=2))


def types(looped: list[Convergence], draw: Draw) -> Html:
    drawing = plots.token_types(looped)
    if drawing is None:
        return Html("")
    caption = (
        "Mean settled depth of the position that predicts a token of each kind, shallowest on top, "
        f"with 95% intervals by blocks (epsilon {looped[0]['epsilon']:g} nats, {_tokens(looped)}). "
        "Kinds with fewer than 30 tokens are left out; unsettled tokens count as horizon + 1."
    )
    return section("Token types", "types", figures([draw("token-types", drawing, caption)]))


def text(looped: list[Convergence]) -> Html:
    made = [passage.coloured(c) for c in looped]
    if not any(made):
        return Html("")
    lead = (
        "The start of the measured text; the stronger its colour, the later the prediction of a "
        f"token settled (epsilon {looped[0]['epsilon']:g} nats, horizon {looped[0]['horizon']})."
    )
    return section("A passage by settled depth", "passage", paragraph(lead), *made)


def hops(looped: list[Convergence], draw: Draw) -> Html:
    made, rows = [], []
    for c in (c for c in looped if c["hops"]):
        n = sum(row["tokens"] for row in c["hops"])
        made.append(
            draw(
                f"hops-depth-{c['corpus']}",
                plots.hops_depth(c),
                "Circles: mean settled depth of answer tokens with 95% intervals (epsilon "
                f"{c['epsilon']:g} nats). Triangles: loss at depth 1 minus the lowest loss of any "
                f"uniform depth; {n:,} answer tokens.",
            )
        )
        made.append(
            draw(
                f"hops-accuracy-{c['corpus']}",
                plots.hops_accuracy(c),
                "Share of answer tokens whose most likely token is right, at every uniform depth; "
                f"{n:,} answer tokens.",
            )
        )
        for row in c["hops"]:
            d, accuracy = row["settled_depth"], row["accuracy_by_depth"]
            rows.append(
                [
                    c["corpus"],
                    str(row["hops"]),
                    f"{row['tokens']:,}",
                    f"{words.number(d['mean'])} ({words.interval(d['low'], d['high'])})",
                    words.number(row["depth_gain_nats"], 3),
                    words.percent(accuracy[0], 1),
                    words.percent(max(accuracy), 1),
                ]
            )
    note = "Answers are grouped by the look-ups they need; groups under 30 tokens are left out."
    head = [
        "corpus",
        "hops",
        "answer tokens",
        "mean settled depth (95%)",
        "worth of depth, nats",
        "right at r=1",
        "right at the best depth",
    ]
    return section("Depth against difficulty", "hops", figures(made), table(head, rows, note=note))


def loss_optimal(looped: list[Convergence]) -> Html:
    rows = []
    for c in looped:
        best = c["loss_optimal"]
        over = best["over_null_nats"]
        rows.append(
            [
                c["corpus"],
                words.number(best["mean_depth"]),
                words.number(best["headroom_nats"], 4),
                words.number(best["null_headroom_nats"], 4),
                f"{words.signed(over['mean'])} ({words.interval(over['low'], over['high'], 4)})",
                _against_null(over),
            ]
        )
    head = [
        "corpus",
        "mean loss-optimal depth",
        "headroom, nats",
        "null, nats",
        "above the null (95%)",
        "reading",
    ]
    lead = (
        "The depth with the lowest loss on the true next token is not where a token settles. An "
        "oracle that picks it gains over the best uniform depth even in pure noise, so its "
        "headroom stands beside a null: each true next token exchanged for a draw from the model's "
        "own last distribution, so that what remains is chance."
    )
    return section("Loss-optimal depth", "loss-optimal", paragraph(lead), table(head, rows))


def _beside_reference(cs: list[Convergence]) -> Html:
    """Both models in the unit they share; nothing where no reference was measured."""
    if not cs:
        return Html("")
    rows = []
    for c in cs:
        found = c["reference"]
        theirs = f"{found['name']} ({words.count(found['parameters'])} parameters)"
        rows += [
            [c["corpus"], theirs, str(found["depth"]), _spread(found["bits_per_byte"])],
            [
                c["corpus"],
                "this model, best depth",
                str(found["best_depth"]),
                _spread(found["best_bits_per_byte"]),
            ],
            [c["corpus"], "difference", "", _spread(found["above_bits_per_byte"], sign=True)],
        ]
    start = cs[0]["reference"]["start_token"]
    note = (
        "The reference, whatever its tokenizer, reads the same bytes cut at the same places; a "
        f"document begins with its own start token ({start}), and ends of documents count on "
        "neither side. 95% intervals by blocks, of the difference paired."
    )
    head = ["corpus", "model", "recurrences", "bits per byte (95%)"]
    return table(head, rows, text_columns=2, note=note)


def _spread(found: dict[str, float], *, sign: bool = False) -> str:
    mean = words.signed(found["mean"], 3) if sign else words.number(found["mean"], 3)
    return f"{mean} ({words.interval(found['low'], found['high'], 3)})"


def _against_null(over: dict[str, float]) -> str:
    if over["low"] > 0:
        return "above chance"
    return "below the null" if over["high"] < 0 else "no more than chance"


def _rate(c: Convergence) -> str:
    found = c["contraction"]
    return "arrives at once" if found.get("arrives_at_once") else words.number(found["rate"], 3)


def _stragglers(c: Convergence) -> str:
    """Says so where some tokens keep moving after most have stopped."""
    found = c["contraction"]
    if found["moving_share"] < _STRAGGLERS:
        return ""
    return (
        f"On {c['corpus']}, {words.percent(found['moving_share'], 1)} of tokens still change their "
        f"latent by more than {words.percent(found['moving_change'])} at recurrence {c['horizon']}."
    )


def _tokens(cs: list[Convergence]) -> str:
    return ", ".join(f"{c['corpus']}: {c['tokens']:,} tokens" for c in cs)


def _with_interval(losses: dict[str, list[float]], depth: int) -> Html:
    if depth > len(losses["mean"]):
        return Html(words.DASH)
    i = depth - 1
    spread = words.interval(losses["low"][i], losses["high"][i], 3)
    return Html(f"{words.number(losses['mean'][i], 3)}<br>{element('span', spread, css='note')}")
