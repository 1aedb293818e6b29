"""The softmax margin: how far the best token is ahead of the second."""

from __future__ import annotations

from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.largest import top_tokens


class Margin(ExitPolicy):
    """Settled once the output is sure of its token; looks at one recurrence alone.

    A token that stays unsure at every depth never settles by it.

    Source: Schuster et al. 2022, arXiv:2207.07061 (CALM, softmax response).
    """

    name = "margin"
    reads = Reads.LOGITS
    watches_movement = False

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """1 - (p1 - p2), the two largest probabilities, in [0, 1]: ``(rows,)`` float32.

        Raises:
            ShapeError: logits are missing.
        """
        logits = observation.needed_logits(self.name)
        margin = softmax_margin(logits.log_softmax(dim=-1), top_tokens(logits))
        return 1.0 - margin, memory


def softmax_margin(log_p: Tensor, top: Tensor) -> Tensor:
    """p1 - p2 from log-probabilities ``(rows, vocab)`` and the ids of the two largest.

    Returns:
        ``(rows,)`` in [0, 1]; 0 for a vocabulary of one token.
    """
    p = log_p.gather(-1, top).exp()
    return p[:, 0] - p[:, -1]
