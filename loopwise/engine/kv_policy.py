"""KV policies: which of its recurrences a token keeps, and which of them a later token reads.

Geometry-free: a policy speaks of recurrences, counted from 1, and of the entries a token keeps in
one core layer, counted from 0. Coda layers follow the same rule where an exit rule reads logits
at every recurrence, and keep one entry where the coda runs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loopwise.errors import EngineError
from loopwise.registry import did_you_mean


class KVPolicy(Protocol):
    """What is kept and what is read.

    Attributes:
        name: as users write it.
        exact: decoding equals the forward pass the model was trained with. Where it does not, what
            a token reads depends on which tokens ran beside it in its prompt chunk.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def entries(self, max_depth: int) -> int:
        """Entries a token keeps per layer when it may run ``max_depth`` recurrences."""
        ...

    def slot(self, r: int) -> int:
        """Entry written at recurrence ``r``, over whatever it held."""
        ...

    def read(self, r: int, last: int) -> int:
        """Entry read at recurrence ``r`` of a token whose latest recurrence is ``last``."""
        ...


@dataclass(frozen=True, slots=True)
class PerLoop:
    """Entry r of each earlier token or, where that token stopped earlier, its last one."""

    name: str = "per-loop"
    exact: bool = True

    def entries(self, max_depth: int) -> int:
        return max_depth

    def slot(self, r: int) -> int:
        return r - 1

    def read(self, r: int, last: int) -> int:
        return min(r, last) - 1


@dataclass(frozen=True, slots=True)
class Last:
    """The most recent entry, whatever its recurrence."""

    name: str = "last"
    exact: bool = False

    def entries(self, max_depth: int) -> int:
        return 1

    def slot(self, r: int) -> int:
        return 0

    def read(self, r: int, last: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Ring:
    """The most recent entry of the recurrences equal to r modulo ``size``, else the most recent."""

    size: int
    exact: bool = False

    @property
    def name(self) -> str:
        return f"ring-{self.size}"

    def entries(self, max_depth: int) -> int:
        return min(self.size, max_depth)

    def slot(self, r: int) -> int:
        return (r - 1) % self.size

    def read(self, r: int, last: int) -> int:
        has_one = last >= self.slot(r) + 1  # the first recurrence that writes this entry
        return self.slot(r if has_one else last)


@dataclass(frozen=True, slots=True)
class FirstThenLast:
    """Entry 1 at recurrence 1, the most recent one after."""

    name: str = "first-then-last"
    exact: bool = False

    def entries(self, max_depth: int) -> int:
        return min(2, max_depth)

    def slot(self, r: int) -> int:
        return min(r, 2) - 1

    def read(self, r: int, last: int) -> int:
        return self.slot(1 if r == 1 else last)


KV_POLICIES = ("per-loop", "last", "ring-N", "first-then-last")


def parse_kv_policy(text: str) -> KVPolicy:
    """Read ``per-loop``, ``last``, ``ring-4`` or ``first-then-last``.

    Raises:
        EngineError: an unknown name, or a ring of no entry.
    """
    plain: dict[str, KVPolicy] = {p.name: p for p in (PerLoop(), Last(), FirstThenLast())}
    if text in plain:
        return plain[text]
    head, dash, size = text.partition("-")
    if head == "ring" and dash and size.isdecimal() and int(size) >= 1:
        return Ring(int(size))
    if head == "ring":
        raise EngineError(f"KV policy {text!r} needs a number of entries from 1: write ring-4")
    hint = did_you_mean(text, plain) or ";"
    raise EngineError(f"no KV policy named {text!r}{hint} known: {', '.join(KV_POLICIES)}")
