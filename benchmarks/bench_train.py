"""How much of the machine does training use, and what does random depth cost?

Timed: whole training steps (forward, backward, optimiser) of the compiled recurrent model, after
compilation. Not timed: reading text, compilation, evaluation, saving.
Peak: the best of repeated 4096 x 1024 x 2048 matrix products in the same dtype.
Random against fixed depth: the same number of steps, the same mean depth, gradients through all
recurrences in both, interleaved. Memory: growth of the process over one step, in fresh processes.
Diagnostics: the same steps of a looped model (FLT, three layers, nine loops) with and without them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import arguments, finish, interleaved, ratios, short, spread, table
from loopwise.data import TokenBatch
from loopwise.models.costs import flops_per_token
from loopwise.models.looped import LoopedConfig, LoopedModel
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.models.views import PackedView
from loopwise.train.diagnostics import Diagnostics, gradients_of
from loopwise.train.loss import LoopedLoss
from loopwise.train.machine import matmul_peak, peak_memory_gib, pick_dtype
from loopwise.train.optim import OptimConfig, Optimizer
from loopwise.train.recurrence import DepthConfig, DepthSampler

MEAN = 8
CPU = torch.device("cpu")


def make(d_model: int, n_core_layers: int) -> RecurrentModel:
    torch.manual_seed(0)
    config = RecurrentConfig(
        vocab_size=4096,
        d_model=d_model,
        n_heads=d_model // 64,
        n_kv_heads=max(1, d_model // 128),
        d_ff=d_model * 11 // 4,
        n_core_layers=n_core_layers,
    )
    return RecurrentModel(config).to(pick_dtype("auto", CPU)[0])


def random_batch(rows: int, seq: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4096, (rows, seq + 1), generator=generator)
    positions = torch.arange(seq, dtype=torch.int32).expand(rows, seq).contiguous()
    return TokenBatch(
        token_ids=ids[:, :-1].contiguous(),
        targets=ids[:, 1:].contiguous(),
        document_ids=torch.zeros(rows, seq, dtype=torch.int32),
        positions=positions,
        hops=torch.zeros(rows, seq, dtype=torch.uint8),
    )


def even_depths(count: int) -> list[int]:
    """Depths at even quantiles of the log-normal, adjusted to the exact mean."""
    sampler = DepthSampler(DepthConfig(mean=MEAN))
    depths = [sampler.quantile((i + 0.5) / count) for i in range(count)]
    depths[-1] += MEAN * count - sum(depths)
    assert min(depths) >= 1, "the adjustment must stay small"
    return depths


def measure_speed(d_model: int, n_core: int, rows: int, steps: int, repeats: int) -> dict[str, Any]:
    model, batch = make(d_model, n_core).train(), random_batch(rows, 256)
    loss = LoopedLoss(model, backprop_depth=64, compiled=True)
    optimizer = Optimizer(model, OptimConfig())
    order = np.random.default_rng(0).permutation(even_depths(steps))

    def run(depths: list[int]) -> None:
        for depth in depths:
            (loss(batch, depth) / batch.n_targets).backward()
            optimizer.step(optimizer.collect_gradients(), 1e-3)

    peaks = [matmul_peak(model.dtype, CPU)]
    seconds = interleaved(
        {"fixed": lambda: run([MEAN] * steps), "random": lambda: run([int(d) for d in order])},
        repeats,
    )
    peaks.append(matmul_peak(model.dtype, CPU))
    flops = flops_per_token(model, context=128).training(MEAN, 64) * rows * 256 * steps
    tokens = rows * 256 * steps
    return {
        "d_model": d_model,
        "core layers": n_core,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens_per_s": spread([tokens / s for s in seconds["random"]]),
        "matmul_peak_gflops": max(peaks) / 1e9,
        "share_of_peak": spread([flops / s / max(peaks) for s in seconds["random"]]),
        "random_over_fixed": ratios(seconds["random"], seconds["fixed"]),
    }


def diagnostics_cost(steps: int, repeats: int) -> dict[str, float]:
    """Time of a step with diagnostics over one without, interleaved on equal models."""
    batch, loops, width = random_batch(4, 256), 9, 128
    shape = {"d_model": width, "n_heads": 2, "n_kv_heads": 2, "d_ff": 4 * width, "n_layers": 3}
    config = LoopedConfig(vocab_size=4096, inject="attn-all", **shape)

    def runner(diagnostics: Diagnostics | None) -> Callable[[], None]:
        torch.manual_seed(0)
        model = LoopedModel(config).to(pick_dtype("auto", CPU)[0]).train()
        loss = LoopedLoss(model, backprop_depth=loops, compiled=True, diagnostics=diagnostics)
        optimizer = Optimizer(model, OptimConfig())

        def run() -> None:
            for _ in range(steps):
                (loss(batch, loops) / batch.n_targets).backward()
                norm = optimizer.collect_gradients()
                if diagnostics is not None:
                    diagnostics.collect(gradients_of(optimizer.learned))
                optimizer.step(norm, 1e-3)

        return run

    seconds = interleaved({"off": runner(None), "on": runner(Diagnostics())}, repeats)
    return ratios(seconds["on"], seconds["off"])


def step_memory(kind: str, depth: int) -> float:
    """GiB one step adds to a fresh process; ``kind`` is ``train-K`` (truncation) or ``infer``."""
    model, batch = make(256, 2), random_batch(32, 256)
    before = peak_memory_gib(CPU)
    if kind == "infer":
        view = PackedView(model.geometry.rope, batch.positions, batch.document_ids, model.dtype)
        with torch.no_grad():
            injection = model.prelude(batch.token_ids, view)
            latent = model.initial_latent(injection)
            for r in range(1, depth + 1):
                latent = model.core_step(latent, injection, r, view)
            model.coda(latent, depth, view)
    else:
        loss = LoopedLoss(model.train(), backprop_depth=int(kind.removeprefix("train-")))
        loss(batch, depth).backward()
    return peak_memory_gib(CPU) - before


def fresh_memory(kind: str, depth: int) -> float:
    code = f"from benchmarks.bench_train import step_memory; print(step_memory({kind!r}, {depth}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    options = arguments(__doc__ or "")
    if options.smoke:
        speeds = [measure_speed(64, 1, 4, 2, 1)]
    else:
        cases = [(256, 2, 16), (256, 4, 16), (512, 2, 16)]
        speeds = [measure_speed(d, n, rows, 4, options.repeats) for d, n, rows in cases]
    diagnostics = diagnostics_cost(1 if options.smoke else 10, options.repeats)
    depths = (4, 32)
    memory = {k: {d: fresh_memory(k, d) for d in depths} for k in ("train-2", "infer")}
    growth = {f"memory_{k}_32_over_4": m[32] / m[4] for k, m in memory.items()}
    table("Training", [short(row) for row in speeds])
    table("Step with diagnostics over one without", [short({"ratio": diagnostics})])
    table("Memory of one step at depth 32 over depth 4", [growth])
    finish(
        "train",
        {
            "mean_depth": MEAN,
            "speeds": speeds,
            "diagnostics_over_none": diagnostics,
            "memory_gib": memory,
            **growth,
        },
        options.save,
    )


if __name__ == "__main__":
    main()
