"""Truncated back-propagation, recomputation and compilation change cost, not meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from loopwise.errors import ConfigError
from loopwise.models.views import PackedView
from loopwise.train.loss import LoopedLoss, ObjectiveConfig, Teacher
from tests.conftest import make_model
from tests.memory import LiveBytes


def _gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def _assert_close(a, b, tolerance):
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize(("depth", "through"), [(1, 4), (4, 4), (6, 2), (5, 1)])
def test_u69_gradients_equal_a_hand_written_truncation(batch, depth, through):
    model = make_model().double().train()
    ours = _gradients(model, LoopedLoss(model, backprop_depth=through)(batch, depth))
    view = PackedView(model.geometry.rope, batch.positions, batch.document_ids, torch.float64)
    injection = model.prelude(batch.token_ids, view)
    latent = model.initial_latent(injection)
    for r in range(1, depth + 1):
        if r == depth - through + 1:
            latent = latent.detach()
        # The early recurrences see the injection's value but send nothing back to it.
        seen = injection if r > depth - through else injection.detach()
        latent = model.core_step(latent, seen, r, view)
    logits = model.coda(latent, depth, view)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    _assert_close(ours, _gradients(model, loss), 1e-5)  # the loss itself is float32


def test_u69_recomputing_each_recurrence_leaves_gradients_unchanged(batch):
    model = make_model().train()
    plain = _gradients(model, LoopedLoss(model, backprop_depth=16)(batch, 16))
    again = LoopedLoss(model, backprop_depth=16, checkpoint_recurrences=True)
    _assert_close(plain, _gradients(model, again(batch, 16)), 1e-4)


def _peak_bytes(batch, depth, through, **changes) -> int:
    model = make_model().train()
    loss = LoopedLoss(model, backprop_depth=through, **changes)
    with LiveBytes() as memory:
        loss(batch, depth).backward()
    return memory.peak


def test_u69_memory_follows_the_truncation_and_not_the_depth(batch):
    assert _peak_bytes(batch, 32, 2) < 1.2 * _peak_bytes(batch, 4, 2)
    assert _peak_bytes(batch, 32, 32) > 4 * _peak_bytes(batch, 4, 4), "else nothing was measured"


def test_u69_recomputing_each_recurrence_takes_less_than_half_the_memory(batch):
    again = _peak_bytes(batch, 16, 16, checkpoint_recurrences=True)
    assert again < 0.5 * _peak_bytes(batch, 16, 16)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_any_depths_need_at_most_three_compilations_of_the_core(batch):
    compiled: list[int] = []

    def count(graph, example_inputs):
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    model = make_model().train()
    loss = LoopedLoss(model, backprop_depth=4, compiled=True, backend=count)
    eager = LoopedLoss(model, backprop_depth=4)
    core_before = None
    for depth in (3, 1, 9, 2, 16, 5, 7, 12, 4):
        assert loss(batch, depth).item() == pytest.approx(eager(batch, depth).item(), rel=1e-5)
        core_before = core_before or len(compiled)
    # prelude, core learning, core without a graph, reading
    assert len(compiled) <= 2 + 3
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in tracing
def test_every_model_of_a_grid_is_compiled(batch):
    """Dynamo keeps eight versions of a function, and one function served all models of a class."""
    compiled: list[int] = []

    def count(graph, example_inputs):
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    each = []
    for cell in range(12):
        before = len(compiled)
        model = make_model(d_ff=8 * (cell + 1)).train()
        LoopedLoss(model, backprop_depth=4, compiled=True, backend=count)(batch, 3)
        each.append(len(compiled) - before)
    assert len(set(each)) == 1 and each[0] >= 3, each
    torch.compiler.reset()


def test_noise_start_depends_on_the_seed_alone(batch):
    model = make_model(latent_init="noise")
    loss = LoopedLoss(model, backprop_depth=4)
    seeds = torch.arange(batch.token_ids.numel()).view_as(batch.token_ids)
    assert loss(batch, 2, seeds).item() == loss(batch, 2, seeds).item()
    assert loss(batch, 2, seeds).item() != loss(batch, 2, seeds + 1).item()


def _latents(model, batch, depth) -> list[torch.Tensor]:
    view = PackedView(model.geometry.rope, batch.positions, batch.document_ids, model.dtype)
    injection = model.prelude(batch.token_ids, view)
    latents = [model.initial_latent(injection)]
    for r in range(1, depth + 1):
        latents.append(model.core_step(latents[-1], injection, r, view))
    return [*latents, model.coda(latents[-1], depth, view)]


def test_distillation_is_the_weighted_kl_to_the_teacher(batch):
    model, teacher = make_model(0), make_model(1)
    objective = ObjectiveConfig(distil_weight=0.3, distil_from="teacher")
    loss = LoopedLoss(model, backprop_depth=3, objective=objective, teacher=Teacher(teacher, 2))
    batch = replace(batch, targets=batch.targets.masked_fill(batch.positions % 3 == 0, -100))
    logits = _latents(model, batch, 3)[-1]
    taught = _latents(teacher, batch, 2)[-1].softmax(-1)
    kl = (taught * (taught.log() - logits.log_softmax(-1))).sum(-1)
    has_target = batch.targets != -100
    own = LoopedLoss(model, backprop_depth=3)(batch, 3).item()
    wanted = 0.7 * own + 0.3 * kl[has_target].sum().item()
    assert loss(batch, 3).item() == pytest.approx(wanted, rel=1e-4)


def test_a_model_has_nothing_to_learn_from_itself(batch):
    objective = ObjectiveConfig(distil_weight=1.0, distil_from="teacher")
    teacher = Teacher(make_model(0), 2)
    loss = LoopedLoss(make_model(0), backprop_depth=2, objective=objective, teacher=teacher)
    assert loss(batch, 2).item() == pytest.approx(0.0, abs=1e-3)
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())


@pytest.mark.parametrize("depth", [1, 5])
def test_the_pull_to_a_fixed_point_is_the_last_steps_squared_relative_change(batch, depth):
    model = make_model()
    objective = ObjectiveConfig(fixed_point_weight=0.05)
    with_pull = LoopedLoss(model, backprop_depth=2, objective=objective)(batch, depth)
    *_, before, last, _ = _latents(model, batch, depth)
    moved = (last - before).norm(dim=-1) ** 2 / last.norm(dim=-1) ** 2
    wanted = 0.05 * moved[batch.targets != -100].sum().item()
    plain = LoopedLoss(model, backprop_depth=2)(batch, depth)
    assert with_pull.item() - plain.item() == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distil_weight": 1.5, "distil_from": "x"}, "distil_weight=1.5"),
        ({"distil_weight": 0.5}, "go together"),
        ({"distil_from": "x"}, "go together"),
        ({"fixed_point_weight": float("nan")}, "fixed_point_weight=nan"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ObjectiveConfig(**changes)
