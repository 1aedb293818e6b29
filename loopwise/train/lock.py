"""One trainer in a run folder at a time: two would mix their checkpoints and their logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopwise.errors import RunFolderError
from loopwise.writing import writing

FILE = ".lock"  # stays: the lock is the system's, which lets go of it however the process ends


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Holds a run folder that is there; where the system has no such locks, nothing is held.

    Raises:
        RunFolderError: another process, or another trainer of this one, holds it.
        WriteError: the folder cannot be written.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with writing(folder / FILE):
        file = (folder / FILE).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunFolderError(
                f"{str(folder)!r} is being trained by process {file.read().strip() or '?'}; wait "
                "for it or stop it, then go on with --resume"
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        with writing(folder / FILE):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield
