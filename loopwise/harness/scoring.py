"""Batched log-likelihoods, equal to those of decoding token by token, and what they cost.

Uniform depth is one plain forward pass. Exits run live in parallel (:mod:`loopwise.measure.live`),
which equals single steps under the `per-loop` KV policy. Any other policy means what the engine
makes of it, so there the engine is fed the continuation token by token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.engine.request import SamplingParams
from loopwise.errors import ExitError
from loopwise.exits.base import Reads
from loopwise.exits.largest import likeliest
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.evaluate import check_depths, trajectory
from loopwise.measure.live import run_live
from loopwise.models.checkpoint import Checkpoint

_BATCH_TOKENS = 4096  # of one forward pass, padding included
_LOGITS = 1 << 25  # entries of one piece of logits: 128 MiB in float32

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of which the last ``n_scored`` are to be predicted; those before are given."""

    token_ids: Sequence[int]
    n_scored: int


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a piece's scored tokens in nats, and whether each was the likeliest."""

    logprob: float
    is_greedy: bool


@dataclass(slots=True)
class Tally:
    """What was run.

    Attributes:
        rows: tokens that went through the model, padding left out.
        core_row_steps: recurrences of all of them.
        scored: tokens whose probability was asked for or that were made.
        scored_depth: recurrences behind those, summed.
        busy_s: seconds inside the model.
        batches: the most requests that ran together, by kind of work: one pass, or the engine.
    """

    rows: int = 0
    core_row_steps: int = 0
    scored: int = 0
    scored_depth: int = 0
    busy_s: float = 0.0
    batches: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, requests: int, truncated: int) -> None:
        self.requests[kind] = self.requests.get(kind, 0) + requests
        self.truncated[kind] = self.truncated.get(kind, 0) + truncated

    def together(self, kind: str, requests: int) -> None:
        self.batches[kind] = max(self.batches.get(kind, 0), requests)

    def to_json(self) -> dict[str, Any]:
        """As plain values; means are None where nothing ran."""
        return {
            "requests": sum(self.requests.values()),
            "requests_by_kind": dict(self.requests),
            "truncated_requests": sum(self.truncated.values()),
            "truncated_by_kind": dict(self.truncated),
            "largest_batch": dict(self.batches),
            "tokens": self.rows,
            "core_row_steps": self.core_row_steps,
            "mean_depth": self.core_row_steps / self.rows if self.rows else None,
            "scored_tokens": self.scored,
            "mean_depth_scored": self.scored_depth / self.scored if self.scored else None,
            "busy_s": self.busy_s,
            "tokens_per_s": self.rows / self.busy_s if self.busy_s else None,
        }


class Scorer:
    """Log-likelihoods and engines of one checkpoint under one exit rule and KV policy.

    Args:
        max_length: tokens a request may feed.
        batch: requests together at most; None for as many as fit in a bounded number of tokens.
    Raises:
        ExitError: a rule that cannot decide live, or is not fitted.
        DepthError: past what the model can run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rule: ExitRule,
        *,
        kv_policy: str = "per-loop",
        max_length: int = 2048,
        batch: int | None = None,
    ) -> None:
        self.checkpoint, self.model, self.rule = checkpoint, checkpoint.model, rule
        self.kv_policy = parse_kv_policy(kv_policy)
        self.max_length, self.batch = max_length, batch
        check_depths(self.model, [rule.max_depth])
        self.policy = build_policy(rule, checkpoint.fitted_policies(), self.model)
        if self.policy.reads is Reads.TRUTH:
            raise ExitError(
                f"exit rule {rule.policy!r} needs later recurrences, so it cannot be served; "
                "choose another for an evaluation"
            )
        self.tally = Tally()

    @property
    def in_parallel(self) -> bool:
        """Whether one pass over a text means what decoding it means."""
        return self.kv_policy.exact or (self.rule.policy == "fixed" and self.rule.max_depth == 1)

    def score(self, pieces: Sequence[Piece], progress: Progress | None = None) -> list[Score]:
        """Scores in the order of ``pieces``; who shares a batch changes nothing.

        A piece without scored tokens has log-probability 0; one past ``max_length`` is the
        caller's to cut.
        """
        out = [Score(0.0, True)] * len(pieces)
        order = [i for i, piece in enumerate(pieces) if piece.n_scored]
        order.sort(key=lambda i: -len(pieces[i].token_ids))  # the longest first
        done = len(pieces) - len(order)
        for indices in self._batches(pieces, order):
            chosen = [pieces[i] for i in indices]
            start = time.perf_counter()
            found = self._parallel(chosen) if self.in_parallel else self._stepwise(chosen)
            self.tally.busy_s += time.perf_counter() - start
            for i, score in zip(indices, found, strict=True):
                out[i] = score
            done += len(indices)
            if progress is not None:
                progress("log-likelihoods", done, len(pieces))
        return out

    def engine(self, longest: int, requests: int) -> Engine:
        """An engine for requests of at most ``longest`` tokens, prompt and output."""
        slots = min(self.batch or 16, requests)
        self.tally.together("engine", slots)
        return Engine.from_checkpoint(
            self.checkpoint,
            EngineConfig(
                exit=str(self.rule),
                max_depth=self.rule.max_depth,
                kv_policy=self.kv_policy.name,
                slots=slots,
                max_seq=longest,
                logits_exits=self.policy.reads.runs_coda,
            ),
        )

    def count_engine(self, engine: Engine) -> None:
        """Add what a finished engine ran."""
        stats = engine.stats()
        self.tally.rows += stats["prelude_rows"]
        self.tally.core_row_steps += stats["core_row_steps"]

    def _batches(self, pieces: Sequence[Piece], order: list[int]) -> Iterator[list[int]]:
        """Indices that run together; lengths fall, so the first of a batch is its width."""
        tokens = _BATCH_TOKENS
        if self.rule.policy != "fixed":  # live exits read logits of every row
            tokens = min(tokens, _LOGITS // self.model.geometry.vocab_size)
        waiting: list[int] = []
        for i in order:
            width = len(pieces[waiting[0] if waiting else i].token_ids) - 1
            full = self.batch is not None and len(waiting) >= self.batch
            if waiting and (full or (len(waiting) + 1) * width > tokens):
                yield waiting
                waiting = []
            waiting.append(i)
        if waiting:
            yield waiting

    @torch.no_grad()
    def _parallel(self, pieces: Sequence[Piece]) -> list[Score]:
        batch = batch_of(pieces)
        self.tally.together("pass", len(pieces))
        rows = sum(len(piece.token_ids) - 1 for piece in pieces)
        self.tally.rows += rows
        self.tally.scored += batch.n_targets
        if self.rule.policy == "fixed":
            loss, argmax = self._uniform(batch)
            self.tally.core_row_steps += rows * self.rule.max_depth
            self.tally.scored_depth += batch.n_targets * self.rule.max_depth
        else:
            live = run_live(self.model, [batch], self.rule, self.policy)
            loss, argmax = live.loss, live.argmax
            self.tally.core_row_steps += live.core_row_steps
            self.tally.scored_depth += int(live.exit_depth.sum())
        right = argmax == batch.targets[batch.targets != NO_TARGET]
        sizes = [piece.n_scored for piece in pieces]
        return [
            Score(-float(nll.double().sum()), bool(hit.all()))
            for nll, hit in zip(loss.split(sizes), right.split(sizes), strict=True)
        ]

    def _uniform(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Loss and likeliest token of each target; only their rows go through the head."""
        [(r, latent, view)] = deque(trajectory(self.model, batch, self.rule.max_depth), maxlen=1)
        wanted = batch.targets != NO_TARGET
        hidden = self.model.hidden(latent, r, view)[wanted]
        size = max(1, _LOGITS // self.model.geometry.vocab_size)
        losses, answers = [], []
        for part, target in zip(hidden.split(size), batch.targets[wanted].split(size), strict=True):
            logits = self.model.head(part).float()
            losses.append(F.cross_entropy(logits, target, reduction="none"))
            answers.append(likeliest(logits))
        return torch.cat(losses), torch.cat(answers)

    def _stepwise(self, pieces: Sequence[Piece]) -> list[Score]:
        """Through the engine, whose chunks and steps are part of what other policies mean."""
        engine = self.engine(max(len(piece.token_ids) - 1 for piece in pieces), len(pieces))
        requests = []
        for piece in pieces:
            given, scored = split_ids(piece)
            params = SamplingParams(logprobs=1)
            requests.append(engine.submit(given, params, forced=scored))
        while not engine.idle:
            engine.step()
        self.count_engine(engine)
        out = []
        for request in requests:
            answer = request.generation()
            if answer.error is not None:
                raise answer.error
            made = answer.completions[0]
            best = [top[0][0] for top in made.top_logprobs]
            out.append(Score(sum(made.logprobs), best == list(made.token_ids)))
            self.tally.scored += len(made.token_ids)
            self.tally.scored_depth += sum(made.exit_depths)
        return out


def split_ids(piece: Piece) -> tuple[list[int], list[int]]:
    """The given tokens and those to be predicted."""
    cut = len(piece.token_ids) - piece.n_scored
    return list(piece.token_ids[:cut]), list(piece.token_ids[cut:])


def batch_of(pieces: Sequence[Piece]) -> TokenBatch:
    """One row each, padded on the right; padding belongs to no document."""
    shape = len(pieces), max(len(piece.token_ids) for piece in pieces) - 1
    ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, NO_TARGET)
    document_ids = torch.full(shape, -1, dtype=torch.int32)
    for row, piece in enumerate(pieces):
        tokens = torch.tensor(piece.token_ids)
        n = len(tokens) - 1
        ids[row, :n] = tokens[:-1]
        targets[row, n - piece.n_scored : n] = tokens[len(tokens) - piece.n_scored :]
        document_ids[row, :n] = 0
    positions = torch.arange(shape[1], dtype=torch.int32).expand(shape).contiguous()
    return TokenBatch(ids, targets, document_ids, positions, torch.zeros(shape, dtype=torch.uint8))
