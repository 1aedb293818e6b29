"""What every command does around its work: its display, its answer, its errors and signals."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from loopwise.errors import LoopwiseError
from loopwise.train.stopping import Interrupted

if TYPE_CHECKING:
    from loopwise.display import Display

Kept = Callable[[], str]  # what a command that is stopped leaves, and how to go on


class Stopped(BaseException):
    """SIGTERM; as with Ctrl-C, nothing but the command itself may take it for an error."""


def nothing_kept() -> str:
    return "nothing was stored; run the command again"


def run_kept(folder: Path) -> Kept:
    """Of commands that go on with ``--resume``."""

    def kept() -> str:
        if not (folder / "config.json").is_file():
            return "nothing was written; run the command again"
        where = shlex.quote(str(folder))
        return f"what is finished in {where} is kept; go on with --resume --out {where}"

    return kept


@contextmanager
def command(
    as_json: bool, debug: bool, kept: Kept = nothing_kept
) -> Iterator[tuple[Display, Callable[[dict[str, Any]], None]]]:
    """Run a command: display on stderr, the answer on stdout, one line and code 2 for bad input.

    What the library warns of is a line on stderr, once. SIGINT and SIGTERM end it with one line and
    code 128 + their number. Denormal numbers count as zero meanwhile. Gradients that shrink from
    loop to loop end there, and some processors take a hundred times as long over them. Threads
    inherit this when they start, so it comes before any work.
    """
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        with _terminable(), _warnings(say), _started(console) as display:

            def answer(value: dict[str, Any]) -> None:
                from loopwise.train.metrics import finite

                if as_json:
                    print(json.dumps(finite(value), allow_nan=False), flush=True)

            yield display, answer
    except LoopwiseError as err:
        if debug:
            raise
        say(f"error: {err}")
        raise typer.Exit(2) from None
    except Interrupted as err:
        say(f"{err}; {kept()}")
        raise typer.Exit(128 + signal.Signals[err.signal_name]) from None
    except KeyboardInterrupt:
        say(f"stopped by SIGINT; {kept()}")
        raise typer.Exit(128 + signal.SIGINT) from None
    except Stopped:
        say(f"stopped by SIGTERM; {kept()}")
        raise typer.Exit(128 + signal.SIGTERM) from None


@contextmanager
def _started(console: Console) -> Iterator[Display]:
    """What takes seconds to load is loaded where a signal is already answered."""
    import torch

    from loopwise.display import Display

    torch.set_flush_denormal(True)
    try:
        with Display(console) as display:
            yield display
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _warnings(say: Callable[[str], None]) -> Iterator[None]:
    """Warnings of the package as lines, each once."""
    said = set()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = f"{record.levelname.lower()}: {record.getMessage()}"
            if line not in said:
                said.add(line)
                say(line)

    ours, lines = logging.getLogger("loopwise"), Lines(logging.WARNING)
    ours.addHandler(lines)
    try:
        yield
    finally:
        ours.removeHandler(lines)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises, as SIGINT does anyway; not in processes a library forks and terminates."""
    own = os.getpid()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != own:
            os._exit(128 + number)
        raise Stopped

    # Outside the main thread signals belong to somebody else.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)
