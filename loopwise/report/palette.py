"""One colour per role, in a light and a dark shade; figures and page read the same table.

Policies use the shades of Okabe and Ito that stay apart for the colour-blind; markers differ too.
"""

from __future__ import annotations

from typing import NamedTuple


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
    "other": ("#7a6a10", "#d8c65a"),
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
    "latent-change": Style("latent change", SHADES["latent"][0], "s"),
    "probe": Style("A2 probe", SHADES["probe"][0], "^"),
    "oracle": Style("argmax oracle", SHADES["oracle"][0], "*", dashed=True),
    "oracle-kl": Style("KL oracle", SHADES["oracle-kl"][0], "D", dashed=True),
}


def policy_style(name: str) -> Style:
    """Look of a policy; one that is not in the table keeps its own name and a spare colour."""
    spare = Style(name, SHADES["other"][0], "v", dashed=name.startswith("oracle"))
    return _POLICIES.get(name, spare)


def in_order(names: list[str]) -> list[str]:
    """Policies in the order a reader meets them: A0, A1, others, oracles."""
    known = [n for n in _POLICIES if n in names and n != "fixed" and not n.startswith("oracle")]
    new = [n for n in names if n not in _POLICIES and not n.startswith("oracle")]
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
