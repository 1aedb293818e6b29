"""Rows of local files as data sets of the harness; its task files call the two loaders by name.

Files are ``NAME.jsonl`` or ``NAME.txt``, each also ``.gz``, ``.xz`` or ``.zst``. Nothing is cached
on disk and no network is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from loopwise.data import ReadOptions, ReadReport
from loopwise.data.compressed import COMPRESSIONS, lines_of, suffixes, unpacked_chunks
from loopwise.data.records import json_records
from loopwise.data.wikitext import articles
from loopwise.errors import DataError, require_extra

Row = dict[str, Any]
SPLIT = "test"  # what local tasks call their one split


def load_rows(
    *,
    folder: str,
    file: str | Sequence[str],
    fields: Sequence[str],
    shape: str | None = None,
    only: Mapping[str, Any] | None = None,
    **_of_the_task: Any,
) -> Any:
    """A JSON lines file as a data set with one split.

    Args:
        folder: where the files are.
        file: name without its endings, or several of which the first that exists is taken.
        fields: what every row must have.
        shape: a row of `SHAPES`, where the file's fields differ from the hub's.
        only: take the rows that have these values.
    Raises:
        DataError: no such folder or file, a broken line, a row without a field, no row at all.
    """
    path = find_file(folder, file, ".jsonl")
    rows = []
    for where, row in _records(path, path.stat().st_mtime_ns):
        missing = [name for name in fields if name not in row]
        if missing:
            raise DataError(
                f"{path}: {where} has no field {missing[0]!r} (it has {', '.join(row)})"
            )
        if only and any(row.get(name) != value for name, value in only.items()):
            continue
        rows.append(SHAPES[shape](row) if shape else row)
    if not rows:
        wanted = ", ".join(f"{name}={value!r}" for name, value in (only or {}).items())
        raise DataError(f"{path} has no rows" + (f" with {wanted}" if wanted else ""))
    return _data_set(rows)


def load_pages(*, folder: str, file: str | Sequence[str], **_of_the_task: Any) -> Any:
    """A text of WikiText's layout as a data set of one article a row, in the field ``page``.

    Raises:
        DataError: no such folder or file, or nothing in it.
    """
    path = find_file(folder, file, ".txt")
    lines = lines_of(unpacked_chunks(path, suffixes(path)[1], is_text=True))
    rows = [{"page": page} for page in articles(line.decode("utf-8") for line in lines)]
    if not rows:
        raise DataError(f"{path} holds no text")
    return _data_set(rows)


def find_file(folder: str | Path, names: str | Sequence[str], ending: str) -> Path:
    """The file meant by a name without its endings.

    Raises:
        DataError: the folder or the file lacks; says which.
    """
    where, stems = Path(folder).expanduser(), [names] if isinstance(names, str) else list(names)
    if not where.is_dir():
        raise DataError(f"no folder {str(folder)!r} of task data; name it with --data-dir")
    for stem in stems:
        for packed in ("", *COMPRESSIONS):
            path = where / f"{stem}{ending}{packed}"
            if path.is_file():
                return path
    wanted = " or ".join(f"{stem}{ending}" for stem in stems)
    raise DataError(
        f"{str(where)!r} has no {wanted} (plain, {', '.join(COMPRESSIONS)}); put it there, or name "
        "another folder with --data-dir"
    )


@lru_cache(maxsize=1)  # BLiMP's 67 tasks read one file
def _records(path: Path, modified_ns: int) -> list[tuple[str, Row]]:
    return list(json_records(path, ReadOptions(), ReadReport()))


def _data_set(rows: list[Row]) -> Any:
    datasets: Any = require_extra("datasets", "eval", "evaluation on local files")
    return datasets.DatasetDict({SPLIT: datasets.Dataset.from_list(rows)})


def _hellaswag(row: Row) -> Row:
    """Rows as the harness itself prepares them, with the right ending's number as text."""
    return {"query": row["query"], "choices": row["choices"], "label": str(row["gold"])}


def _gsm8k(row: Row) -> Row:
    return {
        "question": row["context"],
        "answer": f"{row['chain_of_thought']}\n#### {row['answer']}",
    }


def _wsc273(row: Row) -> Row:
    """The sentence up to where its two readings part, what they go on with, and its end."""
    one, other = row["context_options"]
    same = [a == b for a, b in zip(one, other, strict=False)]
    begun = one[: same.index(False) if False in same else len(same)]
    return {
        "text": f"{begun} {row['continuation']}",
        "options": [one.removeprefix(begun), other.removeprefix(begun)],
        "pronoun": "",  # the file has it replaced already
        "pronoun_loc": len(begun),
        "label": row["gold"],
    }


SHAPES: dict[str, Callable[[Row], Row]] = {
    "hellaswag": _hellaswag,
    "gsm8k": _gsm8k,
    "wsc273": _wsc273,
}
