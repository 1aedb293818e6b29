"""Perplexity under three named protocols. They differ by whole points; never mix them.

``block``: contiguous blocks of one stream without overlap, tail dropped, exp(mean token NLL), as in
arXiv:2605.18797. ``sliding``: a window moved by a stride, each token scored once with what the
window shows of its past. ``document``: each document on its own from its start token, reported per
word and per byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.data import Document, TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import ConfigError, DataError
from loopwise.measure.evaluate import check_depths, trajectory
from loopwise.models.base import LoopedLM
from loopwise.tokenizer import Tokenizer

Protocol = Literal["block", "sliding", "document"]
PROTOCOLS: tuple[Protocol, ...] = ("block", "sliding", "document")
_BATCH_TOKENS = 4096


def perplexity(
    model: LoopedLM,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    protocol: Protocol,
    depths: Sequence[int],
    *,
    block: int = 1024,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity of a frozen model at each depth.

    Args:
        documents: joined to one stream by ``block`` and ``sliding``.
        block: tokens of a block or window; ``document`` cuts longer documents into such windows.
        stride: of ``sliding``, tokens; half a block by default.
    Returns:
        ``by_depth`` (token perplexity and NLL, word and byte perplexity) and how it was computed.
    Raises:
        ConfigError: an unknown protocol, a block or stride out of range.
        DataError: text shorter than one block.
        DepthError: a depth the model cannot run.
        ShapeError: a block is longer than what the model has learned positions for.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"no protocol {protocol!r}; known: {', '.join(PROTOCOLS)}")
    stride = max(1, block // 2) if stride is None else stride
    if block < 2 or not 1 <= stride <= block:
        raise ConfigError(f"block={block} must be at least 2 and stride={stride} in 1..{block}")
    check_depths(model, depths)
    text = "\n".join(d.text for d in documents)
    if protocol == "document":
        windows = list(_document_windows(tokenizer, documents, block))
    else:
        step = block if protocol == "block" else stride
        windows = list(_stream_windows(tokenizer.encode(text), block, step, protocol == "block"))
    if not windows:
        raise DataError(f"the text has fewer than {block + 1} tokens; use a smaller block")
    sums = dict.fromkeys(sorted(set(depths)), 0.0)
    n_targets, done = 0, 0
    for batch in window_batches(windows, max(1, _BATCH_TOKENS // block)):
        n_targets += batch.n_targets
        for r, loss in _losses(model, batch, frozenset(sums)):
            sums[r] += loss
        done += len(batch.token_ids)
        if progress is not None:
            progress(done, len(windows))
    n_words, n_bytes = len(text.split()), len(text.encode("utf-8"))
    return {
        "protocol": protocol,
        "block": block,
        "stride": stride if protocol == "sliding" else block,
        "tokens": n_targets,
        "dtype": str(model.dtype).removeprefix("torch."),
        "by_depth": {
            r: {
                "nll_nats": total / n_targets,
                "perplexity": math.exp(total / n_targets),
                # Tokens that were not scored still stand for words and bytes of the text.
                "word_perplexity": _exp(total / n_words) if protocol == "document" else None,
                "byte_perplexity": _exp(total / n_bytes) if protocol == "document" else None,
                "bits_per_byte": total / n_bytes / math.log(2) if protocol == "document" else None,
            }
            for r, total in sums.items()
        },
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@torch.no_grad()
def _losses(
    model: LoopedLM, batch: TokenBatch, depths: frozenset[int]
) -> Iterator[tuple[int, float]]:
    targets = batch.targets.flatten()
    for r, latent, view in trajectory(model, batch, max(depths)):
        if r not in depths:
            continue
        logits = model.coda(latent, r, view).flatten(0, -2).float()
        loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
        yield r, loss.item()


# A window is its tokens and the index of the first input whose target counts.
Window = tuple[list[int], int]


def _stream_windows(ids: list[int], block: int, step: int, drop_tail: bool) -> Iterator[Window]:
    """Windows over one stream; each target counts once, in the first window that reaches it."""
    scored = 0  # targets scored so far are ids[1 .. scored]
    for first in range(0, max(len(ids) - 1, 0), step):
        window = ids[first : first + block + 1]
        if drop_tail and len(window) < block + 1:
            return
        end = first + len(window) - 1
        if end > scored:
            yield window, scored - first
            scored = end
        if end == len(ids) - 1:
            return


def _document_windows(
    tokenizer: Tokenizer, documents: Sequence[Document], block: int
) -> Iterator[Window]:
    for document in documents:
        ids = [tokenizer.bos_id, *tokenizer.encode(document.text)]
        if len(ids) > 1:
            yield from _stream_windows(ids, block, block, drop_tail=False)


def window_batches(windows: list[Window], size: int) -> Iterator[TokenBatch]:
    """Windows side by side, ``size`` at a time, padded to the longest of them."""
    for first in range(0, len(windows), size):
        chosen = windows[first : first + size]
        width = max(len(ids) for ids, _ in chosen) - 1
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        targets = torch.full((len(chosen), width), NO_TARGET)
        document_ids = torch.full((len(chosen), width), -1, dtype=torch.int32)
        for row, (window, start) in enumerate(chosen):
            n = len(window) - 1
            ids[row, :n] = torch.tensor(window[:-1])
            targets[row, start:n] = torch.tensor(window[1 + start :])
            document_ids[row, :n] = 0
        positions: Tensor = torch.arange(width, dtype=torch.int32).expand(len(chosen), width)
        yield TokenBatch(
            token_ids=ids,
            targets=targets,
            document_ids=document_ids,
            positions=positions.contiguous(),
            hops=torch.zeros(len(chosen), width, dtype=torch.uint8),
        )
