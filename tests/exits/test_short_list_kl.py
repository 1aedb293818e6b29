"""KL over a list of tokens: what it is, and bounds that no tail escapes, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import Observation, Output
from loopwise.exits.kl import step_kl
from loopwise.exits.short_list_kl import (
    LISTED,
    ShortListKL,
    centred_rows,
    kl_bracket,
    largest_kl,
    listed_logits,
)

D = 8


class Weights:
    exit_gate = None

    def __init__(self, vocab: int, cap: float | None = None, scale: float = 1.0, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.head_weight = scale * torch.randn(vocab, D, generator=generator)
        self.head_weight += torch.randn(D, generator=generator)  # what all rows have in common
        self.logit_cap = cap

    def head(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.head_weight.to(hidden.dtype).T
        return logits if self.logit_cap is None else _capped(logits, self.logit_cap)


def _capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


def trajectory(seed: int, rows: int = 5, shrink: float = 0.4, steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    goal, offset = torch.randn(2, rows, D, generator=generator)
    return [goal + shrink**r * offset for r in range(steps)]


def observe(weights: Weights, r: int, hidden: Tensor) -> Observation:
    latent = torch.zeros(len(hidden), D)
    return Observation(r=r, latent=latent, previous=latent, output=Output(hidden, weights.head))


def exact(weights: Weights, now: Tensor, before: Tensor) -> Tensor:
    log_p, log_q = (weights.head(h.double()).log_softmax(-1) for h in (now, before))
    return step_kl(log_p, log_q)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_list_of_the_whole_vocabulary_is_the_kl(cap):
    weights, hidden = Weights(LISTED - 10, cap), trajectory(1)
    policy = ShortListKL.build(None, weights)
    memory = torch.zeros(5, policy.memory_width(LISTED - 10, D))
    for r, h in enumerate(hidden, start=1):
        before = memory
        seen = observe(weights, r, h)
        score, memory = policy.score(seen, memory)
        if r == 1:
            assert torch.isposinf(score).all()
            continue
        wanted = exact(weights, h, hidden[r - 2])
        assert score.double() == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        low, high = policy.bracket(seen, before)
        assert torch.allclose(low, score, atol=1e-6) and torch.allclose(high, score, atol=1e-6)


def test_the_list_is_of_the_best_tokens_and_stays():
    """Those of recurrence 1, renormalised, whatever comes to the top later."""
    weights, hidden = Weights(3 * LISTED), trajectory(2)
    policy = ShortListKL.build(None, weights)
    memory = torch.zeros(5, policy.memory_width(3 * LISTED, D))
    best = weights.head(hidden[0]).topk(LISTED, dim=-1).indices
    for r, h in enumerate(hidden, start=1):
        score, memory = policy.score(observe(weights, r, h), memory)
        assert torch.equal(memory[:, :LISTED].long(), best)
        if r > 1:
            both = [weights.head(x.double()).gather(1, best).log_softmax(-1) for x in hidden[:r]]
            assert score.double() == pytest.approx(step_kl(both[-1], both[-2]), rel=1e-3, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 60),
    listed=st.integers(1, 12),
    scale=st.floats(0.01, 4),
    far=st.floats(0, 3),
    step=st.floats(0, 3),
    capped=st.booleans(),
)
def test_the_kl_lies_within_the_bracket(seed, vocab, listed, scale, far, step, capped):
    """U: for any head, any reading and any two later hidden states. All in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head, cap = scale * draw(vocab, D) + draw(D), 3.0 if capped else None
    read, m = draw(4, D), min(listed, vocab - 1)
    before = read + far * draw(4, D)
    now = before + step * draw(4, D)
    centre = head.mean(0) if cap is None else torch.zeros(D, dtype=torch.float64)
    radius = (head - centre).norm(dim=-1).max()
    at_read, at_before, at_now = (
        h @ (head - centre).T if cap is None else _capped(h @ head.T, cap)
        for h in (read, before, now)
    )
    best = at_read.topk(m, dim=-1).indices
    low, high = kl_bracket(
        at_now.gather(1, best),
        at_before.gather(1, best),
        at_read.scatter(1, best, -math.inf).logsumexp(-1),
        radius * (now - read).norm(dim=-1),
        radius * (before - read).norm(dim=-1),
        radius * (now - before).norm(dim=-1),
    )
    kl = step_kl(at_now.log_softmax(-1), at_before.log_softmax(-1))
    slack = 1e-9 * (1 + kl)
    assert (low <= kl + slack).all()
    assert (kl <= high + slack).all()


def test_the_bracket_of_the_policy_holds_and_closes_as_steps_shrink():
    weights, hidden = Weights(4 * LISTED, scale=0.3), trajectory(3, steps=9)
    policy = ShortListKL.build(None, weights)
    memory = torch.zeros(5, policy.memory_width(4 * LISTED, D))
    widths = []
    for r, h in enumerate(hidden, start=1):
        seen = observe(weights, r, h)
        if r > 1:
            low, high = policy.bracket(seen, memory)
            kl = exact(weights, h, hidden[r - 2])
            assert (low <= kl + 1e-6).all() and (kl <= high + 1e-6).all()
            widths.append(float((high - low).mean()))
        _, memory = policy.score(seen, memory)
    assert widths == sorted(widths, reverse=True)


def test_a_tail_that_carries_everything_is_not_overlooked():
    """The bound's reason: a list whose tokens hardly move says nothing of a tail that does."""
    now = before = torch.zeros(1, 2, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    low, high = kl_bracket(now, before, 5 * one, 2 * one, one, one)
    assert low == 0.0
    assert high > 0.4, "exp(5) of tail moving by 1 may well be half a nat"


MASSES = [0.001, 0.02, 0.3, 0.45, 0.5, 0.6, 0.9, 0.999]


@pytest.mark.parametrize("c", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_a_tail_whose_halves_move_apart_stays_below_the_bound(c):
    """The worst a tail can do: part of its mass goes up by c and the rest down, or back."""
    log_tail = torch.tensor([[m, 1 - m] for m in MASSES], dtype=torch.float64).log()
    apart = c * torch.tensor([1.0, -1.0], dtype=torch.float64)
    one = torch.ones(len(MASSES), dtype=torch.float64)
    for before, now in ((log_tail, log_tail + apart), (log_tail + apart, log_tail)):
        inner = step_kl(now.log_softmax(-1), before.log_softmax(-1))
        assert (inner <= largest_kl(c * one) + 1e-15).all()
        for log_list in (-30.0, -2.0, 0.0, 2.0):  # beside a tail of log-sum 0
            listed = torch.full((len(MASSES), 1), log_list, dtype=torch.float64)
            since = (c * one, 0 * one) if before is log_tail else (0 * one, c * one)
            low, high = kl_bracket(listed, listed, 0 * one, *since, c * one)
            whole = [torch.cat((listed, z), dim=1).log_softmax(-1) for z in (now, before)]
            kl = step_kl(*whole)
            assert (low <= kl + 1e-15).all() and (kl <= high + 1e-15).all()
    if c <= 0.01:
        halves = step_kl(apart.log_softmax(-1), torch.full_like(apart, math.log(0.5)))
        assert halves > 0.999 * largest_kl(one[:1] * c), "no smaller constant is a bound"


def test_rows_of_the_head_give_the_logits_of_the_whole_head(monkeypatch):
    weights, hidden = Weights(50, cap=4.0), trajectory(4, rows=7)[0]
    ids = torch.randint(0, 50, (7, 9), generator=torch.Generator().manual_seed(0))
    wanted = weights.head(hidden).gather(1, ids)
    assert listed_logits(hidden, weights.head_weight, ids, 4.0) == pytest.approx(wanted, rel=1e-5)
    monkeypatch.setattr("loopwise.exits.short_list_kl._GATHERED", 9 * D * 2)
    assert listed_logits(hidden, weights.head_weight, ids, 4.0) == pytest.approx(wanted, rel=1e-5)


def test_the_centre_is_of_all_rows_and_only_where_no_cap_tells_them_apart():
    head = Weights(40).head_weight
    centre, distances = centred_rows(head, None)
    assert torch.allclose(centre, head.mean(0))
    assert torch.allclose(distances, (head - head.mean(0)).norm(dim=-1))
    centre, distances = centred_rows(head, 15.0)
    assert not centre.any() and torch.allclose(distances, head.norm(dim=-1))


def test_token_ids_past_float32_are_refused():
    with pytest.raises(ExitError, match="'short-list-kl' remembers token ids.*16777217"):
        ShortListKL.build(None, Weights(5)).memory_width(2**24 + 1, D)
