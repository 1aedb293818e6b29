"""Terse records: lists, tables, counts, prices and transfers, asked about on the page itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from loopwise.data.puzzles import (
    COLOURS,
    GOODS,
    MAX_HOPS,
    MONTHS,
    NAMES,
    OBJECTS,
    PLACES,
    Chain,
    Draft,
    Fact,
    tell_puzzle,
    words_of,
)

_CODES = [f"{letter}{number}" for letter in "ABCDHKTX" for number in range(11, 99, 8)]
_CLERKS = words_of("Hill Stone Baker Reed Marsh Wood Field Lake Frost Bell")
_LOST = words_of("ladder stool broom bench rug shelf hook fence gate tray")
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


def _recorded(draft: Draft, hops: int) -> Chain:
    """Where, or with whom, is it? A thing under a code, a code under the next."""
    start = draft.take(draft.rng.choice((OBJECTS, _CODES)))[0]
    ends = {"place": PLACES, "keeper": NAMES, "colour": COLOURS}
    kind = list(ends)[draft.kind % len(ends)]
    end = draft.take(ends[kind])[0]
    stops = [start, *draft.take(_CODES, hops - 1), end]
    links = itertools.pairwise(stops)
    facts = tuple(Fact(a, b, draft.layout.format(a=a, b=b)) for a, b in links)
    return Chain(facts, f"{kind} of {start}", "{answer}", end)


def _balance(draft: Draft, hops: int) -> Chain:
    """What is left? An opening count or sum, and each gain and loss."""
    item = draft.take(draft.rng.choice((GOODS, _CODES)))[0]
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


def _prices(draft: Draft, hops: int) -> Chain:
    """What does it cost? So much more or less than another thing, whose price is told."""
    things = draft.take(OBJECTS, hops)
    price = own = draft.rng.randint(8, 40)
    facts = [Fact(things[-1], str(own), draft.layout.format(a=things[-1], b=f"${own}"))]
    for other, thing in zip(things[::-1], things[-2::-1], strict=False):
        change = draft.rng.choice([c for c in range(-5, 10) if c and price + c >= 1])
        price += change
        relative = f"{other} {'+' if change > 0 else '-'} ${abs(change)}"
        facts.append(Fact(thing, other, draft.layout.format(a=thing, b=relative), change))
    return Chain(tuple(facts[::-1]), f"price of {things[0]}", "${answer}", str(price))


_LedgerKind = tuple[Callable[[Draft, int], Chain], str, tuple[str, ...]]
_LEDGER_CHAINS: tuple[_LedgerKind, ...] = (
    (_recorded, "any", ("PLACES AND KEEPERS", "where things are", "Register")),
    (_balance, "backward", ("STOCK", "in and out", "Balance, in order")),
    (_prices, "any", ("PRICES", "price list", "What it costs")),
)


def write_ledger(draft: Draft) -> None:
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


def _ledger_section(draft: Draft, kind: _LedgerKind, hops: int, distractors: int) -> None:
    rng = draft.rng
    chain, order, titles = kind
    puzzle = tell_puzzle(draft, chain, order, hops, distractors)
    draft.text += f"\n\n{rng.choice(titles)}\n"
    label = rng.choice(_LABELS)
    for number, fact in enumerate(puzzle.told, start=1):
        draft.text += label.format(n=number) + fact.text + "\n"
        if rng.random() < 0.08:
            draft.text += _note(draft, _NOTES) + "\n"
    template = rng.choice(_ASKED).replace("{question}", puzzle.asked.question)
    draft.answer(template.replace("{reply}", puzzle.asked.reply), puzzle)


def _note(draft: Draft, templates: tuple[str, ...]) -> str:
    """A line that states no fact: its people and things occur in no chain."""
    pick = draft.rng.choice
    n, day = draft.rng.randint(2, 30), draft.rng.randint(1, 28)
    words = {"place": pick(PLACES), "month": pick(MONTHS)}
    words |= {"name": pick(_CLERKS), "thing": pick(_LOST)}
    return pick(templates).format(n=n, day=day, total=n + day, product=n * day, **words)
