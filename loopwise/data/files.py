"""Documents from what people have: text, JSON lines, Parquet, compressed, the hub, or built in.

Sources are files, folders, globs, ``hub:OWNER/NAME[/CONFIG][:split]``, ``builtin:CORPUS[:COUNT]``
and the names in ``KNOWN``.
Reading streams: one document is held at a time, whatever the size of the files. Lines end at LF
or CRLF alone, so that U+2028, U+2029 and vertical tabs stay inside a line; a CRLF is read as LF.

Nothing is dropped unseen: what cannot be used is an error that names file and line, or a skip that
`ReadReport` counts.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from loopwise.data import stories
from loopwise.data.compressed import COMPRESSIONS, lines_of, suffixes, unpacked_chunks
from loopwise.data.documents import Document
from loopwise.data.reading import BAD_BYTES, BLANK, ReadOptions, ReadReport, decoded, pieces_of
from loopwise.data.records import hub_records, json_records, parquet_records, record_documents
from loopwise.errors import ConfigError, DataError

__all__ = ["ReadOptions", "ReadReport", "read_documents", "split_held_out"]

FORMATS = (".txt", ".jsonl", ".parquet")
# Evaluation sets that have a name everybody uses.
KNOWN = {"wikitext2": "hub:Salesforce/wikitext/wikitext-2-raw-v1:test"}
BUILTIN_COUNT = 10_000  # documents of a built-in corpus when none are asked for: about 7 MB


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
            f"{len(every)} document cannot be split into training and held-out parts; add text"
            + how_to_cut(every)
        )
    draws = [_draw(seed, index, document.text) for index, document in enumerate(every)]
    wanted = max(sum(draw < fraction for draw in draws), 2 if len(every) > 3 else 1)
    lowest_first = sorted(range(len(every)), key=draws.__getitem__)
    chosen = set(lowest_first[: min(wanted, len(every) - 1)])
    train = [document for index, document in enumerate(every) if index not in chosen]
    return train, [document for index, document in enumerate(every) if index in chosen]


def how_to_cut(documents: Sequence[Document]) -> str:
    """The end of a message: what makes several documents of the only one, where it was read."""
    path, _, place = documents[0].source.rpartition(": ") if documents else ("", "", "")
    if not place.startswith(("line ", "row ")):  # made, not read
        return ""
    text = documents[0].text.strip()
    splits = {"blank-line": re.search(r"\n[^\S\n]*\n", text), "line": "\n" in text}
    of_text = suffixes(Path(path))[0] == ".txt"
    remedies = [
        f"--set data.read.split={name}" for name, cuts in splits.items() if cuts and of_text
    ]
    if len(text) > 1:
        remedies.append(f"--set data.read.max_document_chars={(len(text) + 1) // 2}")
    return f", or cut it with {' or '.join(remedies)}" if remedies else ""


def _draw(seed: int, index: int, text: str) -> float:
    raw = f"{seed}/{index}/{text}".encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(raw).digest()[:6], "big") / 2**48


# -- sources -----------------------------------------------------------------------------------


def _expand(source: str | Path, report: ReadReport) -> list[str | Path]:
    """The files a source stands for; hub and built-in sources stay what they are."""
    if isinstance(source, str) and source.startswith(("hub:", "builtin:")):
        _parse_named(source)
        return [source]
    path = Path(source).expanduser()
    if str(source) in KNOWN and not path.exists():
        return [KNOWN[str(source)]]
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
    files = [path for path in found if suffixes(path)[0] in FORMATS]
    if len(files) < len(found):
        report.skipped["other file type"] += len(found) - len(files)
    if not files:
        raise DataError(f"no {_known_types()} file in folder {str(folder)!r}")
    return [_checked(path) for path in files]


def _checked(path: Path) -> Path:
    if suffixes(path)[0] not in FORMATS:
        raise DataError(
            f"{path}: files of this type are not read; give {_known_types()}, or rename plain text "
            "to .txt"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; take it out of the sources")
    return path


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
    elif name.count("/") not in (1, 2) or not all(name.split("/")):
        raise DataError(f"{source!r} must read hub:OWNER/NAME[/CONFIG] or hub:OWNER/NAME:split")
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
            f"--set data.read.text_field={options.text_field}, data.read.split={options.split} and "
            f"data.read.encoding_errors={options.encoding_errors}"
        )


def _read_one(source: str | Path, options: ReadOptions, report: ReadReport) -> Iterator[Document]:
    if isinstance(source, Path):
        kind = suffixes(source)[0]
        if kind == ".parquet":
            records = parquet_records(source, options)
        elif kind == ".jsonl":
            records = json_records(source, options, report)
        else:
            return _text_documents(source, options, report)
        return record_documents(records, str(source), options, report)
    kind, name, detail = _parse_named(source)
    if kind == "builtin":
        return stories.generate(name, 0, 0, int(detail or BUILTIN_COUNT))
    return record_documents(hub_records(name, detail or "train"), source, options, report)


# -- plain text --------------------------------------------------------------------------------


def _text_documents(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[Document]:
    chunks = unpacked_chunks(path, suffixes(path)[1], is_text=True)
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
        line = decoded(raw, f"{path}: line {number}", options, report)
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
            *full, rest = pieces_of("".join(self.lines), self.limit)
            yield from self._documents(full)
            self.lines = [] if self.broken else [rest]
            self.n_chars, self.broken = sum(map(len, self.lines)), False

    def end(self) -> Iterator[Document]:
        """Give out what is left; the next line starts a new document."""
        text = "".join(self.lines).removesuffix("\n")
        if self.lines and not text.strip() and not self.broken:
            self.report.skipped[BLANK] += 1
        elif self.lines or self.broken:
            yield from self._documents(pieces_of(text, self.limit))
        self._reset()

    def _documents(self, texts: Iterable[str]) -> Iterator[Document]:
        if self.broken:
            self.report.skipped[BAD_BYTES] += 1
            return
        for text in texts:
            yield Document(text, source=f"{self.path}: line {self.first_line}")


def _is_line(raw: bytes, separator: bytes) -> bool:
    return raw.removesuffix(b"\r") == separator
