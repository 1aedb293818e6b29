"""Exit rules: their text form, their limits, and the one place where a score becomes a verdict."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.errors import DepthError, ExitError, LoopwiseError
from loopwise.exits import EXITS
from loopwise.exits.probe import Probe
from loopwise.exits.rule import MAX_DEPTH, ExitRule, build_policy, parse_rule, should_exit


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("fixed:8", ExitRule(policy="fixed", max_depth=8)),
        ("fixed:1", ExitRule(policy="fixed", max_depth=1)),
        ("kl:1e-3", ExitRule(policy="kl", threshold=1e-3, max_depth=8)),
        (" kl:0.5 ", ExitRule(policy="kl", threshold=0.5, max_depth=8)),
        (
            "kl:1e-3,min=2,max=16,patience=2",
            ExitRule(policy="kl", threshold=1e-3, min_depth=2, max_depth=16, patience=2),
        ),
        ("kl:1e-3, max=16", ExitRule(policy="kl", threshold=1e-3, max_depth=16)),
        ("probe:0.2,max=4", ExitRule(policy="probe", threshold=0.2, max_depth=4)),
        ("latent-change:0", ExitRule(policy="latent-change", threshold=0.0, max_depth=8)),
        ("kl:1,max=256", ExitRule(policy="kl", threshold=1.0, max_depth=256)),
    ],
)
def test_rules_are_read(text, rule):
    assert parse_rule(text) == rule


def test_the_callers_depth_is_used_where_the_text_has_none():
    assert parse_rule("kl:1", max_depth=12).max_depth == 12
    assert parse_rule("kl:1,max=3", max_depth=12).max_depth == 3
    assert parse_rule("fixed:5", max_depth=12).max_depth == 5


@settings(deadline=None)
@given(
    st.sampled_from([name for name in EXITS if name != "fixed"]),
    st.floats(0, 1e6, allow_nan=False),
    st.integers(1, 5),
    st.integers(5, MAX_DEPTH),
    st.integers(1, 9),
)
def test_a_rule_survives_its_own_text(name, threshold, low, high, patience):
    """What a report prints must make the same run again: no digit may be lost."""
    rule = ExitRule(
        policy=name, threshold=threshold, min_depth=low, max_depth=high, patience=patience
    )
    assert parse_rule(str(rule)) == rule


@settings(deadline=None)
@given(st.integers(1, MAX_DEPTH))
def test_a_fixed_rule_survives_its_own_text(depth):
    rule = ExitRule(policy="fixed", max_depth=depth)
    assert str(rule) == f"fixed:{depth}"
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("latnt-change:1", ExitError, "no exit rule named 'latnt-change'; did you mean 'latent-"),
        ("nothing-like-it:1", ExitError, "no exit rule named 'nothing-like-it'; known: fixed, kl"),
        ("", ExitError, "no exit rule named ''"),
        (":1", ExitError, "no exit rule named ''"),
        ("KL:1", ExitError, "no exit rule named 'KL'"),
        ("kl", ExitError, "'kl' has no threshold; write for example kl:1e-3"),
        ("kl:", ExitError, "has no threshold"),
        ("kl:,max=3", ExitError, "has no threshold"),
        ("kl:abc", ExitError, "'abc' is not a number"),
        ("kl:nan", ExitError, "'nan' is not a number"),
        ("kl:1e-3 nats", ExitError, "not a number"),
        ("kl:-1", ExitError, "'kl:-1': at a threshold of -1 no token stops early; it must be fini"),
        ("margin:-1e-9,max=4", ExitError, "at least 0, as scores are; write for example kl:1e-3"),
        ("argmax:-1e-9", ExitError, "at a threshold of -1e-9 no token stops early"),
        ("latent-kl:inf", ExitError, "at a threshold of inf every token stops at once"),
        ("fixed:nan", ExitError, "'nan' is not a whole number"),
        ("fixed:2.5", ExitError, "'2.5' is not a whole number"),
        ("fixed:", ExitError, "has no threshold"),
        ("fixed:0", DepthError, "0 must be at least 1"),
        ("fixed:-1", DepthError, "-1 must be at least 1"),
        ("fixed:257", DepthError, "depth 257 is past the limit of 256"),
        ("kl:1,max=1000000", DepthError, "past the limit of 256"),
        ("kl:1,max=0", DepthError, "0 must be at least 1"),
        ("kl:1,min=-2", DepthError, "-2 must be at least 1"),
        ("kl:1,min=9", DepthError, "min=9 max=8 must satisfy 1 <= min <= max"),
        ("kl:1,min=5,max=4", DepthError, "min=5 max=4"),
        ("kl:1,patience=0", LoopwiseError, "0 must be at least 1"),
        ("kl:1,patience=x", ExitError, "'x' is not a whole number"),
        ("kl:1,maxx=4", ExitError, "no field 'maxx'; did you mean 'max'\\? known: min, max, pat"),
        ("kl:1,depth=4", ExitError, "no field 'depth'; known: min, max, patience"),
        ("kl:1,", ExitError, "no field ''"),
        ("kl:1,max", ExitError, "not a whole number"),
        ("kl:1,2", ExitError, "no field '2'"),
    ],
)
def test_bad_rules_say_what_is_wrong(text, error, message):
    with pytest.raises(error, match=message):
        parse_rule(text)


@pytest.mark.parametrize("text", ["kl:1,max=4,max=8", "fixed:8,max=4"])
def test_a_rule_that_says_two_depths_is_refused(text):
    """One of the two would be dropped without a word."""
    with pytest.raises(LoopwiseError):
        parse_rule(text)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"policy": "kll"}, ExitError),
        ({"policy": "kl", "threshold": math.nan}, ExitError),
        ({"patience": 0}, LoopwiseError),
        ({"min_depth": 0}, DepthError),
        ({"max_depth": 0}, DepthError),
        ({"min_depth": 4, "max_depth": 3}, DepthError),
        ({"max_depth": MAX_DEPTH + 1}, DepthError),
    ],
)
def test_impossible_rules_cannot_be_made(changes, error):
    with pytest.raises(error):
        ExitRule(**changes)


# Verdicts.


def decide(rule: ExitRule, scores: list[float]) -> int:
    hits = torch.zeros(1, dtype=torch.int64)
    for r, score in enumerate(scores, start=1):
        stop, hits = should_exit(rule, torch.tensor([score]), hits, r)
        if bool(stop):
            return r
    raise AssertionError("a rule stops at max_depth at the latest")


@pytest.mark.parametrize(
    ("changes", "scores", "depth"),
    [
        ({}, [9, 9, 0.1, 9, 9], 3),
        ({}, [9, 9, 9, 9, 0.2], 5),
        ({}, [math.nan] * 5, 5),
        ({"patience": 2}, [0, 9, 0, 0, 9], 4),
        ({"patience": 3, "min_depth": 2}, [0, 0, 0, 9, 9], 3),
        ({"min_depth": 4}, [0, 0, 9, 0, 9], 4),
        ({"threshold": -1.0}, [0, 0, 0, 0, 0], 5),
    ],
)
def test_verdicts_by_hand(changes, scores, depth):
    fields = {"policy": "kl", "threshold": 0.1, "max_depth": 5, **changes}
    assert decide(ExitRule(**fields), scores) == depth


def test_hits_belong_to_rows_and_recurrences_may_differ():
    rule = ExitRule(policy="kl", threshold=0.1, patience=2, min_depth=2, max_depth=6)
    hits = torch.tensor([1, 1, 0, 0, 5])
    score = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    stop, hits = should_exit(rule, score, hits, torch.tensor([3, 3, 3, 6, 1]))
    assert stop.tolist() == [True, False, False, True, False]
    assert hits.tolist() == [2, 0, 1, 0, 6]


# Policies of rules.


def test_policies_are_built_by_name():
    assert build_policy(parse_rule("kl:1")).name == "kl"
    assert build_policy(parse_rule("fixed:3")).name == "fixed"


@pytest.mark.parametrize("fitted", [None, {}, {"other": {}}])
def test_a_policy_without_its_fit_says_how_to_get_one(fitted):
    with pytest.raises(ExitError, match="'probe' must be fitted.*loopwise measure"):
        build_policy(parse_rule("probe:0.5"), fitted)


def test_a_fitted_policy_comes_back():
    state = {"weight": [1.0, 2.0], "bias": 0.5, "mean": [0.0, 0.0], "std": [1.0, 1.0]}
    policy = build_policy(parse_rule("probe:0.5"), {"probe": state})
    assert isinstance(policy, Probe)
    assert policy.to_state() == state


def test_a_rule_that_checks_and_never_stops_can_be_written_down():
    """Frontiers end in one, and what they found is kept as text."""
    rule = ExitRule(policy="probe", threshold=-math.inf, max_depth=4)
    assert parse_rule(str(rule)) == rule
