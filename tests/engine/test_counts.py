"""What is expected of live rows, from how deep others went."""

from __future__ import annotations

import random

import numpy as np

from loopwise.engine.counts import Counts
from tests.engine.decoding import engine_for, job, rule_for, run


def after(depths: list[int]) -> Counts:
    """Counts of rows that went to these depths and left."""
    counts = Counts(8)
    for depth in depths:
        counts.see(np.arange(1, depth + 1))
    return counts


def live(*recurrences: int) -> np.ndarray:
    return np.bincount(recurrences)


def test_rows_are_expected_to_leave_as_others_did():
    counts = after([3, 3, 4, 4])
    assert counts.expected_exits(live(2), 1) == 0.5
    assert counts.expected_exits(live(2), 2) == 1.0
    assert counts.expected_exits(live(1), 1) == 0.0
    assert counts.expected_exits(live(3, 3, 3), 1) == 3.0
    assert counts.expected_exits(live(1, 2, 3), 1) == 1.5


def test_nothing_is_expected_of_depths_nobody_has_been_to():
    assert after([]).expected_exits(live(1, 5), 4) == 0.0
    assert after([2]).expected_exits(live(6), 1) == 0.0


def test_everybody_leaves_at_the_greatest_depth():
    counts = after([8] * 5)
    assert counts.expected_exits(live(6), 1) == 0.0
    assert counts.expected_exits(live(7), 1) == 1.0
    assert counts.expected_exits(live(7), 9) == 1.0


def test_waiting_saves_passes_of_the_coda_and_changes_no_token():
    def made(delay: int) -> tuple[list[object], int]:
        engine = engine_for("add", slots=16, coda_delay=delay)
        rng = random.Random(3)
        rule = rule_for("add", "latent-change")
        jobs = [job([rng.randrange(256) for _ in range(4)], rule, 5) for _ in range(24)]
        found = run(engine, jobs)
        completions = [[c.token_ids for c in g.completions] for g in found]
        return completions, int(engine.stats()["coda_passes"])

    eager, patient = made(0), made(4)
    assert eager[0] == patient[0]
    assert patient[1] < eager[1]
