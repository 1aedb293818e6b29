"""Text to calibrate on: training text is known by parts of it, wherever the checkpoint has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwise.calibrate.options import CalibrateOptions
from loopwise.calibrate.texts import FreshText, read_fresh_text
from loopwise.data import Document, generate
from loopwise.data.reading import ReadReport
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.errors import DataError
from loopwise.models.checkpoint import Checkpoint
from loopwise.study.texts import Texts
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model


def documents(first: int, count: int) -> list[Document]:
    return generate("stories", 0, first, count)


def alone(folder: Path, trained: list[Document]) -> Checkpoint:
    """A checkpoint with no run beside it."""
    training = {TRAINED_ON: DocumentSketch.of(trained).to_json()}
    return Checkpoint(folder / "model", make_model(), ByteTokenizer(), training)


def read(
    checkpoint: Checkpoint, given: list[Document], folder: Path, **options: Any
) -> tuple[FreshText, list[str]]:
    """What is left of the text, and the warnings."""
    file, said = folder / "given.txt", []
    file.write_text("\n<|endoftext|>\n".join(d.text.strip() for d in given), encoding="utf-8")

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            said.append(event["text"])

    asked = CalibrateOptions(**options)
    return read_fresh_text(checkpoint, [str(file)], asked, {}, emit), said


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Trained on 300 documents, of which its sketch keeps 60."""
    monkeypatch.setattr("loopwise.data.sketch.SIZE", 60)
    return alone(tmp_path, read_back(documents(0, 300)))


def read_back(of: list[Document]) -> list[Document]:
    """As reading a file leaves them."""
    return [Document(d.text.strip()) for d in of]


def test_the_first_stories_of_a_training_file_are_refused(many, tmp_path):
    """It was without a word: only the whole file was known."""
    with pytest.raises(DataError) as refused:
        read(many, documents(0, 100), tmp_path)
    words = str(refused.value).split()
    assert words[:5] == ["the", "model", "was", "trained", "on"]
    assert words[5] == words[8], "all that can be told"
    assert "among these 100 documents that can be told, so on about 100% of all" in str(refused)
    assert "--allow-training-data" in str(refused.value)


def test_some_training_documents_among_others_are_refused_with_their_share(many, tmp_path):
    """Those that are found could be left out, but as many again would stay."""
    with pytest.raises(DataError, match=r"so on about (1\d|2\d|3\d)% of all"):
        read(many, documents(250, 250), tmp_path)


def test_other_text_is_taken_without_a_word(many, tmp_path):
    text, said = read(many, documents(300, 300), tmp_path)
    assert len(text.documents) == 300 and not said and not text.left_out


def test_it_can_be_insisted_on(many, tmp_path):
    text, _ = read(many, documents(0, 100), tmp_path, allow_training_data=True)
    assert len(text.documents) == 100


def test_a_few_are_left_out_where_all_are_known(tmp_path):
    checkpoint = alone(tmp_path, read_back(documents(0, 40)))
    text, said = read(checkpoint, documents(35, 100), tmp_path)
    assert len(text.documents) == 95 and text.left_out == {"trained on": 5}
    assert said == ["of 100 documents are left out: 5 trained on"]
    with pytest.raises(DataError, match="trained on 20 of these 100 documents; .*insist"):
        read(checkpoint, documents(20, 100), tmp_path)


def test_a_checkpoint_that_does_not_tell_is_taken_with_a_warning(tmp_path):
    checkpoint = Checkpoint(tmp_path / "model", make_model(), ByteTokenizer(), {})
    text, said = read(checkpoint, documents(0, 20), tmp_path)
    assert len(text.documents) == 20
    assert said == [
        "this checkpoint does not say what it was trained on; that the text is new to it is taken "
        "on trust"
    ]


def test_what_a_run_held_out_is_compared_with_all_it_learned_from(many, tmp_path, monkeypatch):
    """Its text is read anyway: few shared documents are left out, however many it learned from."""

    def held_out(first: int, count: int) -> int:
        aside = {"stories": read_back(documents(first, count))}
        texts = Texts(read_back(documents(100, 200)), aside, ReadReport(), 0)
        monkeypatch.setattr("loopwise.calibrate.texts._run_settings", lambda _: {})
        monkeypatch.setattr("loopwise.calibrate.texts._run_text", lambda *_: texts)
        options = CalibrateOptions()
        return len(read_fresh_text(many, None, options, {}, lambda _: None).documents)

    assert held_out(290, 110) == 100
    with pytest.raises(DataError, match="so on about .*% of all"):
        held_out(0, 100)  # learned from before this run, as the sketch alone tells
