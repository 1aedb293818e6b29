"""The plain transformer equals slow float64 loops, and is a looped model that runs once."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive import Naive, roughen
from torch import Tensor

from loopwise.errors import ConfigError
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.views import PackedView

TINY = FixedConfig(vocab_size=31, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24, n_layers=3)
A = [3, 1, 4, 1, 5, 9, 2, 6, 5, 30]
B = [2, 7, 1, 8, 2, 8, 0]


def tiny(**changes: Any) -> FixedModel:
    model = FixedModel(replace(TINY, **changes)).double().eval()
    roughen(model, seed=0)
    return model


@torch.no_grad()
def logits_of(model: FixedModel, *documents: list[int]) -> Tensor:
    """Logits ``(seq, vocab)`` of documents packed into one row."""
    positions = torch.tensor([[p for doc in documents for p in range(len(doc))]])
    document_ids = torch.tensor([[d for d, doc in enumerate(documents) for _ in doc]])
    view = PackedView(model.geometry.rope, positions, document_ids, model.dtype)
    injection = model.prelude(torch.tensor([[token for doc in documents for token in doc]]), view)
    latent = model.core_step(model.initial_latent(injection), injection, 1, view)
    return model.coda(latent, 1, view)[0]


def gap(left: Tensor, right: Any) -> float:
    return float((left.double() - torch.as_tensor(right)).abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"n_kv_heads": 4},
        {"n_kv_heads": 1, "tie_embeddings": False},
        {"rope_base": 100.0, "norm_eps": 0.1, "n_layers": 1},
    ],
    ids=["gqa", "untied", "mha", "mqa-untied", "base-eps"],
)
def test_the_forward_pass_is_that_of_slow_loops(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    wanted = Naive(model).forward(A, depth=1)
    assert wanted.std() > 0.1, "the comparison would say nothing about flat logits"
    assert gap(logits_of(model, A), wanted) < 1e-9
    assert gap(logits_of(model.float(), A), wanted) < 1e-4


def test_u65_documents_of_a_row_do_not_see_one_another() -> None:
    model = tiny()
    other = [(token * 7 + 3) % 31 for token in A]
    alone = logits_of(model, B)
    for before in (A, other):
        assert gap(logits_of(model, before, B)[len(A) :], alone) < 1e-9
    assert gap(logits_of(model, A), logits_of(model, other)) > 0.1


def test_logits_do_not_depend_on_later_tokens() -> None:
    model = tiny()
    whole = logits_of(model, A)
    for cut in range(1, len(A)):
        changed = A[:cut] + [(token + 1) % 31 for token in A[cut:]]
        found = logits_of(model, changed)
        assert gap(found[:cut], whole[:cut]) < 1e-12
        assert gap(found[cut], whole[cut]) > 1e-3


def test_it_runs_once() -> None:
    geometry = tiny().geometry
    assert geometry.max_depth == 1
    assert geometry.n_layers == geometry.effective_layers(1) == 3
    assert (geometry.n_prelude_layers, geometry.n_core_layers, geometry.n_coda_layers) == (0, 3, 0)


def test_it_has_the_parameters_of_a_llama_of_its_shape() -> None:
    config = FixedConfig(
        vocab_size=49152, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, n_layers=30
    )
    with torch.device("meta"):
        model = FixedModel(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == 134_515_008, "SmolLM2-135M, the same shape, has so many"


def test_u05_evaluation_draws_nothing() -> None:
    model = tiny().float()
    torch.manual_seed(0)
    first = logits_of(model, A, B)
    torch.manual_seed(1234)
    assert torch.equal(logits_of(model, A, B), first)
    assert torch.equal(logits_of(copy.deepcopy(model).train(), A, B), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_u08_many_layers_stay_finite(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = FixedModel(replace(TINY, n_layers=64)).to(dtype)
    logits = logits_of(model, A, B)
    assert logits.isfinite().all()
    assert logits.abs().max() < 1e3


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 3},
        {"n_kv_heads": 0},
        {"n_heads": 3},
        {"n_heads": 0},
        {"d_model": 18},
        {"d_model": 12},
        {"d_model": 0},
        {"n_layers": 0},
        {"vocab_size": 0},
        {"d_ff": 0},
        {"norm_eps": -1.0},
        {"rope_base": 0.0},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(TINY, **changes)
