"""The turn of the latent over one recurrence: its direction, whatever its length."""

from __future__ import annotations

from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads


class CosineChange(ExitPolicy):
    """Settled once a recurrence no longer turns the latent.

    The two latents, not two steps: a trace's ``cosine`` column is that of consecutive steps.

    Source: Geiping et al. 2025, arXiv:2502.05171 (cosine; 1e-3 in their code).
    """

    name = "cosine"
    reads = Reads.LATENT

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """1 - cos(h_r, h_{r-1}) in [0, 2], ``(rows,)`` float32; +inf where a latent is zero.

        Taken as half the squared distance of the two directions, which is equal and keeps its
        digits: 1 - cos in float32 knows nothing below 6e-8, a turn of 0.0003.
        """
        now, before = observation.latent.float(), observation.previous.float()
        sizes = now.norm(dim=-1), before.norm(dim=-1)
        towards, from_ = (
            x / size.clamp_min(1e-30).unsqueeze(1)
            for x, size in zip((now, before), sizes, strict=True)
        )
        turn = (towards - from_).square().sum(dim=-1) / 2
        undirected = (sizes[0] == 0) | (sizes[1] == 0)
        return turn.masked_fill(undirected, float("inf")), memory
