"""The training loop: one depth per optimiser step, exact resume, and no silent trouble."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from loopwise.config import check_choices
from loopwise.data import PackedBlocks, TokenBatch, micro_batch_loader
from loopwise.errors import ConfigError, NonFiniteError
from loopwise.measure.evaluate import batches, loss_by_depth
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import POINTER
from loopwise.models.costs import flops_per_token, parameters
from loopwise.tokenizer import Tokenizer
from loopwise.train.diagnostics import Diagnostics, gradients_of
from loopwise.train.estimate import planned_gib
from loopwise.train.lock import only_trainer
from loopwise.train.loss import LoopedLoss, LossOn, ObjectiveConfig, Teacher
from loopwise.train.machine import can_compile, matmul_peak, peak_memory_gib, pick_dtype
from loopwise.train.metrics import MetricLog
from loopwise.train.optim import OptimConfig, lr_factor, make_optimizer
from loopwise.train.recurrence import DepthConfig, DepthSchedule
from loopwise.train.resume import clean_leftovers, load_step, save_step
from loopwise.train.stopping import Interrupted, StopSignal
from loopwise.writing import make_folder

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, how big, how often."""

    steps: int = 1000
    seq: int = 256
    micro_batch: int = 16  # sequences
    accumulation: int = 1  # micro-batches per optimiser step
    workers: int = 0  # loader processes
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    loss_on: LossOn = "last"  # recurrences whose loss is learned from
    only: tuple[str, ...] = ()  # parameters that learn, by name, * and ? allowed; empty: all
    # Rank of two thin factors that learn in place of each matrix `only` names (empty: all of the
    # core), by AdamW at optim.lr; everything else is frozen. None: matrices learn as they are.
    low_rank: int | None = None
    diagnostics: bool = False  # gradient and latent norms of every step, in metrics.jsonl
    checkpoint_recurrences: bool = False  # recompute each recurrence backwards: less memory
    eval_every: int = 250  # steps
    eval_blocks: int = 32
    eval_depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    save_every: int = 250  # steps
    keep: int = 2  # checkpoints
    non_finite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (
            "steps",
            "micro_batch",
            "accumulation",
            "eval_every",
            "save_every",
            "keep",
            "eval_blocks",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}={getattr(self, name)} must be at least 1")
        if not self.eval_depths or min(self.eval_depths) < 1:
            raise ConfigError(
                f"train.eval_depths={list(self.eval_depths)} must name depths of at least 1"
            )
        if self.low_rank is not None and self.low_rank < 1:
            raise ConfigError(f"train.low_rank={self.low_rank} must be at least 1, or left out")
        if self.seq < 2:
            raise ConfigError(f"train.seq={self.seq} must be at least 2")
        if self.workers < 0:
            raise ConfigError(f"train.workers={self.workers} must not be negative")


class Trainer:
    """Trains one model into a folder.

    Args:
        model: float32, freshly made or loaded; it is moved to the compute dtype.
        tokenizer: saved with every checkpoint.
        train, held_out: packed blocks.
        config, optim, depth: the settings.
        seed: of data order (through ``train``), depth draws and noise.
        folder: of ``metrics.jsonl`` and ``checkpoints/``.
        data_info: hashes and counts of the data, kept in ``training.json``.
        carried: what else ``training.json`` is to say.
        files: texts to save beside the weights, by name.
        objective, teacher: what is learned beside the text's own tokens.
        on_event: called with every event that is logged, for displays.
    """

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: Tokenizer,
        train: PackedBlocks,
        held_out: PackedBlocks,
        *,
        config: TrainConfig,
        optim: OptimConfig,
        depth: DepthConfig,
        seed: int,
        folder: Path,
        data_info: dict[str, Any] | None = None,
        carried: dict[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        objective: ObjectiveConfig | None = None,
        teacher: Teacher | None = None,
        device: torch.device | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        dtype, self.dtype_reason = pick_dtype(config.dtype, self.device)
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(
            self.model, optim, dtype, only=config.only, low_rank=config.low_rank, seed=seed
        )
        self.tokenizer, self.train, self.held_out = tokenizer, train, held_out
        self.config, self.optim, self.depth = config, optim, depth
        self.schedule = DepthSchedule(depth, config.steps)
        self.seed, self.folder, self.data_info = seed, folder, data_info or {}
        self.carried, self.files = carried or {}, dict(files or {})
        compiled = config.compile == "on" or (config.compile == "auto" and can_compile(self.device))
        self.diagnostics = Diagnostics() if config.diagnostics else None
        self.loss = LoopedLoss(
            self.model,
            backprop_depth=depth.backprop_depth,
            loss_on=config.loss_on,
            objective=objective,
            teacher=teacher,
            diagnostics=self.diagnostics,
            checkpoint_recurrences=config.checkpoint_recurrences,
            compiled=compiled,
        )
        self.compiled = compiled
        self.costs = flops_per_token(self.model, context=config.seq // 2)
        self.step = 0
        self.skipped = 0
        self.last_loss = math.nan
        self._first_of_run = True
        self._on_event = on_event or (lambda event: None)
        self._stop = StopSignal()

    @property
    def tokens_per_step(self) -> int:
        """Positions per optimiser step; targets are slightly fewer."""
        return self.config.seq * self.config.micro_batch * self.config.accumulation

    @property
    def tokens(self) -> int:
        """Positions seen so far."""
        return self.step * self.tokens_per_step

    def estimate(self) -> Event:
        """Memory and time of the run, before its first step, from formulas and the matmul peak."""
        peak = matmul_peak(self.model.dtype, self.device)
        flops = self.schedule.average(self.costs.training)
        seconds = flops * self.tokens_per_step * self.config.steps / (0.45 * peak)
        return {
            "event": "estimate",
            "parameters": parameters(self.model),
            "trained_parameters": self.optimizer.n_learned,
            "low_rank": self.config.low_rank,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "dtype_reason": self.dtype_reason,
            "compiled": self.compiled,
            "matmul_peak_flops": peak,
            "training_flops_per_token": flops,
            "steps": self.config.steps,
            "tokens": self.tokens_per_step * self.config.steps,
            "time_s": seconds,
            "memory_gib": planned_gib(self.model, self.optimizer, self.config, self.schedule.final),
            "depth": self.schedule.final.describe(),
        }

    def run(self, resume: bool = False) -> Event:
        """Train to the last step, or from the newest checkpoint on.

        Returns:
            The final event: losses by depth and the checkpoint's path.
        Raises:
            Interrupted: SIGTERM or SIGINT; the state was saved first.
            NonFiniteError: a loss or gradient was not finite (``non_finite = stop``).
            RunFolderError: another trainer is at work in the folder.
            WriteError: the disk refused the log; earlier checkpoints are untouched.
        """
        make_folder(self.folder)
        with only_trainer(self.folder):
            return self._run(resume)

    def _run(self, resume: bool) -> Event:
        checkpoints = self.folder / "checkpoints"
        make_folder(checkpoints)
        clean_leftovers(checkpoints)
        if resume and (checkpoints / POINTER).is_file():  # else it was killed before its first save
            self.step = load_step(checkpoints, self.optimizer)
        self.log = MetricLog(self.folder / "metrics.jsonl")
        estimate = self.estimate()
        self.peak = estimate["matmul_peak_flops"]
        self._emit(estimate)
        with self._stop.watched():
            try:
                self._steps()
                losses = self._evaluate()
            except Interrupted:
                self._save()
                raise
            path = self._save()
            self._stop_if_asked()  # what comes after training must not begin
        final = {"event": "done", "step": self.step, "checkpoint": str(path), **losses}
        self._emit(final)
        return final

    def _steps(self) -> None:
        loader = micro_batch_loader(
            self.train,
            start_step=self.step,
            micro_batch=self.config.micro_batch,
            accumulation=self.config.accumulation,
            rank=0,
            world_size=1,
            workers=self.config.workers,
        )
        for micro_batches in loader:
            if self.step >= self.config.steps:
                break
            self._one_step([b.to(self.device) for b in micro_batches])
            if self.step % self.config.eval_every == 0 and self.step < self.config.steps:
                self._emit({"event": "eval", "step": self.step, **self._evaluate()})
            if self.step % self.config.save_every == 0 and self.step < self.config.steps:
                self._save()

    def _one_step(self, micro_batches: list[TokenBatch]) -> None:
        start = time.perf_counter()
        through = self.schedule.at(self.step).config.backprop_depth
        n = range(len(micro_batches))
        depths = [self.schedule.draw(self.seed, self.step, index) for index in n]
        n_targets = sum(b.n_targets for b in micro_batches)
        total = 0.0
        for index, batch in enumerate(micro_batches):
            self._stop_if_asked()
            loss = self.loss(batch, depths[index], self._seeds(batch, index), through)
            (loss / n_targets).backward()
            total += loss.item() / n_targets
        norm = self.optimizer.collect_gradients()
        factor = lr_factor(self.optim, self.step, self.config.steps)
        if self._first_of_run:
            self._warn_of_idle_parameters()
        seen = None
        if self.diagnostics is not None:
            seen = self.diagnostics.collect(gradients_of(self.optimizer.learned))
        finite = math.isfinite(total) and math.isfinite(norm.item())
        if finite:
            self.optimizer.step(norm, factor, self.step)
        else:
            self._refuse_update(total, norm.item(), max(depths))
        self.step += 1
        self.last_loss = total
        seconds = time.perf_counter() - start
        positions = self.tokens_per_step
        per_token = sum(self.costs.training(d, through) for d in depths) / len(depths)
        flops = positions * per_token / seconds
        self._emit(
            {
                "event": "step",
                "step": self.step,
                "loss_nats": total,
                "depth": depths[0] if self.depth.per == "step" else depths,
                "grad_norm": norm.item(),
                "lr": self.optim.lr * factor,
                "tokens": self.tokens,
                "step_s": seconds,
                "tokens_per_s": positions / seconds,
                "flops_per_s": flops,
                "matmul_peak_share": flops / self.peak,
                "peak_memory_gib": peak_memory_gib(self.device),
                "skipped_steps": self.skipped,
            }
        )

        if seen is not None:
            self._emit({"event": "diagnostics", "step": self.step, **seen})

    def _warn_of_idle_parameters(self) -> None:
        """Once: parameters no gradient reached, as when truncation cuts off all they feed."""
        self._first_of_run = False
        idle = [name for name, p in self.optimizer.learned.items() if p.grad is None]
        if idle:
            self._emit(
                {
                    "event": "warning",
                    "step": self.step + 1,
                    "text": f"no gradient reaches {', '.join(idle[:4])}; they stay as they are. "
                    "With inject=none set depth.backprop_depth to at least the depth",
                }
            )

    def _refuse_update(self, loss: float, norm: float, depth: int) -> None:
        """A non-finite step never reaches the weights."""
        self.optimizer.zero_grad()
        what = f"loss {loss}, gradient norm {norm} at step {self.step + 1} (depth {depth})"
        if self.config.non_finite == "stop":
            self._emit({"event": "non_finite", "step": self.step + 1, "loss": loss, "norm": norm})
            raise NonFiniteError(
                f"{what}; the update was not applied. Lower optim.lr, or set "
                "train.non_finite=skip to count and go on"
            )
        self.skipped += 1
        self._emit({"event": "skipped", "step": self.step + 1, "loss": loss, "norm": norm})

    def _seeds(self, batch: TokenBatch, index: int) -> torch.Tensor:
        """Noise seeds that never repeat over steps, a pure function of (seed, step, place)."""
        n = batch.token_ids.numel()
        base = ((self.seed * 1_000_003 + self.step) * 1_024 + index << 24) % (1 << 62)
        seeds = base + torch.arange(n, dtype=torch.int64, device=self.device)
        return seeds.view_as(batch.token_ids)

    def _evaluate(self) -> Event:
        self.model.eval()
        limit = self.model.geometry.max_depth or max(self.config.eval_depths)
        depths = sorted({min(d, limit) for d in self.config.eval_depths})

        def watched() -> Iterator[TokenBatch]:
            size = self.config.micro_batch
            for batch in batches(self.held_out, size, self.config.eval_blocks):
                self._stop_if_asked()
                yield batch.to(self.device)

        losses = loss_by_depth(self.model, watched(), depths, self.loss.core_step)
        self.model.train()
        return {"loss_nats_by_depth": {str(d): loss for d, loss in losses.items()}}

    def _save(self) -> Path:
        return save_step(
            self.folder / "checkpoints",
            self.step,
            self.model,
            self.tokenizer,
            self.optimizer,
            self._training_info(),
            self.config.keep,
            self.files,
        )

    def _training_info(self) -> Event:
        rank = self.config.low_rank
        return {
            **self.carried,
            **({} if rank is None else {"low_rank": rank}),
            "step": self.step,
            "steps": self.config.steps,
            "tokens_seen": self.tokens,
            "seq": self.config.seq,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "seed": self.seed,
            "depth": self.schedule.final.describe(),
            "data": self.data_info,
            "last_train_loss_nats": self.last_loss if math.isfinite(self.last_loss) else None,
            "skipped_steps": self.skipped,
        }

    def _emit(self, event: Event) -> None:
        self.log.write(event)
        self._on_event(event)

    def _stop_if_asked(self) -> None:
        if self._stop.name:
            self.optimizer.zero_grad()
            self._stop.stop_if_asked(self.step)
