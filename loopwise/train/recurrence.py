"""How the recurrence count of an optimiser step is drawn.

Every sampler is a probability table over 1 .. max_depth, so its true mean and quantiles are known
before training, and a draw is a pure function of (seed, step): equal on every rank and after a
resume, with no generator state to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopwise.config import check_choices
from loopwise.errors import ConfigError

_PARTS = 100  # of a run, for what is averaged over it
MAX_MEAN = 1000  # recurrences; past it the probability table is a typing error


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthConfig:
    """Which depths a training run sees."""

    kind: Literal["lognormal", "lognormal-poisson", "uniform", "fixed"] = "lognormal"
    mean: float = 8.0
    sigma: float = 0.5  # of the logarithm
    max_depth: int | None = None  # draws above it are redrawn; default 4 x mean
    exact_mean: bool = True  # shift the distribution until its true mean is `mean`
    backprop_depth: int = 8  # gradients flow through the last so many recurrences
    per: Literal["step", "micro-batch"] = "step"  # how often a depth is drawn
    # The mean rises from 1 in whole numbers over `curriculum_fraction` of the steps, and gradients
    # flow through no more than it (McLeish et al. 2025, retrofitting): linear, or 1-sqrt, which
    # stays shallow for longer.
    curriculum: Literal["none", "linear", "1-sqrt"] = "none"
    curriculum_fraction: float = 0.5

    def __post_init__(self) -> None:
        check_choices(self)
        if not 1 <= self.mean <= MAX_MEAN:
            raise ConfigError(f"depth.mean={self.mean} must lie in 1..{MAX_MEAN}")
        if self.max_depth is not None and self.kind in ("uniform", "fixed"):
            raise ConfigError(f"depth.max_depth does not go with kind {self.kind!r}; leave it out")
        if not 0 < self.sigma <= 2:
            raise ConfigError(f"depth.sigma={self.sigma} must be in (0, 2]")
        if self.backprop_depth < 1:
            raise ConfigError(f"depth.backprop_depth={self.backprop_depth} must be at least 1")
        if self.max_depth is not None and self.max_depth < self.mean:
            raise ConfigError(
                f"depth.max_depth={self.max_depth} must be at least depth.mean={self.mean}"
            )
        if not 0 < self.curriculum_fraction <= 1:
            raise ConfigError(
                f"depth.curriculum_fraction={self.curriculum_fraction} must be in (0, 1]"
            )
        if self.kind == "fixed" and self.mean != round(self.mean):
            raise ConfigError(f"depth.mean={self.mean} must be whole for kind 'fixed'")
        if self.kind == "uniform" and (2 * self.mean) != round(2 * self.mean):
            raise ConfigError(f"depth.mean={self.mean} must be a multiple of 0.5 for 'uniform'")


class DepthSampler:
    """A distribution over recurrence counts, and its draws.

    Attributes:
        pmf: ``(max_depth,)`` float64; entry i is the probability of depth i + 1.
    """

    def __init__(self, config: DepthConfig) -> None:
        self.config = config
        self.pmf = _probability_table(config)
        self._cdf = np.cumsum(self.pmf)

    @property
    def mean(self) -> float:
        """True mean of the drawn depths."""
        return float(self.pmf @ np.arange(1, self.pmf.size + 1))

    @property
    def std(self) -> float:
        depths = np.arange(1, self.pmf.size + 1)
        return float(np.sqrt(self.pmf @ (depths - self.mean) ** 2))

    def quantile(self, q: float) -> int:
        """Smallest depth that at least a share ``q`` of draws does not exceed."""
        return int(np.searchsorted(self._cdf, q - 1e-12) + 1)

    def draw(self, seed: int, *place: int) -> int:
        """Depth of an optimiser step, or of a micro-batch of one: ``draw(seed, step, index)``."""
        u = np.random.default_rng((seed, *place)).random()
        return min(int(np.searchsorted(self._cdf, u, side="right")), self.pmf.size - 1) + 1

    def describe(self) -> dict[str, float | int | str]:
        """True moments and quantiles, for logs and ``training.json``."""
        return {
            "kind": self.config.kind,
            "asked_mean": self.config.mean,
            "true_mean": self.mean,
            "std": self.std,
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "p99": self.quantile(0.99),
            "min": int(np.flatnonzero(self.pmf)[0] + 1),
            "max": int(np.flatnonzero(self.pmf)[-1] + 1),
            "backprop_depth": self.config.backprop_depth,
        }


class DepthSchedule:
    """Which distribution each step of a run draws from.

    Attributes:
        final: the distribution the run ends with.
    """

    def __init__(self, config: DepthConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.final = DepthSampler(config)
        self._early: dict[int, DepthSampler] = {}

    def at(self, step: int) -> DepthSampler:
        """The distribution of optimiser step ``step`` (from 0)."""
        config = self.config
        done = step / (config.curriculum_fraction * self.steps)
        if config.curriculum == "none" or done >= 1:
            return self.final
        share = done if config.curriculum == "linear" else 1 - math.sqrt(1 - done)
        mean = max(1, math.ceil(share * config.mean))
        if mean >= config.mean:
            return self.final
        if mean not in self._early:
            through = min(config.backprop_depth, mean)
            early = replace(config, mean=float(mean), backprop_depth=through)
            self._early[mean] = DepthSampler(early)
        return self._early[mean]

    def draw(self, seed: int, step: int, index: int) -> int:
        """Depth of micro-batch ``index`` of a step."""
        place = (step,) if self.config.per == "step" else (step, index)
        return self.at(step).draw(seed, *place)

    def average(self, of: Callable[[int, int], float]) -> float:
        """Mean over the run of ``of(depth, backprop depth)``."""
        total = 0.0
        for at in range(_PARTS):
            sampler = self.at(at * self.steps // _PARTS)
            through = sampler.config.backprop_depth
            total += sum(p * of(d, through) for d, p in enumerate(sampler.pmf, 1) if p)
        return total / _PARTS


def _probability_table(config: DepthConfig) -> NDArray[np.float64]:
    if config.kind == "fixed":
        table = np.zeros(int(config.mean))
        table[-1] = 1.0
        return table
    if config.kind == "uniform":  # 1 .. 2 mean - 1
        n = int(2 * config.mean - 1)
        return np.full(n, 1.0 / n)
    size = config.max_depth or max(math.ceil(4 * config.mean), 4)
    if config.kind == "lognormal":
        # Centred on `mean`, as a real number; rounding and the cut move it, hence exact_mean.
        centre = math.log(config.mean) - config.sigma**2 / 2

        def table_at(mu: float) -> NDArray[np.float64]:
            return _rounded_lognormal(mu, config.sigma, size)

    else:
        # Huginn's formula: rate ~ LogNormal(ln(max(mean, backprop)) - sigma^2/2, sigma), depth =
        # Poisson(rate) + 1, whose mean is max(mean, backprop) + 1 (arXiv:2502.05171, appendix).
        centre = math.log(max(config.mean, config.backprop_depth)) - config.sigma**2 / 2
        if config.max_depth is None:
            size = max(size, 4 * config.backprop_depth)

        def table_at(mu: float) -> NDArray[np.float64]:
            return _lognormal_poisson(mu, config.sigma, size)

    return _with_mean(table_at, config.mean, size) if config.exact_mean else table_at(centre)


def _with_mean(
    table_at: Callable[[float], NDArray[np.float64]], mean: float, size: int
) -> NDArray[np.float64]:
    """Bisect the location until the table's mean is ``mean``; the mean grows with the location."""
    depths = np.arange(1, size + 1)
    low, high = -20.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        if table_at(middle) @ depths < mean:
            low = middle
        else:
            high = middle
    table = table_at(high)
    if abs(table @ depths - mean) > 1e-6:
        raise ConfigError(f"depth.mean={mean} cannot be reached with depth.max_depth={size}")
    return table


def _rounded_lognormal(mu: float, sigma: float, size: int) -> NDArray[np.float64]:
    """Log-normal, rounded to the nearest whole number of at least 1, cut at ``size``."""
    edges = np.log(np.arange(1, size + 1) + 0.5)
    cdf = np.array([0.5 * math.erfc(-(e - mu) / (sigma * math.sqrt(2))) for e in edges])
    table = np.diff(cdf, prepend=0.0)
    total = table.sum()
    if total < 1e-300:  # everything lies beyond the cut
        table = np.zeros(size)
        table[-1] = total = 1.0
    return table / total


def _lognormal_poisson(mu: float, sigma: float, size: int) -> NDArray[np.float64]:
    """Poisson(LogNormal(mu, sigma)) + 1 by quadrature over the normal, cut at ``size``."""
    z = np.linspace(-8, 8, 801)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()
    log_rate = mu + sigma * z
    count = np.arange(size)
    log_factorial = np.array([math.lgamma(c + 1) for c in count])
    log_p = count[:, None] * log_rate - np.exp(log_rate) - log_factorial[:, None]
    table = np.exp(log_p) @ weight
    total = table.sum()
    if total < 1e-300:
        table = np.zeros(size)
        table[-1] = total = 1.0
    return table / total
