"""Fitting the certificate: the width of a head, how far states go after a step, and the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError
from loopwise.exits.certified import allowed_distance
from loopwise.measure import certified_fit
from loopwise.measure.certified_fit import (
    fit_certified,
    head_diameter,
    judge_certified,
    reach_examples,
)
from loopwise.measure.evaluate import trajectory
from tests.conftest import make_blocks, make_model


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 60),
    tail=st.floats(0, 3),
    block=st.sampled_from([1, 3, 256]),
)
def test_the_diameter_is_that_of_all_pairs(seed, vocab, tail, block):
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(vocab, 5, generator=generator)
    head *= torch.rand(vocab, 1, generator=generator) ** tail  # few rows far out, as words have it
    wanted = torch.cdist(head.double(), head.double()).max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified_fit, "_BLOCK", block)
        assert head_diameter(head) == pytest.approx(float(wanted), rel=1e-6, abs=1e-6)


@torch.no_grad()
def test_reaches_are_the_furthest_later_distance_in_steps():
    model, horizon, depth = make_model(injection="add", n_core_layers=1), 7, 4
    batch = make_blocks(documents=2, shuffle=False).batch(0, 2)
    reaches, allowed = reach_examples(model, [batch], horizon, depth)
    rows = (batch.targets.flatten() != NO_TARGET).nonzero().squeeze(1)
    hidden = [
        model.hidden(h, r, view).flatten(0, 1)[rows].double()
        for r, h, view in trajectory(model, batch, horizon)
    ]
    wanted = []
    for row in range(len(rows)):
        for r in (2, 3, 4):
            step = (hidden[r - 1][row] - hidden[r - 2][row]).norm()
            later = max(float((hidden[s][row] - hidden[r - 1][row]).norm()) for s in range(r, 7))
            wanted.append(later / float(step))
    assert sorted(reaches.tolist()) == pytest.approx(sorted(wanted), rel=1e-3)
    head = model.head_weight
    distances = (head - head.mean(0)).norm(dim=-1)
    logits = model.head(hidden[depth - 1].float())
    expected = allowed_distance(logits, distances, head_diameter(head))
    assert allowed == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-6)


def test_the_rate_holds_for_the_share_it_says():
    reaches = np.linspace(0.01, 1.0, 1000, dtype=np.float32)
    allowed = np.linspace(0, 2, 500, dtype=np.float32)
    head = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    policy = fit_certified(reaches, allowed, head)
    covered = reaches <= policy.rate / (1 - policy.rate)
    assert covered.mean() == pytest.approx(certified_fit.HELD, abs=2e-3)
    assert (allowed > policy.first_read).mean() == pytest.approx(certified_fit.EASY, abs=5e-3)
    assert policy.diameter == head_diameter(head)
    assert fit_certified(reaches, allowed, head).to_state() == policy.to_state()
    assert 0 < fit_certified(np.zeros(5, np.float32), allowed, head).rate < 1e-5


def test_nothing_to_fit_on_is_refused():
    none = np.zeros(0, np.float32)
    with pytest.raises(DataError, match="no hidden state moves"):
        fit_certified(none, none, torch.randn(3, 2))
    with pytest.raises(DataError, match="no text to fit 'certified' on"):
        reach_examples(make_model(), list[TokenBatch](), 4, 3)


def test_steps_of_rounding_are_no_examples(monkeypatch):
    """A model that arrived moves by its last digits, in any direction."""
    model = make_model()
    batch = make_blocks(documents=2, shuffle=False).batch(0, 1)
    monkeypatch.setattr(type(model), "hidden", lambda self, h, r, view: torch.ones_like(h))
    reaches, _ = reach_examples(model, [batch], 5, 4)
    assert not len(reaches)


def test_the_judge_counts_certificates_and_those_that_were_broken():
    inf = np.inf
    score = np.array([[inf, 2.0, 0.9], [inf, 1.0, 3.0], [inf, 5.0, 4.0], [inf, 0.2, 0.1]])
    argmax = np.array([[1, 2, 3, 3, 3], [1, 7, 7, 7, 8], [1, 2, 3, 4, 5], [9, 4, 4, 4, 4]])
    found = judge_certified(score, argmax)
    assert found == {"fires": [0.0, 0.5, 0.75], "certified": 3, "broken": 1}
