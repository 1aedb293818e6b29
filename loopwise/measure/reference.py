"""A reference model on the text of a trace: bits per byte, which models of any tokenizer share.

The reference reads what the trace ran, piece by piece: what a block holds of one document, from the
same byte to the same byte. A piece that begins a document begins with the reference's start token;
one that goes on with a document begins, as in the trace, with the token before the cut, unscored.
Ends of documents stand for no byte and count on neither side.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from loopwise.config import read_json_object
from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import TraceError
from loopwise.measure.convergence import byte_sums
from loopwise.measure.evaluate import check_length, trajectory
from loopwise.measure.perplexity import Window, window_batches
from loopwise.measure.statistics import BlockSums
from loopwise.measure.trace import Trace
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, usual_depth
from loopwise.models.costs import parameters
from loopwise.tokenizer import Tokenizer
from loopwise.writing import write_whole

FILE, FORMAT, VERSION = "reference.json", "loopwise-reference", 1
_WORDS = ("name", "checkpoint", "weights_hash", "traced_weights_hash", "dtype", "start_token")
_COUNTS = ("parameters", "depth", "tokens", "bytes", "best_depth")
_INTERVALS = ("bits_per_byte", "best_bits_per_byte", "above_bits_per_byte")
_BATCH_LOGITS = 2**26
_COMMIT = re.compile(r"[0-9a-f]{40}")  # how the hub's cache names the folders of its snapshots


@dataclass(frozen=True, slots=True)
class Piece:
    """What one block of a trace holds of one document.

    Attributes:
        block: its number.
        given: the text before it that its first prediction has seen; empty where it begins with a
            start token.
        scored: the text that is predicted.
    """

    block: int
    given: str
    scored: str


def pieces(trace: Trace, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of a trace as it was cut.

    A character that a cut goes through belongs to the piece that ends it, and the whole one before
    it is then what is given; one that the end of the trace goes through is left out.

    Args:
        tokenizer: of the traced model.
    """
    rest, last = b"", ""
    for block, ids, targets in _runs(trace.blocks()):
        before = tokenizer.token_bytes(ids[0])
        if not before:  # a document begins
            rest, last = b"", ""
        given = _from_character(before[: max(0, len(before) - len(rest))]) or last
        scored, rest = _whole_characters(rest + b"".join(map(tokenizer.token_bytes, targets)))
        if scored:
            yield Piece(block, given, scored)
            last = scored[-1]


def measure_reference(
    trace: Trace,
    tokenizer: Tokenizer,
    reference: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Bits per byte of a reference at its own depth, beside the traced model at its best one.

    Args:
        tokenizer: of the traced model.
        progress: called with pieces done and pieces in all.
    Returns:
        What `write_reference` stores; intervals are 95% by blocks, the difference paired.
    Raises:
        TraceError: the trace holds no text.
        ShapeError: a piece is longer than what the reference has learned positions for.
        TokenizerError: a character that its tokenizer has no token for.
    """
    model, own = reference.model, reference.tokenizer
    depth = usual_depth(reference.training, model.geometry.max_depth)
    found = list(pieces(trace, tokenizer))
    if not found:
        raise TraceError(f"{str(trace.folder)!r} holds no text to measure a reference on")
    windows = [_window(piece, own) for piece in found]
    check_length(model, max(len(ids) for ids, _ in windows) - 1)  # before the shorter ones run
    nats = _nats(model, windows, depth, progress)
    of = np.array([piece.block for piece in found])
    n_bytes = np.array([len(piece.scored.encode()) for piece in found])
    ours = byte_sums(trace, tokenizer)
    blocks = len(ours.counts)
    theirs = BlockSums(
        sums=np.bincount(of, weights=nats, minlength=blocks)[:, None].astype(np.float64),
        counts=np.bincount(of, weights=n_bytes, minlength=blocks).astype(np.int64),
    )
    best = int(ours.mean.argmin())
    at_best = BlockSums(sums=ours.sums[:, [best]], counts=ours.counts)
    drawn = [sums.resampled_means()[:, 0] for sums in (at_best, theirs)]  # the same draws
    means = [float(sums.mean[0]) for sums in (at_best, theirs)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name_of(reference),
        "checkpoint": str(reference.path),
        "weights_hash": reference.weights_hash,
        "traced_weights_hash": trace.header["weights_hash"],
        "parameters": parameters(model),
        "depth": depth,
        "dtype": str(model.dtype).removeprefix("torch."),
        "start_token": own.decode([own.bos_id], special=True),
        "tokens": sum(len(ids) - first - 1 for ids, first in windows),
        "bytes": int(n_bytes.sum()),
        "bits_per_byte": _bits(means[1], drawn[1]),
        "best_depth": best + 1,
        "best_bits_per_byte": _bits(means[0], drawn[0]),
        "above_bits_per_byte": _bits(means[0] - means[1], drawn[0] - drawn[1]),
    }


def name_of(checkpoint: Checkpoint) -> str:
    """What people call a checkpoint: its source's name, or that of its run or folder.

    A retrofitted model is no longer its source.
    """
    facts = checkpoint.training
    source = facts.get("converted_from", {}).get("folder", "")
    if source and "retrofitted_from" not in facts and not _COMMIT.fullmatch(source):
        return str(source).removesuffix(".gguf")
    folder = checkpoint.path.absolute()
    return folder.parent.parent.name if folder.parent.name == "checkpoints" else folder.name


def write_reference(trace: Trace, measured: dict[str, Any]) -> None:
    """Beside the trace, in one move.

    Raises:
        WriteError: the disk refuses.
    """
    write_whole(trace.folder / FILE, json.dumps(measured, indent=2) + "\n")


def read_reference(trace: Trace) -> dict[str, Any] | None:
    """What was stored beside a trace; None where nothing was, or it is of another one.

    Raises:
        TraceError: it is damaged, or lacks a part.
    """
    file = trace.folder / FILE
    if not file.is_file():
        return None
    found = read_json_object(file, TraceError)
    if found.get("version", VERSION) != VERSION:
        return None
    broken = _broken_parts(found)
    if broken:
        raise TraceError(
            f"{str(file)!r} is damaged: {', '.join(broken)} missing or of the wrong kind; remove "
            "it and measure the reference again"
        )
    return found if found["traced_weights_hash"] == trace.header["weights_hash"] else None


def _broken_parts(found: dict[str, Any]) -> list[str]:
    """Names in a stored file that are not as `measure_reference` gives them."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def is_interval(value: Any) -> bool:
        return isinstance(value, dict) and all(
            is_number(value.get(k)) for k in ("mean", "low", "high")
        )

    broken = [name for name in _WORDS if not isinstance(found.get(name), str)]
    broken += [name for name in _COUNTS if type(found.get(name)) is not int]
    return broken + [name for name in _INTERVALS if not is_interval(found.get(name))]


def _runs(blocks: TokenBatch) -> Iterator[tuple[int, list[int], list[int]]]:
    """Of each block and document with a target in it: block, token ids, targets."""
    for block, targets in enumerate(blocks.targets):
        documents = blocks.document_ids[block]
        for document in documents.unique_consecutive():
            of = (documents == document) & (targets != NO_TARGET)
            if of.any():
                yield block, blocks.token_ids[block][of].tolist(), targets[of].tolist()


def _from_character(raw: bytes) -> str:
    """From the first whole character on; ``raw`` ends with one."""
    start = next((i for i, byte in enumerate(raw) if byte & 0xC0 != 0x80), len(raw))
    return raw[start:].decode()


def _whole_characters(raw: bytes) -> tuple[str, bytes]:
    """Text, and the bytes at the end that are only the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return decoder.decode(raw), decoder.getstate()[0]


def _window(piece: Piece, tokenizer: Tokenizer) -> Window:
    given = tokenizer.encode(piece.given) or [tokenizer.bos_id]
    return [*given, *tokenizer.encode(piece.scored)], len(given) - 1


@torch.no_grad()
def _nats(
    model: LoopedLM,
    windows: list[Window],
    depth: int,
    progress: Callable[[int, int], None] | None,
) -> NDArray[np.float64]:
    """Summed loss of each window; those of like length are run together."""
    out = np.zeros(len(windows))
    order = sorted(range(len(windows)), key=lambda i: len(windows[i][0]))
    rows = _BATCH_LOGITS // model.geometry.vocab_size
    size = max(1, rows // max(len(ids) for ids, _ in windows))
    done = 0
    for batch in window_batches([windows[i] for i in order], size):
        of = order[done : done + len(batch.token_ids)]
        out[of] = _losses(model, batch, depth).double().cpu().numpy()
        done += len(of)
        if progress is not None:
            progress(done, len(windows))
    return out


def _losses(model: LoopedLM, batch: TokenBatch, depth: int) -> Tensor:
    for r, latent, view in trajectory(model, batch, depth):
        if r == depth:
            logits = model.coda(latent, r, view).float()
    targets = batch.targets.flatten()
    loss = F.cross_entropy(logits.flatten(0, -2), targets, ignore_index=NO_TARGET, reduction="none")
    return loss.view_as(batch.targets).sum(dim=1)


def _bits(mean_nats: float, drawn: NDArray[np.float64]) -> dict[str, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    nats = {"mean": mean_nats, "low": float(low), "high": float(high)}
    return {key: value / math.log(2) for key, value in nats.items()}
