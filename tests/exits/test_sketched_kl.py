"""The sketched KL: what it sums, and how far it is from the KL itself on random heads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from loopwise.exits.base import Observation, Output
from loopwise.exits.kl import step_kl
from loopwise.exits.sketched_kl import BEST, RANK, SketchedKL, half_variance, sketch

D = 24


class Weights:
    exit_gate = None
    logit_cap: float | None

    def __init__(self, vocab: int, sharp: float, cap: float | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.head_weight = sharp * torch.randn(vocab, D, generator=generator) / D**0.5
        self.logit_cap = cap

    def head(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.head_weight.to(hidden.dtype).T
        cap = self.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def run(weights: Weights, hidden: list[Tensor]) -> Tensor:
    """Scores ``(rows, recurrences)``."""
    policy, out = SketchedKL.build(None, weights), []
    vocab = len(weights.head_weight)
    memory, latent = torch.zeros(len(hidden[0]), policy.memory_width(vocab, D)), hidden[0]
    for r, h in enumerate(hidden, start=1):
        output = Output(h, weights.head)
        seen = Observation(r=r, latent=latent, previous=latent, output=output)
        score, memory = policy.score(seen, memory)
        assert int(output.asked.sum()) == (len(h) if r == 1 else 0), "the head is read once"
        out.append(score)
    return torch.stack(out, dim=1)


def trajectory(rows: int, step: float, seed: int = 0, n: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    goal, offset = torch.randn(2, rows, D, generator=generator)
    return [goal + step * 0.5**r * offset for r in range(n)]


def exact(weights: Weights, hidden: list[Tensor]) -> Tensor:
    log_p = [weights.head(h.double()).log_softmax(-1) for h in hidden]
    return torch.stack([step_kl(b, a) for a, b in itertools.pairwise(log_p)], dim=1)


@pytest.mark.parametrize("cap", [None, 6.0])
@pytest.mark.parametrize("sharp", [0.5, 2.0, 5.0])
def test_the_estimate_is_unbiased_while_outputs_stay_near_the_reading(sharp, cap):
    """Flat, usual and peaked outputs over 2,000 words; 200 tokens at four recurrences."""
    weights, hidden = Weights(2000, sharp, cap), trajectory(200, 0.1)
    found, truth = run(weights, hidden)[:, 1:].double(), exact(weights, hidden)
    assert found.sum(0) / truth.sum(0) == pytest.approx(torch.ones(4).double(), abs=0.06)
    assert ((found / truth).log().std(0) < 0.4).all()


@pytest.mark.parametrize("cap", [None, 6.0])
@pytest.mark.parametrize("sharp", [2.0, 5.0])
def test_the_estimate_falls_short_where_outputs_move_far_from_the_reading(sharp, cap):
    """Tokens that came up since are on few lists: 5 to 30% are missing, not a factor."""
    weights, hidden = Weights(2000, sharp, cap), trajectory(200, 0.5)
    found, truth = run(weights, hidden)[:, 1:].double(), exact(weights, hidden)
    share = found.sum(0) / truth.sum(0)
    assert ((share > 0.65) & (share < 1.0)).all()


def test_a_small_vocabulary_is_summed_whole_to_second_order():
    """Up to BEST tokens nothing is drawn: half the variance under p_r, in float64."""
    weights, hidden = Weights(BEST, 2.0), trajectory(20, 0.3)
    found = run(weights, hidden)
    for r in range(1, len(hidden)):
        z = [weights.head(h.double()) for h in (hidden[r - 1], hidden[r])]
        wanted = half_variance(z[1] - z[0], z[1].softmax(-1))
        assert found[:, r].double() == pytest.approx(wanted, rel=2e-3, abs=1e-8)


def test_a_sketch_stands_for_the_whole_distribution():
    logits = 3 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    ids, log_weights = sketch(logits)
    assert ids.shape == log_weights.shape == (6, RANK)
    assert log_weights.exp().sum(-1) == pytest.approx(torch.ones(6), rel=1e-5)
    p = logits.softmax(-1)
    assert torch.equal(ids[:, :BEST], p.topk(BEST).indices)
    assert log_weights[:, :BEST].exp() == pytest.approx(p.topk(BEST).values, rel=1e-5)
    for row in range(6):
        assert not set(ids[row, :BEST].tolist()) & set(ids[row, BEST:].tolist())
        rest = p[row].scatter(0, ids[row, :BEST], 0.0).double()
        drawn = ids[row, BEST:]
        assert (drawn.diff() >= 0).all(), "in the order of the vocabulary"
        # Even steps: before each drawn token lies its share of the rest, give or take its own.
        before = torch.cat((rest.new_zeros(1), rest.cumsum(0)))[drawn] / rest.sum()
        steps = (torch.arange(RANK - BEST) + 0.5) / (RANK - BEST)
        assert (before <= steps + 1e-9).all()
        assert (steps <= before + rest[drawn] / rest.sum() + 1e-9).all()


def test_the_sketch_of_a_row_is_its_own():
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(2))
    whole = sketch(logits)
    for row in range(9):
        alone = sketch(logits[row : row + 1])
        assert torch.equal(alone[0][0], whole[0][row]) and torch.equal(alone[1][0], whole[1][row])


@pytest.mark.parametrize("vocab", [1, 2, BEST, BEST + 1, RANK - 3])
def test_vocabularies_smaller_than_the_sketch_are_fine(vocab):
    found = run(Weights(vocab, 2.0), trajectory(3, 0.3))
    assert torch.isposinf(found[:, 0]).all()
    assert found[:, 1:].isfinite().all() and (found[:, 1:] >= 0).all()


def test_an_output_that_stands_still_scores_zero():
    h = trajectory(4, 1.0)[0]
    assert (run(Weights(500, 3.0), [h, h, h])[:, 1:] == 0).all()
