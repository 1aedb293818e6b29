"""How far many prompts are, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

Told = Callable[[int, int], None]  # finished, all


@contextmanager
def bar(total: int) -> Iterator[Told]:
    """A bar that is gone at the end; nothing where stderr is no terminal, or for one prompt.

    It is drawn only when told, so no thread takes time from the engine.
    """
    console = Console(stderr=True)
    shown = total > 1 and console.is_terminal
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not shown
    ) as progress:
        task = progress.add_task("prompts", total=total)

        def told(done: int, of: int) -> None:
            progress.update(task, completed=done, total=of, refresh=True)

        yield told
