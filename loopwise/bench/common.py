"""What benchmarks share: interleaved repeats, ratios pair by pair, a table, the environment."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import loopwise
from loopwise.train.metrics import finite
from loopwise.writing import make_folder, write_whole


def interleaved(
    candidates: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each candidate, run in turn after one warm-up each: A B A B ..."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "low": float(np.min(values)),
        "high": float(np.max(values)),
    }


def ratios(above: list[float], below: list[float]) -> dict[str, float]:
    """Ratio pair by pair, so that a drifting machine cancels out."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def table(title: str, rows: list[dict[str, Any]], console: Console | None = None) -> None:
    out = Table(title=title)
    for name in rows[0]:
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    (console or Console()).print(out)


def record(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with what it was measured on."""
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "loopwise": loopwise.__version__,
        "torch": torch.__version__,
        "hardware": _hardware(),
        "threads": torch.get_num_threads(),
        **result,
    }


def keep(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a record by its date, name and hardware.

    Raises:
        WriteError: the disk refuses.
    """
    make_folder(folder)
    hardware = result["hardware"].lower().replace(" ", "-")
    path = folder / f"{result['date']}-{result['benchmark']}-{hardware}.json"
    write_whole(path, json.dumps(finite(dict(result)), indent=1, allow_nan=False) + "\n")
    return path


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.cpu.get_capabilities().get('cpu_name', platform.machine())} cpu"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
