"""Tables of names, loaded on use, that answer a wrong name with the nearest right one."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loopwise.errors import LoopwiseError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that was meant, by letters or initials (``learning_rate``: ``lr``)."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    initials = "".join(part[:1] for part in re.split("[-_]", name))
    return near[0] if near else initials if initials in names else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty string."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


class Registry(Mapping[str, Any]):
    """A read-only table ``name -> object``, each written as ``"module:Attribute"``.

    Looking a name up imports its module; listing names imports nothing.

    Args:
        kind: what the rows are, for error messages (``"exit rule"``).
        rows: name to ``"module:Attribute"``.
        error: raised for an unknown name.
    """

    def __init__(self, kind: str, rows: Mapping[str, str], error: type[LoopwiseError]) -> None:
        self.kind = kind
        self._rows = dict(rows)
        self._error = error

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows:
            hint = did_you_mean(name, self._rows)
            raise self._error(
                f"no {self.kind} named {name!r}{hint or ';'} known: {', '.join(self)}"
            )
        module, attribute = self._rows[name].split(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
