"""What the scheduler moves: sequences, their chunks in the core, and where their tokens lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from loopwise.engine.kv_cache import Ints


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request on its way.

    Attributes:
        number: order of arrival.
        tokens: prompt, then what was made.
        root: identity of what must be equal beside tokens for pages to be shared.
        leader: a sequence with the same prompt that computes it first; None once it has.
        done: tokens whose entries are final.
        identity: of the content of the pages known so far.
    """

    number: int
    tokens: list[int]
    root: int
    priority: int = 0
    leader: Sequence | None = None
    n_prompt: int = field(init=False)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    done: int = 0
    learned: int = 0  # pages
    identity: int = 0
    chunk: Chunk | None = None
    waiting_since: int = 0
    waited: int = 0  # ticks, without the wait that goes on
    reused: int = 0  # tokens that were there when it started
    preempted: int = 0  # times
    sound: bool = True
    ended: bool = False

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens ``[start, end)`` of a sequence in the core.

    Attributes:
        seats: of its rows, in order.
        live: seats of those still in the core.
        dropped: the sequence was preempted or cancelled meanwhile.
    """

    sequence: Sequence
    start: int
    end: int
    seats: Ints
    live: Ints
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Tokens of a slot from ``first`` on lie in ``page``."""

    slot: int
    first: int
    page: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Sequences that start with a prompt another one has computed.

    Attributes:
        copies: pages to copy, from and to, before anything else happens.
    """

    sequences: list[Sequence]
    placements: list[Placement]
    copies: list[tuple[int, int]]
