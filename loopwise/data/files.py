"""Documents from what people have: text, JSON lines, Parquet, compressed, the hub, or built in.

Sources are files, folders, globs, ``hub:OWNER/NAME[:split]`` and ``builtin:CORPUS[:COUNT]``.
Reading streams: one document is held at a time, whatever the size of the files. Lines end at LF
or CRLF alone, so that U+2028, U+2029 and vertical tabs stay inside a line; a CRLF is read as LF.

Nothing is dropped unseen: what cannot be used is an error that names file and line, or a skip that
`ReadReport` counts.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from loopwise.data import stories
from loopwise.data.compressed import COMPRESSIONS, lines_of, unpacked_chunks
from loopwise.data.documents import Document
from loopwise.errors import ConfigError, DataError, require_extra

EncodingErrors = Literal["strict", "replace", "skip"]
Split = Literal["auto", "line", "separator", "blank-line", "file"]
FORMATS = (".txt", ".jsonl", ".parquet")
BUILTIN_COUNT = 10_000  # documents of a built-in corpus when none are asked for: about 7 MB
_BAD_BYTES = "bad utf-8"
_BLANK = "blank"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How sources become documents."""

    text_field: str = "text"  # of JSON lines, Parquet and hub records
    encoding_errors: EncodingErrors = "strict"  # replace: U+FFFD; skip: drop the line or document
    split: Split = "auto"  # of .txt; auto: at separator lines if the first MiB has one, else file
    separator: str = "<|endoftext|>"  # a line that holds this and nothing else
    max_document_chars: int = 20_000  # longer ones from files are cut at a newline, else a space

    def __post_init__(self) -> None:
        for name, allowed in (("encoding_errors", EncodingErrors), ("split", Split)):
            value, known = getattr(self, name), get_args(allowed)
            if value not in known:
                raise ConfigError(f"{name}={value!r} must be one of: {', '.join(known)}")
        if self.max_document_chars < 1:
            raise ConfigError(f"max_document_chars={self.max_document_chars} must be at least 1")
        if not self.text_field or not self.separator or "\n" in self.separator:
            raise ConfigError(
                f"text_field={self.text_field!r} and separator={self.separator!r} must not be "
                "empty, and a separator is one line"
            )


@dataclass(slots=True)
class ReadReport:
    """What was read, counted as it is read.

    Attributes:
        files: files opened to their end.
        documents: documents given out.
        characters: of those documents.
        bytes: of those documents in UTF-8.
        replaced: lines or records that hold U+FFFD for bytes that were not UTF-8.
        skipped: lines, records and files left out, by reason.
    """

    files: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    replaced: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line for a person."""
        skips = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return (
            f"{self.documents} documents, {self.characters} characters, {self.bytes} bytes from "
            f"{self.files} files; skipped: {skips or 'none'}; replaced: {self.replaced}"
        )


def read_documents(
    sources: Sequence[str | Path], options: ReadOptions, report: ReadReport
) -> Iterator[Document]:
    """Stream the documents of all sources, in their order; sources are checked at the call.

    Args:
        sources: files, folders, globs, ``hub:OWNER/NAME[:split]``, ``builtin:CORPUS[:COUNT]``.
        options: how they become documents.
        report: filled in while reading.
    Raises:
        DataError: a source that is missing, empty, broken, binary or of another type; bytes that
            are not UTF-8 under ``strict``; or, at the end, not one document.
        MissingExtraError: Parquet or the hub without the ``hub`` extra.
    """
    if not sources:
        raise DataError("no sources; give files, folders, globs, hub:OWNER/NAME or builtin:stories")
    expanded = [item for source in sources for item in _expand(source, report)]
    return _read_all(expanded, options, report)


def split_held_out(
    documents: Iterable[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, both in order, each with at least one (of four, two).

    A document's side depends on (seed, its index, its text) alone.

    Raises:
        ConfigError: ``fraction`` not between 0 and 1.
        DataError: fewer than two documents.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"held-out fraction {fraction} must lie between 0 and 1")
    every = list(documents)
    if len(every) < 2:
        raise DataError(
            f"{len(every)} document cannot be split into training and held-out parts; add text, "
            "or lower max_document_chars or choose another split so that it becomes several"
        )
    draws = [_draw(seed, index, document.text) for index, document in enumerate(every)]
    wanted = max(sum(draw < fraction for draw in draws), 2 if len(every) > 3 else 1)
    lowest_first = sorted(range(len(every)), key=draws.__getitem__)
    chosen = set(lowest_first[: min(wanted, len(every) - 1)])
    train = [document for index, document in enumerate(every) if index not in chosen]
    return train, [document for index, document in enumerate(every) if index in chosen]


def _draw(seed: int, index: int, text: str) -> float:
    raw = f"{seed}/{index}/{text}".encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(raw).digest()[:6], "big") / 2**48


def _chunks(path: Path) -> Iterator[bytes]:
    kind, compression = _format(path)
    return unpacked_chunks(path, compression, is_text=kind != ".parquet")


# -- sources -----------------------------------------------------------------------------------


def _expand(source: str | Path, report: ReadReport) -> list[str | Path]:
    """The files a source stands for; hub and built-in sources stay what they are."""
    if isinstance(source, str) and source.startswith(("hub:", "builtin:")):
        _parse_named(source)
        return [source]
    path = Path(source).expanduser()
    if path.is_dir():
        return list(_files_in(path, report))
    if path.exists():
        return [_checked(path)]
    if not glob.has_magic(str(path)):
        raise DataError(f"no file or folder {str(source)!r}; check the path")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DataError(
            f"no file matches {str(source)!r}; check the pattern (** goes into folders)"
        )
    return [_checked(match) for match in files]


def _files_in(folder: Path, report: ReadReport) -> list[Path]:
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    files = [path for path in found if _format(path)[0] in FORMATS]
    if len(files) < len(found):
        report.skipped["other file type"] += len(found) - len(files)
    if not files:
        raise DataError(f"no {_known_types()} file in folder {str(folder)!r}")
    return [_checked(path) for path in files]


def _checked(path: Path) -> Path:
    if _format(path)[0] not in FORMATS:
        raise DataError(
            f"{path}: files of this type are not read; give {_known_types()}, or rename plain text "
            "to .txt"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; take it out of the sources")
    return path


def _format(path: Path) -> tuple[str, str]:
    """``(".txt", ".gz")`` of ``a.txt.gz``, with an empty string where there is none."""
    packed = path.suffix.lower()
    if packed in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), packed
    return packed, ""


def _known_types() -> str:
    return f"{', '.join(FORMATS)} (each also with {', '.join(COMPRESSIONS)})"


def _parse_named(source: str) -> tuple[str, str, str]:
    """``("hub", "OWNER/NAME", "split")``; the last is empty when not given."""
    kind, _, rest = source.partition(":")
    name, _, detail = rest.partition(":")
    if kind == "builtin":
        stories.check_corpus(name)
        if detail and (not detail.isdecimal() or int(detail) < 1):
            raise DataError(
                f"{source!r}: {detail!r} is not a number of documents; as in {name}:500"
            )
    elif name.count("/") != 1 or not all(name.split("/")):
        raise DataError(f"{source!r} must read hub:OWNER/NAME or hub:OWNER/NAME:split")
    return kind, name, detail


def _read_all(
    sources: list[str | Path], options: ReadOptions, report: ReadReport
) -> Iterator[Document]:
    before = report.documents
    for source in sources:
        for document in _read_one(source, options, report):
            report.documents += 1
            report.characters += len(document.text)
            report.bytes += len(document.text.encode())
            yield document
        report.files += isinstance(source, Path)
    if report.documents == before:
        raise DataError(
            f"not one document in {', '.join(map(str, sources[:3]))}: {report.summary()}; check "
            f"text_field={options.text_field!r}, split and encoding_errors"
        )


def _read_one(source: str | Path, options: ReadOptions, report: ReadReport) -> Iterator[Document]:
    if isinstance(source, Path):
        kind = _format(source)[0]
        if kind == ".parquet":
            records = _parquet_records(source, options)
        elif kind == ".jsonl":
            records = _json_records(source, options, report)
        else:
            return _text_documents(source, options, report)
        return _record_documents(records, str(source), options, report)
    kind, name, detail = _parse_named(source)
    if kind == "builtin":
        return stories.generate(name, 0, 0, int(detail or BUILTIN_COUNT))
    return _record_documents(_hub_records(name, detail or "train"), source, options, report)


# -- records: JSON lines, Parquet, hub -----------------------------------------------------------

_Record = tuple[str, dict[str, Any]]  # where it is ("line 3"), and its fields


def _record_documents(
    records: Iterator[_Record], source: str, options: ReadOptions, report: ReadReport
) -> Iterator[Document]:
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
                f"{type(value).__name__}, not text; choose another text_field"
            )
        text = _decode(value, f"{source}: {where}", options, report)
        if text is None:
            report.skipped[_BAD_BYTES] += 1
        elif not text.strip():
            report.skipped[_BLANK] += 1
        else:
            for piece in _cut(text, options.max_document_chars):
                yield Document(piece, source=f"{source}: {where}")


def _json_records(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[_Record]:
    for number, raw in enumerate(lines_of(_chunks(path)), start=1):
        line = _decode(raw, f"{path}: line {number}", options, report)
        if line is None:
            report.skipped[_BAD_BYTES] += 1
            continue
        if not line.strip():
            report.skipped[_BLANK] += 1
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


def _parquet_records(path: Path, options: ReadOptions) -> Iterator[_Record]:
    arrow: Any = require_extra("pyarrow", "hub", "reading Parquet")
    parquet: Any = require_extra("pyarrow.parquet", "hub", "reading Parquet")
    with tempfile.TemporaryFile() as unpacked:
        if _format(path)[1]:  # Parquet is read from its end, so a compressed one is unpacked first
            for chunk in _chunks(path):
                unpacked.write(chunk)
        try:
            file = parquet.ParquetFile(unpacked if _format(path)[1] else path)
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
        raise DataError(f"{path}: no column {name!r}; set text_field to one of: {known}")
    kind = schema.field(name).type
    plain = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(plain) or arrow.types.is_large_string(plain)):
        raise DataError(
            f"{path}: column {name!r} holds {kind}, not text; choose another text_field"
        )


def _hub_records(name: str, split: str) -> Iterator[_Record]:
    datasets: Any = require_extra("datasets", "hub", "reading from the hub")
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        for number, record in enumerate(rows, start=1):
            yield f"row {number}", record
    except Exception as err:  # each layer below (datasets, hub, HTTP) has exceptions of its own
        raise DataError(
            f"cannot read hub:{name}:{split} ({type(err).__name__}: {err}); if the hub cannot be "
            "reached from here, download the data and give the local .parquet or .jsonl file"
        ) from err


# -- plain text --------------------------------------------------------------------------------


def _text_documents(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[Document]:
    chunks = _chunks(path)
    split = options.split
    if split == "auto":
        head = next(chunks, b"")
        chunks = itertools.chain([head], chunks)
        separator = options.separator.encode()
        has_one = any(_is_line(line, separator) for line in head.split(b"\n"))
        split = "separator" if has_one else "file"
    pieces = _Pieces(path, options, report)
    for number, raw in enumerate(lines_of(chunks), start=1):
        if split == "separator" and _is_line(raw, options.separator.encode()):
            yield from pieces.end()
            continue
        line = _decode(raw, f"{path}: line {number}", options, report)
        if split == "blank-line" and line is not None and not line.strip():
            yield from pieces.end()
            continue
        yield from pieces.add(number, line)
        if split == "line":
            yield from pieces.end()
    yield from pieces.end()


class _Pieces:
    """Lines gathered into documents, and those cut to the limit; their last line end is left off.

    A line of None is one to skip: it takes the document, or what is gathered of it, along.
    """

    def __init__(self, path: Path, options: ReadOptions, report: ReadReport) -> None:
        self.path = path
        self.limit = options.max_document_chars
        self.report = report
        self._reset()

    def _reset(self) -> None:
        self.lines: list[str] = []
        self.first_line = 0
        self.n_chars = 0
        self.broken = False

    def add(self, number: int, line: str | None) -> Iterator[Document]:
        """Take one line without its end; give out what is full."""
        self.first_line = self.first_line or number
        if line is None:
            self.broken = True
            return
        self.lines.append(line + "\n")
        self.n_chars += len(line) + 1
        if self.n_chars > 2 * self.limit:
            *full, rest = _cut("".join(self.lines), self.limit)
            yield from self._documents(full)
            self.lines = [] if self.broken else [rest]
            self.n_chars, self.broken = sum(map(len, self.lines)), False

    def end(self) -> Iterator[Document]:
        """Give out what is left; the next line starts a new document."""
        text = "".join(self.lines).removesuffix("\n")
        if self.lines and not text.strip() and not self.broken:
            self.report.skipped[_BLANK] += 1
        elif self.lines or self.broken:
            yield from self._documents(_cut(text, self.limit))
        self._reset()

    def _documents(self, texts: Iterable[str]) -> Iterator[Document]:
        if self.broken:
            self.report.skipped[_BAD_BYTES] += 1
            return
        for text in texts:
            yield Document(text, source=f"{self.path}: line {self.first_line}")


def _cut(text: str, limit: int) -> Iterator[str]:
    """Pieces of at most ``limit`` characters, but for white space at the end, that join to text."""
    start, stop = 0, len(text.rstrip())
    while stop - start > limit:
        end = start + limit
        for mark in ("\n", " "):
            found = text.rfind(mark, start, end)
            if text[start : found + 1].strip():
                end = found + 1
                break
        else:
            while text[end].isspace():  # what stands before ``stop`` is not white space
                end += 1
        yield text[start:end]
        start = end
    yield text[start:]


def _is_line(raw: bytes, separator: bytes) -> bool:
    return raw.removesuffix(b"\r") == separator


def _decode(raw: bytes, where: str, options: ReadOptions, report: ReadReport) -> str | None:
    """The text of one line or record; None if it is to be skipped."""
    try:
        return raw.decode()
    except UnicodeDecodeError as err:
        if options.encoding_errors == "skip":
            return None
        if options.encoding_errors == "replace":
            report.replaced += 1
            return raw.decode(errors="replace")
        raise DataError(
            f"{where}: byte 0x{raw[err.start]:02x} at position {err.start + 1} is not UTF-8; "
            "convert the file (for Windows text: iconv -f WINDOWS-1252 -t UTF-8), or set "
            "encoding_errors to 'replace' or 'skip'"
        ) from err
