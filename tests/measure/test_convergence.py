"""Convergence on trajectories whose answers are known beforehand."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loopwise.measure.convergence import (
    argmax_final_depth,
    by_hops,
    by_token_type,
    contraction,
    depth_distribution,
    first_crossing,
    is_monotone,
    loss_by_recurrence,
    loss_optimal,
    saturation_depth,
    settled_depth,
    summarise,
)
from loopwise.measure.trace import _latent_columns
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from loopwise.train.metrics import finite


class HandMadeTrace:
    """Columns given by hand, with the face of a Trace."""

    def __init__(self, header: dict[str, Any] | None = None, **columns: np.ndarray) -> None:
        self.columns = columns
        self.n_tokens, self.horizon = columns["loss"].shape
        usual = {
            "corpus": "made",
            "trained_mean_depth": 4.0,
            "trained_depths": [1, 8],
        }
        self.header = {**usual, **(header or {})}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


def hand_made(n: int = 256, horizon: int = 6, **columns: np.ndarray) -> HandMadeTrace:
    header = columns.pop("header", None)
    shape = (n, horizon)
    usual = {
        name: np.full(shape, 0.1, dtype=np.float32)
        for name in ("kl_prev", "kl_last", "rms", "change", "second", "cosine", "margin", "entropy")
    }
    usual["kl_prev"][:, 0] = usual["second"][:, 0] = np.inf
    usual["cosine"][:, 0] = np.nan
    usual |= {
        "loss": np.full(shape, math.log(256), dtype=np.float32),
        "null_loss": np.full(shape, math.log(256), dtype=np.float32),
        "argmax": np.zeros(shape, dtype=np.int32),
        "block": np.arange(n, dtype=np.int32) // 16,
        "token": np.full(n, ord("a"), dtype=np.int32),
        "target": np.full(n, ord("b"), dtype=np.int32),
        "hops": np.zeros(n, dtype=np.uint8),
    }
    return HandMadeTrace(header, **(usual | columns))


# A linear contraction.


def contracting(rho: float, horizon: int = 12, rows: int = 64) -> dict[str, np.ndarray]:
    """Latent columns of h_r = h* + rho^r d with |d| far below |h*|, which keeps |h_r| near |h*|."""
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(rows, 24, generator=generator).double()
    offset = 1e-3 * torch.randn(rows, 24, generator=generator).double()
    latents = [goal + rho**r * offset for r in range(horizon + 1)]
    columns: dict[str, list[torch.Tensor]] = {}
    before = None
    for earlier, now in itertools.pairwise(latents):
        step = now - earlier
        for name, value in _latent_columns(now, step, before).items():
            columns.setdefault(name, []).append(value)
        before = step
    return {name: torch.stack(parts, dim=1).numpy() for name, parts in columns.items()}


@pytest.mark.parametrize("rho", [0.3, 0.5, 0.9])
def test_contraction_rate_of_a_linear_map_is_its_eigenvalue(rho):
    found = contraction(contracting(rho)["change"], floor=0.0)
    assert found["rate"] == pytest.approx(rho, rel=2e-3)
    assert found["ratios"] == pytest.approx([rho] * 11, rel=5e-3)
    assert found["converges"]
    assert found["recurrences_used"] == list(range(3, 13))


def test_a_linear_contraction_keeps_its_direction():
    cosine = contracting(0.6)["cosine"]
    assert np.isnan(cosine[:, 0]).all()
    assert cosine[:, 1:] == pytest.approx(np.ones_like(cosine[:, 1:]), abs=1e-6)


def test_an_alternating_contraction_turns_back_each_time():
    cosine = contracting(-0.6)["cosine"]
    assert cosine[:, 1:] == pytest.approx(-np.ones_like(cosine[:, 1:]), abs=1e-6)


@pytest.mark.parametrize("rho", [0.4, 0.8, -0.5])
def test_second_difference_of_a_linear_contraction(rho):
    """step_r - step_(r-1) = step_r (1 - 1/rho), so second = change |1/rho - 1|."""
    columns = contracting(rho)
    assert np.isinf(columns["second"][:, 0]).all()
    wanted = columns["change"][:, 1:] * abs(1 / rho - 1)
    assert columns["second"][:, 1:] == pytest.approx(wanted, rel=1e-6)


def test_an_expanding_or_a_steady_loop_does_not_converge():
    assert contraction(np.geomspace(0.01, 1, 8)[None])["rate"] > 1
    assert not contraction(np.geomspace(0.01, 1, 8)[None])["converges"]
    assert not contraction(np.full((5, 8), 0.2))["converges"]


def test_rounding_below_the_floor_does_not_count():
    """A contraction at 0.5 that ends in noise of 1e-6 keeps its rate."""
    clean = 0.5 ** np.arange(1, 20.0)
    noisy = np.maximum(clean, 1e-6 * np.array([1, 2] * 10)[:19])[None]
    assert contraction(noisy)["rate"] == pytest.approx(0.5, rel=1e-6)


def test_a_loop_that_stands_still_from_the_start_arrives_at_once():
    for change in (np.zeros((4, 6)), np.array([[1.0, 0.3, 1e-6, 1e-6]])):
        found = contraction(change)
        assert found["arrives_at_once"] and found["converges"]
        assert math.isnan(found["rate"])
    assert not contraction(0.5 ** np.arange(1, 9.0)[None])["arrives_at_once"]


@pytest.mark.parametrize("change", [np.ones((4, 1)), np.ones((4, 2))])
def test_a_rate_that_cannot_be_known_is_nan_not_a_guess(change):
    found = contraction(change)
    assert math.isnan(found["rate"])
    assert found["converges"] is False
    json.dumps(finite(found), allow_nan=False)


# Settling.

EPSILON = 0.01


def test_a_token_that_settles_at_r_has_depth_r():
    for r in range(1, 9):
        score = np.full((1, 8), 1.0)
        score[0, r - 1 :] = 0.0
        assert first_crossing(score, EPSILON).tolist() == [r]
        assert settled_depth(score, EPSILON).tolist() == [r]


def test_a_token_that_opens_again_crosses_early_and_settles_late():
    score = np.array([[1, 0, 0, 1, 1, 0, 0.0]])
    assert first_crossing(score, EPSILON).tolist() == [2]
    assert settled_depth(score, EPSILON).tolist() == [6]


def test_a_token_that_opens_at_the_horizon_never_settles():
    score = np.array([[0, 0, 0, 1.0]])
    assert first_crossing(score, EPSILON).tolist() == [1]
    assert settled_depth(score, EPSILON).tolist() == [5]


def test_a_token_that_never_settles_has_depth_horizon_plus_one():
    for value in (1.0, np.inf, np.nan):
        score = np.full((2, 4), value)
        assert first_crossing(score, EPSILON).tolist() == [5, 5]
        assert settled_depth(score, EPSILON).tolist() == [5, 5]


def test_a_score_at_epsilon_has_settled():
    assert settled_depth(np.array([[1.0, EPSILON, EPSILON]]), EPSILON).tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (6, 7), elements=st.floats(0, 1)), st.floats(0, 1), st.floats(0, 1))
def test_settling_never_precedes_crossing_and_follows_epsilon(score, a, b):
    strict, loose = min(a, b), max(a, b)
    assert (first_crossing(score, strict) <= settled_depth(score, strict)).all()
    assert (settled_depth(score, loose) <= settled_depth(score, strict)).all()
    assert (first_crossing(score, loose) <= first_crossing(score, strict)).all()
    by_hand = []
    for row in score:
        stays = [r for r in range(1, 8) if all(x <= strict for x in row[r - 1 :])]
        by_hand.append(min(stays, default=8))
    assert settled_depth(score, strict).tolist() == by_hand


def test_argmax_final_depth():
    argmax = np.array([[5, 5, 5, 5], [1, 2, 3, 4], [7, 5, 7, 7], [7, 7, 5, 5], [5, 7, 5, 5]])
    assert argmax_final_depth(argmax).tolist() == [1, 4, 3, 3, 3]


def test_argmax_final_depth_of_large_ids_is_exact():
    """Two ids that float32 cannot tell apart."""
    argmax = np.array([[16_777_217, 16_777_216]], dtype=np.int32)
    assert argmax_final_depth(argmax).tolist() == [2]


def test_depth_distribution_counts_the_never_settled_apart():
    found = depth_distribution(np.array([1, 2, 2, 4]), horizon=3)
    assert found["share"] == [0.25, 0.5, 0.0, 0.25]
    assert sum(found["share"]) == pytest.approx(1.0)
    assert found["mean"] == 2.25
    assert found["median"] == 2.0
    assert found["unsettled_share"] == 0.25


# Curves.


def test_saturation_of_a_known_curve():
    curve = np.array([4.0, 3.0, 2.504, 2.5, 2.5])
    loss = np.tile(curve, (200, 1))
    found = saturation_depth(loss, np.arange(200) // 10)
    assert found == {"depth": 3, "low": 3, "high": 3, "within_nats": 0.005}
    assert saturation_depth(loss, np.arange(200) // 10, within=0.003)["depth"] == 4
    assert saturation_depth(loss, np.arange(200) // 10, within=0.6)["depth"] == 2


def test_saturation_interval_spans_what_the_blocks_disagree_on():
    """Half of the blocks need depth 2, half depth 4: with few blocks either may dominate."""
    rng = np.random.default_rng(0)
    early, late = np.array([3, 2, 2, 2.0]), np.array([3, 3, 3, 2.99])
    block = np.repeat(np.arange(6), 50)
    loss = np.where((block % 2 == 0)[:, None], early, late) + rng.normal(0, 1e-4, (300, 4))
    found = saturation_depth(loss, block)
    assert found["low"] <= found["depth"] <= found["high"]
    assert (found["low"], found["high"]) == (2, 4)


def test_saturation_counts_a_loss_that_rises_again():
    loss = np.tile([3.0, 2.0, 2.2, 2.4], (50, 1))
    assert saturation_depth(loss, np.arange(50))["depth"] == 2


def test_loss_by_recurrence_is_the_mean_with_an_interval_around_it():
    rng = np.random.default_rng(0)
    loss = rng.normal([3, 2, 1], 0.3, (400, 3)).astype(np.float32)
    found = loss_by_recurrence(loss, np.arange(400) // 20)
    assert found["mean"] == pytest.approx(loss.astype(float).mean(axis=0).tolist())
    for low, mean, high in zip(found["low"], found["mean"], found["high"], strict=True):
        assert low < mean < high


def test_a_few_tokens_that_cycle_do_not_hide_a_contraction():
    """They are counted instead."""
    change = np.tile(0.5 ** np.arange(1, 13.0), (100, 1))
    change[:5] = 1.5
    found = contraction(change)
    assert found["rate"] == pytest.approx(0.5)
    assert found["converges"]
    assert found["moving_share"] == 0.05


# Loss-optimal depth.

N_TOKENS, HORIZON, VOCAB = 3000, 8, 40
BLOCK = np.arange(N_TOKENS) // 20


def drawn(log_p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One label per row from log-probabilities ``(tokens, vocab)``."""
    return (log_p + rng.gumbel(size=log_p.shape)).argmax(axis=1)


def a_model(seed: int, wobble: float) -> tuple[np.ndarray, np.random.Generator]:
    """Log-probabilities ``(tokens, horizon, vocab)`` that wander around each token's own.

    Entropies differ between tokens, as in text: some are all but certain.
    """
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.2, 4, (N_TOKENS, 1, 1))
    logits = scale * rng.normal(size=(N_TOKENS, 1, VOCAB))
    logits = logits + wobble * rng.normal(size=(N_TOKENS, HORIZON, VOCAB))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)), rng


def losses_of(log_p: np.ndarray, label: np.ndarray) -> np.ndarray:
    return -np.take_along_axis(log_p, label[:, None, None], axis=2).squeeze(2)


@pytest.mark.parametrize("wobble", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_luck_is_no_headroom_over_its_null(seed, wobble):
    """The true tokens come from the last distribution: no token needs another depth than the last.

    Losses are skewed and tokens differ by nats, which must not pass for a preference.
    """
    log_p, rng = a_model(seed, wobble)
    true, null = drawn(log_p[:, -1], rng), drawn(log_p[:, -1], rng)
    found = loss_optimal(losses_of(log_p, true), losses_of(log_p, null), BLOCK)
    assert found["headroom_nats"] > 0.05 * wobble, "nothing tempted the oracle"
    over = found["over_null_nats"]
    assert abs(over["mean"]) < 0.1 * found["headroom_nats"]
    assert over["low"] - 0.005 <= 0 <= over["high"] + 0.005


def test_a_depth_of_each_tokens_own_is_headroom_over_the_null():
    """The true token follows the distribution at a depth of its own, then it is unlearnt."""
    log_p, rng = a_model(0, 1.0)
    best = rng.integers(HORIZON, size=N_TOKENS)
    true = drawn(log_p[np.arange(N_TOKENS), best], rng)
    null = drawn(log_p[:, -1], rng)
    found = loss_optimal(losses_of(log_p, true), losses_of(log_p, null), BLOCK)
    assert found["over_null_nats"]["low"] > 0.1


def test_tokens_that_gain_and_tokens_that_lose_by_depth_are_headroom_over_the_null():
    """Half of the tokens want more depth, half are harmed by it: a router's dream.

    Each line rises or falls by half a nat with next to no noise, so that choosing per token gains
    a quarter of a nat over any uniform depth, and none of it is chance.
    """
    rng = np.random.default_rng(0)
    slope = np.where(rng.permutation(N_TOKENS) % 2 == 0, 0.5, -0.5)[:, None]
    noise = 0.01 * rng.normal(size=(2, N_TOKENS, HORIZON))
    loss = 3 + slope * np.linspace(-0.5, 0.5, HORIZON) + noise[0]
    found = loss_optimal(loss, 3 + noise[1], BLOCK)
    assert found["headroom_nats"] == pytest.approx(0.25, abs=0.02)
    assert found["over_null_nats"]["low"] > 0.2
    assert found["null_headroom_nats"] < 0.03


def test_a_uniform_preference_is_no_headroom():
    loss = np.tile(np.linspace(3, 2, 8), (100, 1))
    found = loss_optimal(loss, loss, np.arange(100))
    assert found["headroom_nats"] == pytest.approx(0.0, abs=1e-12)
    assert found["over_null_nats"] == pytest.approx({"mean": 0.0, "low": 0.0, "high": 0.0})
    assert found["mean_depth"] == 8.0


def test_loss_may_rise_a_little_and_still_count_as_falling():
    assert is_monotone([3.0, 2.0, 2.0005, 1.0])
    assert not is_monotone([3.0, 2.0, 2.01])
    assert is_monotone([3.0])
    assert is_monotone([1.0, 1.1], tolerance=0.2)


# Tables and the summary.


def test_a_uniform_model_over_bytes_takes_8_bits_per_byte():
    found = summarise(hand_made(), ByteTokenizer(), epsilon=1e-3)
    assert found["bits_per_byte"] == pytest.approx([8.0] * 6, rel=1e-6)
    assert found["loss_nats"]["mean"] == pytest.approx([math.log(256)] * 6, rel=1e-6)


def test_bits_per_byte_counts_bytes_not_tokens():
    """Tokens of two bytes each at ln 256 nats are 4 bits per byte."""
    tokenizer = BPETokenizer.train(["ab" * 9], 300)
    (pair,) = tokenizer.encode("ab")
    trace = hand_made(target=np.full(256, pair, dtype=np.int32))
    found = summarise(trace, tokenizer, epsilon=1e-3)
    assert found["bits_per_byte"] == pytest.approx([4.0] * 6, rel=1e-6)


def test_summary_of_a_hand_made_trace():
    kl = np.full((256, 6), 0.5, dtype=np.float32)
    kl[:, 0] = np.inf
    kl[:, 3:] = 1e-5
    kl[:64, 4] = 0.5  # opens again
    argmax = np.tile(np.array([1, 2, 3, 3, 3, 3], dtype=np.int32), (256, 1))
    found = summarise(hand_made(kl_prev=kl, argmax=argmax), ByteTokenizer(), epsilon=1e-3)
    assert found["first_crossing"]["mean"] == 4.0
    assert found["settled"]["mean"] == pytest.approx(4 * 0.75 + 6 * 0.25)
    assert found["moving_at_training_mean"] == 0.25
    assert found["argmax_final"]["mean"] == 3.0
    assert found["argmax_agreement"] == [0, 0, 1, 1, 1, 1]
    assert found["epsilon"] == 1e-3
    assert found["horizon"] == 6
    assert found["curves"]["kl_prev"]["mean"][0] is None, "KL to the previous has no r = 1"
    assert found["curves"]["cosine"]["median"][0] is None
    assert found["curves"]["kl_prev"]["mean"][1] == pytest.approx(0.5)
    json.dumps(finite(found), allow_nan=False)


def test_a_trace_without_text_has_no_bits_per_byte():
    ends = np.full(256, ByteTokenizer().eos_id, dtype=np.int32)
    found = summarise(hand_made(target=ends), ByteTokenizer(), epsilon=1e-3)
    assert np.isnan(found["bits_per_byte"]).all()
    json.dumps(finite(found), allow_nan=False)


def test_summary_at_horizon_one_and_without_a_training_mean():
    trace = hand_made(horizon=1, header={"trained_mean_depth": None})
    found = summarise(trace, ByteTokenizer(), epsilon=1e-3)
    assert found["saturation"]["depth"] == 1
    assert found["argmax_agreement"] == [1.0]
    json.dumps(finite(found), allow_nan=False)


def test_by_hops_follows_planted_difficulty():
    """Answers that need h look-ups settle at 2 h and are right from there on."""
    rng = np.random.default_rng(0)
    n, horizon = 400, 8
    hops = rng.integers(0, 4, n).astype(np.uint8)
    depth = 2 * hops.astype(np.int64) + 1
    target = np.full(n, 9, dtype=np.int32)
    argmax = np.where(np.arange(1, horizon + 1) >= depth[:, None], 9, 3).astype(np.int32)
    loss = np.where(argmax == 9, 0.5, 4.5).astype(np.float32)
    trace = hand_made(n, horizon, hops=hops, target=target)
    rows = by_hops(trace, depth, loss, argmax)
    assert [row["hops"] for row in rows] == [1, 2, 3]
    assert [row["tokens"] for row in rows] == [int((hops == h).sum()) for h in (1, 2, 3)]
    assert [row["settled_depth"]["mean"] for row in rows] == [3.0, 5.0, 7.0]
    assert rows[1]["accuracy_by_depth"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rows[1]["loss_nats_by_depth"] == pytest.approx([4.5] * 4 + [0.5] * 4)
    assert [row["depth_gain_nats"] for row in rows] == pytest.approx([4.0, 4.0, 4.0])


def test_by_hops_says_nothing_of_a_handful_and_copes_with_none():
    trace = hand_made(hops=np.array([1] * 29 + [0] * 227, dtype=np.uint8))
    depth = np.ones(256, dtype=np.int64)
    assert by_hops(trace, depth, trace["loss"], trace["argmax"]) == []
    plain = hand_made()
    assert by_hops(plain, depth, plain["loss"], plain["argmax"]) == []


def test_by_token_type_orders_from_shallow_to_deep():
    target = np.array([ord(" ")] * 100 + [ord("7")] * 100 + [ord("z")] * 20, dtype=np.int32)
    token = np.full(220, ord(" "), dtype=np.int32)
    depth = np.array([5] * 100 + [2] * 100 + [1] * 20)
    block = (np.arange(220) % 7).astype(np.int32)
    rows = by_token_type(
        hand_made(220, token=token, target=target, block=block), ByteTokenizer(), depth
    )
    assert [(row["type"], row["mean"], row["tokens"]) for row in rows] == [
        ("digit", 2.0, 100),
        ("whitespace", 5.0, 100),
    ]
