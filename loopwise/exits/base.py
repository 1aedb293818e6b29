"""The contract of an exit policy: scores, never verdicts.

A policy says how settled each row is; one direction for all, **lower is more settled**. Threshold,
patience, and the smallest and largest depth belong to the caller (:mod:`loopwise.exits.rule`), so
one recorded trace calibrates every threshold of every policy.

What a check costs is declared: :class:`Reads` says which passes through coda and head it takes, and
``products`` how many products over d_model besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from loopwise.errors import ExitError, ShapeError

_LARGEST_VOCAB = 2**24  # float32 holds every whole number up to here


class Reads(Enum):
    """What a policy looks at, and so what a check costs."""

    NOTHING = "nothing"
    LATENT = "latent"  # one reduction over d_model
    HIDDEN = "hidden"  # the coda at every recurrence; the head for the rows it asks for
    LOGITS = "logits"  # coda and head at every recurrence
    TRUTH = "truth"  # later recurrences: an oracle, for bounds only; nothing can serve it

    @property
    def runs_coda(self) -> bool:
        """Whether every check takes the coda, so that each leaves an entry of its own there."""
        return self in (Reads.HIDDEN, Reads.LOGITS)


class Weights(Protocol):
    """What policies may take from a model's weights; every model has these."""

    @property
    def head_weight(self) -> Tensor:
        """``(vocab, d_model)``."""
        ...

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap x tanh(logits / cap); None: as they are."""
        ...

    @property
    def exit_gate(self) -> tuple[Tensor, Tensor] | None:
        """Weight ``(d_model,)`` and bias ``()`` of a learned gate over the latent."""
        ...


class Output:
    """What the coda left of some rows, and what the head says of those that are asked for.

    Logits are made when they are first asked for and kept: what a policy has read is the output of
    a row that stops, and is not made again.

    Args:
        hidden: what the head reads, ``(rows, d_model)``.
        head: from hidden states to logits ``(rows, vocab)``.

    Attributes:
        asked: whose logits were asked for, ``(rows,)`` bool.
    """

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        self.hidden = hidden
        self.asked = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        self._head = head
        self._made: Tensor | None = None  # logits so far
        self._place: Tensor | None = None  # where among them each row lies; None: at its number

    @classmethod
    def known(cls, logits: Tensor, hidden: Tensor | None = None) -> Output:
        """Of rows whose logits ``(rows, vocab)`` are at hand."""
        output = cls(logits[:, :0] if hidden is None else hidden, lambda _: logits)
        output._made = logits
        return output

    def all(self) -> Tensor:
        """Logits ``(rows, vocab)`` of all rows."""
        if self._place is not None:
            return self.read(torch.arange(len(self.hidden), device=self.hidden.device))
        if self._made is None:
            self._made = self._head(self.hidden)
        self.asked[:] = True
        return self._made

    def read(self, rows: Tensor) -> Tensor:
        """Logits ``(len(rows), vocab)`` of different rows, by their numbers (int64)."""
        if self._made is None or self._place is not None:
            self._make(rows[~self.asked[rows]])
        assert self._made is not None, "made just now, or known"
        self.asked[rows] = True
        return self._made[rows if self._place is None else self._place[rows]]

    def _make(self, rows: Tensor) -> None:
        logits = self._head(self.hidden[rows])
        before = 0 if self._made is None else len(self._made)
        if self._place is None:
            self._place = torch.zeros(len(self.hidden), dtype=torch.int64, device=rows.device)
        self._place[rows] = before + torch.arange(len(rows), device=rows.device)
        self._made = logits if self._made is None else torch.cat((self._made, logits))


@dataclass(frozen=True, slots=True)
class Observation:
    """What one recurrence left for a policy to look at.

    Attributes:
        r: recurrence just finished, from 1: an int for all rows, or ``(rows,)`` int64.
        latent: after it, ``(rows, d_model)``.
        previous: before it, ``(rows, d_model)``.
        output: what coda and head make of it, only for policies whose checks run the coda.
    """

    r: int | Tensor
    latent: Tensor
    previous: Tensor
    output: Output | None = None

    def first(self) -> Tensor:
        """Which rows stand at recurrence 1, ``(rows,)`` bool."""
        if isinstance(self.r, int):
            return self.latent.new_full((self.latent.shape[0],), self.r == 1).bool()
        return self.r == 1

    def needed_logits(self, policy: str) -> Tensor:
        """The logits as float32 ``(rows, vocab)``, or a ShapeError that names the policy."""
        return self.needed_output(policy, "logits").all().float()

    def needed_output(self, policy: str, what: str = "the hidden state") -> Output:
        """What the coda left, or a ShapeError that names the policy."""
        if self.output is None:
            raise ShapeError(f"{policy} reads {what}, but got none; run the coda for these rows")
        return self.output


class ExitPolicy:
    """A way to see that a token has settled.

    Attributes:
        name: its row of the EXITS table.
        reads: what it looks at.
        products: over d_model that one check takes beside passes through coda and head.
        published_patience: consecutive hits its source asks for.
        needs_fitting: its state is fitted to text and stored with the checkpoint.
        needs_weights: it is made of the model's weights.
        watches_movement: it takes what no longer moves for settled, so it means nothing on a model
            that does not converge.
    """

    name: ClassVar[str]
    reads: ClassVar[Reads]
    products: ClassVar[int] = 0
    published_patience: ClassVar[int] = 1
    needs_fitting: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    watches_movement: ClassVar[bool] = True

    @classmethod
    def build(cls, state: Mapping[str, Any] | None, weights: Weights | None) -> ExitPolicy:
        """The policy from what it needs; see :func:`loopwise.exits.rule.build_policy`.

        Args:
            state: as its fit stored it; None unless ``needs_fitting``.
            weights: of the model; None unless ``needs_weights``.
        """
        return cls()

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        """Channels of the memory each row carries between recurrences; 0 for none."""
        return 0

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        """How far from settled each row is.

        Args:
            observation: see :class:`Observation`.
            memory: ``(rows, memory_width)`` float32, zeros before recurrence 1; the caller owns it
                and may gather, drop or add rows between calls.
        Returns:
            Score ``(rows,)`` float32, at least 0 (+inf where nothing can be said yet), and the new
            memory.
        """
        raise NotImplementedError


def check_ids_fit(policy: str, vocab_size: int) -> None:
    """For policies that remember token ids as float32.

    Raises:
        ExitError: ids that float32 cannot tell apart.
    """
    if vocab_size > _LARGEST_VOCAB:
        raise ExitError(
            f"exit rule {policy!r} remembers token ids in float32, which is exact for up to "
            f"{_LARGEST_VOCAB} tokens; the vocabulary has {vocab_size}; use margin or entropy"
        )
