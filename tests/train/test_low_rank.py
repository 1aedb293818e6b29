"""Matrices that learn through thin factors: right gradients, plain checkpoints, exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from loopwise.errors import CheckpointError, ConfigError
from loopwise.models import MODELS
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.views import PackedView
from loopwise.train.loss import LoopedLoss
from loopwise.train.low_rank import LowRank, factorise, matrices_to_adapt
from loopwise.train.metrics import read_metrics
from loopwise.train.optim import OptimConfig, Optimizer, learn_only
from tests.conftest import make_model
from tests.train.test_loop import make_trainer

CORE = ("adapter.weight", "core_blocks.0.attn.qkv.weight", "core_blocks.1.mlp.down.weight")


def adapted(model, rank: int = 3, patterns: tuple[str, ...] = ()) -> Optimizer:
    """Factors as after some training: neither is zero."""
    names = matrices_to_adapt(model, patterns, rank)
    factors = factorise(dict(model.named_parameters()), names, rank, seed=0)
    learn_only(model, names)
    optimizer = Optimizer(model, OptimConfig(), factors)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in factors.values():
            factor.up.copy_(0.1 * torch.randn(factor.up.shape, generator=generator))
    optimizer._refresh()
    return optimizer


def loss_of(model, batch, depth: int = 3) -> torch.Tensor:
    view = PackedView(model.geometry.rope, batch.positions, batch.document_ids, model.dtype)
    injection = model.prelude(batch.token_ids, view)
    latent = model.initial_latent(injection)
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    logits = model.coda(latent, depth, view)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


class Wrapped(nn.Module):
    """W0 + B A computed at every use, as adapters usually are."""

    def __init__(self, factor: LowRank) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(factor.up.detach()), nn.Parameter(factor.down.detach())

    def forward(self, base: torch.Tensor) -> torch.Tensor:
        return base + (self.up @ self.down).to(base)


def wrapped(model, factors: dict[str, LowRank]) -> None:
    """The other way to do it: into ``model``, which holds the bases."""
    for name, factor in factors.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        parametrize.register_parametrization(module, "weight", Wrapped(factor))


def test_gradients_of_the_factors_equal_finite_differences(batch):
    model = make_model().double()
    optimizer = adapted(model)
    loss_of(model, batch).backward()
    optimizer.collect_gradients()
    generator = torch.Generator().manual_seed(2)
    weights = dict(model.named_parameters())
    for name in CORE:
        factor = optimizer.factors[name]
        for side in ("up", "down"):
            learned = getattr(factor, side)
            way = torch.randn(learned.shape, generator=generator, dtype=torch.float64)
            around = []
            for sign in (1, -1):
                parts = {"up": factor.up.double(), "down": factor.down.double()}
                parts[side] = parts[side] + sign * 1e-5 * way
                with torch.no_grad():
                    weights[name].copy_(factor.base.double() + parts["up"] @ parts["down"])
                    around.append(loss_of(model, batch))
            weights[name].data.copy_(factor.merged())
            slope = float((around[0] - around[1]) / 2e-5)
            size = float(learned.grad.norm() * way.norm())  # the slope itself may be near zero
            assert abs(float((learned.grad.double() * way).sum()) - slope) < 1e-6 * size


def test_the_merged_model_equals_the_adapted_one_and_learns_alike(batch):
    """Against factors that are multiplied at every use: logits, gradients, a step."""
    model, other = make_model().double(), make_model().double()
    optimizer = adapted(model)
    wrapped(other, optimizer.factors)
    ours, theirs = loss_of(model, batch), loss_of(other, batch)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6 * batch.n_targets)
    ours.backward()
    theirs.backward()
    optimizer.collect_gradients()
    for name, factor in optimizer.factors.items():
        module = other.get_submodule(name.removesuffix(".weight"))
        inner = module.parametrizations["weight"][0]
        for side in ("up", "down"):
            mine, yours = getattr(factor, side).grad, getattr(inner, side).grad
            assert (mine - yours).abs().max() < 1e-5 * yours.abs().max(), (name, side)


def test_only_the_factors_learn_and_checkpoints_hold_plain_weights(tmp_path: Path):
    trainer = make_trainer(tmp_path, steps=4, low_rank=2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    saved = load_checkpoint(tmp_path)
    core = {n for n in before if n.startswith(("adapter", "core_blocks")) and before[n].ndim == 2}
    assert set(trainer.optimizer.factors) == core
    for name, weight in saved.model.state_dict().items():
        moved = weight - before[name]
        if name in core:
            sizes = torch.linalg.svdvals(moved)
            assert sizes[0] > 1e-3
            assert sizes[2] < 1e-5 * sizes[0] + 1e-6, f"{name}: of rank 2"
        else:
            assert not moved.any(), f"{name} is frozen"
    assert saved.training["low_rank"] == 2


def test_the_saved_model_is_the_one_that_was_trained(tmp_path: Path, batch):
    trainer = make_trainer(tmp_path, steps=3, low_rank=2)
    trainer.run()
    other = make_model()
    wrapped(other, trainer.optimizer.factors)
    saved = load_checkpoint(tmp_path).model
    with torch.no_grad():
        gap = loss_of(saved, batch) - loss_of(other, batch)
    assert abs(gap.item()) < 1e-6 * batch.n_targets


def test_before_the_first_step_nothing_has_changed(tmp_path: Path, batch):
    trainer = make_trainer(tmp_path, low_rank=4)
    assert torch.equal(loss_of(trainer.model, batch), loss_of(make_model(), batch))


def test_resume_is_bit_equal_to_an_unbroken_run(tmp_path: Path):
    changes = {"steps": 12, "save_every": 4, "low_rank": 2, "accumulation": 2}
    make_trainer(tmp_path / "straight", **changes).run()
    broken = make_trainer(tmp_path / "broken", **changes)
    one_step = broken._one_step

    def dies_at_6(micro_batches):
        if broken.step == 6:
            raise KeyboardInterrupt
        one_step(micro_batches)

    broken._one_step = dies_at_6
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    again = make_trainer(tmp_path / "broken", **changes)
    with torch.no_grad():  # what it was made with must not matter
        again.optimizer.factors["adapter.weight"].base.add_(1.0)
    assert again.run(resume=True)["step"] == 12
    one, other = (load_checkpoint(tmp_path / x).model.state_dict() for x in ("straight", "broken"))
    for name in one:
        assert torch.equal(one[name], other[name]), name
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "broken")]
    assert [[e["loss_nats"], e["grad_norm"]] for e in logs[0]] == [
        [e["loss_nats"], e["grad_norm"]] for e in logs[1]
    ]


@pytest.mark.parametrize("other", [{}, {"low_rank": 3}, {"low_rank": 2, "only": ("adapter*",)}])
def test_resuming_with_other_factors_is_refused(tmp_path: Path, other):
    make_trainer(tmp_path, steps=2, low_rank=2).run()
    with pytest.raises(CheckpointError, match="other low-rank factors"):
        make_trainer(tmp_path, steps=3, **other).run(resume=True)


def test_the_estimate_counts_what_learns(tmp_path: Path):
    plain, thin = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", low_rank=2)
    shapes = [p.shape for n, p in thin.model.named_parameters() if n in thin.optimizer.factors]
    estimate = thin.estimate()
    assert estimate["trained_parameters"] == sum(2 * (rows + columns) for rows, columns in shapes)
    assert estimate["parameters"] == plain.estimate()["trained_parameters"]
    assert estimate["memory_gib"] < plain.estimate()["memory_gib"]


def test_patterns_choose_the_matrices(tmp_path: Path):
    trainer = make_trainer(tmp_path, steps=2, low_rank=2, only=("*.qkv.weight", "coda_blocks.*"))
    chosen = set(trainer.optimizer.factors)
    assert "prelude_blocks.0.attn.qkv.weight" in chosen
    assert "coda_blocks.0.mlp.up.weight" in chosen
    assert not any("core_blocks.0.mlp" in n or "norm" in n for n in chosen)
    trainer.run()


def test_low_precision_weights_are_copies_of_merged_float32_masters(tmp_path: Path):
    trainer = make_trainer(tmp_path, dtype="bf16", steps=3, low_rank=2)
    trainer.run()
    saved = load_checkpoint(tmp_path).model.state_dict()
    for name, factor in trainer.optimizer.factors.items():
        assert (factor.up.dtype, factor.base.dtype) == (torch.float32, torch.float32)
        assert torch.equal(saved[name], factor.merged())
        assert torch.equal(trainer.optimizer.params[name], factor.merged().bfloat16())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_the_compiled_core_takes_no_more_compilations(batch):
    def compilations(low_rank: bool) -> int:
        compiled: list[int] = []

        def count(graph, example_inputs):
            compiled.append(len(graph.graph.nodes))
            return graph.forward

        torch.compiler.reset()
        model = make_model().train()
        optimizer = adapted(model) if low_rank else Optimizer(model, OptimConfig())
        loss = LoopedLoss(model, backprop_depth=4, compiled=True, backend=count)
        for depth in (3, 1, 9, 2, 5):
            loss(batch, depth).backward()
            optimizer.step(optimizer.collect_gradients(), 1.0)
        torch.compiler.reset()
        return len(compiled)

    assert compilations(low_rank=True) <= compilations(low_rank=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low_rank": 0}, "low_rank=0 must be at least 1"),
        ({"low_rank": 32}, "low_rank=32: no matrix of the core is wider"),
        ({"low_rank": 32, "only": ("adapter*",)}, "must be below 32, the smaller side of adapter"),
        ({"low_rank": 2, "only": ("*.norm_attn_in.*",)}, "no matrix fits '\\*.norm_attn_in"),
    ],
)
def test_what_cannot_be_adapted_is_refused(tmp_path: Path, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, **changes)


@pytest.mark.parametrize("architecture", MODELS)
def test_the_core_of_every_architecture_can_be_adapted(architecture: str):
    with torch.device("meta"):
        model = MODELS[architecture](MODELS[architecture].config_class())
    names = matrices_to_adapt(model, (), rank=8)
    weights = {name: model.get_parameter(name) for name in names}
    assert names and all(w.ndim == 2 and min(w.shape) > 8 for w in weights.values())
    assert set(
        factorise({n: torch.zeros(w.shape) for n, w in weights.items()}, names, 8, 0)
    ) == set(names)
