"""Traces: what every token did at every recurrence of a frozen model, streamed to disk.

A trace is a folder: ``trace.json`` (what was run on what) and ``shard-*.safetensors`` (packed
blocks and what their tokens did). Everything in a report is computed from it by pure functions.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loopwise.config import read_json_object
from loopwise.data import PackedBlocks, TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DivergenceError, RunFolderError, TraceError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.entropy import output_entropy
from loopwise.exits.kl import step_kl
from loopwise.exits.largest import top_tokens
from loopwise.exits.latent_change import latent_size, relative_norm
from loopwise.exits.margin import softmax_margin
from loopwise.measure.evaluate import check_depths, trajectory
from loopwise.models.base import LoopedLM
from loopwise.models.layers import row_seeds, seeded_uniform
from loopwise.writing import make_folder, write_whole, writing

FORMAT = "loopwise-trace"
VERSION = 1
_SHARD_ROWS = 16_384
_UNFINISHED = re.compile(r"shard-\d+\.safetensors|\.trace\.json")
_BATCH_ROWS = 2048  # tokens whose latents of all recurrences are held at once
_HEAD_LOGITS = 2**23  # logits of one recurrence held at once; a matrix product of few rows is slow
_CACHED_LOGITS = 2**19  # logits worked on at once, so that what is made of them stays in the cache
_BLOCK_FIELDS = ("token_ids", "targets", "document_ids", "positions", "hops")

_HEADER_KEYS = ("horizon", "n_tokens", "policies", "shards", "seq", "weights_hash", "corpus")

PER_TOKEN = ("token", "target", "block", "column", "position", "hops")
PER_RECURRENCE = (
    "loss",  # next-token cross-entropy, nats
    "null_loss",  # the same with a label drawn from the last distribution: chance alone, nats
    "kl_prev",  # KL(p_r || p_{r-1}), nats; +inf at r = 1
    "kl_last",  # KL(p_r || p_horizon), nats
    "rms",  # root mean square of the latent h_r
    "change",  # ||h_r - h_{r-1}|| / ||h_r||
    "second",  # ||(h_r - h_{r-1}) - (h_{r-1} - h_{r-2})|| / ||h_r||; +inf at r = 1
    "cosine",  # of (h_r - h_{r-1}) with (h_{r-1} - h_{r-2}); NaN at r = 1
    "margin",  # probability of the best token minus that of the second
    "entropy",  # nats
    "argmax",
)


@dataclass(frozen=True)
class TraceInfo:
    """What a trace was taken of; written as its header."""

    checkpoint: str
    weights_hash: str
    corpus: str
    text_hash: str
    trained_mean_depth: float | None
    trained_depths: tuple[int, int] | None  # smallest and largest depth training could draw


class Trace:
    """A finished trace, read lazily.

    ``trace["loss"]`` is ``(tokens, horizon)``; ``trace["target"]`` is ``(tokens,)``; scores of exit
    policies are ``trace["score.kl"]`` and so on, and where one reads the head of some rows only,
    ``trace["read.certified"]`` says of which. Column r - 1 holds recurrence r.
    """

    header: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        header = folder / "trace.json"
        if not header.is_file():
            raise TraceError(
                f"no finished trace at {str(folder)!r}; make one with `loopwise measure`"
            )
        self.header = read_json_object(header, TraceError)
        if self.header.get("format") != FORMAT:
            raise TraceError(f"{str(folder)!r} is not a loopwise trace")
        version = self.header.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise TraceError(
                f"{str(folder)!r} has trace format {version}, this version reads up to {VERSION}; "
                "update loopwise"
            )
        missing = [key for key in _HEADER_KEYS if key not in self.header]
        if missing:
            raise TraceError(f"{str(header)!r} lacks {missing[0]!r}; measure again")
        self.folder = folder
        self.horizon: int = self.header["horizon"]
        self.n_tokens: int = self.header["n_tokens"]
        self.policies: list[str] = self.header["policies"]

    def __getitem__(self, name: str) -> NDArray[Any]:
        parts = [self._read(shard, name) for shard in self.header["shards"]]
        return torch.cat(parts).numpy()

    def blocks(self) -> TokenBatch:
        """The packed blocks that were run, as one batch."""
        return TokenBatch(*(torch.from_numpy(self[f"blocks.{name}"]) for name in _BLOCK_FIELDS))

    def _read(self, shard: str, name: str) -> Tensor:
        path = self.folder / shard
        try:
            with safe_open(path, framework="pt") as file:
                if name not in file.keys():  # noqa: SIM118
                    known = ", ".join(sorted(file.keys()))
                    raise TraceError(f"{str(self.folder)!r} has no {name!r}; it has: {known}")
                return file.get_tensor(name)
        except (SafetensorError, OSError) as err:
            raise TraceError(
                f"{str(path)!r} is missing or truncated ({err}); measure again"
            ) from None


@torch.no_grad()
def write_trace(
    model: LoopedLM,
    blocks: PackedBlocks,
    folder: Path,
    info: TraceInfo,
    *,
    horizon: int = 32,
    limit: int | None = None,
    policies: Sequence[ExitPolicy] = (),
    byte_lengths: NDArray[np.int32] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Run ``blocks`` to ``horizon`` and stream every token's trajectory into ``folder``.

    Memory is that of one batch, whatever the length of the corpus.

    Args:
        model: frozen; its dtype is the dtype of the measurement.
        limit: at most so many blocks.
        policies: whose scores to record beside the standard quantities.
        byte_lengths: UTF-8 bytes of each token id, ``(vocab,)``, for bits per byte.
        progress: called with blocks done and blocks in all.
    Raises:
        DepthError: a horizon the model cannot run.
        RunFolderError: the folder exists and is not an unfinished trace.
        WriteError: the disk refuses; what was written stays an unfinished trace.
    """
    check_depths(model, [horizon])
    if (folder / "trace.json").exists():
        raise RunFolderError(f"{str(folder)!r} holds a finished trace; choose another name")
    _claim(folder)
    total = blocks.n_blocks if limit is None else min(limit, blocks.n_blocks)
    size = max(1, _BATCH_ROWS // blocks.seq)
    shards = _Shards(folder)
    n_bytes = 0
    for first in range(0, total, size):
        batch = blocks.batch(first, min(size, total - first))
        columns = _token_columns(batch, first)
        packed = {f"blocks.{name}": getattr(batch, name) for name in _BLOCK_FIELDS}
        traced = trace_batch(model, batch, horizon, policies, first_block=first)
        shards.add({**columns, **packed, **traced})
        if byte_lengths is not None:
            n_bytes += int(byte_lengths[columns["target"].numpy()].sum())
        if progress is not None:
            progress(min(first + size, total), total)
    header = {
        "format": FORMAT,
        "version": VERSION,
        **info.__dict__,
        "horizon": horizon,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seq": blocks.seq,
        "n_blocks": total,
        "n_bytes": n_bytes,
        "policies": [p.name for p in policies],
        **shards.finish(),
    }
    write_whole(folder / "trace.json", json.dumps(header, indent=2))
    return Trace(folder)


@torch.no_grad()
def trace_batch(
    model: LoopedLM,
    batch: TokenBatch,
    horizon: int,
    policies: Sequence[ExitPolicy] = (),
    first_block: int = 0,
) -> dict[str, Tensor]:
    """Every quantity of PER_RECURRENCE and every policy's score, each ``(tokens, horizon)``.

    Of a policy that asks for the logits of some rows, ``read.NAME`` says which it asked for.

    Rows are the batch's targets in reading order. What all recurrences left is kept for this batch,
    so that the distance to the last distribution needs no second pass through the core.

    Args:
        first_block: number of the batch's first block; places the draws of ``null_loss``.
    Raises:
        DivergenceError: a latent stopped being finite; names the recurrence.
    """
    rows = (batch.targets.flatten() != NO_TARGET).nonzero().squeeze(-1)
    targets = batch.targets.flatten()[rows]
    luck = seeded_uniform(rows + first_block * batch.targets.shape[1], 1).squeeze(-1)
    latents, hiddens = [], []
    for r, latent, view in trajectory(model, batch, horizon):
        if not bool(latent.isfinite().all()):
            raise DivergenceError(
                f"the latent stops being finite at recurrence {r}: this model diverges there; "
                f"measure to a horizon of at most {r - 1}"
            )
        if r == 1:
            injection = model.prelude(batch.token_ids, view)
            initial = model.initial_latent(injection, row_seeds(batch.positions))
            latents.append(initial.flatten(0, -2)[rows])
        latents.append(latent.flatten(0, -2)[rows])
        hiddens.append(model.hidden(latent, r, view).flatten(0, -2)[rows])
    parts = [
        _trace_rows(
            model,
            [h[of] for h in latents],
            [h[of] for h in hiddens],
            targets[of],
            luck[of],
            policies,
        )
        for of in torch.arange(rows.numel()).split(
            max(1, _HEAD_LOGITS // model.geometry.vocab_size)
        )
    ]
    return _joined(parts)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _trace_rows(
    model: LoopedLM,
    latents: list[Tensor],
    hiddens: list[Tensor],
    targets: Tensor,
    luck: Tensor,
    policies: Sequence[ExitPolicy],
) -> dict[str, Tensor]:
    """``trace_batch`` for some rows, given what each recurrence left of them.

    Args:
        latents: before recurrence 1 and after each, horizon + 1 tensors ``(rows, d_model)``.
        hiddens: what the head reads after each, horizon tensors ``(rows, d_model)``.
        luck: uniform draws that choose the null's labels, ``(rows,)`` float64.
    """
    last = model.head(hiddens[-1]).float().log_softmax(dim=-1)
    before = torch.full_like(last, torch.nan)
    labels = torch.stack((targets, _draw_labels(last, luck)), dim=1)  # the true one, one by chance
    step_before: Tensor | None = None
    memories = [
        last.new_zeros(len(targets), p.memory_width(last.shape[-1], latents[0].shape[-1]))
        for p in policies
    ]
    few = max(1, _CACHED_LOGITS // last.shape[-1])
    columns: dict[str, list[Tensor]] = {}
    for r, hidden in enumerate(hiddens, start=1):
        logits = model.head(hidden).float()
        step = latents[r].float() - latents[r - 1].float()
        some = zip(*(x.split(few) for x in (logits, before, last, labels)), strict=True)
        values = {
            **_joined([_output_columns(*rows, first=r == 1) for rows in some]),
            **_latent_columns(latents[r].float(), step, step_before),
        }
        for i, policy in enumerate(policies):
            output = Output.known(logits, hidden)
            seen = Observation(r=r, latent=latents[r], previous=latents[r - 1], output=output)
            values[f"score.{policy.name}"], memories[i] = policy.score(seen, memories[i])
            if policy.reads is Reads.HIDDEN:
                values[f"read.{policy.name}"] = output.asked
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
        step_before = step
    return {name: torch.stack(parts, dim=1) for name, parts in columns.items()}


def _draw_labels(log_p: Tensor, luck: Tensor) -> Tensor:
    """One label per row from its own distribution by inverting its CDF, ``(rows,)``."""
    cdf = log_p.double().exp().cumsum(dim=-1)
    labels = torch.searchsorted(cdf, luck.unsqueeze(1) * cdf[:, -1:], right=True)
    return labels.squeeze(1).clamp_max(log_p.shape[-1] - 1)


def _output_columns(
    logits: Tensor, before: Tensor, last: Tensor, labels: Tensor, *, first: bool
) -> dict[str, Tensor]:
    """What logits ``(rows, vocab)`` say beside log-probabilities of before and of the end.

    ``before``, of no meaning where this is the ``first`` recurrence, is overwritten with these.
    """
    log_p, p = logits.log_softmax(dim=-1), logits.softmax(dim=-1)  # cheaper than log_p.exp()
    top = top_tokens(logits)
    loss, null_loss = (-log_p.gather(1, labels)).unbind(dim=1)
    kl_prev = torch.full_like(loss, torch.inf) if first else step_kl(log_p, before, p)
    before.copy_(log_p)
    return {
        "loss": loss,
        "null_loss": null_loss,
        "kl_prev": kl_prev,
        "kl_last": step_kl(log_p, last, p),
        "margin": softmax_margin(log_p, top),
        "entropy": output_entropy(log_p, p),
        "argmax": top[:, 0].int(),
    }


def _latent_columns(now: Tensor, step: Tensor, step_before: Tensor | None) -> dict[str, Tensor]:
    """How one recurrence moved the latents ``(rows, d_model)``."""
    size = latent_size(now)
    if step_before is None:
        second, cosine = torch.full_like(size, torch.inf), torch.full_like(size, torch.nan)
    else:
        second = relative_norm(step - step_before, size)
        product = (step.norm(dim=-1) * step_before.norm(dim=-1)).clamp_min(1e-20)
        cosine = (step * step_before).sum(dim=-1) / product
    rms = size / now.shape[-1] ** 0.5
    return {"rms": rms, "change": relative_norm(step, size), "second": second, "cosine": cosine}


def _claim(folder: Path) -> None:
    """Make the folder, or empty it of an unfinished trace; anything else in it is somebody's."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{str(folder)!r} is a file; choose another name for the trace")
    foreign = [p.name for p in folder.glob("*") if not _UNFINISHED.fullmatch(p.name)]
    if foreign:
        raise RunFolderError(
            f"{str(folder)!r} holds other files ({', '.join(sorted(foreign)[:3])}); "
            "choose another folder for the traces"
        )
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)


def _token_columns(batch: TokenBatch, first_block: int) -> dict[str, Tensor]:
    n, seq = batch.targets.shape
    mask = batch.targets != NO_TARGET
    block = torch.arange(first_block, first_block + n, dtype=torch.int32)[:, None].expand(n, seq)
    column = torch.arange(seq, dtype=torch.int32)[None].expand(n, seq)
    return {
        "token": batch.token_ids[mask].int(),
        "target": batch.targets[mask].int(),
        "block": block[mask],
        "column": column[mask],
        "position": batch.positions[mask].int(),
        "hops": batch.hops[mask],
    }


class _Shards:
    """Rows of columns, written out whenever a shard is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.n_tokens = 0
        self._waiting: list[dict[str, Tensor]] = []
        self._rows = 0

    def add(self, columns: dict[str, Tensor]) -> None:
        self._waiting.append(columns)
        self._rows += len(columns["target"])
        if self._rows >= _SHARD_ROWS:
            self._write()

    def finish(self) -> dict[str, Any]:
        if self._rows:
            self._write()
        return {"shards": self.names, "n_tokens": self.n_tokens}

    def _write(self) -> None:
        name = f"shard-{len(self.names):05d}.safetensors"
        merged = {k: torch.cat([c[k] for c in self._waiting]) for k in self._waiting[0]}
        with writing(self.folder / name):
            save_file(merged, self.folder / name)
        self.names.append(name)
        self.n_tokens += self._rows
        self._waiting, self._rows = [], 0
