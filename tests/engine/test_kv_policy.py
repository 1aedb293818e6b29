"""KV policies against the definitions of the design, played through entry by entry."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.engine.kv_policy import KV_POLICIES, KVPolicy, parse_kv_policy
from loopwise.errors import EngineError

NAMES = ["per-loop", "last", "first-then-last", *(f"ring-{n}" for n in (1, 2, 3, 4, 7, 50))]
DEPTHS = range(1, 13)


def kept_after(policy: KVPolicy, last: int) -> dict[int, int]:
    """Entry to the recurrence it holds, once a token has run recurrences 1 to ``last``."""
    kept: dict[int, int] = {}
    for r in range(1, last + 1):
        kept[policy.slot(r)] = r
    return kept


def meant(name: str, r: int, last: int) -> int:
    """In the table's words: the recurrence read at ``r`` of a token that has run ``last``."""
    done = range(1, last + 1)
    if name == "per-loop":
        return r if r in done else last
    if name == "last":
        return last
    if name == "first-then-last":
        return 1 if r == 1 else last
    size = int(name.removeprefix("ring-"))
    same = [i for i in done if i % size == r % size]
    return same[-1] if same else last


@pytest.mark.parametrize("last", DEPTHS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_the_definition_names(name, last):
    policy = parse_kv_policy(name)
    kept = kept_after(policy, last)
    for r in DEPTHS:
        entry = policy.read(r, last)
        assert entry in kept, f"at {r}, an entry that was never written"
        assert kept[entry] == meant(name, r, last), f"at recurrence {r} of a token at {last}"


@pytest.mark.parametrize("max_depth", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_keeps_as_many_entries_as_are_ever_written(name, max_depth):
    policy = parse_kv_policy(name)
    written = {policy.slot(r) for r in range(1, max_depth + 1)}
    assert written == set(range(policy.entries(max_depth)))


@pytest.mark.parametrize(
    ("name", "entries"),
    [("per-loop", 8), ("last", 1), ("ring-3", 3), ("ring-50", 8), ("first-then-last", 2)],
)
def test_the_entries_of_the_table(name, entries):
    assert parse_kv_policy(name).entries(8) == entries


@pytest.mark.parametrize("name", NAMES)
def test_a_token_reads_itself_at_the_recurrence_it_is_at(name):
    policy = parse_kv_policy(name)
    for r in DEPTHS:
        assert kept_after(policy, r)[policy.read(r, r)] == (1 if r == 1 else r)


def test_a_ring_as_wide_as_the_depth_is_per_loop_until_a_token_goes_deeper():
    """Ring entries wrap, `per-loop` ones never do; below the width both read min(r, last)."""
    ring, exact = parse_kv_policy("ring-12"), parse_kv_policy("per-loop")
    for last in DEPTHS:
        for r in DEPTHS:
            assert ring.read(r, last) == exact.read(r, last)


def test_a_ring_of_one_is_last():
    ring, last = parse_kv_policy("ring-1"), parse_kv_policy("last")
    for at in DEPTHS:
        for r in DEPTHS:
            assert (ring.slot(r), ring.read(r, at)) == (last.slot(r), last.read(r, at))


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_says_its_own_name(name):
    assert parse_kv_policy(name).name == name
    assert parse_kv_policy(parse_kv_policy(name).name) == parse_kv_policy(name)


def test_only_per_loop_is_exact():
    assert [name for name in NAMES if parse_kv_policy(name).exact] == ["per-loop"]


# Names.


@pytest.mark.parametrize(
    "text", ["", "lsat", "perloop", "PER-LOOP", " last", "all", "first", "none"]
)
def test_an_unknown_name_is_refused_with_those_that_are_known(text):
    with pytest.raises(EngineError) as caught:
        parse_kv_policy(text)
    assert repr(text) in str(caught.value)
    for name in KV_POLICIES:
        assert name in str(caught.value)


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(EngineError, match="did you mean 'per-loop'"):
        parse_kv_policy("per-lop")


@pytest.mark.parametrize(
    "text", ["ring", "ring-", "ring-0", "ring--1", "ring-x", "ring-1.5", "ring-N"]
)
def test_a_ring_without_a_number_of_entries_is_refused(text):
    with pytest.raises(EngineError, match=r"needs a number of entries from 1: write ring-4"):
        parse_kv_policy(text)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(["ring-", "ring", "", "last"]), st.text("0123456789²٣ \n-", max_size=5))
def test_any_text_is_a_policy_or_one_error(head, tail):
    try:
        policy = parse_kv_policy(head + tail)
    except EngineError:
        return
    assert 1 <= policy.entries(8) <= 8
    assert parse_kv_policy(policy.name) == policy
