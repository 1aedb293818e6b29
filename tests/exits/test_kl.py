"""A1: KL between consecutive outputs, and the relative change of the latent, to the last digit."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ShapeError
from loopwise.exits.base import Observation, Output
from loopwise.exits.kl import StepKL, step_kl
from loopwise.exits.latent_change import LatentChange


def observe(r: int | torch.Tensor, logits: torch.Tensor | None) -> Observation:
    latent = torch.zeros(2 if logits is None else len(logits), 4)
    output = None if logits is None else Output.known(logits)
    return Observation(r=r, latent=latent, previous=latent, output=output)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_kl_equals_a_float64_one(scale):
    torch.manual_seed(0)
    logits = scale * torch.randn(3, 5, 400)
    policy, memory = StepKL(), torch.zeros(5, 400)
    log_p = logits.double().log_softmax(-1)
    for r in range(1, 4):
        score, memory = policy.score(observe(r, logits[r - 1]), memory)
        if r > 1:
            p, q = log_p[r - 1], log_p[r - 2]
            wanted = (p.exp() * (p - q)).sum(-1)
            assert score.double() == pytest.approx(wanted, rel=1e-4, abs=3e-7)


def test_kl_is_of_the_new_output_from_the_old_one():
    """KL(p_r || p_(r-1)), not the reverse: from uniform to sure costs ln 2."""
    policy = StepKL()
    _, memory = policy.score(observe(1, torch.zeros(1, 2)), torch.zeros(1, 2))
    score, _ = policy.score(observe(2, torch.tensor([[100.0, 0.0]])), memory)
    assert score.item() == pytest.approx(0.6931472, abs=1e-6)


def test_equal_outputs_score_zero_and_never_below():
    torch.manual_seed(0)
    log_p = (5 * torch.randn(50, 1000)).log_softmax(-1)
    assert (step_kl(log_p, log_p) == 0).all()
    nearly = (log_p + 1e-6 * torch.randn_like(log_p)).log_softmax(-1)
    assert (step_kl(log_p, nearly) >= 0).all()
    assert torch.equal(step_kl(log_p, nearly), step_kl(log_p, nearly, log_p.exp()))


def test_a_constant_added_to_the_logits_changes_nothing():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    _, memory = StepKL().score(observe(1, logits), torch.zeros(4, 50))
    score, _ = StepKL().score(observe(2, logits + 3.0), memory)
    assert score.abs().max() < 1e-6


def test_only_rows_at_recurrence_one_are_unknown():
    logits = torch.randn(3, 5)
    score, _ = StepKL().score(observe(torch.tensor([1, 2, 7]), logits), torch.zeros(3, 5))
    assert torch.isposinf(score).tolist() == [True, False, False]


@pytest.mark.parametrize("logits", [None, torch.zeros(2, 6), torch.zeros(3, 5)])
def test_logits_that_do_not_fit_are_named(logits):
    with pytest.raises(ShapeError, match="kl reads logits"):
        StepKL().score(observe(2, logits), torch.zeros(2, 5))


def test_relative_change_of_the_latent():
    now, before = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    seen = Observation(r=2, latent=now, previous=before)
    score, _ = LatentChange().score(seen, torch.zeros(2, 0))
    assert score.tolist() == [1.0, 0.5]


def test_a_latent_of_zero_is_finite():
    zero = torch.zeros(1, 4)
    score, _ = LatentChange().score(Observation(r=1, latent=zero, previous=zero), zero[:, :0])
    assert score.tolist() == [0.0]


def test_small_changes_of_a_bfloat16_latent_are_taken_in_float32():
    now = torch.full((1, 64), 1.0078125, dtype=torch.bfloat16)
    before = torch.ones(1, 64, dtype=torch.bfloat16)
    score, _ = LatentChange().score(Observation(r=2, latent=now, previous=before), now[:, :0])
    assert score.item() == pytest.approx(0.0078125 / 1.0078125, rel=1e-5)
