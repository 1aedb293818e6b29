"""The argmax oracle: a bound that looks into the future and cannot be served."""

from __future__ import annotations

from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads


class Oracle(ExitPolicy):
    """Exits at the earliest recurrence whose argmax is final.

    Source: Logan 2026, arXiv:2607.14427. Known only after the last recurrence, so it exists in
    replay (:mod:`loopwise.measure.frontier`) and is refused wherever tokens are decided live.
    """

    name = "oracle"
    reads = Reads.TRUTH
    watches_movement = False

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        raise ExitError(
            "exit rule 'oracle' needs later recurrences, so it cannot decide token by token; "
            "it is a bound for reports"
        )
