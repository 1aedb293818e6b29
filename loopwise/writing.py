"""Files that people are left with: whole or not there, and a disk that refuses is one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from loopwise.errors import WriteError

_NO_PLACE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the lines that write ``path``, and no others.

    Raises:
        WriteError: the disk refuses; names the path and the reason.
    """
    try:
        yield
    except SafetensorError as err:  # how its writer reports what the system said
        raise WriteError(f"cannot write {str(path)!r}: {err}; free some space") from err
    except OSError as err:
        raise WriteError(f"cannot write {str(path)!r}: {why_not_written(err)}") from err


def why_not_written(err: OSError) -> str:
    """What the system said, and what helps."""
    remedy = "choose another place" if err.errno in _NO_PLACE else "free some space"
    return f"{err.strerror or err}; {remedy}"


def make_folder(path: Path) -> None:
    """The folder and those above it, where they are not there yet.

    Raises:
        WriteError: it cannot be made.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one move: what was there before stays until all of ``text`` is on disk.

    Raises:
        WriteError: the disk refuses; nothing is left behind.
    """
    aside = path.with_name(f".{path.name}")
    with writing(path):
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may keep the new name, and no text
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Add one line to a file, made where it is missing.

    Raises:
        WriteError: the disk refuses; a part of the line may stand there.
    """
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
