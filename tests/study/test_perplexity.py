"""``loopwise eval perplexity``: text is read whole, and what a document is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopwise.data import Document
from loopwise.models.checkpoint import save_checkpoint
from loopwise.study import perplexity_command
from loopwise.study.commands import _articles
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

ARTICLES = ["\n = Tom = \n\n Tom sat . \n\n = = Early = = \n", "\n = Ann = \n\n She had 2 . "]


@pytest.fixture
def folder(tmp_path) -> Path:
    save_checkpoint(tmp_path / "ckpt", make_model(n_core_layers=1), ByteTokenizer(), {"seq": 48})
    return tmp_path


def perplexity(folder: Path, text: Path, protocol: Any, **data: Any) -> dict[str, Any]:
    asked = {"data": {"read": data}}
    (found,) = perplexity_command(
        folder / "ckpt", [str(text)], protocol, [2], 64, None, asked, lambda _: None
    ).values()
    return found


def test_an_article_of_wikitext_is_a_document_however_it_comes(folder):
    whole, rows, lines = folder / "w.txt", folder / "w.jsonl", folder / "lines.jsonl"
    text = "\n".join(ARTICLES)
    whole.write_text(text, encoding="utf-8")
    rows.write_text("".join(json.dumps({"text": a}) + "\n" for a in ARTICLES), encoding="utf-8")
    of_line = [json.dumps({"text": x}) + "\n" for x in text.split("\n") if x.strip()]
    lines.write_text("".join(of_line), encoding="utf-8")
    one = perplexity(folder, whole, "document")
    assert one["tokens"] == sum(len(a.encode()) for a in ARTICLES)
    assert perplexity(folder, rows, "document") == one
    by_line = perplexity(folder, lines, "document")  # blank lines are not rows
    assert by_line["tokens"] == sum(len(x.encode()) + 1 for x in text.split("\n") if x.strip()) - 2


def test_rows_that_keep_the_end_of_their_line_are_lines(folder):
    """The hub's WikiText has such rows; every line of it was followed by a blank one."""
    lines = [line for line in "\n".join(ARTICLES).split("\n") if line.strip()]
    bare, ended = folder / "bare.jsonl", folder / "ended.jsonl"
    bare.write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    ended.write_text("".join(json.dumps({"text": x + "\n"}) + "\n" for x in lines))
    assert perplexity(folder, ended, "document") == perplexity(folder, bare, "document")


def test_documents_that_are_not_wikitext_stay_apart(folder):
    """All of them were one article when the first began like one."""
    kept = [Document(" = Notes = \n\nOne. \n"), Document("Two.\nThree.\n"), Document("Four.\n")]
    assert _articles(kept) == kept
    assert _articles(kept[1:]) == kept[1:]
    assert _articles(kept[:1]) == kept[:1], "one that is an article stays as it is, to the last end"


def test_long_text_is_not_cut_unless_asked(folder):
    text = folder / "long.txt"
    text.write_text("so it was " * 3000, encoding="utf-8")
    whole = perplexity(folder, text, "document")
    assert whole["tokens"] == 30_000
    cut = perplexity(folder, text, "document", max_document_chars=20_000)
    assert cut["by_depth"] != whole["by_depth"]
