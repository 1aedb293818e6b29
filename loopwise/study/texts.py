"""Sources to documents: what is learned from, what is held out, under which corpus name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopwise.config import cache_root
from loopwise.data import Document, ReadReport, read_documents, split_held_out
from loopwise.settings import DataConfig, TokenizerConfig
from loopwise.tokenizer import BPETokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Texts:
    """Documents to learn from, and to measure on by corpus name.

    Attributes:
        shared: held-out documents whose very text is learned from.
    """

    train: list[Document]
    held_out: dict[str, list[Document]]
    report: ReadReport
    shared: int


def read_texts(config: DataConfig, seed: int) -> Texts:
    """Read every source and set aside what is measured.

    Raises:
        DataError: a source that cannot be read or split.
    """
    report = ReadReport()
    train: list[Document] = []
    held_out: dict[str, list[Document]] = {}
    for source in config.sources:
        documents = _read(source, config, report)
        if not config.held_out:
            documents, aside = split_held_out(documents, config.held_out_fraction, seed)
            held_out[corpus_name(source, held_out)] = aside
        train += documents
    held_out = held_out or read_corpora(config.held_out, config, report)
    learned = {d.text for d in train}
    shared = sum(d.text in learned for documents in held_out.values() for d in documents)
    return Texts(train, held_out, report, shared)


def read_corpora(
    sources: Sequence[str], config: DataConfig, report: ReadReport | None = None
) -> dict[str, list[Document]]:
    """The documents of each source, by corpus name."""
    out: dict[str, list[Document]] = {}
    for source in sources:
        out[corpus_name(source, out)] = _read(source, config, report or ReadReport())
    return out


def corpus_name(source: str, taken: Iterable[str]) -> str:
    """A short name for a source, usable as a folder, that is not taken yet."""
    stem = Path(source.removeprefix("builtin:").removeprefix("hub:")).name
    stem = re.sub(r"(\.(txt|jsonl|parquet))?(\.(gz|xz|zst))?$", "", stem)
    base = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "corpus"
    names = itertools.chain([base], (f"{base}-{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


def make_tokenizer(config: TokenizerConfig, train: list[Document]) -> Tokenizer:
    """Train a BPE tokenizer on the first megabytes of ``train``, or load the one named."""
    if config.kind != "bpe":
        return load_tokenizer(config.kind)
    budget = config.train_megabytes * 1_000_000
    sizes = itertools.accumulate(len(d.text) for d in train)
    sample = [d.text for d, size in zip(train, sizes, strict=True) if size <= budget]
    return BPETokenizer.train(sample or [train[0].text], config.vocab_size)


def cache_folder() -> Path:
    """Where token files are kept between runs."""
    return cache_root() / "tokens"


def _read(source: str, config: DataConfig, report: ReadReport) -> list[Document]:
    documents = read_documents([source], config.read, report)
    return list(itertools.islice(documents, config.max_documents))
