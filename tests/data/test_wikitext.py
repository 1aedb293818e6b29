"""Articles of WikiText."""

from __future__ import annotations

from loopwise.data.wikitext import articles

TEXT = "\n = Tom = \n\n Tom sat . \n\n = = Early = = \n\n He sat = down . \n = A = B = \n\n 2 . \n"


def test_articles_begin_at_titles_and_not_at_sections():
    first, second = articles(TEXT.split("\n"))
    assert first.startswith("\n = Tom = ") and first.endswith("down . ")
    assert second.startswith(" = A = B = ")
    assert f"{first}\n{second}" == TEXT


def test_what_comes_before_a_title_is_an_article():
    assert list(articles(["so", " = T = ", "x"])) == ["so", " = T = \nx"]
