"""What the scripts of this folder share: their arguments, and one JSON line last."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from loopwise.bench.common import interleaved, keep, ratios, record, spread, table

__all__ = ["arguments", "finish", "interleaved", "parser", "ratios", "short", "spread", "table"]
RESULTS = Path(__file__).parent / "results"
torch.set_flush_denormal(True)  # as commands run


def parser(
    description: str, *, smoke: bool = False, repeats: bool = False
) -> argparse.ArgumentParser:
    """What every script takes, and what those that can take besides."""
    made = argparse.ArgumentParser(description=description)
    if smoke:
        made.add_argument("--smoke", action="store_true", help="seconds on a CPU: does it run")
    if repeats:
        made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    return made


def arguments(description: str) -> argparse.Namespace:
    return parser(description, smoke=True, repeats=True).parse_args()


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A row with each spread as one word: median [low, high]."""
    return {k: _word(v) for k, v in row.items()}


def _word(value: Any) -> Any:
    if isinstance(value, dict):
        return f"{value['median']:.3g} [{value['low']:.3g}, {value['high']:.3g}]"
    return value


def finish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the one JSON line; with ``--save`` keep it by date, name and hardware."""
    found = record(name, result)
    if save:
        keep(found, RESULTS)
    print(json.dumps(found))
