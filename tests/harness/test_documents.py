"""Local files as data sets: what is read, and how what is missing is named."""

from __future__ import annotations

import pytest

from loopwise.errors import DataError
from loopwise.harness.documents import find_file, load_pages, load_rows
from tests.harness.cases import ROWS, write_local

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path):
    return write_local(tmp_path / "data")


def test_rows_come_back_as_they_are_plain_or_compressed(folder):
    for name in ("piqa-valid", "arc-easy-test", "arc-challenge-test"):
        found = load_rows(folder=str(folder), file=name, fields=[])["test"]
        assert list(found) == ROWS[name]
    endings = {path.suffix for path in folder.iterdir()}
    assert endings >= {".jsonl", ".gz", ".xz"}


def test_rows_take_the_hubs_shape(folder):
    cooking = load_rows(
        folder=str(folder), file="hellaswag-valid-1000", fields=["gold"], shape="hellaswag"
    )
    assert cooking["test"][1]["label"] == "1"
    sums = load_rows(folder=str(folder), file="gsm8k-test", fields=["answer"], shape="gsm8k")
    assert sums["test"][3]["answer"].endswith("<<3+2=5>>5.\n#### 5")
    assert sums["test"][3]["question"].startswith("Ann has 3 eggs")


def test_only_the_rows_that_are_asked_for(folder):
    wh = load_rows(folder=str(folder), file="blimp", fields=[], only={"UID": "wh_island"})
    assert [row["sentence_good"] for row in wh["test"]] == [f"The {n} dogs bark." for n in range(3)]
    with pytest.raises(DataError, match="no rows with UID='passive_1'"):
        load_rows(folder=str(folder), file="blimp", fields=[], only={"UID": "passive_1"})


def test_a_changed_file_is_read_again(folder):
    path = folder / "piqa-valid.jsonl"
    assert len(load_rows(folder=str(folder), file="piqa-valid", fields=[])["test"]) == 6
    path.write_text('{"goal": "new"}\n')
    assert list(load_rows(folder=str(folder), file="piqa-valid", fields=[])["test"]) == [
        {"goal": "new"}
    ]


def test_the_first_name_that_exists_is_taken(folder):
    assert find_file(folder, ["piqa", "piqa-valid"], ".jsonl").name == "piqa-valid.jsonl"


def test_what_lacks_is_named(folder):
    with pytest.raises(DataError, match="no folder '.*nowhere' of task data"):
        find_file(folder / "nowhere", "piqa-valid", ".jsonl")
    with pytest.raises(DataError, match="no sciq-test.jsonl or sciq.jsonl"):
        find_file(folder, ["sciq-test", "sciq"], ".jsonl")
    (folder / "piqa-valid.jsonl").write_text('{"goal": "a"}\n\n{"gaol": "b"}\n')
    with pytest.raises(DataError, match="line 3 has no field 'goal' .it has gaol"):
        load_rows(folder=str(folder), file="piqa-valid", fields=["goal"])
    (folder / "piqa-valid.jsonl").write_text("{}\nnot json\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        load_rows(folder=str(folder), file="piqa-valid", fields=[])


def test_articles_are_cut_at_their_titles_and_not_at_sections(folder):
    pages = [row["page"] for row in load_pages(folder=str(folder), file="wikitext2-test")["test"]]
    assert len(pages) == 2
    assert pages[0].strip().startswith("= Ann Lee =") and " = = Life = = " in pages[0]
    assert pages[1].strip().startswith("= Bob =")
    text = (folder / "wikitext2-test.txt").read_text()
    assert "\n".join(pages) == text.removesuffix("\n")
