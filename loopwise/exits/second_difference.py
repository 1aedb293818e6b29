"""The change of the latent's step from one recurrence to the next, relative to the latent."""

from __future__ import annotations

from torch import Tensor

from loopwise.errors import ShapeError
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.latent_change import latent_size, relative_norm


class SecondDifference(ExitPolicy):
    """Settled once consecutive steps are alike: small, or of one length and direction.

    Source: Pappone et al. 2025, arXiv:2509.23314 (acceleration ||d_r - d_{r-1}||, two hits in a
    row: a patience of 2). Here it is divided by ||h_r||, so that a threshold does not depend on the
    scale of the latent.
    """

    name = "second-difference"
    reads = Reads.LATENT
    published_patience = 2

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return d_model  # the previous step

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """||(h_r - h_{r-1}) - (h_{r-1} - h_{r-2})|| / ||h_r||, ``(rows,)`` float32.

        +inf at recurrence 1; at 2 the earlier step is that from the initial latent.

        Raises:
            ShapeError: the memory is not of the latent's shape.
        """
        step = remembered_step(self.name, observation, memory)
        second = relative_norm(step - memory, latent_size(observation.latent.float()))
        return second.masked_fill(observation.first(), float("inf")), step


def remembered_step(policy: str, observation: Observation, memory: Tensor) -> Tensor:
    """The step h_r - h_{r-1}, ``(rows, d_model)`` float32, checked against the one of before."""
    if memory.shape != observation.latent.shape:
        raise ShapeError(
            f"{policy} reads latents {tuple(observation.latent.shape)} but remembers steps "
            f"{tuple(memory.shape)}"
        )
    return observation.latent.float() - observation.previous.float()
