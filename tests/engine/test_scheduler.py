"""The scheduler alone, driven by random streams and a runner that only pretends to compute.

The runner keeps, for every place of every page, what a real one would have left there: the tokens
up to it, and the chunk it came in where that is part of the meaning. So a page that is reused with
other content, handed to two requests or found by mistake shows at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.engine.scheduler import Limits, Scheduler
from loopwise.engine.sequence import Chunk, Sequence
from loopwise.errors import EngineError

LIMITS: dict[str, Any] = {
    "slots": 4,
    "max_seq": 32,
    "chunk": 8,
    "prefill_rows": 16,
    "pages": 40,
    "page_size": 4,
    "max_wait": 50,
}


def limits(**changes: int) -> Limits:
    return Limits(**{**LIMITS, **changes})


@dataclass(eq=False)
class Job:
    """What a request will do, and when it was where."""

    sequence: Sequence
    new_tokens: int
    arrived: int
    waited: int = 0  # ticks, over all its waits
    started: int = -1
    first_token: int = -1
    finished: int = -1

    @property
    def needed(self) -> int:
        """Tokens that will be fed; the last one made is not."""
        return self.sequence.n_prompt + self.new_tokens - 1


@dataclass(eq=False)
class World:
    """A scheduler, its requests, and a runner whose chunks settle after ``settle()`` ticks."""

    limits: Limits
    exact: bool = True
    settle: Any = lambda chunk: 1
    make: Any = lambda job: 7  # the token that follows
    scheduler: Scheduler = field(init=False)
    jobs: dict[Sequence, Job] = field(default_factory=dict)
    live: dict[Chunk, int] = field(default_factory=dict)  # ticks left
    content: dict[tuple[int, int], Any] = field(default_factory=dict)  # by page and place
    table: dict[tuple[int, int], int] = field(default_factory=dict)  # by slot and page of it
    numbers: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.exact)

    @property
    def tick(self) -> int:
        return self.scheduler.tick

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler._waiting

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler._running

    def submit(
        self,
        tokens: list[int],
        new_tokens: int = 1,
        priority: int = 0,
        root: int | None = None,
        leader: Sequence | None = None,
    ) -> Job:
        self.numbers += 1
        root = self.scheduler.pool.root("rule") if root is None else root
        sequence = Sequence(self.numbers, list(tokens), root, priority, leader)
        job = Job(sequence, new_tokens, self.tick)
        self.jobs[sequence] = job
        self.scheduler.submit(sequence)
        return job

    def cancel(self, job: Job) -> None:
        self.scheduler.end(job.sequence)
        job.finished = max(job.finished, 0)

    def step(self) -> None:
        """One tick, with every promise checked."""
        before = {s: (s.pages[:], s.preempted) for s in self.running}
        was_waiting = list(self.waiting)
        late = {s for s in was_waiting if self.jobs[s].waited > self.limits.max_wait}
        chunks, placements = self.scheduler.admit()
        for p in placements:
            assert p.first % self.limits.page_size == 0
            self.table[p.slot, p.first // self.limits.page_size] = p.page
        self.check_who_started(was_waiting, late)
        self.check_who_was_preempted(before)
        for s in [*self.waiting, *(s for s in self.running if s.chunk is None)]:
            self.jobs[s].waited += 1
        for chunk in chunks:
            self.check_chunk(chunk)
            self.live[chunk] = self.settle(chunk)
        self.live = {c: n for c, n in self.live.items() if not c.dropped}
        self.check_holdings()
        for chunk in [c for c, n in self.live.items() if n <= 1]:
            del self.live[chunk]
            self.finish(chunk)
        self.live = {c: n - 1 for c, n in self.live.items()}

    def finish(self, chunk: Chunk) -> None:
        s = chunk.sequence
        for at in range(chunk.start, chunk.end):
            self.content[self.place(s, at)] = self.meaning(s, at)
        self.scheduler.finish(chunk)
        self.check_content(s)
        if chunk.end < len(s.tokens):
            return
        if chunk.end == s.n_prompt:
            self.share(s)
        self.go_on(s)

    def share(self, leader: Sequence) -> None:
        queue = sorted(self.waiting, key=self.scheduler._order)
        line = [s for s in queue if s.leader is leader or self.ready(s)]
        shared = self.scheduler.share(leader)
        size = self.limits.page_size
        for source, page in shared.copies:
            for i in range(size):
                self.content[page, i] = self.content.get((source, i))
        for p in shared.placements:
            self.table[p.slot, p.first // size] = p.page
        for s in shared.sequences:
            assert (s.done, s.chunk, s.reused) == (s.n_prompt, None, s.n_prompt)
            self.jobs[s].started = self.tick
            self.check_content(s)
        assert line[: len(shared.sequences)] == shared.sequences, "somebody was overtaken"
        assert not any(s.leader is leader for s in self.waiting)
        self.check_holdings()
        for s in shared.sequences:
            self.go_on(s)

    def go_on(self, s: Sequence) -> None:
        """A token is made of the last one fed."""
        job = self.jobs[s]
        if job.first_token < 0:
            job.first_token = self.tick
        if len(s.tokens) == job.needed:
            self.scheduler.end(s)
            job.finished = self.tick
        else:
            self.scheduler.append(s, self.make(job))

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            if self.scheduler.idle:
                return
            self.step()
        states = [(s.number, s.slot, s.done, len(s.tokens)) for s in self.running]
        raise AssertionError(f"hangs: {states} running, {len(self.waiting)} waiting")

    # What entries mean.

    def place(self, s: Sequence, at: int) -> tuple[int, int]:
        """As a runner finds it: from the placements it was given alone."""
        size = self.limits.page_size
        return self.table[s.slot, at // size], at % size

    def meaning(self, s: Sequence, at: int) -> Any:
        """All that the entries of the token at a position depend on."""
        past = (s.root, tuple(s.tokens[: at + 1]))
        if self.exact:
            return past
        size = self.limits.chunk
        start = at // size * size if at < s.n_prompt else at
        prompt = min(s.n_prompt, at + 1)  # made tokens ran alone, prompt tokens together
        return *past, start, prompt

    def check_content(self, s: Sequence) -> None:
        for at in range(s.done):
            assert self.content.get(self.place(s, at)) == self.meaning(s, at), (
                f"request {s.number}, token {at}: its place holds something else"
            )

    # Promises.

    def check_who_started(self, was_waiting: list[Sequence], late: set[Sequence]) -> None:
        """Once one has waited too long, nobody who ranks behind it starts before it."""
        passed = [s for s in late if s in self.waiting and self.ready(s)]
        for s in was_waiting:
            if s.slot >= 0 or (s.preempted > 0 and s not in self.waiting):
                for other in passed:
                    assert s in late and s.number < other.number, (
                        f"{s.number} started before {other.number}, which has waited "
                        f"{self.jobs[other].waited} ticks"
                    )
                if self.jobs[s].started < 0:
                    self.jobs[s].started = self.tick

    def ready(self, s: Sequence) -> bool:
        return s.leader is None or s.leader.ended

    def check_who_was_preempted(self, before: dict[Sequence, tuple[list[int], int]]) -> None:
        """Only for somebody who ranks before it, who got pages of its own."""
        lost = [s for s, (_, n) in before.items() if s.preempted > n]
        kept = [s for s in before if s not in lost]
        for s in lost:
            assert s.slot >= 0 or not s.pages  # it may have found room again at once
            assert all(self.order(k) < self.order(s) for k in kept), (
                f"{s.number} was preempted, though others rank behind it"
            )
        if before:
            assert min(before, key=self.order) not in lost, "the first in order lost its pages"

    def order(self, s: Sequence) -> tuple[bool, int, int]:
        late = self.jobs[s].waited > self.limits.max_wait
        return not late, 0 if late else -s.priority, s.number

    def check_chunk(self, chunk: Chunk) -> None:
        s, size = chunk.sequence, self.limits.chunk
        assert chunk.start == s.done < chunk.end <= len(s.tokens)
        rows = chunk.end - chunk.start
        assert len(chunk.seats) == len(chunk.live) == rows <= size
        if rows == 1:
            assert chunk.seats.tolist() == [s.slot]
        else:
            assert min(chunk.seats) >= self.limits.slots
            assert max(chunk.seats) < self.scheduler.seats
            assert sorted(chunk.seats.tolist()) == chunk.seats.tolist()
        if not self.exact and chunk.start < s.n_prompt:
            assert chunk.start % size == 0, "a chunk lies at a fixed multiple from the start"
            assert chunk.end == min(chunk.start + size, s.n_prompt), "and is admitted whole"
        elif not self.exact:
            assert rows == 1, "a made token runs alone, as it did the first time"

    def check_holdings(self) -> None:
        """Slots, seats and pages: each with one holder, unless its content is final and equal."""
        size = self.limits.page_size
        slots = [s.slot for s in self.running]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.limits.slots))
        seats = [seat for c in self.live for seat in c.seats.tolist()]
        assert len(set(seats)) == len(seats), "two rows on one seat"
        held: dict[int, list[tuple[Sequence, int]]] = {}
        for s in self.running:
            end = s.chunk.end if s.chunk is not None else s.done
            assert len(s.pages) >= self.limits.pages_for(end)
            for i, page in enumerate(s.pages):
                assert self.table[s.slot, i] == page, "the runner was not told"
                held.setdefault(page, []).append((s, i))
            self.check_content(s)
        for page, holders in held.items():
            assert 1 <= page <= self.limits.pages
            if len(holders) > 1:
                assert all(s.done >= (i + 1) * size for s, i in holders), "shared and unfinished"
        assert self.scheduler.pool.free + len(held) == self.limits.pages
        assert all(s.slot < 0 and not s.pages for s in self.waiting)

    def check_all_came_back(self) -> None:
        scheduler = self.scheduler
        assert scheduler.idle
        assert scheduler.pool.free == self.limits.pages
        assert sorted(scheduler._slots) == list(range(self.limits.slots))
        assert sorted(scheduler._seats) == list(range(self.limits.slots, scheduler.seats))
        assert not any(scheduler.pool._holders)


# Random streams.

PROMPTS = [[1] * 30, [1, 2, 3, 4] * 7, [1, 2, 3, 4, 1, 2, 3, 9] * 3]  # much in common


@st.composite
def worlds(draw: st.DrawFn) -> World:
    page_size = draw(st.sampled_from([1, 3, 4, 8, 64]))
    chunk = draw(st.sampled_from([1, 2, 4, 6, 40]))
    max_seq = draw(st.integers(1, 32))
    least = -(-max_seq // page_size)
    shape = limits(
        slots=draw(st.integers(1, 5)),
        max_seq=max_seq,
        chunk=chunk,
        prefill_rows=chunk + draw(st.sampled_from([0, 3, 20])),
        pages=draw(st.integers(least, 3 * least)),
        page_size=page_size,
        max_wait=draw(st.sampled_from([0, 3, 30, 10_000])),
    )
    return World(shape, exact=draw(st.booleans()))


@settings(deadline=None, max_examples=120)
@given(world=worlds(), requests=st.integers(1, 14), seed=st.integers(0, 10**9))
def test_any_stream_ends_and_everything_comes_back(world, requests, seed):
    """U52 and more: preempted, cancelled, shared, prioritised, in any order of arrival."""
    rng = random.Random(seed)
    slowest = rng.choice([1, 4])
    world.settle = lambda chunk: rng.randint(1, slowest)
    world.make = lambda job: rng.randint(1, 2)
    size = world.limits.max_seq
    roots = [world.scheduler.pool.root(key) for key in "ab"]
    jobs: list[Job] = []
    while len(jobs) < requests:
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            n = rng.randint(1, min(size, 24))
            prompt = rng.choice(PROMPTS)[:n]
            new = rng.randint(1, size - len(prompt) + 1)
            root, priority = rng.choice(roots), rng.choice([0, 0, 0, 1, -1])
            leader = None
            for _ in range(rng.choice([1, 1, 3])):
                job = world.submit(prompt, new, priority, root, leader)
                leader = leader or job.sequence
                jobs.append(job)
        world.step()
        if rng.random() < 0.1 and jobs:
            world.cancel(rng.choice(jobs))
    # The first in order is always served: in the worst case they go one after another.
    world.run(sum(job.needed for job in jobs) * (slowest + 2) * len(jobs) + 100)
    world.check_all_came_back()
    assert all(job.finished >= 0 for job in jobs)
    assert all(chunk.dropped for chunk in world.live)


@settings(deadline=None, max_examples=40)
@given(world=worlds(), seed=st.integers(0, 10**9))
def test_cancelling_everything_at_any_moment_frees_everything(world, seed):
    rng = random.Random(seed)
    world.settle = lambda chunk: rng.randint(1, 5)
    jobs = []
    for _ in range(rng.randint(1, 6)):
        n = rng.randint(1, min(world.limits.max_seq, 24))
        new = rng.randint(1, world.limits.max_seq - n + 1)
        jobs.append(world.submit(rng.choice(PROMPTS)[:n], new))
    for _ in range(rng.randint(0, 12)):
        world.step()
    for job in rng.sample(jobs, len(jobs)):
        world.cancel(job)
        world.cancel(job)  # twice is once
    world.check_all_came_back()
    world.step()
    assert all(chunk.dropped for chunk in world.live)


# Fairness.


def test_requests_start_in_the_order_of_their_arrival():
    world = World(limits(slots=1))
    jobs = [world.submit([i], 3) for i in range(5)]
    world.run(100)
    starts = [job.started for job in jobs]
    assert starts == sorted(starts)
    assert len(set(starts)) == 5


def test_a_higher_priority_starts_sooner_but_waits_for_no_running_one_to_be_thrown_out():
    world = World(limits(slots=1))
    running = world.submit([1], 4)
    world.step()
    usual, urgent = world.submit([2], 2), world.submit([3], 2, priority=5)
    world.run(100)
    assert running.finished < urgent.started < usual.started
    assert running.sequence.preempted == 0


def steady(world: World, ticks: int, arrival: Any) -> list[Job]:
    """Run with ``arrival(tick)`` called before each tick; the jobs it submitted."""
    jobs = []
    for tick in range(ticks):
        job = arrival(tick)
        if job is not None:
            jobs.append(job)
        world.step()
    return jobs


@pytest.mark.parametrize("max_wait", [0, 10, 60])
def test_a_big_request_lets_small_ones_pass_and_then_gets_its_turn(max_wait):
    """U52: one needs 90% of the pages, small ones keep coming; neither side starves."""
    world = World(limits(slots=8, max_seq=80, pages=20, prefill_rows=80, max_wait=max_wait))
    first = [world.submit([1, i], 6) for i in range(6)]  # hold some pages
    world.step()
    big = world.submit([9] * 72)
    small = [world.submit([2, i], 6) for i in range(8)]
    later = steady(world, 400, lambda tick: world.submit([3, tick], 6) if tick % 2 else None)
    assert big.finished > 0
    assert big.started <= big.arrived + max_wait + 2 * 8, "the wait is bounded"
    waits = sorted(job.started - job.arrived for job in small)
    assert waits[len(waits) // 2] <= 40 + (max_wait == 0) * 40
    assert all(job.started > 0 for job in first + small + later[:-30])


def test_a_low_priority_is_not_preempted_for_ever():
    """Urgent requests that keep growing took its pages every time it had started again."""
    world = World(limits(slots=3, max_seq=24, pages=8, max_wait=20))
    low = world.submit([5] * 12, 12, priority=-1)
    urgent = steady(
        world, 1500, lambda tick: world.submit([tick % 7] * 4, 16) if tick % 6 == 0 else None
    )
    assert low.finished > 0, f"preempted {low.sequence.preempted} times"
    assert low.finished < 300
    assert all(job.finished > 0 for job in urgent[:-60])


@pytest.mark.parametrize("exact", [True, False])
def test_a_whole_chunk_is_not_kept_from_its_seats_for_ever(exact):
    """Small prompts that keep coming left never as many seats free as one large chunk needs."""
    world = World(limits(slots=8, max_wait=20, pages=80, chunk=8, prefill_rows=8), exact)
    world.settle = lambda chunk: 4
    world.submit([7] * 3)
    world.step()
    large = world.submit([1] * 8)
    small = steady(world, 300, lambda tick: world.submit([2 + tick % 5] * 3) if tick % 2 else None)
    assert large.finished > 0
    assert large.finished - large.arrived <= 20 + 3 * 4
    assert all(job.finished > 0 for job in small[:-20])


def test_a_request_that_fits_starts_beside_one_that_does_not():
    world = World(limits(slots=4, pages=8, max_wait=1000))
    world.submit([1] * 20, 8)
    world.step()
    big, small = world.submit([2] * 30), world.submit([3] * 4)
    world.step()
    assert small.started > 0
    assert big.started < 0
    assert world.scheduler.counts["overtaken"] >= 1
    world.run(200)
    assert big.finished > 0


# Preemption.


def test_when_pages_run_out_the_youngest_gives_its_own_and_loses_nothing():
    world = World(limits(slots=2, max_seq=32, pages=8))
    old, young = world.submit([1, 2, 3], 28), world.submit([4, 5, 6], 28)
    world.run(500)
    assert old.sequence.preempted == 0
    assert young.sequence.preempted >= 1
    assert old.finished < young.finished
    assert len(young.sequence.tokens) == 30, "it made all its tokens"
    assert any(
        f"request {young.sequence.number} gives back" in line for line in world.scheduler.log
    )
    world.check_all_came_back()


def test_what_was_preempted_finds_its_own_prompt_again():
    world = World(limits(slots=2, max_seq=32, pages=8))
    world.submit([1] * 20, 13)
    young = world.submit([4] * 9, 13)
    world.run(500)
    assert young.sequence.preempted >= 1
    assert world.scheduler.counts["reused_tokens"] >= 0
    assert young.sequence.reused <= young.sequence.n_prompt, "of the prompt, it says"


# Shared beginnings.


def ended(world: World, *requests: tuple[list[int], int]) -> list[Job]:
    """Requests one after another."""
    jobs = []
    for tokens, new in requests:
        jobs.append(world.submit(tokens, new))
        world.run(1000)
    return jobs


def test_a_prompt_is_computed_once():
    world = World(limits())
    _, again, longer = ended(world, ([1] * 20, 1), ([1] * 20, 1), ([1] * 20 + [2] * 5, 1))
    assert again.sequence.reused == 16, "one token is left to read"
    assert longer.sequence.reused == 20


def test_an_exact_policy_finds_made_tokens_too():
    world = World(limits(), make=lambda job: 5)
    _, chat = ended(world, ([1] * 6, 11), ([1] * 6 + [5] * 10 + [2, 2], 1))
    assert chat.sequence.reused == 16


@pytest.mark.parametrize(("chunk", "size"), [(8, 4), (4, 8), (6, 4), (3, 3), (8, 1)])
def test_an_approximate_policy_reuses_whole_chunks_of_prompts_only(chunk, size):
    unit = math.lcm(chunk, size)
    shape = limits(chunk=chunk, page_size=size, max_seq=64, pages=128)
    world = World(shape, exact=False, make=lambda job: 5)
    prompt = [1] * 29
    _, again, chat = ended(world, (prompt, 20), (prompt, 1), (prompt + [5] * 19 + [2], 1))
    assert again.sequence.reused == 28 // unit * unit
    assert chat.sequence.reused == min(29, 48) // unit * unit, "no made token"


def test_made_tokens_are_never_learned_under_an_approximate_policy():
    world = World(limits(chunk=4), exact=False, make=lambda job: 5)
    first, second = ended(world, ([1] * 4, 20), ([1] * 4 + [5] * 20, 1))
    assert second.sequence.reused == 4
    assert first.sequence.learned == 1


def test_choices_of_a_request_wait_for_the_first_to_read_the_prompt():
    world = World(limits(prefill_rows=32))
    world.settle = lambda chunk: 3
    leader = world.submit([1] * 20, 4)
    others = [world.submit([1] * 20, 4, leader=leader.sequence) for _ in range(2)]
    world.run(200)
    assert [job.sequence.reused for job in others] == [20, 20], "all of it"
    assert all(job.started == job.first_token == leader.first_token for job in others)
    assert all(len(job.sequence.tokens) == 23 for job in (leader, *others))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("prompt", [18, 20])
def test_choices_without_a_slot_are_led_by_the_first_of_them(prompt, exact):
    """Two slots and five choices of one token: three of them compute the prompt."""
    world = World(limits(slots=2), exact)
    leader = world.submit([1] * prompt, 1)
    others = [world.submit([1] * prompt, 1, leader=leader.sequence) for _ in range(4)]
    world.run(200)
    whole = [job.sequence.reused == prompt for job in (leader, *others)]
    assert whole == [False, True, False, True, False]
    world.check_all_came_back()


def test_those_behind_choices_that_wait_for_their_prompt_take_no_slot_from_them():
    world = World(limits(slots=3), settle=lambda chunk: 4)
    leader = world.submit([1] * 6, 4)
    others = [world.submit([1] * 6, 4, leader=leader.sequence) for _ in range(2)]
    behind = world.submit([2] * 6, 4)
    world.run(200)
    assert [job.sequence.reused for job in others] == [6, 6]
    assert behind.started > leader.first_token


def test_choices_of_one_that_has_no_pages_yet_keep_no_slot_free():
    world = World(limits(slots=3, pages=8))
    busy = world.submit([3] * 20, 8)
    world.step()
    leader = world.submit([1] * 20, 1)
    other = world.submit([1] * 20, 1, leader=leader.sequence)
    small = world.submit([2] * 4, 1)
    world.step()
    assert (leader.started, other.started, small.started) == (-1, -1, 2)
    world.run(300)
    assert busy.finished > 0 and other.finished > 0


def test_choices_wait_their_turn_where_somebody_ranks_before_them():
    """An urgent request arrives while their prompt is computed; there is one slot."""
    world = World(limits(slots=2))
    urgent: list[Job] = []

    def settle(chunk: Chunk) -> int:
        if not urgent:
            urgent.append(world.submit([2] * 6, 4, priority=1))
        return 1

    world.settle = settle
    leader = world.submit([1] * 6, 4)
    other = world.submit([1] * 6, 4, leader=leader.sequence)
    world.step()
    assert (leader.first_token, other.started) == (1, -1)
    world.step()
    assert (urgent[0].started, other.started) == (2, -1)
    world.run(200)
    assert other.finished > 0


def test_choices_go_on_when_the_first_is_cancelled_before_it_has_read_the_prompt():
    world = World(limits())
    leader = world.submit([1] * 20, 4)
    other = world.submit([1] * 20, 4, leader=leader.sequence)
    world.step()
    world.cancel(leader)
    world.run(200)
    assert other.finished > 0
    world.check_all_came_back()


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "engine.slots=0 must be at least 1"),
        ({"max_seq": 0}, "engine.max_seq=0 must be at least 1"),
        ({"chunk": -1}, "engine.chunk=-1 must be at least 1"),
        ({"page_size": 0}, "engine.page_size=0 must be at least 1"),
        ({"max_wait": -1}, "engine.max_wait=-1 must not be negative"),
        ({"prefill_rows": 4}, "engine.prefill_rows=4 must hold one chunk of 8"),
        (
            {"pages": 7},
            "engine.pages=7 must hold one request of max_seq=32 tokens: at least 8 of 4",
        ),
    ],
)
def test_limits_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        limits(**changes)
