"""The built-in corpus: endless small English texts whose answers need a known number of look-ups.

Two registers of the same puzzles. ``stories`` is narrative prose; ``ledgers`` is terse records:
lists, tables, counts, prices, transfers. Document ``i`` depends on (corpus, seed, i) alone.

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

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loopwise.data.documents import Document
from loopwise.errors import DataError
from loopwise.registry import did_you_mean

MAX_HOPS = 6


def _words(text: str) -> list[str]:
    return text.split()


_GIRLS = _words(
    "Anna Mia Lily Rosa Clara Emma Nina Ruth Vera Ivy Molly Grace Tara Zoe Hana Lucy Nora Elsa "
    "Maya Alma Daisy Fern Greta Hazel Iris June Kira Lena Mabel Olive"
)
_BOYS = _words(
    "Tom Ben Leo Sam Max Jack Omar Paul Hugo Finn Otto Carl Noah Ravi Luke Adam Eli Gus Ned Theo "
    "Amir Bruno Dan Emil Felix Hans Ivan Jonas Karl Milo"
)
_NAMES = _GIRLS + _BOYS
_HE = dict.fromkeys(_GIRLS, "she") | dict.fromkeys(_BOYS, "he")
_HIS = dict.fromkeys(_GIRLS, "her") | dict.fromkeys(_BOYS, "his")
_COLOURS = _words("red blue green yellow black white orange purple brown grey pink golden")
_OBJECTS = _words(
    "ball key lamp book hat kite drum cup coin ring map shell whistle doll spoon candle mirror "
    "clock flute scarf feather pencil rope brush bell compass kettle puppet marble letter button "
    "glove ladle trumpet umbrella lantern pillow blanket violin hammer saw needle ribbon medal "
    "telescope teapot saucer basin"
)
_PLACES = _words(
    "kitchen garden barn library attic cellar shed bakery school park tower mill castle cave "
    "forest meadow workshop museum chapel stable greenhouse theatre market harbour orchard hall "
    "tent cabin lighthouse station"
)
# From small to large, so that each fits into the next.
_HOLDERS = _words(
    "purse jar tin pot pouch box bag basket bucket drawer sack barrel crate suitcase trunk chest "
    "cupboard wardrobe cart wagon"
)
_ANIMALS = _words("cat dog fox crow horse rabbit duck goat frog mouse bear hedgehog")
_FRUITS = _words("pear plum fig cherry melon peach grape lemon apricot quince")
_SONGS = _words("lullaby march waltz ballad hymn jig carol polka")
_GOODS = _words(
    "apples shells buttons nuts stamps marbles pebbles cards eggs beads stickers acorns plums "
    "candles coins pencils cookies berries flowers feathers"
)
_MOODS = _words("happy sleepy curious proud quiet cheerful gentle brave shy patient hungry merry")
_TASTES = {"colour": _COLOURS, "animal": _ANIMALS, "fruit": _FRUITS, "song": _SONGS}

_OPENINGS = (
    "One {weather} {daytime} the children met near the old bridge.",
    "It was a {weather} {daytime}, and everyone in the village felt {mood}.",
    "Once upon a time there was a village by a river where nobody locked a door.",
    "On a {weather} {daytime} in {month}, the whole class was in a {mood} mood.",
    "Long ago, when winters were cold, some friends played a game of remembering.",
    'Grandmother closed her book. "Listen well," she said, "for I will ask you something."',
    "{month} had just begun. A {mood} {animal} watched from the wall.",
    "The {daytime} was {weather}. There was a lot to do, and many hands to do it.",
    "Nothing much had happened all week, but this {daytime} was different!",
    "Here is a small story for a {weather} {daytime}.",
    "The bell rang {n} times, and the children ran out into the {weather} {daytime}.",
    "This happened in {month}, on the day the {mood} {animal} came to town.",
)
_INTERLUDES = (
    "A {mood} {animal} ran past.",
    "The wind was soft.",
    "Somewhere a door fell shut.",
    "Nobody spoke for a while.",
    "It smelled of bread and rain.",
    "Then the sun came out again.",
    "A {animal} sat on the wall and looked {mood}.",
    "The clock struck {n}.",
    "Everybody laughed, and then it was quiet.",
    "In the distance a {animal} called.",
    "What a {mood} little {animal} that was!",
    "They rested and drank some water.",
    "Far away, {n} boats lay on the lake.",
    '"Oh dear," said an old man, but he was only looking for his glasses.',
    "Clouds came and went.",
    "It was, all in all, a {weather} day.",
)
_ENDINGS = (
    "After that they all went home.",
    "And that was the end of a {mood} day.",
    "They were tired but {mood}, and they slept well.",
    'The {animal} yawned. "Good night," somebody whispered.',
    "Tomorrow there would be another game.",
    "Then it was time for supper, and nobody was late.",
    "They never forgot that {weather} {daytime}.",
    "So they shook hands, and the {mood} {animal} followed them home.",
    "The next day it rained, and they told the story again.",
    "Was it hard? Not if you remember every step.",
)
_ASKING = (
    '"{question}" asked {asker}. "{reply}," said the teacher.',
    "Question: {question} Answer: {answer}.",
    '{asker} looked around. "{question}" Everyone thought about it. "{reply}!" said somebody.',
    "Do you know? {question} {reply}.",
    '"{question}" the old woman asked. "{reply}," answered {asker}, and {he} was right.',
    '"Now tell me, {asker}," said Grandfather. "{question}"\n"{reply}," {he} said.',
    "{asker} had listened well. {question} {reply}, of course.",
)
_WEATHER = _words("sunny rainy windy cold warm foggy bright snowy grey mild")
_DAYTIMES = _words("morning afternoon evening day Sunday Monday Friday")
_MONTHS = _words(
    "January February March April May June July August September October November December"
)
_CODES = [f"{letter}{number}" for letter in "ABCDHKTX" for number in range(11, 99, 8)]
_CLERKS = _words("Hill Stone Baker Reed Marsh Wood Field Lake Frost Bell")
_LOST = _words("ladder stool broom bench rug shelf hook fence gate tray")
_LAYOUTS = ("{a} -> {b}", "{a} > {b}", "| {a} | {b} |", "{a}: {b}", "{a},{b}", "{a} = {b}")
_LABELS = ("#{n} ", "{n}. ", "- ", "* ", "", "", "({n}) ", "{n:02d}/ ")
_HEADERS = (
    "LEDGER {n} | {place} | {day} {month}",
    "Records of the {place}, {month} {day}\n========",
    "[{place} no. {n}]\ndate: {day} {month}",
    "{month} {day} -- {place} -- page {n}",
    "* {place} books *\nvolume {n}; kept by {name}",
)
_NOTES = (
    "checked: {name}",
    "(page {n})",
    "--",
    "note: {thing} broken, {n} cm",
    "{n} x ${day} = ${product}",
    "{n} + {day} = {total}",
    "seen by {name}, {day} {month}",
    "{thing} {n}% off",
)
_ASKED = (
    "Q: {question} A: {reply}",
    "? {question}\n! {reply}",
    "query: {question} [{reply}]",
    "{question} => {reply}",
    "check ({question}) = {reply}.",
)


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
class _Draft:
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

    def fill(self, templates: tuple[str, ...]) -> str:
        """One of some sentences that state no fact, with its blanks filled."""
        pick = self.rng.choice
        return pick(templates).format(
            mood=pick(_MOODS),
            animal=pick(_ANIMALS),
            weather=pick(_WEATHER),
            daytime=pick(_DAYTIMES),
            month=pick(_MONTHS),
            n=pick(("two", "three", "four", "five", "six", "seven")),
        )

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


def _link(text: str, subject: str, object_: str, change: int = 0, **words: str) -> Fact:
    filled = text.format(a=subject, b=object_, **words)
    return Fact(subject, object_, filled[0].upper() + filled[1:], change)


def _handed_on(draft: _Draft, hops: int) -> Chain:
    """Who has it now? Only the first holder is told with the thing; then it goes on."""
    thing = f"{draft.rng.choice(_COLOURS)} {draft.take(_OBJECTS)[0]}"
    people = draft.take(_NAMES, hops)
    first = draft.rng.choice(
        (
            "{b} picked up the {a}.",
            "The {a} was with {b} at first.",
            "{b} found the {a} first.",
            "In the beginning {b} carried the {a}.",
            "{b} started out with the {a}.",
        )
    )
    facts = [_link(first, thing, people[0])]
    for giver, taker in itertools.pairwise(people):
        text = draft.rng.choice(
            (
                "{a} gave what {he} was holding to {b}.",
                "Later {a} passed {his} treasure to {b}.",
                "{b} got whatever {a} had carried.",
                "{a} handed {his} thing on to {b}.",
                "Then {b} took over what {a} had.",
            )
        )
        facts.append(_link(text, giver, taker, he=_HE[giver], his=_HIS[giver]))
    reply = draft.rng.choice(("{answer} has it", "{answer} does", "It is with {answer}"))
    return Chain(tuple(facts), f"Who has the {thing} now?", reply, people[-1])


def _put_inside(draft: _Draft, hops: int) -> Chain:
    """In which place is it? Thing in box, box in chest, chest in a place."""
    thing = f"{draft.rng.choice(_COLOURS)} {draft.take(_OBJECTS)[0]}"
    holders = sorted(draft.take(_HOLDERS, hops - 1), key=_HOLDERS.index)
    place = draft.take(_PLACES)[0]
    facts = []
    for inner, outer in zip([thing, *holders], holders, strict=False):
        text = draft.rng.choice(
            (
                "The {a} was in the {b}.",
                "Someone had put the {a} into the {b}.",
                "Inside the {b} lay the {a}.",
                "The {b} held the {a}.",
            )
        )
        facts.append(_link(text, inner, outer))
    last = draft.rng.choice(("The {a} stood in the {b}.", "You could find the {a} in the {b}."))
    facts.append(_link(last, [thing, *holders][-1], place))
    question = f"In which place would you find the {thing}?"
    return Chain(tuple(facts), question, "It is in the {answer}", place)


def _went_along(draft: _Draft, hops: int) -> Chain:
    """Where is she? With him, who is with someone, who is in a place."""
    people = draft.take(_NAMES, hops)
    place = draft.take(_PLACES)[0]
    facts = []
    for person, other in itertools.pairwise(people):
        text = draft.rng.choice(
            (
                "{a} went along with {b}.",
                "{a} stayed beside {b}.",
                "{a} would not leave {b} alone.",
                "{a} was wherever {b} was.",
                "Next to {b} sat {a}.",
            )
        )
        facts.append(_link(text, person, other))
    last = draft.rng.choice(
        ("{a} was in the {b}.", "{a} had gone to the {b}.", "In the {b}, {a} was at work.")
    )
    facts.append(_link(last, people[-1], place))
    return Chain(
        tuple(facts),
        f"Where is {people[0]}?",
        draft.rng.choice(("In the {answer}", f"{people[0]} is in the {{answer}}")),
        place,
    )


def _same_taste(draft: _Draft, hops: int) -> Chain:
    """What does she like best? The same as he, who likes the same as someone."""
    kind = list(_TASTES)[draft.kind % len(_TASTES)]
    people = draft.take(_NAMES, hops)
    liked = draft.rng.choice(_TASTES[kind])
    facts = []
    for person, other in itertools.pairwise(people):
        text = draft.rng.choice(
            (
                "{a} chose the same {kind} as {b}.",
                "{a} wanted the {kind} that {b} had chosen.",
                "For the {kind}, {a} agreed with {b}.",
            )
        )
        facts.append(_link(text, person, other, kind=kind))
    last = draft.rng.choice(("{a} chose the {kind} first: {b}.", "The {kind} of {a} was {b}."))
    # The link ends at this person's own choice: two chains may well choose the same.
    facts.append(_link(last, people[-1], liked, kind=kind))
    question = f"Which {kind} did {people[0]} choose?"
    return Chain(tuple(facts), question, f"The {kind} was {{answer}}", liked)


def _ages(draft: _Draft, hops: int) -> Chain:
    """How old is she? So much older or younger than he, whose age is told."""
    people = draft.take(_NAMES, hops)
    facts = []
    age = own = draft.rng.randint(6, 20)
    for other, person in zip(people[::-1], people[-2::-1], strict=False):
        change = draft.rng.choice([c for c in (-3, -2, -1, 1, 2, 3, 4) if age + c >= 4])
        age += change
        years = "one year" if abs(change) == 1 else f"{abs(change)} years"
        word = "older" if change > 0 else "younger"
        text = draft.rng.choice(
            ("{a} was {years} {word} than {b}.", "Compared with {b}, {a} was {years} {word}.")
        )
        facts.append(_link(text, person, other, change, years=years, word=word))
    last = draft.rng.choice(("{a} was {b} years old.", "{a} had just turned {b}."))
    facts = [*facts[::-1], _link(last, people[-1], str(own))]
    reply = draft.rng.choice(("{answer} years old", f"{_HE[people[0]].title()} is {{answer}}"))
    return Chain(tuple(facts), f"How old is {people[0]}?", reply, str(age))


def _counts(draft: _Draft, hops: int) -> Chain:
    """How many are left? What there was at first, and every gain and loss."""
    name, goods = draft.take(_NAMES)[0], draft.take(_GOODS)[0]
    count = first = draft.rng.randint(2, 12)
    told = [
        _link(
            draft.rng.choice(("{name} had {b} {goods}.", "There were {b} {goods} before {name}.")),
            f"{goods} 0",
            str(first),
            name=name,
            goods=goods,
        )
    ]
    for time in range(1, hops):
        change = draft.rng.choice([c for c in range(-6, 10) if abs(c) > 1 and count + c > 1])
        count += change
        gains = ("found", "bought", "was given", "won")
        losses = ("lost", "sold", "gave away", "dropped")
        verb = draft.rng.choice(gains if change > 0 else losses)
        text = "{name} {verb} {n} {more}{goods}."
        more = "more " if change > 0 and draft.rng.random() < 0.5 else ""
        words = {"name": name, "verb": verb, "n": str(abs(change)), "more": more, "goods": goods}
        told.append(_link(text, f"{goods} {time}", f"{goods} {time - 1}", change, **words))
    reply = draft.rng.choice(("Now there are {answer}", f"{name} has {{answer}}", "{answer}"))
    return Chain(tuple(told[::-1]), f"How many {goods} does {name} have now?", reply, str(count))


# How each relation is told: hand-overs and counts as they happened, the others in any order.
_STORY_CHAINS: tuple[tuple[Callable[[_Draft, int], Chain], str], ...] = (
    (_handed_on, "forward"),
    (_put_inside, "any"),
    (_went_along, "any"),
    (_same_taste, "any"),
    (_ages, "any"),
    (_counts, "backward"),
)


def _puzzle(
    draft: _Draft, chain: Callable[[_Draft, int], Chain], order: str, hops: int, distractors: int
) -> Puzzle:
    """One asked chain and its distractors, told interleaved."""
    rng = draft.rng
    draft.kind, draft.layout = rng.randrange(12), rng.choice(_LAYOUTS)
    asked = chain(draft, hops)
    chains = [asked] + [chain(draft, rng.randint(1, 4)) for _ in range(distractors)]
    if order == "any":
        told = [fact for one in chains for fact in one.facts]
        rng.shuffle(told)
    else:
        queues = [list(one.facts if order == "backward" else one.facts[::-1]) for one in chains]
        turns = [i for i, queue in enumerate(queues) for _ in queue]
        rng.shuffle(turns)
        told = [queues[i].pop() for i in turns]
    return Puzzle(tuple(told), asked)


def _write_story(draft: _Draft) -> None:
    rng = draft.rng
    draft.text = draft.fill(_OPENINGS)
    _story_puzzle(draft, rng.randint(1, MAX_HOPS), distractors=rng.choice((1, 2, 2)))
    if len(draft.text) < 450 or (len(draft.text) < 700 and rng.random() < 0.6):
        _story_puzzle(draft, rng.randint(1, 4), distractors=1)
    draft.text += ("\n" if rng.random() < 0.3 else "\n\n") + draft.fill(_ENDINGS)


def _story_puzzle(draft: _Draft, hops: int, distractors: int) -> None:
    rng = draft.rng
    chain, order = rng.choice(_STORY_CHAINS)
    puzzle = _puzzle(draft, chain, order, hops, distractors)
    draft.text += "\n\n" if rng.random() < 0.6 else " "
    for fact in puzzle.told:
        draft.text += fact.text
        draft.text += f" {draft.fill(_INTERLUDES)}" if rng.random() < 0.2 else ""
        draft.text += "\n" if rng.random() < 0.1 else " "
    draft.text = draft.text.rstrip() + rng.choice(("\n\n", "\n", "\n\n"))
    asker = draft.take(_NAMES)[0]
    template = rng.choice(_ASKING)
    if "{answer}" not in template:
        template = template.replace("{reply}", puzzle.asked.reply)
    question = puzzle.asked.question
    for blank, word in (("question", question), ("asker", asker), ("he", _HE[asker])):
        template = template.replace(f"{{{blank}}}", word)
    draft.answer(template, puzzle)


def _recorded(draft: _Draft, hops: int) -> Chain:
    """Where, or with whom, is it? A thing under a code, a code under the next."""
    start = draft.take(draft.rng.choice((_OBJECTS, _CODES)))[0]
    ends = {"place": _PLACES, "keeper": _NAMES, "colour": _COLOURS}
    kind = list(ends)[draft.kind % len(ends)]
    end = draft.take(ends[kind])[0]
    stops = [start, *draft.take(_CODES, hops - 1), end]
    links = itertools.pairwise(stops)
    facts = tuple(Fact(a, b, draft.layout.format(a=a, b=b)) for a, b in links)
    return Chain(facts, f"{kind} of {start}", "{answer}", end)


def _balance(draft: _Draft, hops: int) -> Chain:
    """What is left? An opening count or sum, and each gain and loss."""
    item = draft.take(draft.rng.choice((_GOODS, _CODES)))[0]
    unit = ("", "$")[draft.kind % 2]
    total = first = draft.rng.randint(2, 60)
    told = [Fact(f"{item} 0", str(first), draft.layout.format(a=item, b=f"{unit}{first}"))]
    for time in range(1, hops):
        change = draft.rng.choice([c for c in range(-9, 20) if c and total + c >= 0])
        total += change
        signed = f"{'+' if change > 0 else '-'}{unit}{abs(change)}"
        text = draft.layout.format(a=item, b=signed)
        told.append(Fact(f"{item} {time}", f"{item} {time - 1}", text, change))
    return Chain(tuple(told[::-1]), f"{item} left", f"{unit}{{answer}}", str(total))


def _prices(draft: _Draft, hops: int) -> Chain:
    """What does it cost? So much more or less than another thing, whose price is told."""
    things = draft.take(_OBJECTS, hops)
    price = own = draft.rng.randint(8, 40)
    facts = [Fact(things[-1], str(own), draft.layout.format(a=things[-1], b=f"${own}"))]
    for other, thing in zip(things[::-1], things[-2::-1], strict=False):
        change = draft.rng.choice([c for c in range(-5, 10) if c and price + c >= 1])
        price += change
        relative = f"{other} {'+' if change > 0 else '-'} ${abs(change)}"
        facts.append(Fact(thing, other, draft.layout.format(a=thing, b=relative), change))
    return Chain(tuple(facts[::-1]), f"price of {things[0]}", "${answer}", str(price))


_LedgerKind = tuple[Callable[[_Draft, int], Chain], str, tuple[str, ...]]
_LEDGER_CHAINS: tuple[_LedgerKind, ...] = (
    (_recorded, "any", ("PLACES AND KEEPERS", "where things are", "Register")),
    (_balance, "backward", ("STOCK", "in and out", "Balance, in order")),
    (_prices, "any", ("PRICES", "price list", "What it costs")),
)


def _write_ledger(draft: _Draft) -> None:
    rng = draft.rng
    draft.text = _note(draft, _HEADERS)
    target = rng.randint(380, 900)
    distractors = rng.choice((2, 2, 3))
    for kind in rng.sample(_LEDGER_CHAINS * 2, 2 * len(_LEDGER_CHAINS)):
        _ledger_section(draft, kind, rng.randint(1, MAX_HOPS), distractors)
        if len(draft.text) >= target:
            break
        distractors = rng.choice((1, 2))
    draft.text += "\n\n" + _note(draft, ("signed: {name}", "end of page {n}", "-- {month} --"))


def _ledger_section(draft: _Draft, kind: _LedgerKind, hops: int, distractors: int) -> None:
    rng = draft.rng
    chain, order, titles = kind
    puzzle = _puzzle(draft, chain, order, hops, distractors)
    draft.text += f"\n\n{rng.choice(titles)}\n"
    label = rng.choice(_LABELS)
    for number, fact in enumerate(puzzle.told, start=1):
        draft.text += label.format(n=number) + fact.text + "\n"
        if rng.random() < 0.08:
            draft.text += _note(draft, _NOTES) + "\n"
    template = rng.choice(_ASKED).replace("{question}", puzzle.asked.question)
    draft.answer(template.replace("{reply}", puzzle.asked.reply), puzzle)


def _note(draft: _Draft, templates: tuple[str, ...]) -> str:
    """A line that states no fact: its people and things occur in no chain."""
    pick = draft.rng.choice
    n, day = draft.rng.randint(2, 30), draft.rng.randint(1, 28)
    words = {"place": pick(_PLACES), "month": pick(_MONTHS)}
    words |= {"name": pick(_CLERKS), "thing": pick(_LOST)}
    return pick(templates).format(n=n, day=day, total=n + day, product=n * day, **words)


CORPORA: dict[str, Callable[[_Draft], None]] = {"stories": _write_story, "ledgers": _write_ledger}


def check_corpus(corpus: str) -> None:
    """Pass if there is such a corpus.

    Raises:
        DataError: there is none; names the nearest.
    """
    if corpus not in CORPORA:
        hint = did_you_mean(corpus, CORPORA) or ";"
        raise DataError(f"no built-in corpus named {corpus!r}{hint} known: {', '.join(CORPORA)}")


def compose(corpus: str, seed: int, index: int) -> tuple[Document, tuple[Puzzle, ...]]:
    """Document ``index`` and the puzzles in it, one for each entry of ``Document.hops``.

    Raises:
        DataError: no such corpus.
    """
    check_corpus(corpus)
    draft = _Draft(random.Random(f"{corpus}/{seed}/{index}"))
    CORPORA[corpus](draft)
    return draft.document(f"builtin:{corpus}/{seed}/{index}"), tuple(draft.puzzles)


def generate(corpus: str, seed: int, first: int, count: int) -> Iterator[Document]:
    """Documents ``first .. first + count - 1``; each depends on (corpus, seed, its number) alone.

    Raises:
        DataError: no such corpus.
    """
    for index in range(first, first + count):
        yield compose(corpus, seed, index)[0]
