"""A piece of the measured text, each token coloured by the depth at which it settled."""

from __future__ import annotations

from typing import Any

from loopwise.report import facts
from loopwise.report.markup import Html, element, join, place

_RGB = "226,94,18"
_OPACITY = 0.03, 0.72  # of the earliest and the latest; ink on it reads on light and on dark


def shades(results: facts.Results) -> str:
    """CSS classes ``d<depth>``, spread over the depths that occur in any passage."""
    depths = [t["depth"] for c in results["convergence"] for t in c.get("passage", [])]
    if not depths:
        return ""
    low, high = min(depths), max(depths)
    rules = []
    for depth in range(low, high + 1):
        part = (depth - low) / max(1, high - low)
        opacity = _OPACITY[0] + part * (_OPACITY[1] - _OPACITY[0])
        rules.append(f".d{depth}{{background:rgba({_RGB},{opacity:.2f})}}\n")
    return "".join(rules)


def coloured(convergence: dict[str, Any]) -> Html:
    """The passage and its key; nothing where the results hold no passage."""
    tokens, horizon = convergence.get("passage") or [], convergence["horizon"]
    if not tokens:
        return Html("")
    spans = "".join(_span(t["text"], t["depth"], horizon) for t in tokens)
    used = sorted({t["depth"] for t in tokens})
    keys = [
        element("span", f"r={d}" if d <= horizon else "still moving", css=_classes("", d, horizon))
        for d in used
    ]
    return join(
        (
            element("h3", convergence["corpus"]),
            element("div", "settled at ", *keys, css="key"),
            element("div", Html(spans), css="passage"),
        )
    )


def _span(text: str, depth: int, horizon: int) -> str:
    title = f"settled at r={depth}" if depth <= horizon else f"not settled within r={horizon}"
    shown = place(text) if text else "∎"  # the end of a document has no text
    return f'<span class="{_classes(text, depth, horizon)}" title="{title}">{shown}</span>'


def _classes(text: str, depth: int, horizon: int) -> str:
    extra = " newline" if "\n" in text else ""
    return f"d{depth}{extra}{' moving' if depth > horizon else ''}"
