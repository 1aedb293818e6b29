"""The built-in corpus: endless small English texts whose answers need a known number of look-ups.

Three registers of the same puzzles (:mod:`loopwise.data.puzzles`). ``stories`` is narrative prose,
written here; ``ledgers`` is terse records (:mod:`loopwise.data.ledgers`); ``lookups`` is links and
questions alone (:mod:`loopwise.data.lookups`). Document ``i`` depends on (corpus, seed, i) alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from loopwise.data.documents import Document
from loopwise.data.ledgers import write_ledger
from loopwise.data.lookups import write_lookups
from loopwise.data.puzzles import (
    BOYS,
    COLOURS,
    GIRLS,
    GOODS,
    MAX_HOPS,
    MONTHS,
    NAMES,
    OBJECTS,
    PLACES,
    Chain,
    Draft,
    Fact,
    Puzzle,
    tell_puzzle,
    words_of,
)
from loopwise.errors import DataError
from loopwise.registry import did_you_mean

_HE = dict.fromkeys(GIRLS, "she") | dict.fromkeys(BOYS, "he")
_HIS = dict.fromkeys(GIRLS, "her") | dict.fromkeys(BOYS, "his")
# From small to large, so that each fits into the next.
_HOLDERS = words_of(
    "purse jar tin pot pouch box bag basket bucket drawer sack barrel crate suitcase trunk chest "
    "cupboard wardrobe cart wagon"
)
_ANIMALS = words_of("cat dog fox crow horse rabbit duck goat frog mouse bear hedgehog")
_FRUITS = words_of("pear plum fig cherry melon peach grape lemon apricot quince")
_SONGS = words_of("lullaby march waltz ballad hymn jig carol polka")
_MOODS = words_of("happy sleepy curious proud quiet cheerful gentle brave shy patient hungry merry")
_TASTES = {"colour": COLOURS, "animal": _ANIMALS, "fruit": _FRUITS, "song": _SONGS}

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
_WEATHER = words_of("sunny rainy windy cold warm foggy bright snowy grey mild")
_DAYTIMES = words_of("morning afternoon evening day Sunday Monday Friday")


def _link(text: str, subject: str, object_: str, change: int = 0, **words: str) -> Fact:
    filled = text.format(a=subject, b=object_, **words)
    return Fact(subject, object_, filled[0].upper() + filled[1:], change)


def _handed_on(draft: Draft, hops: int) -> Chain:
    """Who has it now? Only the first holder is told with the thing; then it goes on."""
    thing = f"{draft.rng.choice(COLOURS)} {draft.take(OBJECTS)[0]}"
    people = draft.take(NAMES, hops)
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


def _put_inside(draft: Draft, hops: int) -> Chain:
    """In which place is it? Thing in box, box in chest, chest in a place."""
    thing = f"{draft.rng.choice(COLOURS)} {draft.take(OBJECTS)[0]}"
    holders = sorted(draft.take(_HOLDERS, hops - 1), key=_HOLDERS.index)
    place = draft.take(PLACES)[0]
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


def _went_along(draft: Draft, hops: int) -> Chain:
    """Where is she? With him, who is with someone, who is in a place."""
    people = draft.take(NAMES, hops)
    place = draft.take(PLACES)[0]
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


def _same_taste(draft: Draft, hops: int) -> Chain:
    """What does she like best? The same as he, who likes the same as someone."""
    kind = list(_TASTES)[draft.kind % len(_TASTES)]
    people = draft.take(NAMES, hops)
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


def _ages(draft: Draft, hops: int) -> Chain:
    """How old is she? So much older or younger than he, whose age is told."""
    people = draft.take(NAMES, hops)
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


def _counts(draft: Draft, hops: int) -> Chain:
    """How many are left? What there was at first, and every gain and loss."""
    name, goods = draft.take(NAMES)[0], draft.take(GOODS)[0]
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
_STORY_CHAINS: tuple[tuple[Callable[[Draft, int], Chain], str], ...] = (
    (_handed_on, "forward"),
    (_put_inside, "any"),
    (_went_along, "any"),
    (_same_taste, "any"),
    (_ages, "any"),
    (_counts, "backward"),
)


def _write_story(draft: Draft) -> None:
    rng = draft.rng
    draft.text = _fill(draft, _OPENINGS)
    _story_puzzle(draft, rng.randint(1, MAX_HOPS), distractors=rng.choice((1, 2, 2)))
    if len(draft.text) < 450 or (len(draft.text) < 700 and rng.random() < 0.6):
        _story_puzzle(draft, rng.randint(1, 4), distractors=1)
    draft.text += ("\n" if rng.random() < 0.3 else "\n\n") + _fill(draft, _ENDINGS)


def _story_puzzle(draft: Draft, hops: int, distractors: int) -> None:
    rng = draft.rng
    chain, order = rng.choice(_STORY_CHAINS)
    puzzle = tell_puzzle(draft, chain, order, hops, distractors)
    draft.text += "\n\n" if rng.random() < 0.6 else " "
    for fact in puzzle.told:
        draft.text += fact.text
        draft.text += f" {_fill(draft, _INTERLUDES)}" if rng.random() < 0.2 else ""
        draft.text += "\n" if rng.random() < 0.1 else " "
    draft.text = draft.text.rstrip() + rng.choice(("\n\n", "\n", "\n\n"))
    asker = draft.take(NAMES)[0]
    template = rng.choice(_ASKING)
    if "{answer}" not in template:
        template = template.replace("{reply}", puzzle.asked.reply)
    question = puzzle.asked.question
    for blank, word in (("question", question), ("asker", asker), ("he", _HE[asker])):
        template = template.replace(f"{{{blank}}}", word)
    draft.answer(template, puzzle)


def _fill(draft: Draft, templates: tuple[str, ...]) -> str:
    """One of some sentences that state no fact, with its blanks filled."""
    pick = draft.rng.choice
    return pick(templates).format(
        mood=pick(_MOODS),
        animal=pick(_ANIMALS),
        weather=pick(_WEATHER),
        daytime=pick(_DAYTIMES),
        month=pick(MONTHS),
        n=pick(("two", "three", "four", "five", "six", "seven")),
    )


CORPORA: dict[str, Callable[[Draft], None]] = {
    "stories": _write_story,
    "ledgers": write_ledger,
    "lookups": write_lookups,
}


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
    draft = Draft(random.Random(f"{corpus}/{seed}/{index}"))
    CORPORA[corpus](draft)
    return draft.document(f"builtin:{corpus}/{seed}/{index}"), tuple(draft.puzzles)


def generate(corpus: str, seed: int, first: int, count: int) -> Iterator[Document]:
    """Documents ``first .. first + count - 1``; each depends on (corpus, seed, its number) alone.

    Raises:
        DataError: no such corpus.
    """
    for index in range(first, first + count):
        yield compose(corpus, seed, index)[0]
