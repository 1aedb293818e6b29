"""Records that hold a text among other fields: JSON lines, Parquet, data sets of the hub."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopwise.data.compressed import lines_of, suffixes, unpacked_chunks
from loopwise.data.documents import Document
from loopwise.data.reading import BAD_BYTES, BLANK, ReadOptions, ReadReport, decoded, pieces_of
from loopwise.errors import DataError, require_extra

Record = tuple[str, dict[str, Any]]  # where it is ("line 3"), and its fields


def record_documents(
    records: Iterator[Record], source: str, options: ReadOptions, report: ReadReport
) -> Iterator[Document]:
    """The text field of each record, cut to the limit; records without one are counted."""
    for where, record in records:
        if options.text_field not in record:
            report.skipped[f"missing field {options.text_field!r}"] += 1
            continue
        value = record[options.text_field]
        if value is None:
            report.skipped["null text"] += 1
            continue
        if isinstance(value, str):
            # JSON can spell half a surrogate pair, which UTF-8 cannot: the same as a bad byte.
            value = value.encode("utf-8", errors="surrogatepass")
        if not isinstance(value, bytes):
            raise DataError(
                f"{source}: {where}: field {options.text_field!r} holds "
                f"{type(value).__name__}, not text; choose another with "
                "--set data.read.text_field=NAME"
            )
        text = decoded(value, f"{source}: {where}", options, report)
        if text is None:
            report.skipped[BAD_BYTES] += 1
        elif not text.strip():
            report.skipped[BLANK] += 1
        else:
            for piece in pieces_of(text, options.max_document_chars):
                yield Document(piece, source=f"{source}: {where}")


def json_records(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[Record]:
    """Objects of a JSON lines file; blank lines and skipped bytes are counted."""
    chunks = unpacked_chunks(path, suffixes(path)[1], is_text=True)
    for number, raw in enumerate(lines_of(chunks), start=1):
        line = decoded(raw, f"{path}: line {number}", options, report)
        if line is None:
            report.skipped[BAD_BYTES] += 1
            continue
        if not line.strip():
            report.skipped[BLANK] += 1
            continue
        try:
            record = json.loads(line)
        except ValueError as err:
            raise DataError(
                f"{path}: line {number} is not JSON ({err}); each line holds one object"
            ) from err
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: line {number} holds {type(record).__name__}, not an object with a field "
                f"{options.text_field!r}"
            )
        yield f"line {number}", record


def parquet_records(path: Path, options: ReadOptions) -> Iterator[Record]:
    """Rows of a Parquet file, its text column alone, as bytes."""
    arrow: Any = require_extra("pyarrow", "hub", "reading Parquet")
    parquet: Any = require_extra("pyarrow.parquet", "hub", "reading Parquet")
    with tempfile.TemporaryFile() as unpacked:
        packed = suffixes(path)[1]
        if packed:  # Parquet is read from its end, so a compressed one is unpacked first
            for chunk in unpacked_chunks(path, packed, is_text=False):
                unpacked.write(chunk)
        try:
            file = parquet.ParquetFile(unpacked if packed else path)
            _check_column(path, arrow, file.schema_arrow, options.text_field)
            row = itertools.count(1)
            for batch in file.iter_batches(batch_size=256, columns=[options.text_field]):
                # As bytes, so that a value that is not UTF-8 meets encoding_errors.
                column = batch.column(0).cast(arrow.large_string()).cast(arrow.large_binary())
                for value in column.to_pylist():
                    yield f"row {next(row)}", {options.text_field: value}
        except (arrow.ArrowException, OSError) as err:
            raise DataError(f"{path}: not a readable Parquet file with text ({err})") from err


def _check_column(path: Path, arrow: Any, schema: Any, name: str) -> None:
    if name not in schema.names:
        known = ", ".join(schema.names)
        raise DataError(
            f"{path}: no column {name!r}; choose another with --set data.read.text_field=NAME, one "
            f"of: {known}"
        )
    kind = schema.field(name).type
    plain = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(plain) or arrow.types.is_large_string(plain)):
        raise DataError(
            f"{path}: column {name!r} holds {kind}, not text; choose another with "
            "--set data.read.text_field=NAME"
        )


def hub_records(name: str, split: str) -> Iterator[Record]:
    """Rows of a data set of the hub, streamed; ``name`` is ``OWNER/NAME[/CONFIG]``."""
    datasets: Any = require_extra("datasets", "hub", "reading from the hub")
    try:
        owner, repository, *config = name.split("/")
        path = f"{owner}/{repository}"
        with _quiet("huggingface_hub", "datasets"):
            rows = iter(datasets.load_dataset(path, *config, split=split, streaming=True))
            first = list(itertools.islice(rows, 1))
        for number, record in enumerate(itertools.chain(first, rows), start=1):
            yield f"row {number}", record
    except Exception as err:  # each layer below (datasets, hub, HTTP) has exceptions of its own
        raise DataError(
            f"cannot read hub:{name}:{split} ({type(err).__name__}: {err}); if the hub cannot be "
            "reached from here, download the data and give the local .parquet or .jsonl file"
        ) from err


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Loggers held to errors: what they retry and then give up on is told once, by us."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
