"""Stopping a run from outside: a signal is noted, and acted on where the state can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved at ``step``."""

    def __init__(self, step: int, signal_name: str) -> None:
        super().__init__(f"stopped by {signal_name} after step {step}, which is saved")
        self.step, self.signal_name = step, signal_name


class StopSignal:
    """The first SIGTERM or SIGINT that came while watched; a second one acts as usual.

    Attributes:
        name: of the signal that came, None before.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._answered = False

    def stop_if_asked(self, step: int) -> None:
        """Answer the signal that came, if one did.

        Raises:
            Interrupted: it asks to stop after ``step``, which the caller saves.
        """
        if self.name:
            self._answered = True
            raise Interrupted(step, self.name)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note signals in place of dying of them; one that nobody answered comes again afterwards.

        So it is not lost where the lines below end otherwise, by an error that somebody catches to
        go on, or before they look again.
        """
        usual: dict[signal.Signals, Any] = {}

        def note(number: int, frame: object) -> None:
            self.name = signal.Signals(number).name
            restore()

        def restore() -> None:
            for each, handler in usual.items():
                signal.signal(each, handler)

        # Outside the main thread signals belong to somebody else.
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                usual[each] = signal.signal(each, note)
        try:
            yield
        finally:
            restore()
            if self.name and not self._answered:
                self._answered = True
                signal.raise_signal(signal.Signals[self.name])
