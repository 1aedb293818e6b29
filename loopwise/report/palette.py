"""One colour per role, in a light and a dark shade; figures and page read the same table.

Policies use the shades of Okabe and Ito that stay apart for the colour-blind; markers differ too.
A rule of the EXITS table that has no look of its own here gets a spare one by its place in it.
"""

from __future__ import annotations

from typing import NamedTuple

from loopwise.exits import EXITS


class Style(NamedTuple):
    """How a policy looks in every figure."""

    label: str
    colour: str  # hex of the light shade
    marker: str
    dashed: bool = False


# role: (light, dark); the light shades are all different, so a drawing can be re-themed by them
SHADES = {
    "surface": ("#fefefe", "#14181d"),
    "panel": ("#f4f6f8", "#1c2229"),
    "ink": ("#1c2128", "#e4e8ed"),
    "muted": ("#58626f", "#a3adb9"),
    "grid": ("#dde2e8", "#323a44"),
    "fixed": ("#454c55", "#c6ced8"),
    "kl": ("#0b62ad", "#62b0f2"),
    "probe": ("#c4500b", "#f79a5e"),
    "latent": ("#00795c", "#3fc79f"),
    "oracle": ("#7d45a8", "#c79bea"),
    "oracle-kl": ("#b0336f", "#ee8db8"),
    "latent-kl": ("#8f5f00", "#edb93f"),
    "other": ("#7a6a10", "#d8c65a"),
    "spare-1": ("#4a6f96", "#93b8de"),
    "spare-2": ("#5d7440", "#a9c48a"),
    "spare-3": ("#8a5a52", "#d3a59c"),
    "spare-4": ("#66609a", "#b3aee3"),
    "spare-5": ("#3d7679", "#8cc3c6"),
    "spare-6": ("#875a80", "#d0a5c9"),
    "spare-7": ("#6b6b5a", "#b9b9a5"),
    "spare-8": ("#2f6b8a", "#86bfdd"),
    "spare-9": ("#9a5b2f", "#dba87f"),
    "spare-10": ("#4b7a5a", "#9accaa"),
    "spare-11": ("#7d4f66", "#c99bb2"),
    "spare-12": ("#5b5f2e", "#c2c78a"),
    "corpus-1": ("#2f4694", "#93a9f5"),
    "corpus-2": ("#a86a09", "#e7b254"),
    "corpus-3": ("#1f7572", "#6cc9c4"),
    "corpus-4": ("#8c2d5c", "#e58fb9"),
}

INK, MUTED, GRID, SURFACE = (SHADES[role][0] for role in ("ink", "muted", "grid", "surface"))
CORPUS_COLOURS = [SHADES[f"corpus-{i}"][0] for i in range(1, 5)]

_POLICIES = {
    "fixed": Style("A0 uniform", SHADES["fixed"][0], "."),
    "kl": Style("A1 KL", SHADES["kl"][0], "o"),
    "latent-kl": Style("latent KL", SHADES["latent-kl"][0], "P"),
    "latent-change": Style("latent change", SHADES["latent"][0], "s"),
    "probe": Style("A2 probe", SHADES["probe"][0], "^"),
    "oracle": Style("argmax oracle", SHADES["oracle"][0], "*", dashed=True),
    "oracle-kl": Style("KL oracle", SHADES["oracle-kl"][0], "D", dashed=True),
}


_PLAIN = [name for name in EXITS if name not in _POLICIES]  # they keep the table's name
_SPARE_COLOURS = [pair[0] for role, pair in SHADES.items() if role.startswith("spare-")]
_SPARE_MARKERS = "v<>phdX8+x12"


def policy_style(name: str) -> Style:
    """Look of a policy; one that has none of its own keeps its name and gets a spare look.

    Spare looks of rules of the table differ; one of results from elsewhere may meet its twin.
    """
    if name in _POLICIES:
        return _POLICIES[name]
    i = _PLAIN.index(name) if name in _PLAIN else len(_PLAIN) + len(name)
    colour = _SPARE_COLOURS[i % len(_SPARE_COLOURS)]
    marker = _SPARE_MARKERS[i % len(_SPARE_MARKERS)]
    return Style(name, colour, marker, dashed=name.startswith("oracle"))


def in_order(names: list[str]) -> list[str]:
    """Policies in the order a reader meets them: A0, A1, those with a look, others, oracles."""
    order = [*_POLICIES, *_PLAIN]
    known = [n for n in order if n in names and n != "fixed" and not n.startswith("oracle")]
    new = [n for n in names if n not in order and not n.startswith("oracle")]
    bounds = [n for n in names if n.startswith("oracle")]
    return [n for n in names if n == "fixed"] + known + new + bounds


def css_variables() -> str:
    """The table as custom properties, light first, dark where the reader's system asks for it."""

    def block(shade: int) -> str:
        return "".join(f"--{role}:{pair[shade]};" for role, pair in SHADES.items())

    return f":root{{{block(0)}}}\n@media (prefers-color-scheme: dark){{:root{{{block(1)}}}}}\n"


def follow_theme(svg: str) -> str:
    """Replace the light shades in a drawing by the page's custom properties."""
    for role, (light, _) in SHADES.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg
