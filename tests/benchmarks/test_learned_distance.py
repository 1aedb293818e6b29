"""The rule that is taught the distance to the last output: what it computes and learns from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks import learned_distance
from benchmarks.learned_distance import HIDDEN, LearnedDistance, _Examples, _Leaving, fit, learn
from benchmarks.learned_distance import predict as predicted
from loopwise.exits.base import Observation
from loopwise.exits.rule import ExitRule
from loopwise.measure.evaluate import batches, trajectory
from loopwise.measure.live import run_live
from tests.conftest import make_blocks, make_model

D_MODEL, DEPTH = 6, 3
RULE = ExitRule(policy="probe", threshold=0.0, max_depth=4)


def a_policy() -> LearnedDistance:
    g = torch.Generator().manual_seed(1)
    net = {
        "weight": torch.randn(HIDDEN, D_MODEL, generator=g),
        "bias": torch.randn(DEPTH, HIDDEN, generator=g),
        "out": torch.randn(HIDDEN, generator=g) / HIDDEN**0.5,
        "moves": torch.rand(DEPTH, 2, generator=g),
        "offset": torch.randn(DEPTH, generator=g),
    }
    return LearnedDistance(net, torch.full((D_MODEL,), 0.5), torch.full((D_MODEL,), 2.0))


def naive(policy: LearnedDistance, h: list[list[float]], r: int) -> float:
    """One row in plain floats; ``h`` holds its latents before recurrence 1 and after each."""

    def norm(values: list[float]) -> float:
        return math.sqrt(sum(v * v for v in values))

    def less(a: list[float], b: list[float]) -> list[float]:
        return [x - y for x, y in zip(a, b, strict=True)]

    net = {name: p.tolist() for name, p in policy.net.items()}
    at, step = min(r, DEPTH) - 1, less(h[r], h[r - 1])
    before = less(h[r - 1], h[r - 2]) if r > 1 else [0.0] * D_MODEL
    total = net["offset"][at]
    for slope, move in zip(net["moves"][at], (step, less(step, before)), strict=True):
        total += slope * math.log(norm(move) / norm(h[r]))
    for weight, bias, out in zip(net["weight"], net["bias"][at], net["out"], strict=True):
        u = sum(w * (x - 0.5) / 2.0 for w, x in zip(weight, h[r], strict=True)) + bias
        total += out * u * 0.5 * (1 + math.erf(u / math.sqrt(2)))
    return math.exp(total)


def test_the_score_is_the_network_in_plain_floats_from_recurrence_one_on():
    policy, g = a_policy(), torch.Generator().manual_seed(0)
    scale = 0.5 ** torch.arange(6)[:, None, None]
    h = (torch.randn(6, 4, D_MODEL, generator=g) * scale).cumsum(0)
    memory = torch.zeros(4, policy.memory_width(100, D_MODEL))
    for r in range(1, 6):
        score, memory = policy.score(Observation(r=r, latent=h[r], previous=h[r - 1]), memory)
        wanted = [naive(policy, h[:, row].double().tolist(), r) for row in range(4)]
        assert score.tolist() == pytest.approx(wanted, rel=1e-4)


def planted(n: int, seed: int) -> _Examples:
    """log KL = 2 |z_0| - z_1 + 1.5 log change + 0.5 log second - r."""
    g = torch.Generator().manual_seed(seed)
    z, moves = torch.randn(n, DEPTH, D_MODEL, generator=g), torch.randn(n, DEPTH, 2, generator=g)
    log_kl = 2 * z[..., 0].abs() - z[..., 1] + moves @ torch.tensor([1.5, 0.5])
    return _Examples(z, moves, log_kl - torch.arange(1.0, DEPTH + 1))


def test_a_planted_distance_is_found_on_fresh_tokens_at_every_recurrence(monkeypatch):
    monkeypatch.setattr(learned_distance, "_STEPS", 1500)
    net, fresh = fit(planted(2000, 0)), planted(1000, 1)
    error = (predicted(net, fresh, torch.arange(DEPTH)) - fresh.log_kl).square().mean(dim=0)
    assert (error / fresh.log_kl.var(dim=0)).max() < 0.05
    assert net["moves"] == pytest.approx(torch.tensor([[1.5, 0.5]] * DEPTH), abs=0.1)


def kept(stay: float) -> tuple[_Leaving, list[Tensor]]:
    """What is recorded of one batch, and the full trajectory of its rows."""
    model, blocks = make_model(injection="add", n_core_layers=1), make_blocks(documents=2)
    (batch,) = list(batches(blocks, 4, 1))
    leaving = _Leaving(torch.Generator().manual_seed(0), stay)
    run_live(model, [batch], RULE, leaving)
    with torch.no_grad():
        full = [h.flatten(0, 1) for _, h, _ in trajectory(model, batch, 4)]
    real = (batch.document_ids.flatten() >= 0).nonzero().squeeze(-1)
    return leaving, [h[real] for h in full]


def test_where_none_leaves_latents_are_those_of_the_trajectory():
    leaving, full = kept(1.0)
    latents, hiddens = leaving.of_last()
    assert len(latents) == len(hiddens) + 1 == 5
    for found, wanted in zip(latents[1:], full, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_those_that_stay_read_what_the_others_left():
    leaving, full = kept(0.3)
    end, latents = leaving.rows[-1], leaving.of_last()[0]
    assert 0 < len(end) < 0.6 * len(full[0])
    assert torch.allclose(latents[1], full[0][end], atol=1e-5), "none has left at recurrence 1"
    assert not torch.allclose(latents[4], full[3][end], atol=1e-5)


def test_what_it_learns_of_a_model_is_finite_and_no_move_makes_it_less(monkeypatch):
    monkeypatch.setattr(learned_distance, "_STEPS", 100)
    model, blocks = make_model(injection="add", n_core_layers=1), make_blocks(documents=3)
    policy = learn(model, list(batches(blocks, 4)), 4, stay=0.5, passes=2)
    assert all(p.isfinite().all() and not p.requires_grad for p in policy.net.values())
    assert (policy.net["moves"] >= 0).all()
