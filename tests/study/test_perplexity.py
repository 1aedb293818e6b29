"""``loopwise eval perplexity``: text is read whole, and what a document is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopwise.models.checkpoint import save_checkpoint
from loopwise.study import perplexity_command
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


def test_long_text_is_not_cut_unless_asked(folder):
    text = folder / "long.txt"
    text.write_text("so it was " * 3000, encoding="utf-8")
    whole = perplexity(folder, text, "document")
    assert whole["tokens"] == 30_000
    cut = perplexity(folder, text, "document", max_document_chars=20_000)
    assert cut["by_depth"] != whole["by_depth"]
