"""Puzzles that take a known number of look-ups, and the document they are written into.

A puzzle states facts. A fact is a *link*: it leads from a thing the reader holds to the next one
(the red ball: Tom; Tom: Anna; Anna: Ben). Each chain begins at what its question names and ends at
its answer; every thing has one link, and chains share no thing with each other. **Hops are the
number of links between question and answer**, from 1 to 6, which is also the least number of
stated facts that together entail the answer. In sums and ages each link adds or takes a number,
and the answer is the last number with all of them applied.

Distractor chains of the same relation and of other lengths are told in between, over other people
and things, so that neither the last name nor the only name is the answer. Each chain is asked
about at most once: an answer that stands in the text would shorten the next question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from loopwise.data.documents import Document

MAX_HOPS = 6


def words_of(text: str) -> list[str]:
    """A list of its own from one line: :meth:`Draft.take` tells lists apart by identity."""
    return text.split()


# Things that facts are about, shared by the registers.
GIRLS = words_of(
    "Anna Mia Lily Rosa Clara Emma Nina Ruth Vera Ivy Molly Grace Tara Zoe Hana Lucy Nora Elsa "
    "Maya Alma Daisy Fern Greta Hazel Iris June Kira Lena Mabel Olive"
)
BOYS = words_of(
    "Tom Ben Leo Sam Max Jack Omar Paul Hugo Finn Otto Carl Noah Ravi Luke Adam Eli Gus Ned Theo "
    "Amir Bruno Dan Emil Felix Hans Ivan Jonas Karl Milo"
)
NAMES = GIRLS + BOYS
COLOURS = words_of("red blue green yellow black white orange purple brown grey pink golden")
OBJECTS = words_of(
    "ball key lamp book hat kite drum cup coin ring map shell whistle doll spoon candle mirror "
    "clock flute scarf feather pencil rope brush bell compass kettle puppet marble letter button "
    "glove ladle trumpet umbrella lantern pillow blanket violin hammer saw needle ribbon medal "
    "telescope teapot saucer basin"
)
PLACES = words_of(
    "kitchen garden barn library attic cellar shed bakery school park tower mill castle cave "
    "forest meadow workshop museum chapel stable greenhouse theatre market harbour orchard hall "
    "tent cabin lighthouse station"
)
GOODS = words_of(
    "apples shells buttons nuts stamps marbles pebbles cards eggs beads stickers acorns plums "
    "candles coins pencils cookies berries flowers feathers"
)
MONTHS = words_of(
    "January February March April May June July August September October November December"
)
_LAYOUTS = ("{a} -> {b}", "{a} > {b}", "| {a} | {b} |", "{a}: {b}", "{a},{b}", "{a} = {b}")


@dataclass(frozen=True, slots=True)
class Fact:
    """A link from ``subject`` to ``object``; sums also add ``change``. ``text`` states it."""

    subject: str
    object: str
    text: str
    change: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in the order they are followed, the question that starts them and how to reply.

    ``reply`` is a whole sentence without its full stop, with ``{answer}`` where the answer goes.
    """

    facts: tuple[Fact, ...]
    question: str
    reply: str
    answer: str


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Facts of several chains in the order they are told, and the one chain that is asked about."""

    told: tuple[Fact, ...]
    asked: Chain

    @property
    def hops(self) -> int:
        """Links between the question and its answer."""
        return len(self.asked.facts)


@dataclass(slots=True)
class Draft:
    """A document being written: its text so far, its answers, and names not used in it yet."""

    rng: random.Random
    text: str = ""
    hops: list[tuple[int, int, int]] = field(default_factory=list)
    puzzles: list[Puzzle] = field(default_factory=list)
    # Shared by the chains of a puzzle: with a kind of its own, an answer would stand out.
    kind: int = 0
    layout: str = "{a} -> {b}"
    _unused: dict[int, list[str]] = field(default_factory=dict)

    def take(self, words: list[str], count: int = 1) -> list[str]:
        """Words of a list that this document has not used, in random order."""
        unused = self._unused.get(id(words))
        if unused is None:
            unused = self._unused[id(words)] = self.rng.sample(words, len(words))
        taken = unused[:count]
        assert len(taken) == count, "a document needs more words than its list holds"
        del unused[:count]
        return taken

    def answer(self, template: str, puzzle: Puzzle) -> None:
        """Append a template that holds ``{answer}`` once, and mark where the answer stands."""
        before, after = template.split("{answer}")
        start = len(self.text) + len(before)
        answer = puzzle.asked.answer
        self.text += before + answer + after
        self.hops.append((start, start + len(answer), puzzle.hops))
        self.puzzles.append(puzzle)

    def document(self, source: str) -> Document:
        """What has been written."""
        return Document(self.text, tuple(self.hops), source)


def tell_puzzle(
    draft: Draft, chain: Callable[[Draft, int], Chain], order: str, hops: int, distractors: int
) -> Puzzle:
    """One asked chain and its distractors, told interleaved.

    Args:
        chain: writes a chain of so many hops.
        order: of telling: ``forward`` or ``backward`` along each chain, or ``any``.
    """
    rng = draft.rng
    draft.kind, draft.layout = rng.randrange(12), rng.choice(_LAYOUTS)
    asked = chain(draft, hops)
    chains = [asked] + [chain(draft, rng.randint(1, 4)) for _ in range(distractors)]
    return Puzzle(interleave(rng, chains, order), asked)


def interleave(rng: random.Random, chains: list[Chain], order: str) -> tuple[Fact, ...]:
    """The facts of all chains in the order they are told, which is ``order`` along each of them."""
    if order == "any":
        told = [fact for one in chains for fact in one.facts]
        rng.shuffle(told)
        return tuple(told)
    queues = [list(one.facts if order == "backward" else one.facts[::-1]) for one in chains]
    turns = [i for i, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    return tuple(queues[i].pop() for i in turns)
