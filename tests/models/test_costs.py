"""Costs against closed forms: parameters, FLOPs of each part, KV bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopwise.models.costs import (
    Costs,
    flops_per_token,
    kv_bytes_per_token,
    kv_entries_per_token,
    parameters,
)
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.nanochat import NanochatConfig, NanochatModel
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel

D, FF, V = 32, 48, 100
CONFIG = RecurrentConfig(
    vocab_size=V,
    d_model=D,
    n_heads=4,
    n_kv_heads=2,
    d_ff=FF,
    n_prelude_layers=1,
    n_core_layers=3,
    n_coda_layers=2,
)
HEAD = D // 4
MATRICES = D * (4 + 2 * 2) * HEAD + D * D + 3 * D * FF  # of one layer
NORMS = 4 * D


def recurrent(**changes: object) -> RecurrentModel:
    return RecurrentModel(replace(CONFIG, **changes))


def test_parameters_count_the_core_and_tied_tensors_once():
    assert parameters(recurrent()) == V * D + 6 * (MATRICES + NORMS) + 2 * D * D + D
    assert parameters(recurrent(injection="add")) == V * D + 6 * (MATRICES + NORMS) + D
    untied = recurrent(tie_embeddings=False)
    assert parameters(untied) == 2 * V * D + 6 * (MATRICES + NORMS) + 2 * D * D + D


@pytest.mark.parametrize("tied", [True, False])
def test_flops_without_context_are_twice_the_matrices_passed(tied):
    costs = flops_per_token(recurrent(tie_embeddings=tied))
    assert costs.prelude == 2 * MATRICES
    assert costs.core == 2 * (3 * MATRICES + 2 * D * D)
    assert costs.coda == 2 * 2 * MATRICES
    assert costs.head == 2 * V * D


def test_attention_costs_grow_with_context():
    """Scores and mixing: 2 x 2 x context x heads x head size for each layer passed."""
    at = flops_per_token(recurrent(), context=10)
    free = flops_per_token(recurrent())
    per_layer = 4 * 10 * 4 * HEAD
    assert at.prelude - free.prelude == per_layer
    assert at.core - free.core == 3 * per_layer
    assert at.coda - free.coda == 2 * per_layer
    assert at.head == free.head


def test_layers_with_a_window_see_no_more_than_it():
    """A window of four is three others; prelude and one layer of the core have it."""
    shape = {"vocab_size": V, "d_model": D, "n_heads": 4, "n_kv_heads": 2, "d_ff": FF}
    layers = {"n_prelude_layers": 1, "n_core_layers": 2, "n_coda_layers": 1}
    model = NanochatModel(NanochatConfig(**shape, **layers, local_layers=(0, 2), window=4))
    at, free = flops_per_token(model, context=10), flops_per_token(model)
    per_token = 2 * 2 * 4 * HEAD
    assert at.prelude - free.prelude == 3 * per_token
    assert at.core - free.core == (10 + 3) * per_token
    assert at.coda - free.coda == 10 * per_token
    short = flops_per_token(model, context=2)
    assert short.core - free.core == 2 * 2 * per_token


def test_flops_of_a_fixed_model_lie_in_its_core_and_head():
    model = FixedModel(
        FixedConfig(vocab_size=V, d_model=D, n_heads=4, n_kv_heads=2, d_ff=FF, n_layers=5)
    )
    costs = flops_per_token(model)
    assert (costs.prelude, costs.coda) == (0, 0)
    assert costs.core == 2 * 5 * MATRICES
    assert costs.head == 2 * V * D


COSTS = Costs(prelude=10.0, core=100.0, coda=20.0, head=220.0)


def test_forward_training_and_cap_by_hand():
    assert COSTS.forward(3) == 10 + 300 + 240
    assert COSTS.forward(3, codas=2, heads=2) == 10 + 300 + 3 * 240
    assert COSTS.forward(2.5) == 500
    assert COSTS.training(8, 4) == COSTS.forward(8) + 2 * COSTS.forward(4)
    assert COSTS.training(2, 4) == 3 * COSTS.forward(2)
    assert COSTS.check_in_recurrences == 2.4
    assert COSTS.cap(8, 2) == 1050 / 450
    assert COSTS.cap(8, 8) == 1.0


def test_the_papers_geometry_has_the_papers_price_of_a_check():
    """In paper 1's geometry one full-vocabulary check costs 2.4 recurrences."""
    with torch.device("meta"):
        model = RecurrentModel(
            RecurrentConfig(
                vocab_size=49_152,
                d_model=576,
                n_heads=9,
                n_kv_heads=3,
                d_ff=1536,
                n_prelude_layers=2,
                n_core_layers=4,
                n_coda_layers=2,
            )
        )
    costs = flops_per_token(model)
    assert costs.check_in_recurrences == pytest.approx(2.4, abs=0.1)
    # "A1 checked every recurrence does 1.58x the work of uniform-8" at 4.94 mean recurrences.
    assert costs.forward(4.94, codas=3.94, heads=3.94) / costs.forward(8) == pytest.approx(
        1.58, abs=0.01
    )


def test_kv_bytes():
    geometry = CONFIG.geometry
    assert kv_entries_per_token(geometry, 1) == 1 + 2 + 3
    assert kv_entries_per_token(geometry, 8) == 1 + 2 + 3 * 8
    assert kv_bytes_per_token(geometry, 8, bytes_per_value=2) == 27 * 2 * 2 * HEAD * 2
