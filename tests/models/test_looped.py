"""The looped model equals slow float64 loops in every injection, cached or not, trained or read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from naive import roughen
from naive_looped import NaiveLooped
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.engine.reference import DecodedToken, ReferenceDecoder
from loopwise.errors import ConfigError
from loopwise.exits.base import Observation
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.live import run_live
from loopwise.measure.trace import trace_batch
from loopwise.models.looped import Inject, LoopedConfig, LoopedModel
from loopwise.models.views import PackedView
from loopwise.train.loss import LoopedLoss

INJECTS = ["none", "input", "attn-first", "residual-all", "attn-all"]
TINY = LoopedConfig(
    vocab_size=31,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    d_ff=24,
    n_layers=2,
)
OPTIONS = {
    "paper": {},
    "three-layers": {"n_layers": 3},
    "one-layer": {"n_layers": 1},
    "swiglu": {"mlp": "swiglu"},
    "learned-norms": {"learned_norms": True},
    "tied": {"tie_embeddings": True},
    "uncapped": {"logit_cap": None},
    "hard-cap": {"logit_cap": 1.5},
    "no-qk-norm": {"qk_norm": False},
    "mqa-base-eps": {"n_kv_heads": 1, "rope_base": 100.0, "norm_eps": 0.1},
    "mha": {"n_kv_heads": 4},
    "all-unusual": {
        "mlp": "swiglu",
        "learned_norms": True,
        "tie_embeddings": True,
        "logit_cap": None,
        "qk_norm": False,
    },
}
DEPTHS = [1, 3, 6, 12]
A = [3, 1, 4, 1, 5, 9, 2, 6, 5, 30]
B = [2, 7, 1, 8, 2, 8, 0, 4, 11, 17]


def tiny(seed: int = 0, gain: float = 1.0, **changes: Any) -> LoopedModel:
    """Every weight drawn afresh: the zero start of the output projections would hide all faults."""
    model = LoopedModel(replace(TINY, **changes)).double().eval()
    roughen(model, seed, gain)
    return model


def as_batch(*rows: list[int]) -> TokenBatch:
    """One document per row, each token predicting the next; the last predicts token 0."""
    ids = torch.tensor(rows)
    positions = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    return TokenBatch(
        token_ids=ids,
        targets=torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1),
        document_ids=torch.zeros(ids.shape, dtype=torch.int32),
        positions=positions,
        hops=torch.zeros(ids.shape, dtype=torch.uint8),
    )


def latents_of(model: LoopedModel, *rows: list[int]) -> Iterator[tuple[int, Tensor, PackedView]]:
    """Recurrence, latent ``(batch, seq, d_model)`` after it and view, without end."""
    batch = as_batch(*rows)
    view = PackedView(model.geometry.rope, batch.positions, None, model.dtype)
    injection = model.prelude(batch.token_ids, view)
    latent = model.initial_latent(injection)
    r = 0
    while True:
        r += 1
        latent = model.core_step(latent, injection, r, view)
        yield r, latent, view


def forward(model: LoopedModel, *rows: list[int], depth: int) -> Tensor:
    """Logits ``(batch, seq, vocab)`` of a full pass at uniform depth."""
    for r, latent, view in latents_of(model, *rows):
        if r == depth:
            return model.coda(latent, depth, view)
    raise AssertionError("depth starts at 1")


def gap(left: Tensor, right: Any) -> float:
    return float((left.detach().double() - torch.as_tensor(right).detach()).abs().max())


def test_these_are_all_the_injections() -> None:
    assert sorted(get_args(Inject)) == sorted(INJECTS)


# The forward pass.


@pytest.mark.parametrize("inject", INJECTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_the_forward_pass_is_that_of_slow_loops(options: dict[str, Any], inject: str) -> None:
    model = tiny(inject=inject, **options)
    naive = NaiveLooped(model)
    deepest = DEPTHS[-1] if options in ({}, {"n_layers": 3}) else 3
    depths = [depth for depth in DEPTHS if depth <= deepest]
    wanted = {"A": naive.forward(A, deepest), "B": naive.forward(B, deepest)}
    assert wanted["A"].std() > 0.1, "the comparison would say nothing about flat logits"
    assert abs(wanted["A"][0] - wanted["A"][2]).max() > 0.05, "recurrences must matter"
    found = {depth: forward(model, A, B, depth=depth) for depth in depths}
    model.float()
    for depth in depths:
        single = forward(model, A, B, depth=depth)
        assert single.dtype == torch.float32
        for row, document in enumerate("AB"):
            assert gap(found[depth][row], wanted[document][depth - 1]) < 1e-9
            assert gap(single[row], wanted[document][depth - 1]) < 1e-4


@torch.no_grad()
def test_the_injections_are_five_different_models_that_agree_on_recurrence_one() -> None:
    models = [tiny(inject=inject) for inject in INJECTS]
    first = [forward(model, A, depth=1) for model in models]
    second = [forward(model, A, depth=2) for model in models]
    for i in range(len(INJECTS)):
        assert torch.equal(first[i], first[0]), INJECTS[i]
        for j in range(i):
            assert gap(second[i], second[j]) > 0.05, f"{INJECTS[i]} is {INJECTS[j]}"


@torch.no_grad()
def test_attention_over_the_first_layer_alone_is_all_of_it_in_one_layer() -> None:
    first, every = (tiny(inject=name, n_layers=1) for name in ("attn-first", "attn-all"))
    assert torch.equal(forward(first, A, depth=4), forward(every, A, depth=4))


@torch.no_grad()
def test_the_norm_of_queries_and_keys_may_come_before_the_rotary_phase() -> None:
    """A rotation keeps lengths, so the paper's order (phase, then norm) is this one."""
    naive = NaiveLooped(tiny())
    head = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    for position in (0, 1, 77):
        other = naive.rotate(naive.rms(head), position)
        assert abs(other - naive.phased(head, position)).max() < 1e-12


@pytest.mark.parametrize("cap", [15.0, 0.5])
@torch.no_grad()
def test_the_cap_bounds_the_logits(cap: float) -> None:
    model = tiny(logit_cap=cap)
    for weight in (model.unembedding.weight, model.embedding.weight):
        weight.mul_(100.0)
    logits = forward(model, A, depth=3)
    assert 0.9 * cap < logits.abs().max() <= cap
    free = tiny(logit_cap=None)
    free.load_state_dict(model.state_dict())
    assert gap(logits, cap * (forward(free, A, depth=3) / cap).tanh()) < 1e-9


@pytest.mark.parametrize("inject", INJECTS)
@torch.no_grad()
def test_a_fresh_model_passes_its_embedding_through(inject: str) -> None:
    """Output projections start at zero, so no layer adds anything before the first update."""
    torch.manual_seed(0)
    fresh = LoopedModel(replace(TINY, inject=inject, logit_cap=None)).double()
    started = NaiveLooped(fresh)
    h = torch.stack([torch.as_tensor(started.start(token)) for token in A])
    wanted = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() @ fresh.unembedding.weight.T
    assert gap(forward(fresh, A, depth=1)[0], wanted) < 1e-9
    rough = LoopedModel(replace(TINY, inject=inject, logit_cap=None, zero_init_out=False)).double()
    for block, loud in zip(fresh.core_blocks, rough.core_blocks, strict=True):
        assert not block.out.weight.any()
        assert not block.mlp.down.weight.any()
        assert loud.out.weight.all()
        assert loud.mlp.down.weight.all()


@pytest.mark.parametrize("inject", INJECTS)
@torch.no_grad()
def test_logits_do_not_depend_on_later_tokens(inject: str) -> None:
    model = tiny(inject=inject)
    whole = forward(model, A, depth=6)[0]
    for cut in range(1, len(A)):
        changed = A[:cut] + [(token + 1) % 31 for token in A[cut:]]
        found = forward(model, changed, depth=6)[0]
        assert gap(found[:cut], whole[:cut]) < 1e-12
        assert gap(found[cut], whole[cut]) > 1e-3
    assert gap(forward(model, [*A[:-2], 7, 8], depth=6)[0, -1], whole[-1]) > 1e-3


@pytest.mark.parametrize("inject", ["attn-all", "attn-first", "residual-all"])
@torch.no_grad()
def test_a_stream_that_starts_again_does_not_grow(inject: str) -> None:
    """The residual exploded with the number of recurrences."""
    for seed in range(3):
        sizes = {}
        for r, latent, _ in latents_of(tiny(seed, inject=inject), A, B):
            assert latent.isfinite().all()
            sizes[r] = float(latent.norm(dim=-1).mean())
            if r == 64:
                break
        assert max(sizes[r] for r in range(4, 65)) < 2 * sizes[4]
        assert sizes[64] > sizes[4] / 2


# Decoding from a cache.


def decode(model: LoopedModel, ids: list[int], rule: ExitRule) -> list[DecodedToken]:
    decoder = ReferenceDecoder(model, rule, build_policy(rule))
    return [decoder.feed(token) for token in ids]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("inject", INJECTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward_pass(
    inject: str, depth: int, dtype: torch.dtype
) -> None:
    """The known fault of this architecture: a cache that keeps the last recurrence alone.

    Twelve loops of wild weights blow the rounding of float32 up past 1e-4 on some processors, so
    weights are wild in float64 alone. Logits come in float32 either way.
    """
    exact = dtype == torch.float64
    model = tiny(inject=inject, n_layers=3, gain=1.0 if exact else 0.5).to(dtype)
    whole = forward(model, A, depth=depth)[0]
    for position, token in enumerate(decode(model, A, parse_rule(f"fixed:{depth}"))):
        assert token.exit_depth == depth
        bound = 1e-6 if exact else 1e-4
        assert gap(token.logits, whole[position]) < bound, f"token {position}"


class Listening:
    """A policy that writes its scores down."""

    def __init__(self, rule: ExitRule) -> None:
        self.inner, self.scores = build_policy(rule), []
        self.name, self.reads = self.inner.name, self.inner.reads
        self.memory_width = self.inner.memory_width

    def score(self, seen: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        score, memory = self.inner.score(seen, memory)
        self.scores.append(float(score))
        return score, memory


def middle_threshold(model: LoopedModel, policy: str, ids: list[int]) -> float:
    """In the widest gap near the median of the scores, so that no rounding decides."""
    rule = ExitRule(policy=policy, threshold=-1.0, max_depth=8)
    listening = Listening(rule)
    decoder = ReferenceDecoder(model, rule, listening)
    for token in ids:
        decoder.feed(token)
    scores = torch.tensor(sorted(score for score in listening.scores if math.isfinite(score)))
    window = scores[len(scores) // 2 - 4 : len(scores) // 2 + 5]
    widest = int(window.diff().argmax())
    return float(window[widest : widest + 2].mean())


@pytest.mark.parametrize("policy", ["kl", "latent-change"])
@pytest.mark.parametrize("inject", INJECTS)
@torch.no_grad()
def test_exits_token_by_token_equal_live_measurement(inject: str, policy: str) -> None:
    model = tiny(inject=inject)
    ids = [*A, *B]
    rule = ExitRule(policy=policy, threshold=middle_threshold(model, policy, ids), max_depth=8)
    tokens = decode(model, ids, rule)
    depths = [token.exit_depth for token in tokens]
    assert len(set(depths)) >= 2, "one depth for all tests little"
    batch = as_batch(ids)
    found = run_live(model, [batch], rule, build_policy(rule))
    assert found.exit_depth.tolist() == depths
    logits = torch.stack([token.logits for token in tokens])
    losses = torch.nn.functional.cross_entropy(logits, batch.targets[0], reduction="none")
    assert gap(found.loss, losses.double()) < 1e-4
    assert gap(logits, NaiveLooped(model).decode(ids, depths)) < 1e-5


# Parameters.


def test_no_injection_has_parameters_of_its_own() -> None:
    for changes in ({}, {"learned_norms": True, "tie_embeddings": True, "mlp": "swiglu"}):
        shapes = [
            {name: tuple(p.shape) for name, p in tiny(inject=i, **changes).state_dict().items()}
            for i in INJECTS
        ]
        assert all(shape == shapes[0] for shape in shapes)


@pytest.mark.parametrize(
    ("sizes", "in_layers", "total"),
    [
        ((6, 384, 3, 1536), 10_616_832, 127_303_680),
        ((12, 768, 6, 3072), 84_934_656, 318_308_352),
    ],
    ids=["small", "base"],
)
@pytest.mark.parametrize("inject", INJECTS)
def test_the_sizes_of_the_paper_to_the_digit(
    inject: str, sizes: tuple[int, int, int, int], in_layers: int, total: int
) -> None:
    """127.3M and 318.3M parameters need 151,936 words; 151,669 would make 127.1M and 317.9M."""
    n_layers, d_model, n_heads, d_ff = sizes
    config = LoopedConfig(
        vocab_size=151_936,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_ff=d_ff,
        n_layers=n_layers,
        inject=inject,
    )
    with torch.device("meta"):
        model = LoopedModel(config)
    assert model.geometry.head_dim == 128
    assert sum(p.numel() for p in model.core_blocks.parameters()) == in_layers
    assert sum(p.numel() for p in model.parameters()) == total
    for words, rounded in ((151_936, {127.3, 318.3}), (151_669, {127.1, 317.9})):
        assert round((in_layers + 2 * words * d_model) / 1e6, 1) in rounded


@pytest.mark.parametrize("changes", [{}, {"learned_norms": True}, {"tie_embeddings": True}])
def test_options_change_only_the_parameters_they_name(changes: dict[str, Any]) -> None:
    plain = set(tiny().state_dict())
    found = set(tiny(**changes).state_dict())
    norms = {"norm_embedding.weight", "norm_latent.weight", "norm_final.weight"} | {
        f"core_blocks.{i}.{name}.weight" for i in range(2) for name in ("norm_attn", "norm_mlp")
    }
    assert found - plain == (norms if changes.get("learned_norms") else set())
    assert plain - found == ({"unembedding.weight"} if changes.get("tie_embeddings") else set())


# Gradients.


def readout(model: LoopedModel) -> Tensor:
    """A smooth scalar of the logits after recurrences 2 and 3."""
    total = torch.zeros((), dtype=torch.float64)
    for r, latent, view in latents_of(model, A[:6]):
        if r > 1:
            logits = model.coda(latent, r, view)
            labels = torch.arange(6)
            total = total - logits.log_softmax(dim=-1)[0, labels, labels].sum()
        if r == 3:
            return total
    raise AssertionError("three recurrences")


@torch.no_grad()
def slope(model: LoopedModel, parameter: Tensor, direction: Tensor, step: float = 1e-5) -> float:
    """Central difference of the readout along ``direction``."""
    ends = []
    start = parameter.clone()
    for sign in (1, -1):
        parameter.copy_(start + sign * step * direction)
        ends.append(float(readout(model)))
    parameter.copy_(start)
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("inject", INJECTS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"learned_norms": True, "tie_embeddings": True, "mlp": "swiglu", "qk_norm": False}],
    ids=["paper", "all-unusual"],
)
def test_gradients_are_those_of_finite_differences(changes: dict[str, Any], inject: str) -> None:
    model = tiny(inject=inject, **changes)
    readout(model).backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        largest = float(gradient.abs().max())
        assert largest > 0, f"{name} gets no gradient"
        everywhere = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        everywhere /= everywhere.norm()
        wanted = float((gradient * everywhere).sum())
        assert abs(slope(model, parameter, everywhere) - wanted) < 1e-5 * largest, name
        for index in torch.randint(gradient.numel(), (3,), generator=generator).tolist():
            one = torch.zeros_like(gradient)
            one.view(-1)[index] = 1.0
            wanted = float(gradient.view(-1)[index])
            assert abs(slope(model, parameter, one) - wanted) < 1e-5 * largest, f"{name} {index}"


def test_the_slopes_of_these_tests_are_those_of_the_slow_loops() -> None:
    """Finite differences of the package could share a fault of its forward pass."""
    model = tiny()
    weight = model.core_blocks[0].query.weight
    readout(model).backward()
    direction = weight.grad / weight.grad.norm()
    ends = []
    for sign in (1, -1):
        moved = NaiveLooped(model)
        moved.weights["core_blocks.0.query.weight"] = (
            (weight + sign * 1e-5 * direction).detach().numpy()
        )
        logits = torch.as_tensor(moved.forward(A[:6], 3))[1:].log_softmax(dim=-1)
        labels = torch.arange(6)
        ends.append(-float(logits[:, labels, labels].sum()))
    assert abs((ends[0] - ends[1]) / 2e-5 / float(weight.grad.norm()) - 1) < 1e-5


# Rows of one call at recurrences of their own.


class Alone:
    """Each row weighs its own values by its own query: no row can matter to another.

    Keeps what it was handed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any, Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, r: int | Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append((layer, r, q, k, v))
        k, v = (t.repeat_interleave(q.shape[-2] // t.shape[-2], dim=-2) for t in (k, v))
        return v * (q * k).sum(dim=-1, keepdim=True).sigmoid()


class Grouped:
    """Rows attend among the rows of their own group, whatever their recurrence."""

    def __init__(self, groups: Tensor) -> None:
        self.apart = groups[:, None] != groups

    def attend(self, layer: int, r: int | Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        shares = scores.masked_fill(self.apart, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", shares, v)


MIXED_R = torch.tensor([1, 3, 1, 2, 7, 1, 64])
INJECTS_AND_NORMS = [(inject, learned) for inject in INJECTS for learned in (False, True)]


def mixed_rows(inject: str, learned: bool) -> tuple[LoopedModel, Tensor, Tensor]:
    """A model, latents of any kind and the injections of seven rows."""
    model = tiny(inject=inject, learned_norms=learned)
    generator = torch.Generator().manual_seed(2)
    injection = model.prelude(torch.tensor(A[:7]), Alone())
    latent = 3 * torch.randn(7, 16, generator=generator, dtype=torch.float64)
    fresh = model.initial_latent(injection)
    return model, torch.where((MIXED_R == 1)[:, None], fresh, latent), injection


@pytest.mark.parametrize(("inject", "learned"), INJECTS_AND_NORMS)
@torch.no_grad()
def test_a_row_does_not_care_at_which_recurrence_the_others_stand(
    inject: str, learned: bool
) -> None:
    model, latent, injection = mixed_rows(inject, learned)
    together = Alone()
    found = model.core_step(latent, injection, MIXED_R, together)
    assert [call[0] for call in together.calls] == [0, 1]
    assert all(torch.equal(torch.as_tensor(call[1]), MIXED_R) for call in together.calls)
    for row, r in enumerate(MIXED_R.tolist()):
        one = slice(row, row + 1)
        for own in (r, MIXED_R[one]):
            alone = Alone()
            wanted = model.core_step(latent[one], injection[one], own, alone)
            assert gap(found[one], wanted) < 1e-12
            for mixed, single in zip(together.calls, alone.calls, strict=True):
                for many, few in zip(mixed[2:], single[2:], strict=True):
                    assert gap(many[one], few) < 1e-12, f"row {row}, layer {mixed[0]}"
    first = model.core_step(latent, injection, 1, Alone())
    assert gap(found[1], first[1]) > 1e-3, "at r > 1 the latent must matter"
    assert gap(model.core_step(latent, injection, torch.ones(7).long(), Alone()), first) == 0


@pytest.mark.parametrize(("inject", "learned"), INJECTS_AND_NORMS)
@torch.no_grad()
def test_requests_at_recurrences_of_their_own_share_one_call(inject: str, learned: bool) -> None:
    model, latent, injection = mixed_rows(inject, learned)
    groups = torch.tensor([0, 1, 0, 1, 1, 0, 2])
    r = torch.tensor([1, 5, 1, 5, 5, 1, 2])
    latent = torch.where((r == 1)[:, None], model.initial_latent(injection), latent)
    found = model.core_step(latent, injection, r, Grouped(groups))
    for group in range(3):
        rows = (groups == group).nonzero().squeeze(1)
        own = int(r[rows[0]])
        view = Grouped(groups[rows])
        wanted = model.core_step(latent[rows], injection[rows], own, view)
        assert gap(found[rows], wanted) < 1e-12
        everyone = model.core_step(latent[rows], injection[rows], own, Alone())
        assert group == 2 or gap(wanted, everyone) > 1e-3, "neighbours must matter"


@pytest.mark.parametrize(("inject", "learned"), INJECTS_AND_NORMS)
@torch.no_grad()
def test_nothing_leaks_between_rows(inject: str, learned: bool) -> None:
    """Not even what is no number: a broken request must not take its neighbours with it."""
    model, latent, injection = mixed_rows(inject, learned)
    clean = model.core_step(latent, injection, MIXED_R, Alone())
    for row in range(7):
        others = torch.arange(7) != row
        broken_latent, broken_injection = latent.clone(), injection.clone()
        broken_latent[row], broken_injection[row] = math.nan, math.nan
        found = model.core_step(broken_latent, broken_injection, MIXED_R, Alone())
        assert torch.equal(found[others], clean[others])
        assert found[row].isnan().all()
        later = MIXED_R.clone()
        later[row] += 1
        found = model.core_step(latent, injection, later, Alone())
        assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("inject", INJECTS)
@torch.no_grad()
def test_recurrence_one_reads_no_earlier_state(inject: str) -> None:
    """A slot's last tenant showed through in the first recurrence of the next one."""
    model, latent, injection = mixed_rows(inject, False)
    clean = model.core_step(latent, injection, MIXED_R, Alone())
    fresh = MIXED_R == 1
    for stale in (math.nan, math.inf, 5.0):
        dirty = latent.masked_fill(fresh[:, None], stale)
        assert torch.equal(model.core_step(dirty, injection, MIXED_R, Alone()), clean)


@pytest.mark.parametrize("inject", INJECTS)
def test_gradients_do_not_leak_between_rows(inject: str) -> None:
    model, latent, injection = mixed_rows(inject, True)
    latent, injection = (t.detach().requires_grad_() for t in (latent, injection))
    for row, r in enumerate(MIXED_R.tolist()):
        out = model.core_step(latent, injection, MIXED_R, Alone())[row]
        pulled = torch.autograd.grad(
            out.square().sum(), (latent, injection), allow_unused=True, materialize_grads=True
        )
        others = torch.arange(7) != row
        assert all(not gradient[others].any() for gradient in pulled)
        assert all(gradient.isfinite().all() for gradient in pulled)
        assert bool(pulled[0][row].any()) == (r > 1)
        assert bool(pulled[1][row].any()) == (r == 1 or inject != "none")


# The rest of the package.


@pytest.mark.parametrize("inject", INJECTS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_truncated_training_reaches_every_parameter(inject: str, checkpointed: bool) -> None:
    model = tiny(inject=inject, learned_norms=True).float()
    batch = as_batch(A, B)
    log_p = forward(model, A, B, depth=3).log_softmax(dim=-1)
    wanted = -log_p.gather(-1, batch.targets.unsqueeze(-1)).sum()
    for backprop_depth in (2, 3):
        loss = LoopedLoss(model, backprop_depth=backprop_depth, checkpoint_recurrences=checkpointed)
        total = loss(batch, 3)
        assert gap(total, wanted.double()) < 1e-3
        total.backward()
        for name, parameter in model.named_parameters():
            if inject == "none" and backprop_depth == 2 and "embedding" in name:
                # Tokens enter at recurrence 1 alone, which truncation left out of the graph.
                assert parameter.grad is None or name == "unembedding.weight"
                continue
            assert parameter.grad is not None, f"{name} gets no gradient"
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any(), f"{name} gets no gradient"
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_any_depths_need_few_compilations_of_the_core() -> None:
    compiled: list[int] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    model = tiny(n_layers=1).float().train()
    loss = LoopedLoss(model, backprop_depth=4, compiled=True, backend=count)
    try:
        for depth in (3, 1, 9):
            loss(as_batch(A, B), depth)
    finally:
        torch.compiler.reset()
    # prelude, reading; core at recurrence 1 and after it, with a graph and without, and once more
    # for latents that are leaves
    assert len(compiled) <= 2 + 5


@pytest.mark.parametrize("inject", INJECTS)
@torch.no_grad()
def test_a_trace_holds_the_losses_of_the_forward_pass(inject: str) -> None:
    model = tiny(inject=inject)
    policies = [build_policy(parse_rule(rule)) for rule in ("kl:0.1", "latent-change:0.1")]
    batch = as_batch(A, B)
    found = trace_batch(model, batch, 6, policies)
    targets = batch.targets.flatten()
    for r in (1, 2, 6):
        log_p = forward(model, A, B, depth=r).flatten(0, 1).float().log_softmax(dim=-1)
        losses = -log_p.gather(1, targets[:, None]).squeeze(1)
        assert gap(found["loss"][:, r - 1], losses.double()) < 1e-5
    for name, column in found.items():
        assert column.shape == (20, 6), name
    assert found["loss"].isfinite().all()


# Shapes.


@pytest.mark.parametrize(
    "changes",
    [
        {"inject": "attn"},
        {"inject": ""},
        {"mlp": "relu"},
        {"d_model": 18},
        {"d_model": 12},  # head_dim 3: rotary phase turns pairs
        {"n_heads": 3},
        {"n_kv_heads": 3},
        {"logit_cap": 0.0},
        {"logit_cap": -1.0},
        {"logit_cap": math.inf},
        {"logit_cap": math.nan},
        {"norm_eps": -1.0},
        {"rope_base": 0.0},
        {"vocab_size": 0},
        {"d_model": 0},
        {"n_heads": 0},
        {"n_kv_heads": 0},
        {"n_kv_heads": -2},
        {"d_ff": 0},
        {"n_layers": 0},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TINY, **changes)
    name, value = next(iter(changes.items()))
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


def test_no_cap_is_a_choice() -> None:
    assert replace(TINY, logit_cap=None).logit_cap is None


def test_geometry_tells_a_cache_what_it_must_know() -> None:
    geometry = tiny(n_layers=3).geometry
    assert (geometry.n_layers, geometry.effective_layers(5)) == (3, 15)
    assert all(geometry.is_core(layer) for layer in range(3))
    assert (geometry.n_heads, geometry.n_kv_heads, geometry.head_dim) == (4, 2, 4)
    assert not geometry.rope.interleaved
    assert geometry.max_depth is None
