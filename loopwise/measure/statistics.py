"""Means with intervals over tokens that are not independent: resampling by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Per-block sums of token values, which is all a block bootstrap needs.

    Attributes:
        sums: ``(blocks, columns)`` float64.
        counts: ``(blocks,)`` tokens.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def mean(self) -> NDArray[np.float64]:
        return self.sums.sum(axis=0) / self.counts.sum()

    def resampled_means(self, seed: int = 0, n: int = N_RESAMPLES) -> NDArray[np.float64]:
        """Means over ``n`` draws of blocks with replacement, ``(n, columns)``."""
        blocks = len(self.counts)
        rng = np.random.default_rng(seed)
        # How often each block is drawn: the same law as drawing one by one, in one call.
        weights = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=n).astype(np.float64)
        return (weights @ self.sums) / (weights @ self.counts)[:, None]

    def interval(self, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """95% percentile interval of each column's mean."""
        means = self.resampled_means(seed)
        return np.quantile(means, 0.025, axis=0), np.quantile(means, 0.975, axis=0)


def block_sums(values: NDArray, block: NDArray) -> BlockSums:
    """Sum ``values (tokens,)`` or ``(tokens, columns)`` within each block.

    Tokens of one block share context, so the block is the unit that is resampled.
    """
    values = values.reshape(len(block), -1).astype(np.float64)
    _, index, counts = np.unique(block, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), values.shape[1]))
    np.add.at(sums, index, values)
    return BlockSums(sums=sums, counts=counts)


def mean_with_interval(values: NDArray, block: NDArray) -> dict[str, float]:
    """``{"mean", "low", "high"}`` of one value per token, 95% by block bootstrap."""
    sums = block_sums(values, block)
    low, high = sums.interval()
    return {"mean": float(sums.mean[0]), "low": float(low[0]), "high": float(high[0])}
