"""The gate: the model's own chances, multiplied up; and models that have none."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ExitError
from loopwise.exits.base import Observation
from loopwise.exits.gate import Gate
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.models.ouro import OuroConfig, OuroModel
from tests.conftest import make_model


def model(**changes: object) -> OuroModel:
    torch.manual_seed(0)
    config = OuroConfig(vocab_size=20, d_model=16, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=24)
    made = OuroModel(OuroConfig(**{**{f: getattr(config, f) for f in config.__slots__}, **changes}))
    if made.config.exit_gate:
        torch.nn.init.normal_(made.gate.weight)
    return made.eval()


@torch.no_grad()
def test_the_score_is_what_the_models_own_chances_leave():
    looped, latents = model(), torch.randn(6, 5, 16)
    policy = build_policy(ExitRule(policy="gate"), {}, looped)
    memory, left = torch.zeros(5, 1), torch.ones(5, dtype=torch.float64)
    for r, latent in enumerate(latents, start=1):
        seen = Observation(r=r, latent=latent, previous=latent)
        score, memory = policy.score(seen, memory)
        left = left * (1 - looped.stop_probability(latent).double())
        assert score.double() == pytest.approx(left, rel=1e-4, abs=1e-6)


def test_what_is_left_never_rises_and_small_chances_keep_their_digits():
    policy = Gate(torch.tensor([1.0]), torch.tensor(0.0))
    memory, scores = torch.zeros(3, 1), []
    for _ in range(40):
        latent = torch.tensor([[-12.0], [0.0], [15.0]])  # hardly ever, one in two, nearly always
        score, memory = policy.score(Observation(r=1, latent=latent, previous=latent), memory)
        scores.append(score)
    found = torch.stack(scores)
    assert (found.diff(dim=0) <= 0).all()
    assert found[-1, 0] == pytest.approx((1 - 6.144e-6) ** 40, rel=1e-6)
    assert found[-1, 1] == pytest.approx(2.0**-40, rel=1e-4)
    assert found[1, 2] == pytest.approx((3.059e-7) ** 2, rel=1e-3)


@pytest.mark.parametrize("other", [model(exit_gate=False), make_model()])
def test_a_model_without_a_gate_is_refused_with_a_way_out(other):
    with pytest.raises(ExitError, match="this model has none; use a rule that .*latent-kl"):
        build_policy(ExitRule(policy="gate"), {}, other)
