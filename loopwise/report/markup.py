"""The few HTML pieces the page is made of; everything that goes in as text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup that is already safe; plain strings are escaped where they are placed."""

    __slots__ = ()


def place(content: str) -> str:
    return content if isinstance(content, Html) else escape(content, quote=False)


def join(parts: Iterable[str]) -> Html:
    return Html("\n".join(place(p) for p in parts))


def element(tag: str, *content: str, css: str = "") -> Html:
    attribute = f' class="{escape(css, quote=True)}"' if css else ""
    return Html(f"<{tag}{attribute}>{''.join(place(c) for c in content)}</{tag}>")


def section(title: str, anchor: str, *content: str) -> Html:
    body = join((element("h2", title), *content))
    return Html(f'<section id="{escape(anchor, quote=True)}">\n{body}\n</section>')


def paragraph(*sentences: str, css: str = "") -> Html:
    return element("p", Html(" ".join(place(s) for s in sentences if s)), css=css)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, note: str = ""
) -> Html:
    """A table that scrolls sideways in its own box.

    Args:
        text_columns: so many columns from the left are words, the rest numbers.
        note: what the columns mean, above the table.
    """

    def cells(tag: str, values: Sequence[str]) -> Html:
        made = [
            element(tag, v, css="" if i < text_columns else "num") for i, v in enumerate(values)
        ]
        return element("tr", *made)

    parts = [element("thead", cells("th", head)), element("tbody", *(cells("td", r) for r in rows))]
    box = element("div", element("table", *parts), css="scroll")
    return join((paragraph(note, css="note"), box)) if note else box


def figure(svg: Html, caption: str) -> Html:
    return element("figure", svg, element("figcaption", caption))


def figures(made: Sequence[Html]) -> Html:
    return element("div", *made, css="figures") if made else Html("")


def facts_list(pairs: Sequence[tuple[str, str]]) -> Html:
    inner = [element("div", element("dt", k), element("dd", v)) for k, v in pairs]
    return element("dl", *inner, css="facts")


def card(title: str, rows: Sequence[tuple[str, str]], remark: str) -> Html:
    """One headline figure, for each corpus."""
    lines = [
        element("div", element("b", value), element("span", name), css="row")
        for name, value in rows
    ]
    return element("div", element("h3", title), *lines, element("p", remark), css="card")


def details(summary: str, content: str) -> Html:
    return element("details", element("summary", summary), content)
