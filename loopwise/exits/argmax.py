"""Whether the most likely token is still the one of the recurrence before."""

from __future__ import annotations

from torch import Tensor

from loopwise.exits.base import ExitPolicy, Observation, Reads, check_ids_fit
from loopwise.exits.largest import likeliest


class ArgmaxChange(ExitPolicy):
    """Settled once the answer stays; the rule's patience says for how many recurrences.

    ``argmax:0,patience=5`` stops after five recurrences in a row without a change.

    Source: Geiping et al. 2025, arXiv:2502.05171 (argmax stability; 5 recurrences in their code).
    """

    name = "argmax"
    reads = Reads.LOGITS

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        """The previous argmax as a float32, exact for the vocabularies that are let in.

        Raises:
            ExitError: token ids that float32 cannot tell apart.
        """
        check_ids_fit(self.name, vocab_size)
        return 1

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """0 where the argmax is unchanged, 1 where it changed; ``(rows,)``, +inf at recurrence 1.

        Raises:
            ShapeError: logits are missing.
        """
        best = likeliest(observation.needed_logits(self.name)).float().unsqueeze(1)
        changed = (best != memory).float().squeeze(1)
        return changed.masked_fill(observation.first(), float("inf")), best
