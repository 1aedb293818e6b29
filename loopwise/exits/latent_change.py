"""The relative change of the latent over one recurrence: one reduction, no head."""

from __future__ import annotations

from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads


class LatentChange(ExitPolicy):
    """Settled once a recurrence moves the latent little, relative to its size.

    Source: Geiping et al. 2025, arXiv:2502.05171 (latent difference).
    """

    name = "latent-change"
    reads = Reads.LATENT

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """||h_r - h_{r-1}|| / ||h_r||, ``(rows,)`` float32."""
        now, before = observation.latent.float(), observation.previous.float()
        return relative_norm(now - before, latent_size(now)), memory


def latent_size(latent: Tensor) -> Tensor:
    """Euclidean norm of ``(rows, d_model)`` float32: ``(rows,)``, above 0."""
    return latent.norm(dim=-1).clamp_min(1e-12)


def relative_norm(move: Tensor, size: Tensor) -> Tensor:
    """||move|| / size for moves ``(rows, d_model)`` of latents of that :func:`latent_size`."""
    return move.norm(dim=-1) / size
