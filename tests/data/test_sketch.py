"""Which documents a model was trained on: exact for few of them, a fair sample for many."""

from __future__ import annotations

import base64

import pytest

from loopwise.data import Document, document_hash
from loopwise.data.sketch import SIZE, TRAINED_ON, DocumentSketch
from loopwise.errors import DataError


def documents(first: int, count: int) -> list[Document]:
    return [Document(f"story {i}") for i in range(first, first + count)]


def hashes(of: list[Document]) -> set[str]:
    return {document_hash(d) for d in of}


def test_few_documents_are_all_known():
    sketch = DocumentSketch.of(documents(0, SIZE - 1))
    assert sketch.whole
    told, known = sketch.compare(documents(SIZE - 10, 30))
    assert told == 30
    assert known == hashes(documents(SIZE - 10, 9))


def test_of_many_documents_a_fair_sample_is_known_and_nothing_else():
    trained = documents(0, 4 * SIZE)
    sketch = DocumentSketch.of(trained)
    assert not sketch.whole and len(sketch.smallest) == SIZE
    told, known = sketch.compare(trained)
    assert told == len(known) == SIZE, "up to the largest hash kept, all of them"
    told, known = sketch.compare(documents(4 * SIZE, 2000))
    assert not known
    assert told == pytest.approx(500, rel=0.2), "a quarter of other text can be told too"
    told, known = sketch.compare(documents(4 * SIZE - 1000, 4000))
    assert len(known) / told == pytest.approx(0.25, abs=0.05)
    assert known < hashes(trained)


@pytest.mark.parametrize("counts", [(10, 20), (SIZE - 1, SIZE - 1), (3 * SIZE, 50), (50, 3 * SIZE)])
def test_two_sketches_together_are_that_of_both_texts(counts):
    one, other = documents(0, counts[0]), documents(counts[0] - 5, counts[1])
    both = DocumentSketch.of(one) | DocumentSketch.of(other)
    assert both.to_json() == DocumentSketch.of([*other, *one]).to_json()


def test_repeated_documents_count_once():
    twice = DocumentSketch.of([*documents(0, 9), *documents(0, 9)])
    assert len(twice.smallest) == 9
    assert twice.compare(documents(0, 9) * 2)[0] == 9


def test_it_survives_training_json_and_damage_is_refused():
    sketch = DocumentSketch.of(documents(0, 100))
    again = DocumentSketch.of_training({TRAINED_ON: sketch.to_json()})
    assert again is not None and again.compare(documents(90, 30)) == sketch.compare(
        documents(90, 30)
    )
    assert DocumentSketch.of_training({"data": {}}) is None
    backwards = base64.b64encode(base64.b64decode(sketch.to_json())[::-1]).decode()
    too_many = base64.b64encode(b"".join(i.to_bytes(8, "little") for i in range(SIZE + 1))).decode()
    for damage in (sketch.to_json()[:-9], "?", 7, None, backwards, too_many):
        with pytest.raises(DataError, match="'trained_on' in training.json is no sketch"):
            DocumentSketch.of_training({TRAINED_ON: damage})
