"""Low-rank adaptation: matrices that learn through two thin factors, the rest as it was.

Source: Hu et al. 2021, arXiv:2106.09685: W = W0 + B A, W0 frozen, B zero at the start.

The model keeps plain matrices. It computes with the merged W, whose gradient G gives those of the
factors by the chain rule, dB = G A^T and dA = B^T G, once a step; so nothing is wrapped, renamed or
multiplied at every recurrence, and what is saved is what was trained.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from loopwise.errors import ConfigError
from loopwise.models.base import LoopedLM


class LowRank:
    """One matrix as its frozen base and two factors, all float32.

    Args:
        base: W0, ``(rows, columns)``.
        rank: columns of B and rows of A.
        generator: draws A, of variance 1 / columns, so that A x is as large as x whatever the rank.
    """

    def __init__(self, base: Tensor, rank: int, generator: torch.Generator) -> None:
        rows, columns = base.shape
        drawn = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.base = base.detach().float().clone()
        self.up = nn.Parameter(torch.zeros(rows, rank, device=base.device))
        self.down = nn.Parameter(drawn.to(base.device))

    def merged(self) -> Tensor:
        """W, ``(rows, columns)``, without a graph."""
        with torch.no_grad():
            return torch.addmm(self.base, self.up, self.down)

    def take_gradient(self, gradient: Tensor) -> None:
        """From that of W, ``(rows, columns)`` float32, to those of the factors."""
        with torch.no_grad():
            self.up.grad = gradient @ self.down.T
            self.down.grad = self.up.T @ gradient

    def tensors(self) -> dict[str, Tensor]:
        """All three by name, sharing memory."""
        return {"base": self.base, "up": self.up.detach(), "down": self.down.detach()}


def matrices_to_adapt(model: LoopedLM, patterns: Sequence[str], rank: int) -> list[str]:
    """The matrices that get factors, by parameter name: those a pattern fits, or those of the core.

    Of the core, matrices no wider than the rank, such as gates of a few rows, stay as they are.

    Raises:
        ConfigError: a pattern that fits no matrix, or a core without any.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    for pattern in patterns:
        if not fnmatch.filter(matrices, pattern):
            raise ConfigError(
                f"train.only: no matrix fits {pattern!r}, and train.low_rank adapts matrices; the "
                f"first are {', '.join(list(matrices)[:4])}"
            )
    if patterns:
        return [n for n in matrices if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    core = {id(p) for module in model.parts()["core"] for p in module.parameters()}
    chosen = [
        name
        for name, p in matrices.items()
        # A table of tokens is looked up, not multiplied with.
        if id(p) in core and min(p.shape) > rank and "embedding" not in name
    ]
    if not chosen:
        raise ConfigError(
            f"train.low_rank={rank}: no matrix of the core is wider; lower it, or name others with "
            "train.only"
        )
    return chosen


def factorise(
    weights: Mapping[str, Tensor], names: Iterable[str], rank: int, seed: int
) -> dict[str, LowRank]:
    """Factors for the named matrices of ``weights``, the same ones for the same seed.

    Raises:
        ConfigError: the rank is no saving for one of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        side = min(weights[name].shape)
        if rank >= side:
            raise ConfigError(
                f"train.low_rank={rank} must be below {side}, the smaller side of {name}; lower it "
                "or leave that matrix out with train.only"
            )
    return {name: LowRank(weights[name], rank, generator) for name in names}
