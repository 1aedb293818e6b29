"""The architectures of published checkpoints keep the contract every looped model keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from naive import roughen
from torch import Tensor, nn

from loopwise.config import from_table, to_table
from loopwise.errors import ConfigError
from loopwise.models import MODELS
from loopwise.models.base import LoopedLM, Rope, RopeScaling
from loopwise.models.costs import flops_per_token
from loopwise.models.layers import row_seeds, seeded_truncated_normal
from loopwise.models.views import PackedView

SHAPE = {"vocab_size": 31, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24}
LAYERS = {"n_prelude_layers": 1, "n_core_layers": 2, "n_coda_layers": 1}
SCALING = RopeScaling(factor=4.0, original_length=16)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "huginn": ("raven", {**LAYERS, "n_kv_heads": 4, "embedding_scale": 4.0}),
    "retrofit llama": (
        "raven",
        {**LAYERS, "block": "pre-norm", "qk_bias": False, "norm_before_coda": False,
         "rope_interleaved": False, "rope_scaling": SCALING, "tie_embeddings": False},
    ),
    "retrofit olmo": (
        "raven",
        {**LAYERS, "block": "post-norm", "qk_bias": False, "qk_norm": True,
         "norm_before_coda": False, "rope_interleaved": False, "latent_init": "zeros"},
    ),
    "retrofit from the prelude": (
        "raven",
        {**LAYERS, "block": "post-norm", "qk_bias": False, "latent_init": "injection",
         "skip_first_adapter": True},
    ),
    "ouro": ("ouro", {"n_layers": 3, "head_dim": 4}),
    "nanbeige": ("ouro", {"n_layers": 3, "head_dim": 8, "block": "pre-norm", "exit_gate": False}),
    "nanochat": ("nanochat", LAYERS),
    "nanochat noise": ("nanochat", {**LAYERS, "latent_init": "noise", "n_coda_layers": 0}),
    "nanochat passthrough": ("nanochat", {**LAYERS, "injection": "none", "n_prelude_layers": 0}),
    "loopformer": ("loopformer", {"n_layers": 2, "max_positions": 20}),
    "dory": ("dory", {**LAYERS, "head_dim": 4, "local_layers": (0, 2), "window": 3}),
    "dory, all local": ("dory", {**LAYERS, "head_dim": 4, "local_layers": (0, 1, 2, 3)}),
    "parcae": ("parcae", {**LAYERS, "value_layers": (0, 2, 3), "gate_channels": 5}),
}  # fmt: skip
A = [3, 1, 4, 1, 5, 9, 2, 6, 5, 30]
B = [2, 7, 1, 8, 2, 8, 0]


def build(kind: str, rough: bool = True) -> LoopedLM:
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    model_class = MODELS[name]
    fields = {f.name for f in dataclasses.fields(model_class.config_class)}
    shape = {key: size for key, size in SHAPE.items() if key in fields}  # some have no n_kv_heads
    model = model_class(model_class.config_class(**{**shape, **changes})).eval()
    if rough:
        roughen(model, seed=0)
    return model


@torch.no_grad()
def logits_at(model: LoopedLM, documents: list[list[int]], depth: int) -> Tensor:
    """Logits ``(seq, vocab)`` of documents packed into one row."""
    positions = torch.tensor([[p for doc in documents for p in range(len(doc))]])
    ids = torch.tensor([[d for d, doc in enumerate(documents) for _ in doc]])
    tokens = torch.tensor([[t for doc in documents for t in doc]])
    view = PackedView(model.geometry.rope, positions, ids, model.dtype, tokens)
    injection = model.prelude(tokens, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)[0]


def gap(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_documents_of_a_row_do_not_see_one_another(kind: str, depth: int) -> None:
    model = build(kind).double()
    alone = logits_at(model, [B], depth)
    assert gap(logits_at(model, [A, B], depth)[len(A) :], alone) < 1e-6
    assert gap(logits_at(model, [A], depth), logits_at(model, [A[::-1]], depth)) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_later_tokens(kind: str) -> None:
    model = build(kind).double()
    whole = logits_at(model, [A], 3)
    changed = logits_at(model, [[*A[:6], 0, 0, 0, 0]], 3)
    assert gap(changed[:6], whole[:6]) < 1e-9
    assert gap(changed[6], whole[6]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_numbered_through_and_rows_keep_their_recurrence(kind: str) -> None:
    model, seen = build(kind), []

    class Spy:
        positions = torch.arange(3)
        token_ids = torch.tensor([1, 2, 3])

        def attend(self, layer: int, r: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            seen.append((layer, r, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return q

    r = torch.tensor([1, 5, 2])
    with torch.no_grad():
        injection = model.prelude(torch.tensor([1, 2, 3]), Spy())
        latent = model.core_step(model.initial_latent(injection), injection, r, Spy())
        assert model.coda(latent, r, Spy()).shape == (3, 31)
    g = model.geometry
    assert [call[0] for call in seen] == list(range(g.n_layers))
    assert all(call[1] == 1 for call in seen[: g.n_prelude_layers])
    assert all(call[1] is r for call in seen[g.n_prelude_layers :])
    kv = (3, g.n_kv_heads, g.head_dim)
    assert {call[2:] for call in seen} == {((3, g.n_heads, g.head_dim), kv, kv)}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_every_matrix_but_embedding_head_and_gate(kind: str) -> None:
    model = build(kind)
    modules = [m for listed in model.parts().values() for root in listed for m in root.modules()]
    found = [id(m.weight) for m in modules if isinstance(m, nn.Linear)]
    assert len(found) == len(set(found))
    rest = {n for n, p in model.named_parameters() if p.ndim == 2 and id(p) not in found}
    tables = ("embedding.weight", "gate.weight")  # looked up, or read once a recurrence
    assert all(name.endswith(tables) or name.startswith("modulation.") for name in rest), rest
    assert flops_per_token(model).core > 0


@pytest.mark.parametrize("kind", KINDS)
def test_training_reaches_every_weight(kind: str) -> None:
    model = build(kind, rough=False).train()
    positions, tokens = torch.arange(len(A))[None], torch.tensor([A])
    view = PackedView(model.geometry.rope, positions, None, model.dtype, tokens)
    injection = model.prelude(tokens, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in (1, 2):
        latent = model.core_step(latent, injection, r, view)
    model.coda(latent, 2, view).square().sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None}
    assert still <= {"gate.weight", "gate.bias"}, "the gate learns from a loss of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_model_is_near_uniform_and_stays_finite(kind: str) -> None:
    model = build(kind, rough=False)
    for depth in (1, 8, model.geometry.max_depth or 64):
        log_p = logits_at(model, [A, B], depth).log_softmax(dim=-1)
        assert log_p.isfinite().all()
        assert -(log_p.exp() * log_p).sum(dim=-1).mean() > 0.5 * torch.log(torch.tensor(31.0))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_draws_nothing(kind: str) -> None:
    model = build(kind)
    torch.manual_seed(0)
    first = logits_at(model, [A, B], 3)
    torch.manual_seed(1)
    assert torch.equal(logits_at(model, [A, B], 3), first)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_matter_where_the_model_says_so(kind: str) -> None:
    model = build(kind)
    injection = torch.ones(2, 16)
    one, two = model.initial_latent(injection, torch.tensor([7, 8]))
    assert torch.equal(one, two) != model.seeded_latent
    assert torch.equal(model.initial_latent(injection[:1], torch.tensor([8]))[0], two)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_come_back_from_plain_tables(kind: str) -> None:
    config = build(kind).config
    assert from_table(type(config), to_table(config), "model.") == config


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True},  # beside the bias
        {"n_kv_heads": 2},  # beside the bias
        {"block": "sandwitch"},
        {"latent_std": 0.0},
        {"embedding_scale": -1.0},
        {"n_core_layers": 0},
        {"d_model": 18},
    ],
    ids=str,
)
def test_impossible_raven_shapes_are_refused(changes: dict[str, Any]) -> None:
    model_class = MODELS["raven"]
    with pytest.raises(ConfigError):
        model_class.config_class(**{**SHAPE, "n_kv_heads": 4, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"factor": 0.5}, {"low_freq_factor": 4.0}, {"low_freq_factor": 0.0}, {"original_length": 0}],
    ids=str,
)
def test_impossible_scalings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RopeScaling(**{"factor": 8.0, **changes})


def test_no_scaling_is_a_factor_of_one() -> None:
    positions = torch.arange(100)
    plain = Rope(head_dim=8).tables(positions, torch.float64)
    same = Rope(head_dim=8, scaling=RopeScaling(factor=1.0, original_length=16))
    for left, right in zip(plain, same.tables(positions, torch.float64), strict=True):
        assert torch.allclose(left, right, atol=1e-12)


def test_truncated_noise_is_a_normal_without_tails() -> None:
    rows = seeded_truncated_normal(torch.arange(4000), 64)
    assert rows.abs().max() <= 3
    values = rows.double()
    assert abs(values.mean()) < 4 / 256_000**0.5
    # The variance of a normal cut at c: 1 - 2 c phi(c) / (2 Phi(c) - 1), at c = 3.
    assert abs(values.var() - 0.97334) < 0.01
    inside = (values.abs() < 1).double().mean()
    assert abs(inside - 0.68269 / 0.99730) < 0.004
