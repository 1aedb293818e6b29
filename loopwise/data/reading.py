"""How bytes become documents, and what is counted on the way: shared by every kind of source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from loopwise.errors import ConfigError, DataError

EncodingErrors = Literal["strict", "replace", "skip"]
Split = Literal["auto", "line", "separator", "blank-line", "file"]
BAD_BYTES = "bad utf-8"
BLANK = "blank"


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


def decoded(raw: bytes, where: str, options: ReadOptions, report: ReadReport) -> str | None:
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
            "convert the file (for Windows text: iconv -f WINDOWS-1252 -t UTF-8), or add "
            "--set data.read.encoding_errors=replace (or skip)"
        ) from err


def pieces_of(text: str, limit: int) -> Iterator[str]:
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
