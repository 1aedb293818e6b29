"""What does tracing cost over the forward passes it needs, and does its memory stay flat?

Timed: ``trace_batch`` against the same passes with nothing recorded (prelude, every recurrence of
the core, and coda and head at every recurrence), interleaved. Not timed: writing shards.
Memory: growth of a fresh process while tracing a corpus, for a short and a four times longer one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import arguments, finish, interleaved, ratios, table
from loopwise.data import PackedBlocks, TokenBatch, generate, tokenize
from loopwise.measure.evaluate import trajectory
from loopwise.measure.trace import TraceInfo, trace_batch, write_trace
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import ByteTokenizer
from loopwise.train.machine import peak_memory_gib

HORIZON = 32


def make(d_model: int, vocab_size: int) -> RecurrentModel:
    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=vocab_size, d_model=d_model, d_ff=d_model * 11 // 4)
    return RecurrentModel(config).eval()


def make_blocks(documents: int) -> PackedBlocks:
    store = tokenize(generate("stories", 0, 0, documents), ByteTokenizer())
    return PackedBlocks(store, 256, seed=0, shuffle=False)


@torch.no_grad()
def plain_passes(model: RecurrentModel, batch: TokenBatch, horizon: int) -> None:
    for r, latent, view in trajectory(model, batch, horizon):
        model.coda(latent, r, view)


def traced_memory(documents: int) -> float:
    """GiB that tracing adds to a fresh process."""
    model, blocks = make(64, 512), make_blocks(documents)
    info = TraceInfo(
        checkpoint="",
        weights_hash="",
        corpus="stories",
        text_hash=blocks.store.text_hash,
        trained_mean_depth=None,
        trained_depths=None,
    )
    before = peak_memory_gib(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        write_trace(model, blocks, Path(folder) / "trace", info, horizon=8)
    return peak_memory_gib(torch.device("cpu")) - before


def fresh_memory(documents: int) -> float:
    code = f"from benchmarks.bench_measure import traced_memory; print(traced_memory({documents}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    options = arguments(__doc__ or "")
    whole = [(256, 1024, HORIZON), (256, 4096, HORIZON), (256, 16384, HORIZON // 2)]
    cases = [(64, 512, 4)] if options.smoke else whole
    rows = []
    for d_model, vocab, horizon in cases:
        model, batch = make(d_model, vocab), make_blocks(20).batch(0, 4)
        seconds = interleaved(
            {
                "traced": lambda m=model, b=batch, h=horizon: trace_batch(m, b, h),
                "plain": lambda m=model, b=batch, h=horizon: plain_passes(m, b, h),
            },
            1 if options.smoke else options.repeats,
        )
        cost = ratios(seconds["traced"], seconds["plain"])
        rows.append({"d_model": d_model, "vocab": vocab, "horizon": horizon, **cost})
    documents = (50, 200) if options.smoke else (200, 800)
    memory = {n: fresh_memory(n) for n in documents}
    table("Tracing over plain forward passes (ratio of seconds)", rows)
    table("GiB added while tracing", [{f"{n} documents": gib for n, gib in memory.items()}])
    growth = memory[documents[1]] / memory[documents[0]]
    finish(
        "measure",
        {"tracing_over_plain": rows, "memory_gib": memory, "memory_4x_corpus": growth},
        options.save,
    )


if __name__ == "__main__":
    main()
