"""The predicted KL: additive, never falling, finite far outside of what it was fitted on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.errors import ExitError, ShapeError
from loopwise.exits.base import Observation, Reads
from loopwise.exits.latent_kl import LatentKL
from loopwise.exits.rule import ExitRule, build_policy

STATE = {
    "change": {"knots": [-5.0, -3.0, -1.0], "slopes": [2.0, 0.5]},
    "second": {"knots": [-4.0, -2.0, 0.0, 1.0], "slopes": [0.0, 1.0, 0.25]},
    "offsets": [-2.0, -2.5, -1.75],
}
POLICY = LatentKL.from_state(STATE)


def ramp(values: dict[str, list[float]], x: float) -> float:
    """Walk along the pieces."""
    knots, slopes = values["knots"], values["slopes"]
    if x < knots[0]:
        return slopes[0] * (x - knots[0])
    total = 0.0
    for i, slope in enumerate(slopes):
        end = math.inf if i == len(slopes) - 1 else knots[i + 1]
        if x > knots[i]:
            total += slope * (min(x, end) - knots[i])
    return total


def naive(change: float, second: float, r: int, state: dict[str, Any] = STATE) -> float:
    if r == 1:
        return math.inf
    offset = state["offsets"][min(r - 2, len(state["offsets"]) - 1)]
    return math.exp(
        ramp(state["change"], math.log(change)) + ramp(state["second"], math.log(second)) + offset
    )


MOVES = st.floats(-9, 4).map(math.exp)


@settings(deadline=None)
@given(MOVES, MOVES, st.integers(2, 40))
def test_predictions_equal_a_walk_along_the_pieces(change, second, r):
    found = POLICY.predict(torch.tensor([change]), torch.tensor([second]), r)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(naive(change, second, r), rel=1e-4)


@settings(deadline=None)
@given(MOVES, MOVES, MOVES, MOVES, st.integers(2, 40))
def test_more_movement_never_predicts_less(a, b, c, d, r):
    changes, seconds = torch.tensor(sorted((a, b))), torch.tensor(sorted((c, d)))
    small, large = POLICY.predict(changes, seconds, r)
    assert small <= large
    assert (POLICY.predict(changes, seconds[0], r).diff() >= 0).all()
    assert (POLICY.predict(changes[0], seconds, r).diff() >= 0).all()


def test_the_last_offset_serves_every_later_recurrence():
    change = second = torch.full((5,), 0.1)
    found = POLICY.predict(change, second, torch.tensor([3, 4, 5, 100, 256]))
    assert found[1:].unique().numel() == 1
    assert found[0] != found[1]


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-20, 1e20, 3e38])
def test_far_outside_of_the_fit_predictions_stay_finite_and_ordered(value):
    steep = LatentKL.from_state({**STATE, "change": {"knots": [0.0, 1.0], "slopes": [50.0]}})
    for policy in (POLICY, steep):
        middle = policy.predict(torch.tensor(0.1), torch.tensor(0.1), 3)
        found = policy.predict(torch.tensor(value), torch.tensor(value), 3)
        assert found.isfinite()
        assert (found <= middle) if value < 0.1 else (found >= middle)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_move_that_is_no_number_is_not_settled(value):
    good, bad = torch.tensor([0.1]), torch.tensor([value])
    assert POLICY.predict(bad, good, 3).tolist() == [math.inf]
    assert POLICY.predict(good, bad, 3).tolist() == [math.inf]


def test_the_score_is_the_prediction_from_the_latents():
    torch.manual_seed(0)
    h = (torch.randn(5, 3, 8) * 0.5 ** torch.arange(5)[:, None, None]).cumsum(0)
    memory = torch.zeros(3, 8)
    for r in range(1, 5):
        score, memory = POLICY.score(Observation(r=r, latent=h[r], previous=h[r - 1]), memory)
        for row in range(3):
            size = h[r, row].double().norm()
            step = (h[r] - h[r - 1])[row].double()
            before = (h[r - 1] - h[r - 2])[row].double() if r > 1 else step * math.nan
            wanted = naive(float(step.norm() / size), float((step - before).norm() / size), r)
            assert score[row].item() == pytest.approx(wanted, rel=1e-4)


def test_it_reads_no_logits():
    assert POLICY.reads is Reads.LATENT
    assert POLICY.memory_width(50_000, 64) == 64


def test_another_width_is_named():
    latent = torch.zeros(2, 4)
    with pytest.raises(ShapeError, match="latent-kl reads latents"):
        POLICY.score(Observation(r=2, latent=latent, previous=latent), torch.zeros(2, 5))


def test_the_state_survives_json_to_the_bit():
    state = POLICY.to_state()
    again = LatentKL.from_state(json.loads(json.dumps(state)))
    assert again.to_state() == state == STATE
    change, second = torch.rand(50), torch.rand(50)
    assert torch.equal(again.predict(change, second, 3), POLICY.predict(change, second, 3))


@pytest.mark.parametrize(
    "damage",
    [
        {"change": {"knots": [0.0, 1.0], "slopes": [-1.0]}},
        {"change": {"knots": [1.0, 0.0], "slopes": [1.0]}},
        {"change": {"knots": [0.0, 0.0], "slopes": [1.0]}},
        {"second": {"knots": [0.0, 1.0], "slopes": [1.0, 1.0]}},
        {"second": {"knots": [0.0], "slopes": []}},
        {"second": {"knots": [0.0, math.nan], "slopes": [1.0]}},
        {"offsets": []},
        {"offsets": [math.inf]},
    ],
)
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(ExitError, match="damaged.*loopwise measure"):
        LatentKL.from_state({**STATE, **damage})


def test_it_must_be_fitted_first():
    with pytest.raises(ExitError, match="'latent-kl' must be fitted"):
        build_policy(ExitRule(policy="latent-kl"))
    assert isinstance(build_policy(ExitRule(policy="latent-kl"), {"latent-kl": STATE}), LatentKL)
