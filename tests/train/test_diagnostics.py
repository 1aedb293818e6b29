"""Diagnostics see what they say they see, and change nothing."""

from __future__ import annotations

import pytest
import torch

from loopwise.models.checkpoint import load_checkpoint
from loopwise.train.diagnostics import Diagnostics, gradients_of
from loopwise.train.loss import LoopedLoss
from loopwise.train.metrics import read_metrics
from tests.conftest import make_model
from tests.train.test_loop import make_trainer


def test_training_is_bit_equal_with_and_without(tmp_path):
    for name, on in (("off", False), ("on", True)):
        make_trainer(tmp_path / name, steps=6, accumulation=2, diagnostics=on).run()
    weights = [load_checkpoint(tmp_path / n).model.state_dict() for n in ("off", "on")]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    assert not read_metrics(tmp_path / "off" / "metrics.jsonl", "diagnostics")
    events = read_metrics(tmp_path / "on" / "metrics.jsonl", "diagnostics")
    assert [e["step"] for e in events] == list(range(1, 7))


def test_norms_equal_those_of_a_hand_written_pass(batch):
    model = make_model().train()
    seen = Diagnostics()
    LoopedLoss(model, backprop_depth=4, diagnostics=seen)(batch, 3).backward()
    found = seen.collect(gradients_of(dict(model.named_parameters())))
    latents = []
    step = model.core_step

    def keeping(*args):
        out = step(*args)
        out.retain_grad()
        latents.append(out)
        return out

    model.zero_grad()
    model.core_step = keeping
    LoopedLoss(model, backprop_depth=4)(batch, 3).backward()
    for r, latent in enumerate(latents, start=1):
        assert found["latent_norm"][str(r)] == pytest.approx(
            latent.norm(dim=-1).mean().item(), rel=1e-5
        )
        assert found["latent_grad_norm"][str(r)] == pytest.approx(
            latent.grad.norm().item(), rel=1e-4
        )
    block = model.core_blocks[1]
    grads = [block.mlp.up.weight.grad, block.mlp.down.weight.grad]
    wanted = torch.stack([g.norm() for g in grads]).norm().item()
    assert found["grad_norm_mlp"]["core_blocks.1"] == pytest.approx(wanted, rel=1e-5)
    assert set(found["grad_norm_attn"]) == {
        "prelude_blocks.0",
        "core_blocks.0",
        "core_blocks.1",
        "coda_blocks.0",
    }
    assert "latent_norm" not in seen.collect({}), "the next step starts clean"


def test_recurrences_before_the_window_are_seen_under_their_numbers(batch):
    """Depth 3 and a window of 2: recurrence 1 has a norm too, and no gradient."""
    model = make_model().train()
    found = []
    for through in (2, 3):
        seen = Diagnostics()
        LoopedLoss(model, backprop_depth=through, diagnostics=seen)(batch, 3).backward()
        found.append(seen.collect({}))
    short, whole = found
    assert list(short["latent_norm"]) == ["1", "2", "3"]
    assert short["latent_norm"] == pytest.approx(whole["latent_norm"])
    assert list(short["latent_grad_norm"]) == ["2", "3"]


def test_gradient_norms_of_accumulated_batches_add_in_squares(batch):
    model = make_model().train()
    seen = Diagnostics()
    loss = LoopedLoss(model, backprop_depth=2, diagnostics=seen)
    loss(batch, 2).backward()
    once = seen.collect({})["latent_grad_norm"]["2"]
    for _ in range(2):
        loss(batch, 2).backward()
    assert seen.collect({})["latent_grad_norm"]["2"] == pytest.approx(once * 2**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("loss_on", "depth", "read"),
    [
        ("last", 6, [6]),
        ("every", 4, [1, 2, 3, 4]),
        ("last-third", 6, [5, 6]),
        ("last-third", 7, [5, 6, 7]),
    ],
)
def test_the_loss_is_taken_where_it_is_asked_for(batch, loss_on, depth, read):
    model = make_model()
    alone = [LoopedLoss(model, backprop_depth=8)(batch, r).item() for r in read]
    together = LoopedLoss(model, backprop_depth=8, loss_on=loss_on)(batch, depth).item()
    assert together == pytest.approx(sum(alone) / len(alone), rel=1e-5)


def test_parameters_that_no_gradient_reaches_are_named(tmp_path):
    trainer = make_trainer(tmp_path, steps=1)
    trainer.loss.prelude = torch.no_grad()(trainer.loss.prelude)
    events = []
    trainer._on_event = events.append
    trainer.run()
    (warning,) = [e for e in events if e["event"] == "warning"]
    assert "prelude_blocks.0" in warning["text"]
