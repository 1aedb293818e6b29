"""Nothing but look-ups: who holds what after it was handed on, asked about every thing told.

Stories and records spend most of their tokens on other things, so a small model hardly learns to
look anything up in the minutes it has. Here every chain is asked about, and short ones are
more frequent: what takes two look-ups is learned once those that take one are.
"""

from __future__ import annotations

import itertools

from loopwise.data.puzzles import MAX_HOPS, NAMES, OBJECTS, Chain, Draft, Fact, Puzzle, interleave


def write_lookups(draft: Draft) -> None:
    """Chains of one to six links, told in the order of time and each asked about once."""
    rng = draft.rng
    hops = range(1, MAX_HOPS + 1)
    lengths = rng.choices(hops, weights=[1 / h**1.5 for h in hops], k=rng.randint(3, 6))
    chains = [_handed_on(draft, length) for length in lengths]
    told = interleave(rng, chains, "forward")
    draft.text = "".join(f"{fact.text}\n" for fact in told)
    rng.shuffle(chains)
    for chain in chains:
        draft.answer(f"? {chain.question} {{answer}}\n", Puzzle(told, chain))


def _handed_on(draft: Draft, hops: int) -> Chain:
    stops = [*draft.take(OBJECTS), *draft.take(NAMES, hops)]
    facts = tuple(Fact(a, b, f"- {a} {b}") for a, b in itertools.pairwise(stops))
    return Chain(facts, stops[0], "{answer}", stops[-1])
