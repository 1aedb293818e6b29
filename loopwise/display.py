"""What the command line shows meanwhile: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Event = dict[str, Any]
_PLAIN_EVERY_S = 10.0


class Display:
    """Prints events of training and measurement; a context manager.

    Args:
        quiet: say nothing (results only).
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._steps = 0
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the live bar, so that results can be printed."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        if self.quiet:
            return
        kind = event["event"]
        if kind == "cell":
            self._say(_cell_line(event))
        elif "cell" in event and kind != "step":  # of a grid, only steps and outcomes
            self._steps = event.get("steps", self._steps)
        elif kind == "step":
            self._progress(
                event.get("cell", "training"), event["step"], self._steps, _step_note(event)
            )
        elif kind == "progress":
            self._progress(event["stage"], event["done"], event["total"], "")
        elif kind == "estimate":
            self._steps = event["steps"]
            self._say(_estimate_line(event))
        elif kind == "data":
            self._say(
                f"data: {event['read']}\n"
                f"tokens: {event['tokens']:,} to learn from, {event['held_out_tokens']:,} held out"
            )
        elif kind in ("eval", "done"):
            losses = ", ".join(f"{d}: {x:.3f}" for d, x in event["loss_nats_by_depth"].items())
            self._say(f"step {event['step']}: held-out loss (nats) at depth {losses}")
        elif kind == "warning":
            self._say(f"warning: {event['text']}")
        elif kind in ("skipped", "non_finite"):
            self._say(f"step {event['step']}: loss or gradient is not finite")

    def _progress(self, stage: str, done: float, total: float, note: str) -> None:
        if self._bar is not None:
            if stage != self._stage or self._task is None:
                self._task = self._bar.add_task(stage, total=total, note=note)
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif stage != self._stage or time.monotonic() - self._last_line > _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._say(f"{stage} {done}/{total} {note}".rstrip())
        self._stage = stage

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _step_note(event: Event) -> str:
    return (
        f"loss {event['loss_nats']:.3f} nats  depth {event['depth']}  "
        f"{event['tokens_per_s']:,.0f} tokens/s  {event['matmul_peak_share']:.0%} of matmul peak"
    )


def _cell_line(event: Event) -> str:
    end = (
        f"loss {event['final_loss_nats']:.3f} nats"
        if event["status"] == "survived"
        else event["reason"]
    )
    kept = " (kept)" if event["kept"] else ""
    return f"[{event['index']}/{event['cells']}] {event['cell']}: {event['status']}{kept}, {end}"


def _estimate_line(event: Event) -> str:
    depth = event["depth"]
    n, learn = event["parameters"], event["trained_parameters"]
    part = "" if learn == n else f", of which {learn / 1e6:.3g}M learn"
    if event["low_rank"] is not None:
        part = f"; {learn / 1e6:.3g}M learn in factors of rank {event['low_rank']}"
    return (
        f"model: {n / 1e6:.2f}M parameters{part}, {event['dtype_reason']}, "
        f"{'compiled' if event['compiled'] else 'not compiled'}\n"
        f"depth: {depth['kind']}, mean {depth['true_mean']:.2f}, median {depth['median']}, "
        f"p95 {depth['p95']}, gradients through the last {depth['backprop_depth']}\n"
        f"plan: {event['steps']} steps, {event['tokens']:,} tokens, about "
        f"{event['time_s'] / 60:.1f} min, {event['memory_gib']:.2f} GiB beside the program itself "
        f"(measured matmul peak {event['matmul_peak_flops'] / 1e9:.0f} GFLOP/s)"
    )
