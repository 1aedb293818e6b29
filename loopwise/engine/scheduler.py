"""Who runs, who waits, who holds which page: plain Python over small integers.

A running request holds a *slot*. Its tokens go through the core in *chunks*: pieces of its prompt,
then single tokens as they are made. All rows of a chunk enter together and the next chunk follows
when the last of them has settled, so that a token never meets an unfinished one before it.

Fairness: requests start in the order of (priority, arrival). One that does not fit lets smaller
ones pass, but only for ``max_wait`` ticks of all its waits together, for a slot or for seats; from
then on nobody who ranks behind it starts before it, and priorities no longer count against it. When
pages run out, the last in that order gives its own back and is computed again later; the first
always goes on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loopwise.engine.pages import PagePool
from loopwise.engine.sequence import Chunk, Placement, Sequence, Shared
from loopwise.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What can be in flight at once.

    Attributes:
        slots: requests.
        max_seq: tokens of one request, prompt and output.
        chunk: prompt tokens that enter the core together.
        prefill_rows: prompt tokens in the core at once, over all requests.
        pages, page_size: of KV storage, and tokens in each.
        max_wait: ticks a request may be overtaken.
    """

    slots: int
    max_seq: int
    chunk: int
    prefill_rows: int
    pages: int
    page_size: int
    max_wait: int

    def __post_init__(self) -> None:
        for name in ("slots", "max_seq", "chunk", "prefill_rows", "page_size"):
            if getattr(self, name) < 1:
                raise EngineError(f"engine.{name}={getattr(self, name)} must be at least 1")
        if self.max_wait < 0:
            raise EngineError(f"engine.max_wait={self.max_wait} must not be negative")
        if self.prefill_rows < self.chunk:
            raise EngineError(
                f"engine.prefill_rows={self.prefill_rows} must hold one chunk of {self.chunk}"
            )
        if self.pages < self.pages_for(self.max_seq):
            raise EngineError(
                f"engine.pages={self.pages} must hold one request of max_seq={self.max_seq} "
                f"tokens: at least {self.pages_for(self.max_seq)} of {self.page_size}"
            )

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class Scheduler:
    """Admission, pages and seats.

    The seat of a single token is its slot; further seats are for prompt chunks.

    Args:
        exact: what a token reads does not depend on the chunk it came in, so that chunks may start
            anywhere and made tokens can be computed again in chunks.
        whole_batches: start requests only when none is running.
    """

    def __init__(self, limits: Limits, exact: bool, whole_batches: bool = False) -> None:
        self.limits, self.exact, self.whole_batches = limits, exact, whole_batches
        self.pool = PagePool(limits.pages)
        self.tick = 0
        self.counts: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=256)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._slots = list(range(limits.slots - 1, -1, -1))
        self._seats = list(range(limits.slots, limits.slots + limits.prefill_rows))[::-1]
        self._placed: list[Placement] = []
        self._seats_kept = False  # in this tick, for one that has waited too long for them

    @property
    def seats(self) -> int:
        return self.limits.slots + self.limits.prefill_rows

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence of at most ``max_seq`` tokens."""
        sequence.waiting_since = self.tick + 1
        self._waiting.append(sequence)

    def admit(self) -> tuple[list[Chunk], list[Placement]]:
        """Start what can start in this tick: its chunks, and where their tokens lie."""
        self.tick += 1
        self._placed = []
        self._seats_kept = False
        chunks = []
        for sequence in sorted(self._running, key=self._order):
            if sequence.chunk is None and sequence.slot >= 0:
                chunks += self._start(sequence)
        if not (self.whole_batches and self._running):
            for sequence in self._candidates():
                chunks += self._start(sequence)
        for sequence in self._running:
            if sequence.chunk is None:  # no seats
                sequence.waited += 1
        return [c for c in chunks if not c.dropped], self._placed

    def finish(self, chunk: Chunk, sound: bool = True) -> None:
        """All rows of a chunk have settled and left their entries in every layer.

        Args:
            sound: its entries are numbers; from the first that is not on, nothing is shared.
        """
        sequence = chunk.sequence
        sequence.sound = sequence.sound and sound
        self._free_seats(chunk)
        sequence.chunk = None
        sequence.done = chunk.end
        size = self.limits.page_size
        # Under an approximate policy what a made token left depends on how it was made.
        known = sequence.done if self.exact else min(sequence.done, sequence.n_prompt)
        while sequence.sound and (sequence.learned + 1) * size <= known:
            first, page = sequence.learned * size, sequence.pages[sequence.learned]
            tokens = sequence.tokens[first : first + size]
            sequence.identity = self.pool.learn(sequence.identity, page, tokens)
            sequence.learned += 1

    def share(self, leader: Sequence) -> Shared:
        """Start who waits for a prompt that has just been computed: nothing of it is left to do.

        Pages the prompt fills are held; of one it does not fill, each gets its own copy, since made
        tokens follow there. Nobody is overtaken. Those without room are led by their first.
        """
        self._placed = []
        shared = Shared([], self._placed, [])
        if not any(s.leader is leader for s in self._waiting):
            return shared
        whole, part = divmod(leader.n_prompt, self.limits.page_size)
        for sequence in sorted(self._waiting, key=self._order):
            if sequence.leader is not leader:
                if _ready(sequence):
                    break
                continue
            if not self._slots or (part and not self.pool.free):
                break
            found = [(page, leader.identity) for page in leader.pages[:whole]]
            sequence.waited += 1  # this tick's admission has passed it by
            self._seat(sequence, found, leader.n_prompt)
            if part:
                page = self.pool.take()
                self._place(sequence, page)
                shared.copies.append((leader.pages[whole], page))
            sequence.sound, sequence.leader = leader.sound, None
            shared.sequences.append(sequence)
        rest = [s for s in self._waiting if s.leader is leader]
        for sequence in rest:
            sequence.leader = None if sequence is rest[0] else rest[0]
        return shared

    def append(self, sequence: Sequence, token_id: int) -> None:
        """A token was made; it enters the core at the next tick."""
        sequence.tokens.append(token_id)

    def end(self, sequence: Sequence) -> None:
        """The sequence is complete, or nobody wants it any more."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences that get a slot now, seated."""
        if not self._slots:  # a long queue is not sorted in vain
            return
        kept = 0  # slots, for who starts once the prompt it waits for is computed
        for sequence in sorted(self._waiting, key=self._order):
            if len(self._slots) <= kept:
                return
            leader = sequence.leader
            if leader is not None and not leader.ended:
                kept += leader.slot >= 0
                continue
            found = list(self._shared(sequence))
            new = self.limits.pages_for(len(sequence.tokens)) - len(found)
            if new > self.pool.free - self.pool.idle(page for page, _ in found):
                if self._overdue(sequence):
                    return
                self.counts["overtaken"] += 1
                continue
            self._seat(sequence, found, len(found) * self.limits.page_size)
            yield sequence

    def _overdue(self, sequence: Sequence) -> bool:
        now = self.tick - sequence.waiting_since if sequence.slot < 0 else 0
        return sequence.waited + now > self.limits.max_wait

    def _order(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Smaller goes first."""
        late = self._overdue(sequence)
        return not late, 0 if late else -sequence.priority, sequence.number

    def _shared(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """Pages of its beginning that are there already; at least one token is left to compute."""
        size = self.limits.page_size
        usable = len(sequence.tokens) - 1
        if not self.exact:  # only whole chunks of the prompt mean the same again
            unit = math.lcm(size, self.limits.chunk)
            usable = min(usable, sequence.n_prompt) // unit * unit
        found = list(self.pool.find(sequence.root, sequence.tokens[:usable], size))
        if not self.exact:
            found = found[: len(found) * size // unit * unit // size]
        yield from found

    def _seat(self, sequence: Sequence, found: list[tuple[int, int]], done: int) -> None:
        """Give it a slot and the pages ``found``, with identities, of its first ``done`` tokens."""
        sequence.waited += self.tick - sequence.waiting_since
        sequence.slot = self._slots.pop()
        sequence.identity = sequence.root
        for page, identity in found:
            self.pool.hold(page)
            self._place(sequence, page)
            sequence.identity = identity
        sequence.learned = len(found)
        sequence.done = done
        if not sequence.preempted:  # later it finds what it has computed itself
            sequence.reused = sequence.done
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self.counts["admitted"] += 1
        self.counts["reused_tokens"] += sequence.done
        self.counts["longest_wait"] = max(self.counts["longest_wait"], sequence.waited)

    def _start(self, sequence: Sequence) -> list[Chunk]:
        """The next chunk of a running sequence; nothing where it must wait or was preempted."""
        if sequence.slot < 0:
            return []
        end = self._end_of_chunk(sequence)
        rows = end - sequence.done
        if rows > 1 and (self._seats_kept or rows > len(self._seats)):
            self._seats_kept = self._seats_kept or self._overdue(sequence)
            return []
        if not self._cover(sequence, end):
            return []
        if rows == 1:
            seats = np.array([sequence.slot])
        else:
            seats = np.array(sorted(self._seats.pop() for _ in range(rows)))
        chunk = Chunk(sequence, sequence.done, end, seats, seats)
        sequence.chunk = chunk
        return [chunk]

    def _end_of_chunk(self, sequence: Sequence) -> int:
        size, total = self.limits.chunk, len(sequence.tokens)
        if self.exact:
            return min(sequence.done + size, total)
        if sequence.done >= sequence.n_prompt:
            return sequence.done + 1
        return min((sequence.done // size + 1) * size, sequence.n_prompt)

    def _cover(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for the first ``tokens`` tokens; sequences behind it give theirs where needed."""
        needed = self.limits.pages_for(tokens) - len(sequence.pages)
        while needed > self.pool.free:
            last = max(self._running, key=self._order)
            self._preempt(last, needed - self.pool.free)
            if last is sequence:
                return False
        for _ in range(needed):
            self._place(sequence, self.pool.take())
        return True

    def _place(self, sequence: Sequence, page: int) -> None:
        first = len(sequence.pages) * self.limits.page_size
        self._placed.append(Placement(sequence.slot, first, page))
        sequence.pages.append(page)

    def _preempt(self, sequence: Sequence, short: int) -> None:
        self.counts["preempted"] += 1
        self.log.append(
            f"tick {self.tick}: request {sequence.number} gives back {len(sequence.pages)} pages "
            f"({short} short; it is the last in order) and will be computed again"
        )
        self._leave(sequence)
        sequence.preempted += 1
        sequence.done = sequence.learned = 0
        sequence.waiting_since = self.tick
        self._waiting.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Slot, seats and pages come back."""
        if sequence.chunk is not None:
            sequence.chunk.dropped = True
            self._free_seats(sequence.chunk)
            sequence.chunk = None
        self._placed = [p for p in self._placed if p.slot != sequence.slot]
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages = -1, []

    def _free_seats(self, chunk: Chunk) -> None:
        self._seats += [seat for seat in chunk.seats.tolist() if seat >= self.limits.slots]


def _ready(sequence: Sequence) -> bool:
    """Whether the prompt it shares has been computed, or nobody will."""
    return sequence.leader is None or sequence.leader.ended
