"""A2: a probability from the latent, that survives JSON and refuses another model's width."""

from __future__ import annotations

import json

import pytest
import torch

from loopwise.errors import ExitError
from loopwise.exits.base import Observation
from loopwise.exits.probe import Probe


def probe(d: int = 8) -> Probe:
    torch.manual_seed(0)
    return Probe(
        weight=torch.randn(d), bias=0.123456789, mean=torch.randn(d), std=torch.rand(d) + 0.5
    )


def test_probability_is_the_logistic_of_the_standardised_latent():
    p, latent = probe(), torch.randn(5, 8)
    z = (latent.double() - p.mean.double()) / p.std.double()
    wanted = 1 / (1 + (-(z @ p.weight.double()) - p.bias).exp())
    assert p.probability(latent).double() == pytest.approx(wanted, rel=1e-5)
    assert p.probability(latent.view(5, 1, 8)).shape == (5, 1)


def test_the_score_is_the_probability_of_a_change():
    p, latent = probe(), torch.randn(5, 8)
    seen = Observation(r=1, latent=latent, previous=latent)
    score, memory = p.score(seen, torch.zeros(5, 0))
    assert torch.equal(score, p.probability(latent))
    assert memory.shape == (5, 0)


def test_extreme_latents_stay_probabilities():
    found = probe().probability(torch.tensor([[1e30] * 8, [-1e30] * 8]))
    assert ((found >= 0) & (found <= 1)).all()


def test_the_state_survives_json_to_the_bit():
    p = probe()
    again = Probe.from_state(json.loads(json.dumps(p.to_state())))
    for name in ("weight", "mean", "std"):
        assert torch.equal(getattr(again, name), getattr(p, name))
    assert again.bias == p.bias
    latent = torch.randn(5, 8)
    assert torch.equal(again.probability(latent), p.probability(latent))


def test_another_width_is_refused_with_both_widths():
    with pytest.raises(ExitError, match="d_model 8, the model has 12.*loopwise measure"):
        probe().probability(torch.zeros(3, 12))
