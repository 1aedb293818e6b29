"""Block bootstrap: right means, intervals that cover, no crash on one block."""

from __future__ import annotations

import numpy as np
import pytest

from loopwise.measure.statistics import block_sums, mean_with_interval


def _clustered(seed: int, blocks: int, per_block: int, spread: float) -> tuple:
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(blocks), per_block)
    values = 2.0 + rng.normal(0, spread, blocks)[block] + rng.normal(0, 1, len(block))
    return values, block


def test_the_mean_weighs_tokens_not_blocks():
    values, block = np.array([1.0, 1.0, 1.0, 5.0]), np.array([7, 7, 7, 2])
    assert block_sums(values, block).mean.tolist() == [2.0]
    assert block_sums(values, block).counts.tolist() == [1, 3]


def test_order_and_names_of_blocks_do_not_matter():
    values, block = _clustered(0, 10, 5, 1.0)
    order = np.random.default_rng(1).permutation(len(values))
    plain, shuffled = block_sums(values, block), block_sums(values[order], block[order])
    assert np.allclose(plain.sums, shuffled.sums)
    renamed = block_sums(values, block * 1000 + 3)
    assert np.allclose(plain.sums, renamed.sums)


def test_intervals_of_clustered_tokens_cover_the_true_mean_about_95_percent():
    """300 draws of 40 blocks; a percentile bootstrap is a little narrow, resampling tokens far."""
    covered, naive = 0, 0
    for seed in range(300):
        values, block = _clustered(seed, 40, 12, 1.0)
        found = mean_with_interval(values, block)
        covered += found["low"] <= 2.0 <= found["high"]
        half = 1.96 * values.std() / len(values) ** 0.5
        naive += abs(values.mean() - 2.0) <= half
    assert 0.90 <= covered / 300 <= 0.985
    assert naive / 300 < 0.75, "the clusters were too weak to test anything"


def test_columns_share_their_draws_so_that_differences_are_paired():
    values, block = _clustered(0, 30, 8, 3.0)
    sums = block_sums(np.stack([values, values + 0.25], axis=1), block)
    means = sums.resampled_means()
    assert np.allclose(means[:, 1] - means[:, 0], 0.25)


def test_one_block_gives_its_mean_as_interval():
    found = mean_with_interval(np.array([1.0, 2.0, 6.0]), np.zeros(3, dtype=np.int64))
    assert found == pytest.approx({"mean": 3.0, "low": 3.0, "high": 3.0})


def test_float32_values_are_summed_in_float64():
    values = np.full(300_000, 3.1, dtype=np.float32)
    found = block_sums(values, np.arange(300_000) // 100).mean[0]
    assert found == pytest.approx(float(np.float32(3.1)), abs=1e-9)


def test_the_same_seed_gives_the_same_interval():
    values, block = _clustered(0, 10, 5, 1.0)
    assert mean_with_interval(values, block) == mean_with_interval(values, block)
