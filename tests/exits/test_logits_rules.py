"""Entropy, argmax, margin and min-p KL, held against float64 loops over single probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.errors import ExitError, ShapeError
from loopwise.exits.argmax import ArgmaxChange
from loopwise.exits.base import ExitPolicy, Observation, Output
from loopwise.exits.entropy import EntropyChange
from loopwise.exits.kl import StepKL
from loopwise.exits.margin import Margin
from loopwise.exits.min_p_kl import MinPKL

INF = float("inf")


def observe(r: int | torch.Tensor, logits: torch.Tensor | None, rows: int = 2) -> Observation:
    latent = torch.zeros(rows if logits is None else len(logits), 4)
    output = None if logits is None else Output.known(logits)
    return Observation(r=r, latent=latent, previous=latent, output=output)


def run(policy: ExitPolicy, logits: torch.Tensor) -> list[list[float]]:
    """Scores ``[r][row]`` of logits ``(horizon, rows, vocab)``."""
    memory = torch.zeros(logits.shape[1], policy.memory_width(logits.shape[2], 4))
    out = []
    for r, now in enumerate(logits, start=1):
        score, memory = policy.score(observe(r, now), memory)
        out.append(score.tolist())
    return out


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    parts = [math.exp(x - top) for x in logits]
    return [x / math.fsum(parts) for x in parts]


def entropy(p: list[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def min_p_kl(p: list[float], q: list[float], min_p: float) -> float:
    kept = [i for i in range(len(p)) if p[i] >= min_p * max(p) or q[i] >= min_p * max(q)]
    p_kept, q_kept = math.fsum(p[i] for i in kept), math.fsum(q[i] for i in kept)
    return math.fsum(p[i] / p_kept * math.log(p[i] / p_kept / (q[i] / q_kept)) for i in kept)


def naive(name: str, now: list[float], before: list[float] | None) -> float:
    p = softmax(now)
    if name == "margin":
        second, first = sorted(p)[-2:]
        return 1 - (first - second)
    if before is None:
        return INF
    q = softmax(before)
    if name == "entropy":
        return abs(entropy(p) - entropy(q))
    if name == "argmax":
        return float(now.index(max(now)) != before.index(max(before)))
    return min_p_kl(p, q, 0.1)


RULES = [EntropyChange(), ArgmaxChange(), Margin(), MinPKL()]


@pytest.mark.parametrize("scale", [1e-2, 1.0, 8.0])
@pytest.mark.parametrize("policy", RULES, ids=lambda p: p.name)
def test_scores_equal_a_loop_in_float64(policy, scale):
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(5, 6, 40, generator=generator)
    logits[3] = logits[2] + 0.3 * logits[3]  # some answers stay
    found = run(policy, logits)
    for r, rows in enumerate(logits.double().tolist()):
        for row, now in enumerate(rows):
            before = logits[r - 1, row].double().tolist() if r else None
            wanted = naive(policy.name, now, before)
            assert found[r][row] == pytest.approx(wanted, rel=1e-4, abs=2e-6), (r, row)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4), min_size=2, max_size=5)
)
def test_any_logits_give_scores_in_range(values):
    logits = torch.tensor(values).unsqueeze(1)
    for policy in RULES:
        for r, (score,) in enumerate(run(policy, logits), start=1):
            assert score >= 0
            assert math.isfinite(score) is (r > 1 or policy.name == "margin")
            if policy.name in ("argmax", "margin"):
                assert score <= 1 or r == 1


@pytest.mark.parametrize("policy", RULES, ids=lambda p: p.name)
def test_a_constant_added_to_the_logits_changes_nothing(policy):
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 30)
    found = run(policy, torch.cat([logits, logits + 3.0]))[1]
    wanted = run(policy, torch.cat([logits, logits]))[1]
    assert found == pytest.approx(wanted, abs=1e-6)


# Argmax.


def test_patience_counts_recurrences_without_a_change_of_the_answer():
    one, other = [2.0, 0.0], [0.0, 2.0]
    assert run(ArgmaxChange(), torch.tensor([[one], [one], [other], [other], [one]])) == [
        [INF], [0.0], [1.0], [0.0], [1.0],
    ]  # fmt: skip


def test_an_answer_of_token_zero_is_not_taken_for_an_empty_memory():
    assert run(ArgmaxChange(), torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]])) == [[INF], [0.0]]


def test_neighbouring_token_ids_are_told_apart_up_to_the_limit():
    policy, memory = ArgmaxChange(), torch.tensor([[2.0**24 - 1]])
    assert policy.memory_width(2**24, 4) == 1
    logits = torch.zeros(1, 2**24)
    logits[0, -2] = 1.0
    score, _ = policy.score(observe(2, logits), memory)
    assert score.item() == 1.0


def test_a_vocabulary_past_float32_is_refused_with_the_limit():
    with pytest.raises(ExitError, match="16777216 tokens; the vocabulary has 16777217"):
        ArgmaxChange().memory_width(2**24 + 1, 4)


# Margin.


def test_a_vocabulary_of_one_token_is_as_unsure_as_can_be():
    assert run(Margin(), torch.zeros(1, 2, 1)) == [[1.0, 1.0]]


def test_a_sure_output_is_settled_and_a_tie_is_not():
    (found,) = run(Margin(), torch.tensor([[[50.0, 0.0, 0.0], [7.0, 7.0, -9.0]]]))
    assert found == pytest.approx([0.0, 1.0], abs=1e-6)


# Min-p KL.


def test_what_only_the_tail_does_costs_nothing():
    before = torch.tensor([[8.0, 7.5, 0.0, 1.0, 2.0]])
    now = torch.tensor([[8.0, 7.5, 2.0, 0.5, -3.0]])
    logits = torch.stack([before, now])
    assert run(MinPKL(), logits)[1] == pytest.approx([0.0], abs=1e-6)
    assert run(StepKL(), logits)[1][0] > 1e-4


def test_a_token_that_was_likely_or_becomes_it_is_kept():
    """From token 0 to token 1: by either distribution alone nothing but one token is left."""
    logits = torch.tensor([[[5.0, 0.0]], [[0.0, 5.0]]])
    assert run(MinPKL(), logits)[1] == pytest.approx(run(StepKL(), logits)[1], rel=1e-6)
    assert run(MinPKL(), logits)[1][0] > 4


def test_an_output_of_one_likely_token_is_settled():
    """Nothing that is kept can move: the rule is as quick as that."""
    logits = torch.tensor([[[9.0, 0.0, 0.0]], [[5.0, 0.0, 1.0]]])
    assert run(MinPKL(), logits)[1] == [0.0]


def test_with_every_token_kept_it_is_the_plain_kl():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50)
    found, wanted = run(MinPKL(min_p=1e-30), logits), run(StepKL(), logits)
    for r in (1, 2):
        assert found[r] == pytest.approx(wanted[r], rel=1e-4, abs=1e-7)


def test_a_token_ruled_out_by_minus_infinity_is_left_out():
    logits = torch.tensor([[[1.0, 0.5, -INF]], [[0.5, 1.0, -INF]]])
    assert run(MinPKL(), logits)[1] == pytest.approx(run(StepKL(), logits[..., :2])[1], rel=1e-5)


@pytest.mark.parametrize("min_p", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(min_p):
    with pytest.raises(ExitError, match="above 0 and at most 1"):
        MinPKL(min_p=min_p)


def test_another_vocabulary_is_named():
    with pytest.raises(ShapeError, match="min-p-kl reads logits"):
        MinPKL().score(observe(2, torch.zeros(2, 6)), torch.zeros(2, 5))
