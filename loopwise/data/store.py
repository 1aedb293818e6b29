"""Documents to token ids: a tokenised corpus in memory, or mapped from a cache of token files.

Every document is ``[bos] text [eos]``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from loopwise.data.documents import Document
from loopwise.errors import DataError, TokenizerError, WriteError
from loopwise.tokenizer import Tokenizer
from loopwise.writing import make_folder, writing

FORMAT_VERSION = 1  # of the token files; raise it when their bytes change meaning
_BATCH_CHARS = 1 << 20  # text tokenised in one call


@dataclass(frozen=True, slots=True)
class TokenStore:
    """A tokenised corpus, in memory or mapped from disk.

    Attributes:
        token_ids: all documents end to end, each ``[bos] text [eos]``, ``(tokens,)`` uint16, or
            uint32 for vocabularies past 65,536.
        offsets: where each document starts, and the end, ``(documents + 1,)`` int64.
        hops: look-ups that the answer a token belongs to needs, 0 if none, ``(tokens,)`` uint8.
        text_hash: SHA-256 of the documents, in hexadecimal.
        folder: where the arrays are mapped from; None in memory.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    hops: np.ndarray
    text_hash: str
    folder: Path | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens, counting bos and eos."""
        return len(self.token_ids)

    @property
    def n_documents(self) -> int:
        """Documents."""
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled into a worker, a mapped array would travel as a copy of the whole corpus.
        if self.folder is not None:
            return _load, (self.folder,)
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStore:
    """Tokenise into memory.

    Raises:
        DataError: there is no document.
        TokenizerError: text that the tokenizer cannot hold.
    """
    digest = hashlib.sha256()
    chunks = list(_token_chunks(documents, tokenizer, digest))
    if not chunks:
        raise DataError("no documents to tokenise")
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    return TokenStore(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        hops=np.concatenate([chunk.hops for chunk in chunks]),
        text_hash=digest.hexdigest(),
    )


def load_or_tokenize(
    documents_factory: Callable[[], Iterable[Document]], tokenizer: Tokenizer, cache_dir: str | Path
) -> TokenStore:
    """The token files of this very text and tokenizer, made on first use, mapped from disk.

    The text is read once to hash it and, when its tokens are not in ``cache_dir`` yet, once more.
    Files are written aside and renamed, so that a killed run or a second writer leaves none broken.

    Args:
        documents_factory: starts the same documents afresh at each call.
        tokenizer: part of the key through its fingerprint.
        cache_dir: holds one folder per text and tokenizer; made if missing.
    Raises:
        DataError: no document, text that changed between two reads, or a damaged cache.
        WriteError: the disk refuses the token files.
    """
    digest = hashlib.sha256()
    for document in documents_factory():
        _hash_document(digest, document)
    text_hash = digest.hexdigest()
    key = f"{text_hash} {tokenizer.fingerprint} {FORMAT_VERSION}"
    folder = Path(cache_dir) / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not folder.exists():
        _write(documents_factory(), tokenizer, folder, text_hash)
    return _load(folder)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some documents: token ids and hops end to end, and the length of each document."""

    token_ids: np.ndarray
    hops: np.ndarray
    lengths: np.ndarray


def _hash_document(digest: Any, document: Document) -> None:
    raw = document.text.encode("utf-8", errors="surrogatepass")
    # The length goes first, so that moving a document boundary changes the hash.
    digest.update(f"{len(raw)} {document.hops}\n".encode())
    digest.update(raw)


def _token_chunks(
    documents: Iterable[Document], tokenizer: Tokenizer, digest: Any
) -> Iterator[_Chunk]:
    waiting: list[Document] = []
    n_chars = 0
    for document in documents:
        _hash_document(digest, document)
        waiting.append(document)
        n_chars += len(document.text)
        if n_chars >= _BATCH_CHARS:
            yield _encode_named(waiting, tokenizer)
            waiting, n_chars = [], 0
    if waiting:
        yield _encode_named(waiting, tokenizer)


def _encode_named(documents: list[Document], tokenizer: Tokenizer) -> _Chunk:
    try:
        return _encode(documents, tokenizer)
    except TokenizerError:
        # The whole batch was refused at once: find the document, so that its source can be named.
        for document in documents:
            try:
                tokenizer.encode(document.text)
            except TokenizerError as err:
                raise TokenizerError(f"{document.source or 'a document'}: {err}") from err
        raise


def _encode(documents: list[Document], tokenizer: Tokenizer) -> _Chunk:
    plain = iter(tokenizer.encode_batch([d.text for d in documents if not d.hops]))
    ids: list[int] = []
    hops: list[np.ndarray] = []
    lengths = []
    for document in documents:
        if document.hops:
            text_ids, spans = tokenizer.encode_spans(document.text)
            text_hops = _token_hops(spans, document.hops)
        else:
            text_ids = next(plain)
            text_hops = np.zeros(len(text_ids), dtype=np.uint8)
        ids += [tokenizer.bos_id, *text_ids, tokenizer.eos_id]
        hops.append(np.pad(text_hops, 1))
        lengths.append(len(text_ids) + 2)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    return _Chunk(np.array(ids, dtype=dtype), np.concatenate(hops), np.array(lengths))


def _token_hops(
    spans: list[tuple[int, int]], answers: tuple[tuple[int, int, int], ...]
) -> np.ndarray:
    """Hops of each token: those of the answer whose characters it touches."""
    bounds = np.array(spans, dtype=np.int64)
    hops = np.zeros(len(bounds), dtype=np.uint8)
    for start, end, count in answers:
        hops[(bounds[:, 0] < end) & (bounds[:, 1] > start)] = count
    return hops


def _write(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, text_hash: str
) -> None:
    make_folder(folder.parent)
    with writing(folder):
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_files(documents, tokenizer, aside, folder, text_hash)
        with writing(folder):
            os.rename(aside, folder)
    except WriteError:
        # Another process may have finished the same tokens first, which serves as well.
        if not (folder / "meta.json").exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_files(
    documents: Iterable[Document], tokenizer: Tokenizer, aside: Path, folder: Path, text_hash: str
) -> None:
    """Into ``aside``; errors name ``folder``, what it will be."""
    digest = hashlib.sha256()
    lengths = []
    dtype = "uint16"
    for chunk in _token_chunks(documents, tokenizer, digest):  # reads: an OSError there is its own
        with writing(folder):
            _append(aside / "token_ids.bin", chunk.token_ids)
            _append(aside / "hops.bin", chunk.hops)
        lengths.append(chunk.lengths)
        dtype = chunk.token_ids.dtype.name
    if not lengths:
        raise DataError("no documents to tokenise")
    if digest.hexdigest() != text_hash:
        raise DataError("the documents changed between two reads; start again once they are final")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    meta = {
        "format_version": FORMAT_VERSION,
        "text_hash": text_hash,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
        "n_documents": len(offsets) - 1,
        "n_tokens": int(offsets[-1]),
    }
    with writing(folder):
        _append(aside / "offsets.bin", offsets)
        (aside / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        array.tofile(file)


def _load(folder: Path) -> TokenStore:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        n_tokens = meta["n_tokens"]
        shapes = {"token_ids": (meta["dtype"], n_tokens), "hops": ("uint8", n_tokens)}
        shapes["offsets"] = ("int64", meta["n_documents"] + 1)
        arrays = {
            name: np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r", shape=(size,))
            for name, (dtype, size) in shapes.items()
        }
    except (OSError, ValueError, KeyError) as err:
        raise DataError(f"damaged token files in {folder} ({err}); delete that folder") from err
    return TokenStore(**arrays, text_hash=meta["text_hash"], folder=folder)
