"""Fitted thresholds: the best there are on what they are fitted on."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from benchmarks.allocation_cells import VARIANTS, Cell
from benchmarks.allocation_rules import (
    best_cut,
    exits_by_group,
    first_below,
    group_thresholds,
    priced,
    recurrence_thresholds,
)
from loopwise.settings import build_config

PRICE = 0.3


def made(tokens: int, depth: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores that know a little of the loss that is left; none at recurrence 1."""
    rng = np.random.default_rng(seed)
    loss = rng.exponential(size=(tokens, depth)).cumsum(axis=1)[:, ::-1].copy()
    score = (loss - loss[:, -1:] + rng.normal(size=loss.shape)).round(1)
    score[:, 0] = np.inf
    return score, loss


def total(depth: np.ndarray, loss: np.ndarray) -> float:
    return float(priced(loss, PRICE)[np.arange(len(loss)), depth - 1].sum())


def test_a_token_stops_where_its_score_first_meets_the_threshold_of_that_recurrence() -> None:
    score = np.array([[3.0, 1.0, 0.0], [3.0, 2.0, 2.0], [0.5, 9.0, 9.0]])
    assert first_below(score, np.array([1.0, 1.5, -np.inf])).tolist() == [2, 3, 1]
    assert exits_by_group(score, np.array([0, 1, 1]), np.array([1.0, -np.inf])).tolist() == [
        2,
        3,
        3,
    ]


def test_a_cut_is_the_best_of_all_and_parts_no_equal_scores() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        score, saved = rng.integers(0, 5, size=8).astype(float), rng.normal(size=8)
        saves = {t: saved[score <= t].sum() for t in (-math.inf, *score)}
        assert saved[score <= best_cut(score, saved)].sum() == pytest.approx(max(saves.values()))
    assert best_cut(np.array([np.inf]), np.array([1.0])) == -np.inf, "no score, no stop"


def test_thresholds_by_recurrence_are_no_worse_than_any_single_one() -> None:
    for seed in range(5):
        score, loss = made(400, 6, seed)
        fitted = total(first_below(score, recurrence_thresholds(score, loss, PRICE)), loss)
        single = min(total(first_below(score, t), loss) for t in np.unique(score[:, 1:-1]))
        assert fitted <= single + 1e-9


def test_thresholds_by_recurrence_are_the_best_where_all_can_be_tried() -> None:
    score, loss = made(6, 4, 3)
    cuts = [(-np.inf, *np.unique(score[:, r])) for r in (1, 2)]
    tried = (np.array([-np.inf, a, b, -np.inf]) for a, b in itertools.product(*cuts))
    best = min(total(first_below(score, t), loss) for t in tried)
    found = total(first_below(score, recurrence_thresholds(score, loss, PRICE)), loss)
    assert found == pytest.approx(best)


def test_each_group_gets_a_threshold_of_its_own() -> None:
    score = np.array([[np.inf, 1.0, 1.0]] * 4)
    loss = np.array([[9.0, 5.0, 0.0]] * 2 + [[9.0, 0.0, 0.0]] * 2)  # the first two must go on
    group = np.array([0, 0, 1, 1])
    exits = exits_by_group(score, group, group_thresholds(score, loss, group, PRICE))
    assert exits.tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cell_can_be_trained(variant: str) -> None:
    """Cores of other sizes keep the number of parameters, which the table of cells rests on."""
    config = build_config(Cell(variant, 0).settings("a.txt", "b.txt", smoke=False))
    model = config.model_config(config.tokenizer.vocab_size)
    layers = model.n_prelude_layers + model.n_core_layers + model.n_coda_layers
    attention = 2 * model.d_model**2 + 2 * model.d_model * (model.d_model // 2)
    if not variant.startswith("small"):
        assert layers * (attention + 3 * model.d_model * model.d_ff) == 737_280
