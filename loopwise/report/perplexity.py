"""The result of ``loopwise eval perplexity`` as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_perplexity(name: str, result: dict[str, Any]) -> None:
    """Print one corpus's perplexity by depth to standard output."""
    protocol, block = result["protocol"], result["block"]
    stride = f", stride {result['stride']}" if protocol == "sliding" else ""
    table = Table(
        title=f"{name}: protocol {protocol}, block {block}{stride}, {result['tokens']:,} tokens"
    )
    columns = ["nll_nats", "perplexity"]
    if protocol == "document":
        columns += ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    table.add_column("depth", justify="right")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for depth, values in result["by_depth"].items():
        table.add_row(str(depth), *(f"{values[c]:,.4f}" for c in columns))
    Console().print(table)
