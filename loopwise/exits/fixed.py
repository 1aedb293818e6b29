"""A0: every token runs the same depth."""

from __future__ import annotations

from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads


class FixedDepth(ExitPolicy):
    """Never settles, so that ``max_depth`` of the rule decides: uniform depth (A0 of paper 1)."""

    name = "fixed"
    reads = Reads.NOTHING
    watches_movement = False

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        rows = observation.latent.shape[0]
        return observation.latent.new_full((rows,), float("inf")).float(), memory
