"""How a command runs: its display, its answer, its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from loopwise.errors import LoopwiseError

if TYPE_CHECKING:
    from loopwise.display import Display


@contextmanager
def command(
    as_json: bool, debug: bool
) -> Iterator[tuple[Display, Callable[[dict[str, Any]], None]]]:
    """Run a command: display on stderr, the answer on stdout, one line and code 2 for bad input.

    Denormal numbers count as zero meanwhile. Gradients that shrink from loop to loop end there, and
    some processors take a hundred times as long over them. Threads inherit this when they start, so
    it comes before any work.
    """
    import torch

    from loopwise.display import Display
    from loopwise.train.loop import Interrupted
    from loopwise.train.metrics import finite

    console = Console(stderr=True)
    torch.set_flush_denormal(True)
    try:
        with Display(console) as display:

            def answer(value: dict[str, Any]) -> None:
                if as_json:
                    print(json.dumps(finite(value), allow_nan=False), flush=True)

            yield display, answer
    except LoopwiseError as err:
        if debug:
            raise
        console.print(f"error: {err}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except Interrupted as err:
        console.print(str(err), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        torch.set_flush_denormal(False)
