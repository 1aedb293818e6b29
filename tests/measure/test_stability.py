"""The collapse rule on made-up logs, and the spectrum of a core that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopwise.data import generate, tokenize
from loopwise.errors import ConfigError
from loopwise.measure.stability import (
    CollapseRule,
    CollapseWatch,
    core_spectrum,
    running_std,
    unigram_nats,
)
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

RULE = CollapseRule(window=10, grace_steps=20, max_latent_rms=100.0)


def reason(losses, floor=3.0):
    watch = CollapseWatch(RULE, floor, d_model=16)
    for step, loss in enumerate(losses, start=1):
        found = watch.see_loss(step, loss)
        if found:
            return step, found
    return None


def test_a_run_that_learns_does_not_collapse():
    assert reason([6 * 0.95**step for step in range(100)]) is None


def test_a_plateau_at_the_unigram_floor_is_a_collapse_after_the_grace():
    step, why = reason([6.0] * 10 + [3.01] * 60)
    assert step == 21
    assert "not below 3.000" in why


def test_a_spike_that_heals_is_none_and_one_that_stays_is():
    healthy = [2.0] * 40
    assert reason([*healthy, *[9.0] * 1, *healthy]) is None
    step, _ = reason([*healthy, *[4.0] * 20])
    assert step == 40 + 5, "five of ten steps at 4.0 bring the mean to the floor of 3.0"


def test_what_is_not_finite_is_a_collapse_at_once():
    assert reason([2.0, math.nan]) == (2, "loss is not finite at step 2")


def test_an_exploding_latent_names_its_recurrence():
    watch = CollapseWatch(RULE, 3.0, d_model=16)
    assert watch.see_latents(5, {1: 4.0, 2: 8.0, 3: 399.0}) is None
    assert "after recurrence 3 at step 6" in watch.see_latents(6, {3: 401.0, 1: 4.0, 2: 8.0})
    assert "after recurrence 2" in watch.see_latents(7, {1: 4.0, 2: math.nan})
    assert "after recurrence 5" in watch.see_latents(8, {4: 4.0, 5: 401.0}), "its real number"


@pytest.mark.parametrize(
    "changes",
    [{"window": 0}, {"grace_steps": -1}, {"floor_share": 0.0}, {"max_latent_rms": math.inf}],
)
def test_rules_that_cannot_be_applied_are_refused(changes):
    with pytest.raises(ConfigError):
        CollapseRule(**changes)


def test_running_std():
    found = running_std(np.array([1.0, 3.0, 1.0, 3.0, 3.0, 3.0]), 2)
    assert np.isnan(found[0])
    assert found[1:] == pytest.approx([1, 1, 1, 0, 0])
    assert np.isnan(running_std(np.arange(3), 5)).all()


def test_unigram_entropy_is_that_of_the_counts():
    store = tokenize(generate("stories", 0, 0, 3), ByteTokenizer())
    counts = np.bincount(store.token_ids)
    wanted = -sum(c / counts.sum() * math.log(c / counts.sum()) for c in counts if c)
    assert unigram_nats(store) == pytest.approx(wanted)


def test_the_spectrum_of_a_linear_core(batch):
    """A shear: radius 0.5, but one step can stretch by its norm, which is larger."""
    model = make_model()
    d = model.geometry.d_model
    matrix = 0.5 * torch.eye(d)
    matrix[0, 1] = 2.0
    model.core_step = lambda latent, injection, r, view: latent @ matrix.T + injection
    found = core_spectrum(model, batch, depth=4, iterations=200)
    assert found["norm"] == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-3)
    assert found["radius"] == pytest.approx(0.5, rel=0.02)


def test_the_spectrum_of_a_real_core_is_finite(batch):
    found = core_spectrum(make_model(), batch, depth=4, iterations=10)
    assert 0 < found["radius"] <= found["norm"] * 1.01
