"""Fitting A2: a planted rule is found, labels mean what they say, the judge is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError
from loopwise.measure.evaluate import batches, trajectory
from loopwise.measure.probe_fit import auroc, fit_probe, judge_probe, probe_examples
from tests.conftest import make_blocks, make_model


def planted(n: int, seed: int, d: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents with channels of very different scale and labels from a linear rule with noise."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=generator)
    weight = torch.tensor([3.0, -3.0, 2.0] + [0.0] * (d - 3))
    chance = torch.sigmoid(2 * (z @ weight) - 1)
    labels = (torch.rand(n, generator=generator) < chance).float()
    return z * torch.logspace(-2, 2, d) + 5.0, labels


def test_a_planted_linear_rule_is_found_on_fresh_rows():
    probe = fit_probe(*planted(3000, 0))
    latents, labels = planted(3000, 1)
    judged = judge_probe(probe.probability(latents).numpy(), labels.numpy())
    assert judged["auroc"] > 0.95
    assert judged["calibration_error"] < 0.03
    assert not probe.weight.requires_grad


def test_a_channel_that_never_moves_is_harmless():
    latents, labels = planted(500, 0)
    latents[:, 5] = 7.0
    probe = fit_probe(latents, labels)
    assert torch.isfinite(probe.probability(latents)).all()
    shifted = latents.clone()
    shifted[:, 5] += 1e-6
    assert probe.probability(shifted).sub(probe.probability(latents)).abs().max() < 1e-2


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_gives_a_sure_and_finite_probe(value):
    latents, _ = planted(300, 0)
    probability = fit_probe(latents, torch.full((300,), value)).probability(latents)
    assert torch.isfinite(probability).all()
    assert (probability - value).abs().max() < 0.05


def test_labels_say_whether_the_argmax_still_changes():
    model, blocks = make_model(injection="add", n_core_layers=1), make_blocks(documents=3)
    horizon, max_depth = 7, 4
    latents, labels = probe_examples(model, batches(blocks, 2, 3), horizon, max_depth)
    wanted_latents, wanted = [], []
    for batch in batches(blocks, 2, 3):
        rows = [i for i, t in enumerate(batch.targets.flatten().tolist()) if t != NO_TARGET]
        with torch.no_grad():
            steps = list(trajectory(model, batch, horizon))
            argmax = [
                model.coda(latent, r, view).flatten(0, 1)[rows].argmax(-1).tolist()
                for r, latent, view in steps
            ]
        for r in range(1, max_depth + 1):
            wanted_latents.append(steps[r - 1][1].flatten(0, 1)[rows])
            for i in range(len(rows)):
                path = [argmax[k - 1][i] for k in range(r, horizon + 1)]
                wanted.append(float(len(set(path)) > 1))
    assert labels.tolist() == wanted
    assert 0.05 < labels.mean() < 0.95, "labels of one kind test nothing"
    assert torch.allclose(latents, torch.cat(wanted_latents), atol=1e-6)


def test_no_text_is_an_error():
    with pytest.raises(DataError, match="no text to fit"):
        probe_examples(make_model(), [], 4, 4)


# The judge.


@pytest.mark.parametrize(
    ("score", "label", "area"),
    [
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], 1.0),
        ([0.9, 0.8, 0.2, 0.1], [0, 0, 1, 1], 0.0),
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 0.5),
        ([0.1, 0.5, 0.5, 0.9], [0, 0, 1, 1], 0.875),
        ([0.3, 0.1, 0.2], [1, 0, 1], 1.0),
        ([0.1, 0.2, 0.3, 0.4], [1, 0, 1, 0], 0.25),
    ],
)
def test_auroc_of_small_cases(score, label, area):
    assert auroc(np.array(score), np.array(label)) == pytest.approx(area)


@pytest.mark.parametrize("label", [0, 1])
def test_auroc_of_one_class_is_not_a_number(label):
    assert math.isnan(auroc(np.array([0.1, 0.9]), np.array([label, label])))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_auroc_is_the_share_of_pairs_in_order(rows):
    score = np.array([s for s, _ in rows], dtype=float)
    label = np.array([x for _, x in rows])
    pairs = [(s > t) + 0.5 * (s == t) for s in score[label] for t in score[~label]]
    if pairs:
        assert auroc(score, label) == pytest.approx(float(np.mean(pairs)))
    else:
        assert math.isnan(auroc(score, label))


def test_calibration_of_a_perfect_and_a_boastful_judge():
    rng = np.random.default_rng(0)
    p = rng.random(20_000)
    honest = judge_probe(p, rng.random(20_000) < p)
    assert honest["calibration_error"] < 0.02
    assert sum(row["share"] for row in honest["calibration"]) == pytest.approx(1.0)
    assert len(honest["calibration"]) == 10
    boastful = judge_probe(np.full(1000, 0.9), np.arange(1000) % 2 == 0)
    assert boastful["calibration_error"] == pytest.approx(0.4)
    assert boastful["positive_share"] == 0.5


def test_certain_predictions_fall_into_the_outer_bins():
    found = judge_probe(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]))
    assert [row["predicted"] for row in found["calibration"]] == [0.0, 1.0]
    assert found["calibration_error"] == 0.0
