"""Output folders: refused where they hold something else, before any work."""

from __future__ import annotations

from pathlib import Path

from loopwise.errors import RunFolderError
from loopwise.train.lock import FILE as LOCK
from loopwise.writing import writing


def require_free(folder: Path, remedy: str) -> None:
    """Refuse an output folder that holds anything, or cannot be made; nothing is written.

    Args:
        remedy: what to do about one that holds something.
    Raises:
        RunFolderError: it holds something, or a file is in its way.
        WriteError: it may not be looked at.
    """
    with writing(folder):
        above = next(p for p in (folder, *folder.parents) if p.exists())
        taken = folder.is_dir() and any(p.name != LOCK for p in folder.iterdir())
    if not above.is_dir():
        raise RunFolderError(
            f"cannot make {str(folder)!r}: {str(above)!r} is a file; choose another name with --out"
        )
    if taken:
        raise RunFolderError(f"{str(folder)!r} is not empty; {remedy}")
