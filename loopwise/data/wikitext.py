"""Articles of a text in WikiText's layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_TITLE = re.compile(r" ?= [^=](.*[^=])? = ?")  # of an article; sections have more signs


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Lines from one title to the next, joined; what comes before the first is one as well."""
    article: list[str] = []
    for line in lines:
        if is_title(line) and "".join(article).strip():
            yield "\n".join(article)
            article = []
        article.append(line)
    if "".join(article).strip():
        yield "\n".join(article)


def begins_with_title(text: str) -> bool:
    """Whether the first line that is not blank is a title."""
    return is_title(next((line for line in text.split("\n") if line.strip()), ""))


def is_title(line: str) -> bool:
    return _TITLE.fullmatch(line.rstrip()) is not None
