"""The page pool: every page is held, known or blank, and what is found is what was learned."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loopwise.engine.pages import PagePool

SIZE = 2


def fill(pool: PagePool, root: int, tokens: list[int]) -> list[int]:
    """Compute ``tokens`` and learn every full page of them; the pages are held."""
    pages, before = [], root
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        pages.append(pool.take())
        before = pool.learn(before, pages[-1], tokens[at : at + SIZE])
    return pages


def found(pool: PagePool, root: int, tokens: list[int]) -> list[int]:
    return [page for page, _ in pool.find(root, tokens, SIZE)]


def test_pages_are_numbered_from_one_and_all_of_them_are_handed_out():
    pool = PagePool(5)
    assert sorted(pool.take() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert pool.free == 0
    with pytest.raises(IndexError, match="no page is free"):
        pool.take()


def test_a_page_of_unknown_content_comes_back_blank():
    pool = PagePool(2)
    pages = [pool.take(), pool.take()]
    pool.release(pages)
    assert pool.free == 2
    assert pool.idle(pages) == 0


def test_a_finished_prompt_is_found_after_its_request_has_gone():
    pool = PagePool(4)
    root = pool.root("rule")
    pages = fill(pool, root, [1, 2, 3, 4, 5])
    pool.release(pages)
    assert pool.free == 4, "known pages can be handed out as well"
    assert found(pool, root, [1, 2, 3, 4, 9, 9]) == pages
    assert found(pool, root, [1, 2, 3]) == pages[:1], "half a page is no page"
    assert found(pool, root, [1, 2, 9, 4]) == pages[:1]
    assert found(pool, root, [3, 4, 1, 2]) == [], "the same tokens elsewhere mean something else"
    assert found(pool, root, []) == []


@pytest.mark.parametrize("key", ["other rule", ("rule", 1), None])
def test_nothing_is_found_under_another_rule(key):
    pool = PagePool(4)
    fill(pool, pool.root("rule"), [1, 2])
    assert found(pool, pool.root(key), [1, 2]) == []
    assert found(pool, pool.private_root(), [1, 2]) == []
    assert pool.root("rule") == pool.root("rule")


def test_as_many_beginnings_as_pages_are_remembered():
    """Each seed of a model that starts from noise has its own; a server must not grow by it."""
    pool = PagePool(3)
    first = pool.root(0)
    for key in range(1, 3):
        pool.root(key)
    assert pool.root(0) == first, "asked for again, so the youngest"
    for key in range(3, 5):
        pool.root(key)
    assert pool.root(0) == first
    assert len(pool._roots) == 3
    pool.root(5), pool.root(6), pool.root(7)
    assert pool.root(0) != first, "an identity is never used twice"


def test_what_two_learned_at_once_stays_known_once():
    pool = PagePool(4)
    root = pool.root(0)
    first, second = fill(pool, root, [1, 2]), fill(pool, root, [1, 2])
    assert found(pool, root, [1, 2]) == first
    pool.release(second)
    assert pool.idle(second) == 0
    pool.release(first)
    assert pool.idle(first) == 1
    assert pool.free == 4


def test_a_page_of_two_holders_is_free_when_both_are_gone():
    pool = PagePool(1)
    root = pool.root(0)
    pages = fill(pool, root, [1, 2])
    pool.hold(pages[0])
    pool.release(pages)
    assert pool.free == 0
    pool.release(pages)
    assert pool.free == 1


def test_the_longest_unused_goes_first_and_the_end_of_a_prompt_before_its_beginning():
    pool = PagePool(4)
    root = pool.root(0)
    old, new = fill(pool, root, [1, 2, 3, 4]), fill(pool, root, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert [pool.take() for _ in range(4)] == [*old[::-1], *new[::-1]]
    assert found(pool, root, [1, 2]) == []


def test_a_page_that_was_held_again_counts_as_just_used():
    pool = PagePool(2)
    root = pool.root(0)
    a, b = fill(pool, root, [1, 2]), fill(pool, root, [3, 4])
    pool.release(a)
    pool.release(b)
    pool.hold(a[0])
    pool.release(a)
    assert pool.take() == b[0]


def test_what_followed_a_forgotten_page_is_not_found_behind_its_successor():
    """The same tokens computed again are another identity, which nothing hangs from yet."""
    pool = PagePool(3)
    root = pool.root(0)
    first, _ = fill(pool, root, [1, 2, 3, 4])
    pool.release([first])
    spare = pool.take()
    assert pool.take() == first
    assert found(pool, root, [1, 2, 3, 4]) == []
    pool.learn(root, spare, [1, 2])
    assert found(pool, root, [1, 2, 3, 4]) == [spare]


def test_releasing_more_often_than_taking_is_noticed():
    pool = PagePool(1)
    page = pool.take()
    pool.release([page])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([page])


class Holders(RuleBasedStateMachine):
    """Requests come and go; a model knows what every page holds."""

    @initialize(pages=st.integers(1, 6))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.pages = pages
        self.held: list[tuple[int, list[int], list[int]]] = []  # root, tokens, pages
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}  # page: root, all tokens so far

    @rule(root=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), max_size=8))
    def arrive(self, root: str, tokens: list[int]) -> None:
        start = self.pool.root(root)
        known = list(self.pool.find(start, tokens, SIZE))
        for i, (page, _) in enumerate(known):
            assert self.content[page] == (start, tuple(tokens[: SIZE * (i + 1)]))
            self.pool.hold(page)
        identities = [start, *(identity for _, identity in known)]
        assert all(a != b for a, b in pairwise(identities))
        before, pages = identities[-1], [page for page, _ in known]
        while len(pages) < len(tokens) // SIZE and self.pool.free:
            page, end = self.pool.take(), SIZE * (len(pages) + 1)
            assert page not in {p for *_, others in self.held for p in others} | set(pages)
            self.content[page] = start, tuple(tokens[:end])
            before = self.pool.learn(before, page, tokens[end - SIZE : end])
            pages.append(page)
        self.held.append((start, tokens, pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, _, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)

    @invariant()
    def every_page_is_held_or_free(self) -> None:
        if hasattr(self, "pool"):
            held = {page for *_, pages in self.held for page in pages}
            assert self.pool.free + len(held) == self.pages

    @invariant()
    def what_is_held_keeps_its_content(self) -> None:
        for start, tokens, pages in getattr(self, "held", []):
            for i, page in enumerate(pages):
                assert self.content[page] == (start, tuple(tokens[: SIZE * (i + 1)]))


Holders.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=30)
TestHolders = Holders.TestCase
