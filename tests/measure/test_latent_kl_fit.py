"""Fitting the predicted KL: a planted relation is found, slopes never fall, the solver is exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loopwise.errors import DataError
from loopwise.exits.latent_kl import LatentKL
from loopwise.measure.latent_kl_fit import (
    KL_FLOOR,
    fit_latent_kl,
    judge_latent_kl,
    nonnegative_solution,
)

HORIZON = 6
R = np.arange(1, HORIZON + 1)


def moves(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Change and second difference ``(tokens, HORIZON)``, shrinking, apart from each other."""
    rng = np.random.default_rng(seed)
    change = np.exp(-0.6 * R + rng.normal(size=(tokens, HORIZON)))
    second = change * np.exp(0.5 * rng.normal(size=(tokens, HORIZON)))
    second[:, 0] = np.inf
    return change.astype(np.float32), second.astype(np.float32)


def planted(change: np.ndarray, second: np.ndarray) -> np.ndarray:
    """KL with a bend at change 0.1 and an offset per recurrence; nothing known at recurrence 1."""
    x, y = np.log(change), np.log(second)
    bend = np.log(0.1)
    log_kl = 1.5 * np.minimum(x, bend) + 0.5 * np.maximum(x, bend) + 0.3 * y + 0.2 * (R % 3)
    return np.exp(log_kl)


def predict(policy: LatentKL, change: np.ndarray, second: np.ndarray) -> np.ndarray:
    tensors = (torch.from_numpy(values) for values in (change, second))
    return policy.predict(*tensors, torch.from_numpy(R)).numpy()


def test_a_planted_relation_is_found_on_fresh_tokens():
    change, second = moves(3000)
    policy = fit_latent_kl(change, second, planted(change, second), R)
    fresh = moves(1000, seed=1)
    judged = judge_latent_kl(predict(policy, *fresh), planted(*fresh))
    assert judged["r2"] > 0.999
    assert judged["rms_log"] < 0.1
    for row in judged["calibration"]:
        assert row["predicted"] == pytest.approx(row["observed"], rel=0.1)


def test_a_power_law_is_found_to_the_last_digit():
    change, second = moves(2000)
    policy = fit_latent_kl(change, second, 0.3 * change**1.5, R)
    assert policy.change.slopes.tolist() == pytest.approx([1.5] * 8, abs=1e-3)
    assert policy.second.slopes.tolist() == pytest.approx([0.0] * 8, abs=1e-3)
    far = np.full((1, HORIZON), 1e-5, dtype=np.float32)  # below any example: linear there
    assert predict(policy, far, far)[0, 1:] == pytest.approx(0.3 * 1e-5**1.5, rel=0.02)


def test_noise_leaves_the_geometric_mean():
    change, second = moves(20_000)
    noise = np.random.default_rng(3).normal(size=change.shape)
    policy = fit_latent_kl(change, second, planted(change, second) * np.exp(noise), R)
    fresh = moves(1000, seed=1)
    error = np.log(predict(policy, *fresh)[:, 1:] / planted(*fresh)[:, 1:])
    assert abs(error.mean()) < 0.03
    assert error.std() < 0.1


def test_a_relation_that_falls_is_fitted_flat():
    change, second = moves(1000)
    policy = fit_latent_kl(change, second, 1 / (1 + change), R)
    assert policy.change.slopes.max() < 1e-3
    predicted = predict(policy, change, second)
    assert np.isfinite(predicted[:, 1:]).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(30, 80))
def test_any_data_gives_ramps_that_never_fall_and_a_state_that_comes_back(seed, tokens):
    rng = np.random.default_rng(seed)
    change, second, kl = (np.exp(3 * rng.normal(size=(tokens, HORIZON))) for _ in range(3))
    policy = fit_latent_kl(change, second, kl, R)
    assert (policy.change.slopes >= 0).all() and (policy.second.slopes >= 0).all()
    assert len(policy.offsets) == HORIZON - 1
    again = LatentKL.from_state(policy.to_state())
    assert again.to_state() == policy.to_state()
    assert fit_latent_kl(change, second, kl, R).to_state() == policy.to_state()


def test_moves_that_never_differ_are_harmless():
    """A model that stands still, and outputs whose KL has sunk into rounding."""
    still = np.zeros((100, HORIZON), dtype=np.float32)
    policy = fit_latent_kl(still, still, still, R)
    found = predict(policy, still, still)
    assert found[:, 1:] == pytest.approx(KL_FLOOR, rel=1e-4)
    assert np.isfinite(predict(policy, still + 1, still + 1)[:, 1:]).all()


def test_recurrence_one_and_what_is_not_finite_are_no_examples():
    change, second = moves(500)
    kl = planted(change, second)
    wanted = fit_latent_kl(change, second, kl, R).to_state()
    kl[:, 0] = np.inf
    extra = np.full((3, HORIZON), np.nan)
    stacked = [np.concatenate([values, extra]) for values in (change, second, kl)]
    assert fit_latent_kl(*stacked, R).to_state() == wanted


def test_recurrences_without_examples_are_bridged():
    change, second = moves(500)
    kl = planted(change, second)
    kl[:, [1, 3]] = np.nan
    offsets = fit_latent_kl(change, second, kl, R).offsets
    assert len(offsets) == HORIZON - 1
    assert offsets[0] == offsets[1]
    assert offsets[2] == pytest.approx(float(offsets[1] + offsets[3]) / 2, abs=1e-5)


def test_too_little_is_refused():
    change, second = moves(10)
    with pytest.raises(DataError, match="50 examples .* needs 100"):
        fit_latent_kl(change, second, planted(change, second), R)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (6, 4), elements=st.floats(-3, 3).map(lambda x: round(x, 2))),
    arrays(np.float64, 6, elements=st.floats(-3, 3).map(lambda x: round(x, 2))),
)
def test_the_solver_is_as_good_as_trying_every_support(design, wanted):
    gram = design.T @ design + 1e-6 * np.eye(4)
    moment = design.T @ wanted

    def value(s: np.ndarray) -> float:
        return float(s @ gram @ s / 2 - moment @ s)

    best = 0.0
    for n in range(1, 5):
        for support in itertools.combinations(range(4), n):
            s = np.zeros(4)
            s[list(support)] = np.linalg.solve(
                gram[np.ix_(support, support)], moment[list(support)]
            )
            if (s >= 0).all():
                best = min(best, value(s))
    found = nonnegative_solution(gram, moment)
    assert (found >= 0).all()
    assert value(found) <= best + 1e-7 * (1 + abs(best))
