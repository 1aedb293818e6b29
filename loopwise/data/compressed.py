"""Bytes of text files: unpacked as they stream, and cut into lines at LF and CRLF alone."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import zstandard

from loopwise.errors import DataError

COMPRESSIONS = (".gz", ".xz", ".zst")
_CHUNK = 1 << 20


def suffixes(path: Path) -> tuple[str, str]:
    """``(".txt", ".gz")`` of ``a.txt.gz``, with an empty string where there is none."""
    packed = path.suffix.lower()
    if packed in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), packed
    return packed, ""


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their LF or CRLF; the last may lack one."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest


def unpacked_chunks(path: Path, compression: str, *, is_text: bool) -> Iterator[bytes]:
    """The unpacked bytes of a file, 1 MiB at a time, without a byte order mark.

    Args:
        compression: one of COMPRESSIONS, or empty.
        is_text: refuse binary files.
    Raises:
        DataError: unreadable, truncated, corrupt, or binary where text is wanted.
    """
    first = True
    try:
        with open(path, "rb") as file:
            for chunk in _unpacked(file, compression):
                if first and is_text:
                    if b"\0" in chunk[:1024]:
                        raise DataError(
                            f"{path} is binary (it has NUL bytes), not UTF-8 text; take it out of "
                            "the sources, or convert it if it is UTF-16"
                        )
                    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
                first = False
                yield chunk
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as err:
        raise DataError(f"{path}: cannot be read to its end ({err}); copy the file anew") from err
    if first:
        raise DataError(f"{path} is empty; take it out of the sources")


def _unpacked(file: IO[bytes], compression: str) -> Iterator[bytes]:
    if compression == ".zst":
        yield from _zstd_chunks(file)
        return
    openers = {".gz": gzip.open, ".xz": lzma.open}
    if compression in openers:
        file = openers[compression](file)  # type: ignore[operator]
    with closing(file):
        while chunk := file.read(_CHUNK):
            yield chunk


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame, because the library's own reader takes a truncated file for a whole one."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    fresh = True
    gathered = b""
    while data := file.read(_CHUNK // 16):  # unpacks to many times as much
        while data:
            gathered += frame.decompress(data)
            data, fresh = frame.unused_data, frame.eof
            if fresh:
                frame = zstandard.ZstdDecompressor().decompressobj()
        if len(gathered) >= _CHUNK:
            yield gathered
            gathered = b""
    if not fresh:
        raise EOFError("the compressed file ends early")
    if gathered:
        yield gathered
