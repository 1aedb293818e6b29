"""What the scripts of this folder share: their arguments, and one JSON line last."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loopwise.bench.common import interleaved, keep, ratios, record, spread, table

__all__ = ["arguments", "finish", "interleaved", "ratios", "spread", "table"]
RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="seconds on a CPU: does it run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    return parser.parse_args()


def finish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the one JSON line; with ``--save`` keep it by date, name and hardware."""
    found = record(name, result)
    if save:
        keep(found, RESULTS)
    print(json.dumps(found))
