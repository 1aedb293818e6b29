"""The training log: append-only JSON lines, tied to steps, that survives crashes and resumes.

Each line carries ``segment`` (which start of the run wrote it) and ``step``; units end the names.
After a resume the later segment repeats the steps since the last checkpoint; readers keep the later
value. Numbers that are not finite are stored as null, so every line is valid JSON.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from loopwise.writing import append_line


class MetricLog:
    """Appends events to ``path``; a new object starts a new segment.

    Raises:
        WriteError: the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file() and not path.read_bytes().endswith(b"\n"):
            append_line(path, "")  # close the line a kill left half-written
        self.segment = 1 + max((e.get("segment", 0) for e in _lines(path)), default=0)

    def write(self, event: dict[str, Any]) -> None:
        line = {"segment": self.segment, **event}
        append_line(self.path, json.dumps(finite(line), allow_nan=False))


def read_metrics(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Events of one kind, once per step in step order; the latest segment's value wins."""
    events = [e for e in _lines(path) if e.get("event") == kind]
    # A later segment starts again at its checkpoint: what earlier ones wrote past it is undone.
    starts: dict[int, int] = {}
    for e in events:
        starts.setdefault(e["segment"], e["step"])
    kept: dict[int, dict[str, Any]] = {}
    for e in events:
        undone = any(s > e["segment"] and e["step"] >= first for s, first in starts.items())
        if not undone:
            kept[e["step"]] = e
    return [kept[step] for step in sorted(kept)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the half-written last line of a killed process
    return out


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
