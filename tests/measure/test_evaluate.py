"""Depth as a measured axis: sweeps, divergence, memory."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import DepthError, DivergenceError
from loopwise.measure.convergence import summarise
from loopwise.measure.evaluate import batches, latents_at, loss_by_depth
from loopwise.measure.trace import TraceInfo, trace_batch, write_trace
from loopwise.tokenizer import ByteTokenizer
from loopwise.train.loss import LoopedLoss
from loopwise.train.optim import OptimConfig, Optimizer
from loopwise.train.recurrence import DepthConfig, DepthSampler
from tests.conftest import make_blocks, make_model
from tests.memory import LiveBytes


def _train(depth: DepthConfig, steps: int) -> torch.nn.Module:
    model = make_model(d_ff=64).train()
    blocks, sampler = make_blocks(documents=60), DepthSampler(depth)
    loss = LoopedLoss(model, backprop_depth=depth.backprop_depth)
    optimizer = Optimizer(model, OptimConfig(lr=5e-3, embedding_lr=5e-3))
    for step in range(steps):
        batch = blocks.batch(step * 8, 8)
        (loss(batch, sampler.draw(0, step)) / batch.n_targets).backward()
        optimizer.step(optimizer.collect_gradients(), 1.0)
    return model.eval()


def _sweep(model, depth: DepthConfig, folder):
    described = DepthSampler(depth).describe()
    info = TraceInfo(
        checkpoint="",
        weights_hash="",
        corpus="stories",
        text_hash="",
        trained_mean_depth=described["true_mean"],
        trained_depths=(described["min"], described["max"]),
    )
    held_out = make_blocks(documents=6, first=500, shuffle=False)
    trace = write_trace(model, held_out, folder, info, horizon=16)
    return summarise(trace, ByteTokenizer(), epsilon=1e-3)


def test_u07_a_depth_sweep_tells_a_plateau_from_a_sharp_optimum(tmp_path):
    """Trained at one depth only, a model is worse at others; trained at random depths it is not."""
    fixed = DepthConfig(kind="fixed", mean=4.0, backprop_depth=4)
    random = DepthConfig(kind="uniform", mean=4.5, backprop_depth=4)
    sharp = _sweep(_train(fixed, 100), fixed, tmp_path / "fixed")
    elastic = _train(random, 100)
    flat = _sweep(elastic, random, tmp_path / "random")
    assert sharp["trained_depths"] == [4, 4]
    assert flat["trained_depths"] == [1, 8]
    assert not sharp["monotone_to_horizon"]
    assert sharp["rise_after_best_nats"] > flat["rise_after_best_nats"]
    assert sharp["loss_nats"]["mean"][0] > flat["loss_nats"]["mean"][0]
    again = _sweep(elastic, random, tmp_path / "again")
    assert again["loss_nats"] == flat["loss_nats"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_u08_deep_trajectories_stay_finite_and_report_their_size(batch, dtype):
    columns = trace_batch(make_model().to(dtype), batch, 64)
    assert columns["rms"].shape[1] == 64
    assert columns["rms"].isfinite().all()


def test_u08_divergence_is_an_error_that_names_the_recurrence(batch):
    model = make_model()
    step = model.core_step
    model.core_step = lambda latent, *rest: (step(latent, *rest) + 1e3 * latent) * 1e3
    with pytest.raises(DivergenceError, match=r"at recurrence \d+.*horizon of at most"):
        trace_batch(model, batch, 64)


def test_u10_only_the_asked_latents_are_kept(tiny_model, batch):
    found = latents_at(tiny_model, batch, [1, 8])
    assert sorted(found) == [1, 8]
    assert found[8].shape == (*batch.token_ids.shape, tiny_model.geometry.d_model)
    with pytest.raises(DepthError, match="depth 0"):
        latents_at(tiny_model, batch, [0])


def test_u10_scoring_at_a_depth_takes_no_more_memory_for_more_depth(tiny_model, batch):
    def peak(depth: int) -> int:
        with LiveBytes() as memory:
            loss_by_depth(tiny_model, [batch], [depth])
        return memory.peak

    assert peak(32) < 1.1 * peak(4)


def test_loss_at_a_depth_does_not_hang_on_the_others_asked_for(tiny_model):
    blocks = make_blocks(documents=3, shuffle=False)
    together = loss_by_depth(tiny_model, batches(blocks, 4), [1, 2, 4, 8])
    for depth, loss in together.items():
        alone = loss_by_depth(tiny_model, batches(blocks, 2), [depth])[depth]
        assert loss == pytest.approx(alone, abs=1e-5)
