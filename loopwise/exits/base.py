"""The contract of an exit policy: scores, never verdicts.

A policy says how settled each row is; one direction for all, **lower is more settled**. Threshold,
patience, and the smallest and largest depth belong to the caller (:mod:`loopwise.exits.rule`), so
one recorded trace calibrates every threshold of every policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from loopwise.errors import ShapeError


class Reads(Enum):
    """What a policy looks at, and so what a check costs."""

    NOTHING = "nothing"
    LATENT = "latent"  # one reduction over d_model
    LOGITS = "logits"  # coda and head
    TRUTH = "truth"  # later recurrences: an oracle, for bounds only; nothing can serve it


@dataclass(frozen=True, slots=True)
class Observation:
    """What one recurrence left for a policy to look at.

    Attributes:
        r: recurrence just finished, from 1: an int for all rows, or ``(rows,)`` int64.
        latent: after it, ``(rows, d_model)``.
        previous: before it, ``(rows, d_model)``.
        logits: ``(rows, vocab)``, only for policies that read logits.
    """

    r: int | Tensor
    latent: Tensor
    previous: Tensor
    logits: Tensor | None = None

    def first(self) -> Tensor:
        """Which rows stand at recurrence 1, ``(rows,)`` bool."""
        if isinstance(self.r, int):
            return self.latent.new_full((self.latent.shape[0],), self.r == 1).bool()
        return self.r == 1

    def needed_logits(self, policy: str) -> Tensor:
        """The logits as float32 ``(rows, vocab)``, or a ShapeError that names the policy."""
        if self.logits is None:
            raise ShapeError(f"{policy} reads logits, but got none; run the coda for these rows")
        return self.logits.float()


class ExitPolicy(Protocol):
    """A way to see that a token has settled."""

    name: str
    reads: Reads

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        """Channels of the memory each row carries between recurrences; 0 for none."""
        ...

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """How far from settled each row is.

        Args:
            observation: see :class:`Observation`.
            memory: ``(rows, memory_width)`` float32, zeros before recurrence 1; the caller owns it
                and may gather, drop or add rows between calls.
        Returns:
            Score ``(rows,)`` float32 (+inf where nothing can be said yet), and the new memory.
        """
        ...
