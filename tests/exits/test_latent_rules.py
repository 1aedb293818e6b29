"""Cosine and second difference, held against float64 loops over single channels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.errors import ShapeError
from loopwise.exits.base import ExitPolicy, Observation
from loopwise.exits.cosine import CosineChange
from loopwise.exits.second_difference import SecondDifference

INF = float("inf")


def run(policy: ExitPolicy, latents: torch.Tensor) -> list[list[float]]:
    """Scores ``[r - 1][row]`` of latents ``(horizon + 1, rows, d_model)``, initial one first."""
    memory = torch.zeros(latents.shape[1], policy.memory_width(9, latents.shape[2]))
    out = []
    for r in range(1, len(latents)):
        seen = Observation(r=r, latent=latents[r], previous=latents[r - 1])
        score, memory = policy.score(seen, memory)
        out.append(score.tolist())
    return out


def norm(x: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in x))


def less(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def naive_cosine(h: list[list[float]], r: int) -> float:
    product = math.fsum(a * b for a, b in zip(h[r], h[r - 1], strict=True))
    return 1 - product / (norm(h[r]) * norm(h[r - 1]))


def naive_second(h: list[list[float]], r: int) -> float:
    if r == 1:
        return INF
    return norm(less(less(h[r], h[r - 1]), less(h[r - 1], h[r - 2]))) / norm(h[r])


@pytest.mark.parametrize("shrink", [0.9, 0.3, 0.05])
@pytest.mark.parametrize(
    ("policy", "naive"),
    [(CosineChange(), naive_cosine), (SecondDifference(), naive_second)],
    ids=["cosine", "second-difference"],
)
def test_scores_equal_a_loop_in_float64(policy, naive, shrink):
    generator = torch.Generator().manual_seed(1)
    goal = torch.randn(4, 12, generator=generator)
    latents = torch.stack(
        [goal + shrink**r * torch.randn(4, 12, generator=generator) for r in range(7)]
    )
    found = run(policy, latents)
    for row in range(4):
        h = latents[:, row].double().tolist()
        for r in range(1, 7):
            wanted = naive(h, r)
            # A float32 latent moves by whole roundings: what is left of a small step is coarse.
            assert found[r - 1][row] == pytest.approx(wanted, rel=5e-3, abs=1e-12), (row, r)


# Cosine.


def test_the_angle_counts_and_the_length_does_not():
    latents = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]], [[0.0, 0.1]], [[0.0, -8.0]]])
    assert run(CosineChange(), latents) == [[0.0], [pytest.approx(1.0)], [pytest.approx(2.0)]]


@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-5])
def test_small_turns_keep_their_digits(angle):
    """1 - cos in float32 is 0, or a rounding, from a turn of 0.0003 down."""
    latents = torch.tensor([[[1.0, 0.0]], [[1.0, angle]]])
    assert run(CosineChange(), latents)[0][0] == pytest.approx(angle**2 / 2, rel=1e-3)


def test_a_zero_latent_has_no_direction():
    latents = torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    assert run(CosineChange(), latents) == [[INF, INF]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=3, max_size=3),
        min_size=2,
        max_size=4,
    )
)
def test_cosine_of_anything_is_in_range(values):
    for (score,) in run(CosineChange(), torch.tensor(values).unsqueeze(1)):
        assert 0 <= score <= 2 + 1e-5 or score == INF


# Second difference.


def test_equal_steps_are_settled_however_long():
    latents = torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]], [[5.0, 8.0]], [[7.0, 12.0]]])
    assert run(SecondDifference(), latents) == [[INF], [0.0], [0.0]]


def test_the_second_recurrence_knows_the_step_from_the_initial_latent():
    latents = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[3.0, 4.0]]])
    assert run(SecondDifference(), latents) == [[INF], [1.0]]


def test_small_steps_of_a_bfloat16_latent_are_taken_in_float32():
    latents = torch.tensor([[[1.0]], [[1.0]], [[1.0078125]]]).bfloat16()
    assert run(SecondDifference(), latents)[1][0] == pytest.approx(0.0078125 / 1.0078125, rel=1e-5)


def test_a_latent_of_zero_is_finite():
    assert run(SecondDifference(), torch.zeros(4, 1, 3)) == [[INF], [0.0], [0.0]]


def test_another_width_is_named():
    latent = torch.zeros(2, 4)
    seen = Observation(r=2, latent=latent, previous=latent)
    with pytest.raises(ShapeError, match=r"reads latents \(2, 4\) but remembers steps \(2, 5\)"):
        SecondDifference().score(seen, torch.zeros(2, 5))
