"""What a benchmark is asked for, and the engines it compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from loopwise.bench.drive import Pass
from loopwise.bench.quality import Quality, judge
from loopwise.bench.workload import Lengths, make_jobs
from loopwise.data import ReadOptions, ReadReport, read_documents
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.runner import Calls
from loopwise.errors import ConfigError
from loopwise.measure.tiers import named_rule, why_not_promised
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, why_extrapolated
from loopwise.train.machine import DtypeName, pick_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What is measured, on how much.

    Attributes:
        data: text the prompts are cut from.
        exit: rule or calibrated tier under test; None: what the benchmark usually takes.
        depth: full depth, the most any token may run; None: the training mean.
        batch: requests in flight.
        requests: of one pass.
        judged: requests whose continuations are scored.
        rate: of full-depth capacity at which requests arrive (`serve`).
        seeds: draws of different documents (`exits`).
        tokens: of each (`exits`).
        budget: nats above full depth that rules are compared at (`exits`).
        wall: time the engine as well (`exits`).
        dtype: of the weights; auto: see `train.machine.pick_dtype`.
        smoke: seconds, to see that it runs.
    """

    data: tuple[str, ...] = ("builtin:stories:1000",)
    exit: str | None = None
    depth: int | None = None
    kv_policy: str = "per-loop"
    batch: int = 32
    requests: int = 64
    judged: int = 64
    repeats: int = 5
    rate: float = 0.7
    seeds: int = 3
    tokens: int = 8000
    budget: float = 0.01
    wall: bool = True
    dtype: DtypeName = "fp32"
    compile: bool = False
    seed: int = 0
    smoke: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "requests", "judged", "repeats", "seeds", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1")
        if not self.rate > 0:
            raise ConfigError(f"--rate {self.rate} must be above 0")
        if not 0 < self.budget < math.inf:
            raise ConfigError(f"--budget {self.budget:g} must be a number of nats above 0")
        if self.dtype not in get_args(DtypeName):
            raise ConfigError(f"--dtype {self.dtype!r} must be fp32, bf16 or auto")


class Bench:
    """Engines of one checkpoint under different settings, on one workload.

    Args:
        usual: exit rule where the options name none; None is uniform full depth.
    """

    def __init__(
        self,
        path: Path,
        options: BenchOptions,
        lengths: Lengths,
        console: Console,
        usual: str | None = "latent-change:0.1",
    ) -> None:
        if options.smoke:
            lengths = Lengths((8, 16), (4, 8))
            batch, tokens = min(options.batch, 4), min(options.tokens, 256)
            options = replace(options, batch=batch, requests=4, judged=4, repeats=2, tokens=tokens)
        self.options, self.lengths, self.console = options, lengths, console
        dtype, why = pick_dtype(options.dtype, torch.get_default_device())
        if options.dtype == "auto":
            self.say(f"dtype: {why}")
        self.checkpoint: Checkpoint = load_checkpoint(path, dtype)
        mean = self.checkpoint.trained_mean_depth
        self.depth = options.depth or round(mean or 1)
        rule = named_rule(
            self.checkpoint, options.exit or usual or f"fixed:{self.depth}", self.depth
        )
        self.rule = replace(rule, max_depth=min(rule.max_depth, self.depth))
        documents = read_documents(options.data, ReadOptions(), ReadReport())
        tokenizer = self.checkpoint.tokenizer
        n = max(options.requests, options.judged)
        jobs = make_jobs(documents, tokenizer, lengths, n, options.seed)
        self.jobs, self.judged = jobs[: options.requests], jobs[: options.judged]
        longest = lengths.prompt[1] + lengths.output[1]
        self.config = EngineConfig(
            exit=str(self.rule),
            max_depth=self.depth,
            kv_policy=options.kv_policy,
            slots=options.batch,
            max_seq=longest,
            prefix_cache=False,
            compile="on" if options.compile else "off",
        )
        self.first = self._engine(self.config)
        self.warnings: list[str] = []
        self.warn(why_extrapolated(self.checkpoint.training, self.depth))
        self.warn(why_not_promised(self.checkpoint, options.exit, options.kv_policy))

    def engine(self, **changes: Any) -> Engine:
        """Another engine of the same weights; compiled functions are shared."""
        return self._engine(replace(self.config, **changes), self.first.runner.calls)

    def _engine(self, config: EngineConfig, calls: Calls | None = None) -> Engine:
        """Not told of tiers and training: what it would warn of is said once, for all engines."""
        fitted, model = self.checkpoint.fitted_policies(), self.checkpoint.model
        return Engine(model, self.checkpoint.tokenizer, config, fitted, calls)

    def warn(self, text: str | None) -> None:
        """Say what makes the results doubtful, and keep it with them."""
        if text is not None:
            self.warnings.append(text)
            self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def quality(self) -> Quality:
        return judge(self.first, self.judged, str(self.rule), self.say)

    def timed(self, passes: dict[str, Callable[[], Pass]]) -> dict[str, list[Pass]]:
        """Each in turn, after one warm-up each: A B A B ..."""
        out: dict[str, list[Pass]] = {name: [] for name in passes}
        for repeat in range(self.options.repeats + 1):
            for name, run in passes.items():
                found = run()
                if repeat:  # the first warms up
                    out[name].append(found)
                    self.say(f"{repeat}/{self.options.repeats} {name}: {found.seconds:.2f} s")
        return out

    def settings(self) -> dict[str, Any]:
        """What a figure depends on."""
        g = self.checkpoint.model.geometry
        return {
            "checkpoint": self.checkpoint.weights_hash[:12],
            "geometry": f"{g.n_prelude_layers}/{g.n_core_layers}/{g.n_coda_layers} layers, "
            f"d_model {g.d_model}, vocabulary {g.vocab_size}",
            "rule": str(self.rule),
            "full_depth": self.depth,
            "kv_policy": self.config.kv_policy,
            "chunk": self.config.chunk,
            "attention": self.first.attention,
            "kv_bytes_per_token": self.first.cache.bytes_per_token,
            "batch": self.options.batch,
            "requests": len(self.jobs),
            "workload": str(self.lengths),
            "repeats": self.options.repeats,
            "dtype": "bf16" if self.checkpoint.model.dtype == torch.bfloat16 else "fp32",
            "compiled": self.options.compile,
            "data": list(self.options.data),
            "warnings": self.warnings,
        }
