"""The recurrent model equals slow float64 loops, keeps documents apart, and shares its weights."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive import Naive, roughen
from torch import Tensor, nn

from loopwise.errors import ConfigError
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.models.views import PackedView

TINY = RecurrentConfig(
    vocab_size=31,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    d_ff=24,
    n_prelude_layers=1,
    n_core_layers=2,
    n_coda_layers=1,
)
PAPER = RecurrentConfig(
    vocab_size=49152,
    d_model=576,
    n_heads=9,
    n_kv_heads=3,
    d_ff=1536,
    n_prelude_layers=2,
    n_core_layers=4,
    n_coda_layers=2,
)
A = [3, 1, 4, 1, 5, 9, 2, 6, 5, 30]
B = [2, 7, 1, 8, 2, 8, 0]


def tiny(seed: int = 0, **changes: Any) -> RecurrentModel:
    model = RecurrentModel(replace(TINY, **changes)).double().eval()
    roughen(model, seed)
    return model


@torch.no_grad()
def logits_at(model: RecurrentModel, rows: list[list[list[int]]], depth: int) -> Tensor:
    """Logits of packed rows, each a list of documents; all rows are equally long."""
    ids = torch.tensor([[token for doc in row for token in doc] for row in rows])
    positions = torch.tensor([[p for doc in row for p in range(len(doc))] for row in rows])
    document_ids = torch.tensor([[d for d, doc in enumerate(row) for _ in doc] for row in rows])
    view = PackedView(model.geometry.rope, positions, document_ids, model.dtype)
    injection = model.prelude(ids, view)
    latent = model.initial_latent(injection)
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)


def gap(left: Tensor, right: Any) -> float:
    return float((left.double() - torch.as_tensor(right)).abs().max())


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("injection", ["concat", "add"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "latent_init": "injection"},
        {"n_kv_heads": 4, "latent_init": "injection"},
        {"n_kv_heads": 1, "tie_embeddings": False},
        {"n_heads": 2, "n_kv_heads": 1, "n_prelude_layers": 2, "n_coda_layers": 2},
        {"rope_base": 100.0, "norm_eps": 0.1, "n_core_layers": 1},
    ],
    ids=["gqa", "untied-from-injection", "mha-from-injection", "mqa-untied", "deeper", "base-eps"],
)
def test_the_forward_pass_is_that_of_slow_loops(
    changes: dict[str, Any], injection: str, depth: int
) -> None:
    model = tiny(injection=injection, **changes)
    naive = Naive(model)
    found = logits_at(model, [[A], [A[::-1]]], depth)
    wanted = [naive.forward(A, depth), naive.forward(A[::-1], depth)]
    assert wanted[0].std() > 0.1, "the comparison would say nothing about flat logits"
    for row in range(2):
        assert gap(found[row], wanted[row]) < 1e-9
    single = logits_at(model.float(), [[A]], depth)
    assert single.dtype == torch.float32
    assert gap(single[0], wanted[0]) < 1e-4


def test_one_document_without_document_ids_is_the_same() -> None:
    model = tiny()
    view = PackedView(model.geometry.rope, torch.arange(len(A))[None], None, model.dtype)
    with torch.no_grad():
        injection = model.prelude(torch.tensor([A]), view)
        latent = model.core_step(model.initial_latent(injection), injection, 1, view)
        found = model.coda(latent, 1, view)
    assert gap(found, logits_at(model, [[A]], 1)) < 1e-12


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_u65_documents_of_a_row_do_not_see_one_another(dtype: torch.dtype, depth: int) -> None:
    """Packing leaked across documents."""
    model = tiny().to(dtype)
    other = [(token * 7 + 3) % 31 for token in A]
    alone = logits_at(model, [[B]], depth)[0]
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4  # other sums, so other roundings
    for before in (A, other):
        packed = logits_at(model, [[before, B, before]], depth)[0]
        found = packed[len(before) : len(before) + len(B)]
        assert gap(found, alone) < tolerance, "B is not what it is alone"
        assert gap(packed[: len(before)], packed[-len(before) :]) < tolerance
    one = logits_at(model, [[A, B]], depth)[0, len(A) :]
    two = logits_at(model, [[other, B]], depth)[0, len(A) :]
    assert gap(one, two) < 1e-6, "altering A moved B"
    assert gap(logits_at(model, [[A]], depth), logits_at(model, [[other]], depth)) > 0.1


@pytest.mark.parametrize("depth", [1, 4])
def test_logits_do_not_depend_on_later_tokens(depth: int) -> None:
    model = tiny()
    whole = logits_at(model, [[A]], depth)[0]
    for cut in range(1, len(A)):
        changed = A[:cut] + [(token + 1) % 31 for token in A[cut:]]
        found = logits_at(model, [[changed]], depth)[0]
        assert gap(found[:cut], whole[:cut]) < 1e-12
        assert gap(found[cut], whole[cut]) > 1e-3
        assert gap(logits_at(model, [[A[:cut]]], depth)[0], whole[:cut]) < 1e-12


def test_rows_of_one_call_may_stand_at_different_recurrences() -> None:
    """The model itself does nothing with `r` but hand it to the view."""
    model = tiny()
    seen = []

    class Spy:
        def attend(self, layer: int, r: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append((layer, r, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return q

    r = torch.tensor([1, 5, 2])
    with torch.no_grad():
        injection = model.prelude(torch.tensor([1, 2, 3]), Spy())
        latent = model.core_step(injection, injection, r, Spy())
        logits = model.coda(latent, r, Spy())
    assert logits.shape == (3, 31)
    assert [call[0] for call in seen] == [0, 1, 2, 3]
    assert seen[0][1] == 1
    assert all(call[1] is r for call in seen[1:])
    assert {call[2:] for call in seen} == {((3, 4, 4), (3, 2, 4), (3, 2, 4))}


def test_the_paper_geometry_has_its_number_of_parameters() -> None:
    with torch.device("meta"):
        model = RecurrentModel(PAPER)
    total = sum(parameter.numel() for parameter in model.parameters())
    d, ff, kv = 576, 1536, 3 * 64
    layer = d * (d + 2 * kv) + d * d + d * 2 * ff + ff * d
    assert layer == 3_538_944
    norms = 8 * 4 * d + d
    assert total == 28_311_552 + 8 * layer + 2 * d * d + norms
    assert round(total / 1e6, 1) == 57.3
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))


def test_untying_and_adding_change_only_the_matrices_they_name() -> None:
    base = {name: tuple(p.shape) for name, p in tiny().state_dict().items()}
    untied = {name: tuple(p.shape) for name, p in tiny(tie_embeddings=False).state_dict().items()}
    added = {name: tuple(p.shape) for name, p in tiny(injection="add").state_dict().items()}
    assert set(untied) - set(base) == {"unembedding.weight"}
    assert set(base) - set(added) == {"adapter.weight"}
    assert untied["unembedding.weight"] == (31, 16)


def test_u05_noise_belongs_to_its_seed_alone() -> None:
    model = tiny(latent_init="noise")
    seeds = torch.tensor([5, 0, 7, 5, 123_456_789_012, 2**62, 1])
    rows = model.initial_latent(torch.zeros(7, 16, dtype=torch.float64), seeds)
    assert rows.dtype == torch.float64
    assert torch.equal(rows[0], rows[3])
    for order in ([6, 5, 4, 3, 2, 1, 0], [2], [4, 1], [0, 0, 0, 0, 2]):
        injection = torch.ones(len(order), 16, dtype=torch.float64)
        assert torch.equal(model.initial_latent(injection, seeds[order]), rows[order])
    shaped = model.initial_latent(torch.zeros(1, 7, 16, dtype=torch.float64), seeds[None])
    assert torch.equal(shaped[0], rows), "leading axes do not matter"
    distinct = rows[[0, 1, 2, 4, 5, 6]]
    apart = (distinct[:, None] - distinct[None]).abs().amax(dim=-1)
    assert (apart + torch.eye(6) > 0.1).all(), "two seeds gave one row"
    none = model.initial_latent(torch.zeros(2, 16, dtype=torch.float64))
    assert torch.equal(none, rows[[1, 1]]), "no seeds means seed 0 everywhere"


def test_u05_noise_does_not_touch_the_global_generator() -> None:
    model = tiny(latent_init="noise")
    injection = torch.zeros(3, 16, dtype=torch.float64)
    torch.manual_seed(1)
    first = model.initial_latent(injection, torch.arange(3))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(model.initial_latent(injection, torch.arange(3)), first)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_noise_is_standard_normal() -> None:
    model = RecurrentModel(replace(TINY, latent_init="noise", d_model=64))
    rows = model.initial_latent(torch.zeros(4000, 64), torch.arange(4000))  # 256,000 numbers
    assert rows.dtype == torch.float32
    values = rows.double()
    assert abs(values.mean()) < 4 / 256_000**0.5
    assert abs(values.var() - 1) < 4 * (2 / 256_000) ** 0.5
    assert abs((values**3).mean()) < 4 * (15 / 256_000) ** 0.5
    assert abs((values**4).mean() - 3) < 4 * (96 / 256_000) ** 0.5
    assert values.mean(dim=0).abs().max() < 5 / 4000**0.5, "channels have means of their own"
    assert values.mean(dim=1).abs().max() < 5 / 64**0.5, "seeds have means of their own"
    for lag in (1, 2, 64):  # neighbours in seed or channel are unrelated
        flat = values.flatten()
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 4 / 256_000**0.5


@pytest.mark.parametrize("latent_init", ["zeros", "injection", "noise"])
def test_u05_evaluation_draws_nothing(latent_init: str) -> None:
    """Two evaluations of one checkpoint disagreed."""
    model = tiny(latent_init=latent_init).float()
    torch.manual_seed(0)
    first = logits_at(model, [[A, B]], 4)
    torch.manual_seed(1234)
    assert torch.equal(logits_at(model, [[A, B]], 4), first)
    assert torch.equal(logits_at(copy.deepcopy(model), [[A, B]], 4), first)
    assert torch.equal(logits_at(model.train(), [[A, B]], 4), first), "there is no dropout"


@pytest.mark.parametrize("injection", ["concat", "add"])
def test_the_loop_equals_its_untied_copies_in_a_row(injection: str) -> None:
    """One set of core weights, used again, is a deep stack whose copies are equal."""
    depth = 3
    model = tiny(injection=injection)
    wanted = logits_at(model, [[A]], depth)
    view = PackedView(model.geometry.rope, torch.arange(len(A))[None], None, model.dtype)
    copies = [copy.deepcopy(model) for _ in range(depth)]
    injected = model.prelude(torch.tensor([A]), view)
    latent = model.initial_latent(injected)
    for stage in copies:
        latent = stage.core_step(latent, injected, 1, view)
    logits = model.coda(latent, 1, view)
    assert gap(logits.detach(), wanted) < 1e-12
    logits.square().sum().backward()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for stage in (model, *copies):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad

    model.zero_grad()
    injected = model.prelude(torch.tensor([A]), view)
    latent = model.initial_latent(injected)
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injected, r, view)
    model.coda(latent, depth, view).square().sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, f"{name} gets no gradient"
        assert gap(parameter.grad, total[name]) < 1e-9 * scale, f"{name} is not shared"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("injection", ["concat", "add"])
def test_u08_sixty_four_recurrences_stay_finite(injection: str, dtype: torch.dtype) -> None:
    """Values grew without bound past the trained depth."""
    torch.manual_seed(0)
    fresh = RecurrentModel(replace(TINY, injection=injection)).to(dtype)
    for model in (fresh, tiny(injection=injection).to(dtype)):
        logits = logits_at(model, [[A, B]], 64)
        assert logits.isfinite().all()
        assert logits.abs().max() < 1e3


def test_a_fresh_model_starts_near_the_uniform_distribution() -> None:
    torch.manual_seed(0)
    model = RecurrentModel(replace(TINY, vocab_size=101, d_model=64))
    for depth in (1, 8, 32):
        log_p = logits_at(model, [[A, B]], depth).log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1).mean()
        assert entropy > 0.6 * torch.log(torch.tensor(101.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 3},
        {"n_heads": 3},
        {"d_model": 18},
        {"d_model": 12},  # head_dim 3: rotary phase turns pairs
        {"n_core_layers": 0},
        {"n_prelude_layers": -1},
        {"n_coda_layers": -1},
        {"vocab_size": 0},
        {"d_ff": 0},
        {"n_kv_heads": 0},
        {"n_heads": 0},
        {"d_model": 0},
        {"norm_eps": -1.0},
        {"rope_base": 0.0},
        {"injection": "cat"},
        {"latent_init": "normal"},
        {"init_depth": 0},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(TINY, **changes)


def test_geometry_tells_a_cache_what_it_must_know() -> None:
    model = tiny()
    geometry = model.geometry
    assert (geometry.n_layers, geometry.effective_layers(5)) == (4, 12)
    assert [geometry.is_core(layer) for layer in range(4)] == [False, True, True, False]
    assert geometry.rope.head_dim == 4
    assert not geometry.rope.interleaved


@pytest.mark.parametrize("injection", ["concat", "add"])
def test_parts_hold_every_matrix_but_the_embedding_once(injection: str) -> None:
    model = tiny(injection=injection, tie_embeddings=False)
    modules = [m for listed in model.parts().values() for root in listed for m in root.modules()]
    found = [id(m.weight) for m in modules if isinstance(m, nn.Linear)]
    assert len(found) == len(set(found))
    named = model.named_parameters()
    rest = {name for name, p in named if p.ndim == 2 and id(p) not in found}
    assert rest == {"embedding.weight", "unembedding.weight"}
