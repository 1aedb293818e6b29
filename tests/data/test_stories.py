"""The built-in corpus: repeatable, and every answer needs exactly the hops it claims."""

import re
from collections import Counter

import pytest

from loopwise.data.stories import CORPORA, MAX_HOPS, Puzzle, compose, generate
from loopwise.errors import DataError

EACH = pytest.mark.parametrize("corpus", CORPORA)


def solve(puzzle: Puzzle) -> tuple[str, int]:
    """Answer and hops from the told facts and the start of the question alone."""
    links = {fact.subject: fact for fact in puzzle.told}
    assert len(links) == len(puzzle.told), "every thing has one link"
    at, hops, change = puzzle.asked.facts[0].subject, 0, 0
    while at in links:
        change += links[at].change
        at, hops = links[at].object, hops + 1
    return (str(int(at) + change) if at.isdigit() else at), hops


@EACH
def test_a_document_depends_on_corpus_seed_and_number_alone(corpus: str) -> None:
    documents = list(generate(corpus, 7, 0, 20))
    assert list(generate(corpus, 7, 5, 3)) == documents[5:8]
    assert [d.text for d in generate(corpus, 8, 0, 20)] != [d.text for d in documents]
    assert len({document.text for document in generate(corpus, 7, 0, 500)}) == 500


@EACH
def test_annotated_answers_are_the_ones_the_facts_entail(corpus: str) -> None:
    seen: Counter[int] = Counter()
    for index in range(300):
        document, puzzles = compose(corpus, 0, index)
        assert len(puzzles) == len(document.hops) >= 1
        for (start, end, hops), puzzle in zip(document.hops, puzzles, strict=True):
            assert solve(puzzle) == (document.text[start:end], hops)
            before = document.text[:start]
            assert all(fact.text in before for fact in puzzle.told), "facts come first"
            for fact in puzzle.told:
                for end_of_link in (fact.subject, fact.object):
                    name = re.sub(r"(?<=.) \d+$", "", end_of_link)  # "apples 2" is a running count
                    assert name.lower() in fact.text.lower()
            seen[hops] += 1
    assert set(seen) == set(range(1, MAX_HOPS + 1))
    assert min(seen.values()) > 20


def test_a_reader_of_the_text_alone_finds_the_answers_of_a_ledger() -> None:
    """A second solver that knows only the printed lines of the registers."""
    checked: Counter[int] = Counter()
    for index in range(200):
        document, _ = compose("ledgers", 3, index)
        for section in document.text.split("\n\n"):
            asked = re.search(r"(?:place|keeper|colour) of (\w+)\W+(?:A: )?(\w+)", section)
            if not asked:
                continue
            line = (
                r"^(?:\W*\d+[./)] ?|#\d+ |[-*] )?\W*(\w+)(?: -> | > | \| |: |,| = )(\w+)(?: \|)?$"
            )
            links = dict(re.findall(line, section, flags=re.MULTILINE))
            at, hops = asked[1], 0
            while at in links:
                at, hops = links[at], hops + 1
            assert at == asked[2], section
            checked[hops] += 1
    assert set(checked) >= set(range(1, MAX_HOPS + 1))


def test_all_chains_of_look_ups_are_asked_about() -> None:
    for index in range(100):
        document, puzzles = compose("lookups", 5, index)
        facts, questions = document.text.split("\n"), [p.asked.question for p in puzzles]
        assert len(puzzles[0].told) == sum(p.hops for p in puzzles)
        assert len(set(questions)) == len(questions) >= 3
        assert len(facts) == len(puzzles[0].told) + len(questions) + 1


@EACH
def test_the_answer_is_not_simply_what_was_told_last(corpus: str) -> None:
    last = total = 0
    for index in range(400):
        for puzzle in compose(corpus, 1, index)[1]:
            total += 1
            last += puzzle.told[-1].object == puzzle.asked.facts[-1].object
    assert last / total < 0.35


@pytest.mark.parametrize(
    ("corpus", "shortest", "mean", "longest"),
    [("stories", 250, 500, 1400), ("ledgers", 250, 500, 1400), ("lookups", 50, 150, 600)],
)
def test_documents_are_short_and_varied_text(
    corpus: str, shortest: int, mean: int, longest: int
) -> None:
    texts = [document.text for document in generate(corpus, 0, 0, 300)]
    assert all(shortest < len(text) < longest for text in texts)
    assert sum(map(len, texts)) / len(texts) > mean
    assert all("\n" in text and re.search(r"[.?|:]", text) for text in texts)
    assert len({text.split("\n")[0][:40] for text in texts}) > 100
    assert not any(mark in text for text in texts for mark in "{}")


def test_an_unknown_corpus_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="'storys'; did you mean 'stories'"):
        next(generate("storys", 0, 0, 1))
