"""Depth-wise continuous batching: every tick is one recurrence of all live tokens.

A token that settles leaves the core at once and the next one takes its place, so what an exit rule
saves is not computed. Tokens of a prompt are rows like any other and leave as they settle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from loopwise.config import check_choices
from loopwise.engine.counts import Counts
from loopwise.engine.detokenize import Detokenizer
from loopwise.engine.kernels import can_fuse
from loopwise.engine.kv_cache import CacheShape, Ints, KVCache
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.engine.request import Completion, FinishReason, SamplingParams, TokenOutput
from loopwise.engine.rows import RowTable
from loopwise.engine.runner import Calls, LiveRows, Runner
from loopwise.engine.sampler import History, LogitsError, sample
from loopwise.engine.scheduler import Chunk, Limits, Scheduler, Sequence
from loopwise.errors import DataError, DepthError, EngineError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.evaluate import check_depths
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint
from loopwise.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs; the defaults suit a laptop.

    Attributes:
        exit: rule of requests that name none.
        max_depth: most recurrences of any token; sizes the storage of ``per-loop``.
        kv_policy: ``per-loop``, ``last``, ``ring-N`` or ``first-then-last``.
        slots: requests in flight at once.
        max_seq: tokens of one request, prompt and output.
        pages: of KV storage; None holds every slot at full length.
        page_size: tokens of a page.
        chunk: prompt tokens that enter the core together; under an approximate KV policy a part
            of the result's meaning.
        prefill_rows: prompt tokens in the core at once; None: one chunk.
        prefix_cache: keep finished prompts and share what begins alike.
        logits_exits: serve rules that read logits, which keep a coda entry per recurrence.
        coda_batch: settled tokens that are worth a pass of coda and head.
        coda_delay: ticks one may wait for that.
        batching: ``continuous`` starts a token as soon as another stops. For comparison,
            ``lockstep`` lets all wait for the deepest token of each step, and ``static`` in
            addition starts no request before all of a batch are finished.
        max_wait: ticks a request may be overtaken by smaller ones.
        end_ids: ids that end a text, beside the tokenizer's own.
        compile: compile the model's functions, once for any number of rows.
        kernels: ``auto`` builds the decode attention with the machine's C compiler, where there is
            one; :meth:`Engine.stats` says which is used.
    """

    exit: str = "fixed:8"
    max_depth: int = 8
    kv_policy: str = "per-loop"
    slots: int = 32
    max_seq: int = 1024
    pages: int | None = None
    page_size: int = 32
    chunk: int = 128
    prefill_rows: int | None = None
    prefix_cache: bool = True
    logits_exits: bool = True
    coda_batch: int = 1
    coda_delay: int = 0
    batching: Literal["continuous", "lockstep", "static"] = "continuous"
    max_wait: int = 1000
    end_ids: tuple[int, ...] = ()
    compile: Literal["on", "off"] = "off"
    kernels: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("max_depth", "coda_batch"):
            if getattr(self, name) < 1:
                raise EngineError(f"engine.{name}={getattr(self, name)} must be at least 1")
        if self.coda_delay < 0:
            raise EngineError(f"engine.coda_delay={self.coda_delay} must not be negative")

    def limits(self) -> Limits:
        """Raises EngineError where they do not fit together."""
        per_slot = -(-self.max_seq // max(1, self.page_size))
        return Limits(
            slots=self.slots,
            max_seq=self.max_seq,
            chunk=self.chunk,
            prefill_rows=self.chunk if self.prefill_rows is None else self.prefill_rows,
            pages=self.slots * per_slot if self.pages is None else self.pages,
            page_size=self.page_size,
            max_wait=self.max_wait,
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request came to.

    Attributes:
        prompt_ids: as fed, begin-of-text included.
        prompt_exit_depths: recurrences of each prompt token; None for those found in the cache.
        completions: one per choice.
        ttft_s: from submission to the first token, of the first choice that had one.
        total_s: from submission to the last token.
        reused_tokens: of the prompt, found in the prefix cache.
    """

    prompt_ids: tuple[int, ...]
    prompt_exit_depths: tuple[int | None, ...]
    completions: tuple[Completion, ...]
    ttft_s: float
    total_s: float
    reused_tokens: int

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.completions[0].text


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request while it runs."""

    request: Request
    index: int
    sequence: Sequence
    text: Detokenizer
    outputs: list[TokenOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: Tensor | None = None  # of the next token, once its row has been read

    @property
    def next_forced(self) -> int | None:
        forced = self.request.forced
        return None if forced is None else forced[len(self.outputs)]

    def take_logits(self) -> Tensor:
        logits, self.logits = self.logits, None
        assert logits is not None, "a settled row has been read"
        return logits

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "a completion is of a finished choice"
        outputs = self.outputs
        asked = self.request.params.logprobs is not None
        return Completion(
            index=self.index,
            token_ids=tuple(o.token_id for o in outputs),
            text="".join(o.text for o in outputs),
            exit_depths=tuple(o.exit_depth for o in outputs),
            logprobs=tuple(o.logprob for o in outputs),
            top_logprobs=tuple(o.top_logprobs for o in outputs) if asked else (),
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters, and what has come of it so far.

    Attributes:
        error: why it could not be finished; the others go on.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rule: ExitRule
    max_tokens: int
    end_ids: frozenset[int]
    submitted_s: float
    choices: list[Choice] = field(default_factory=list)
    depths: list[int | None] = field(default_factory=list)
    forced: SequenceOf[int] | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.choices)

    def generation(self) -> Generation:
        """Raises what kept it from being finished."""
        if self.error is not None:
            raise self.error
        return Generation(
            prompt_ids=self.prompt_ids,
            prompt_exit_depths=tuple(self.depths),
            completions=tuple(c.completion() for c in self.choices),
            ttft_s=self.ttft_s,
            total_s=self.total_s,
            reused_tokens=self.choices[0].sequence.reused,
        )


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of a running request, as :meth:`Engine.stream` yields them.

    Attributes:
        index: of the choice.
        finish_reason: with the last token of a choice.
    """

    index: int
    output: TokenOutput
    finish_reason: FinishReason | None


class Engine:
    """Decodes many requests together, each token at the depth it needs.

    Args:
        model: moved nowhere; frozen.
        tokenizer: of the model.
        fitted: state of fitted exit policies by name (``exits.json``).
        calls: of another engine of the same model, to compile once for both.
    Raises:
        EngineError: settings that do not fit together or do not fit the model.
    """

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        fitted: Mapping[str, Any] | None = None,
        calls: Calls | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        geometry = model.geometry
        if tokenizer.vocab_size > geometry.vocab_size:
            raise EngineError(
                f"the tokenizer has {tokenizer.vocab_size} ids but the model only "
                f"{geometry.vocab_size}; they do not belong together"
            )
        check_depths(model, [config.max_depth])
        self.model, self.tokenizer, self.config = model.eval(), tokenizer, config
        self.kv_policy = parse_kv_policy(config.kv_policy)
        limits = config.limits()
        static = config.batching == "static"
        self.scheduler = Scheduler(limits, self.kv_policy.exact, whole_batches=static)
        shape = CacheShape(
            limits.pages, limits.page_size, config.max_depth, coda_every=config.logits_exits
        )
        device = next(model.parameters()).device
        self.cache = KVCache(geometry, self.kv_policy, shape, model.dtype, device)
        seats = self.scheduler.seats
        fused = config.kernels == "auto" and can_fuse(model.dtype, device)
        self.table = RowTable(
            self.cache,
            seats=seats,
            slots=limits.slots,
            max_seq=limits.max_seq,
            rope=geometry.rope,
            fused=fused,
        )
        self.attention = "compiled kernel" if fused else "tensor operations"
        self._fitted = dict(fitted or {})
        self._policy_index: dict[str, int] = {}
        calls = Calls(model, config.compile == "on") if calls is None else calls
        self.runner = Runner(model, self.cache, self.table, calls, seats=seats)
        self.default_rule = self._rule(config.exit)
        self._check_ids("engine.end_ids", config.end_ids)
        self.end_ids = frozenset((tokenizer.eos_id, *config.end_ids))
        self._choices: dict[Sequence, Choice] = {}
        self._live: list[Chunk] = []
        self._settled: list[tuple[int, Chunk]] = []  # since which tick
        self._chunk_at: dict[int, Chunk] = {}  # by seat
        self._arrivals = 0
        self._counts = Counts(config.max_depth)
        self._listeners: dict[Request, asyncio.Queue[StreamedToken | None]] = {}
        self._driver: asyncio.Task[None] | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, config: EngineConfig | None = None) -> Engine:
        """An engine with the exit rules fitted to the checkpoint."""
        return cls(checkpoint.model, checkpoint.tokenizer, config, checkpoint.fitted_policies())

    # Requests.

    def submit(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        exit: str | ExitRule | None = None,
        priority: int = 0,
        forced: SequenceOf[int] | None = None,
    ) -> Request:
        """Queue a request; :meth:`step` makes it go on.

        ``max_tokens`` past what the slot leaves is cut to it, with finish reason ``length``.

        Args:
            prompt: text, which gets a begin-of-text token, or token ids as they are to be fed.
            exit: when its tokens stop; by default the engine's rule.
            priority: higher starts sooner, and is preempted later.
            forced: tokens to go on with whatever the model says; their log-probabilities are what
                is wanted (teacher forcing under live exits).
        Raises:
            DataError: an empty prompt.
            EngineError: a prompt that leaves no room, ids outside the vocabulary.
            ExitError, DepthError: a rule that cannot decide token by token, or past ``max_depth``.
        """
        params = SamplingParams() if params is None else params
        params.check_vocab(self.model.geometry.vocab_size)
        rule = self.default_rule if exit is None else self._rule(exit)
        ids = self._prompt_ids(prompt)
        room = self.config.max_seq - len(ids) + 1  # the last token made need not be fed
        if forced is not None:
            self._check_ids("forced", forced)
            params = _forcing(params, forced, room)
        request = Request(
            prompt_ids=ids,
            params=params,
            rule=rule,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            end_ids=params.end_ids(self.end_ids),
            submitted_s=time.perf_counter(),
            depths=[None] * len(ids),
            forced=forced,
        )
        root = self._root(rule, params)
        leader = None
        for index in range(params.n):
            self._arrivals += 1
            sequence = Sequence(self._arrivals, list(ids), root, priority, leader)
            leader = leader or sequence
            choice = Choice(request, index, sequence, Detokenizer(self.tokenizer, params.stop))
            request.choices.append(choice)
            self._choices[sequence] = choice
            self.scheduler.submit(sequence)
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request at whatever point it is; what it has stays readable."""
        for choice in request.choices:
            if choice.finish_reason is None:
                self._finish(choice, "cancelled")

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        exit: str | ExitRule | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts together; results in their order.

        Args:
            params: for all, or one per prompt.
            progress: told (finished, all) after each tick that finished one.
        """
        if isinstance(prompts, str):
            raise EngineError(f"generate takes a list of prompts; write [{prompts[:20]!r}]")
        each = list(params) if isinstance(params, SequenceOf) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts but {len(each)} params; give one of each")
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, p, exit=exit))
            done = 0
            while not all(r.finished for r in requests):
                self.step()
                now = sum(r.finished for r in requests)
                if progress is not None and now > done:
                    progress(now, len(requests))
                done = now
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return [r.generation() for r in requests]

    async def stream(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        exit: str | ExitRule | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamedToken]:
        """Tokens as they are made. Closing the iterator cancels the request.

        Requests of one event loop share the engine's ticks.
        """
        request = self.submit(prompt, params, exit=exit, priority=priority)
        queue: asyncio.Queue[StreamedToken | None] = asyncio.Queue()
        self._listeners[request] = queue
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while (token := await queue.get()) is not None:
                yield token
            if request.error is not None:
                raise request.error
        finally:
            del self._listeners[request]
            self.cancel(request)

    async def _drive(self) -> None:
        try:
            while not self.scheduler.idle:
                self.step()
                await asyncio.sleep(0)  # readers take what is there; new requests come in
        except Exception as err:  # each reader raises it; none is to take its part for a whole
            for request in self._listeners:
                request.error = request.error or err
        finally:
            for queue in self._listeners.values():
                queue.put_nowait(None)

    # Ticks.

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self) -> None:
        """One tick: admit, one recurrence of every live row, tokens of those that stop."""
        started = time.perf_counter()
        self._enter()
        self._live = [c for c in self._live if not c.dropped]
        if self._live:
            self._recur()
        self._read()
        self._counts.ticks += 1
        self._counts.busy_s += time.perf_counter() - started

    def _enter(self) -> None:
        waits = self.config.batching != "continuous"
        if waits and (self._live or self._settled):
            return
        chunks, placements = self.scheduler.admit()
        for p in placements:
            self.table.place(p.slot, p.first, p.page)
        if not chunks:
            return
        ids: list[int] = []
        seeds = []
        for chunk in chunks:
            sequence = chunk.sequence
            choice = self._choices[sequence]
            self.table.seat(chunk.seats, sequence.slot, chunk.start, choice.request.rule)
            ids += sequence.tokens[chunk.start : chunk.end]
            seeds += [choice.request.params.seed] * len(chunk.seats)
            for seat in chunk.seats.tolist():
                self._chunk_at[seat] = chunk
        self.runner.enter([self._rows(c) for c in chunks], ids, np.array(seeds, np.int64))
        self._counts.prelude_rows += len(ids)
        self._live += chunks

    def _rows(self, chunk: Chunk) -> LiveRows:
        return LiveRows(
            chunk.live, self._policy_index[self._choices[chunk.sequence].request.rule.policy]
        )

    def _recur(self) -> None:
        exits = self.runner.recur([self._rows(c) for c in self._live])
        self._counts.see(self.table.r[np.concatenate([c.live for c in self._live])])
        for left in exits:
            if left.logits is not None:
                self._keep_logits(left.seats, left.logits)
            gone = left.seats.tolist()
            touched = {id(c): c for c in map(self._chunk_at.__getitem__, gone)}
            leaving = set(gone)
            for chunk in touched.values():
                chunk.live = np.array(
                    [s for s in chunk.live.tolist() if s not in leaving], np.int64
                )
                if not len(chunk.live):
                    self._settled.append((self.scheduler.tick, chunk))
        self._live = [c for c in self._live if len(c.live)]

    def _keep_logits(self, seats: Ints, logits: Tensor) -> None:
        """The reading at the exit is the output; a prompt's last token waits for the others."""
        for at, seat in enumerate(seats.tolist()):
            chunk = self._chunk_at[seat]
            if seat == chunk.seats[-1] and chunk.end == len(chunk.sequence.tokens):
                self._choices[chunk.sequence].logits = logits[at]

    def _read(self) -> None:
        """Coda and head for chunks that have settled, once they are worth a pass."""
        self._settled = [(since, c) for since, c in self._settled if not c.dropped]
        if not self._settled:
            return
        rows = sum(len(c.seats) for _, c in self._settled)
        waited = self.scheduler.tick - self._settled[0][0]
        config = self.config
        if self._live and config.batching != "continuous":
            return
        if self._live and rows < config.coda_batch and waited < config.coda_delay:
            return
        chunks = [c for _, c in self._settled]
        self._settled = []
        unread = [c for c in chunks if not self._reads_logits(c)]
        last = [c for c in chunks if c.end == len(c.sequence.tokens)]
        if unread:
            wanted = [c for c in unread if c.end == len(c.sequence.tokens)]
            seats = np.array([c.seats[-1] for c in wanted], np.int64)
            logits = self.runner.read([c.seats for c in unread], seats)
            for chunk, row in zip(wanted, logits, strict=True):
                self._choices[chunk.sequence].logits = row
            self._counts.coda_rows += sum(len(c.seats) for c in unread)
        for chunk in chunks:
            self._note_depths(chunk)
            # A row that is no number spoils those before it in its chunk: nobody is to find them.
            sound = len(chunk.seats) == 1 or self.runner.finite(chunk.seats)
            self.scheduler.finish(chunk, sound)
        if last:
            self._sample(last)

    def _reads_logits(self, chunk: Chunk) -> bool:
        policy = self._choices[chunk.sequence].request.rule.policy
        return self.runner.policies[self._policy_index[policy]].reads is Reads.LOGITS

    def _note_depths(self, chunk: Chunk) -> None:
        choice = self._choices[chunk.sequence]
        if choice.index == 0 and chunk.start < len(choice.request.depths):
            depths = self.table.r[chunk.seats].tolist()[: len(choice.request.depths) - chunk.start]
            choice.request.depths[chunk.start : chunk.start + len(depths)] = depths

    def _sample(self, chunks: list[Chunk]) -> None:
        choices = [self._choices[c.sequence] for c in chunks]
        depths = self.table.r[[c.seats[-1] for c in chunks]].tolist()
        logits = torch.stack([c.take_logits() for c in choices])
        while choices:
            try:
                found = sample(
                    logits,
                    [c.request.params for c in choices],
                    [c.request.params.choice_seed(c.index) for c in choices],
                    [len(c.sequence.tokens) for c in choices],
                    [_history(c) for c in choices],
                    [c.next_forced for c in choices],
                )
            except LogitsError as err:  # those rows end with it, the others are sound
                for row in err.rows:
                    choices[row].request.error = err
                    self._finish(choices[row], "cancelled")
                keep = [i for i in range(len(choices)) if i not in err.rows]
                choices, depths = [choices[i] for i in keep], [depths[i] for i in keep]
                logits = logits[keep]
                continue
            break
        else:
            return
        rows = zip(choices, depths, found.token_ids.tolist(), found.logprobs.tolist(), strict=True)
        for row, (choice, depth, token_id, logprob) in enumerate(rows):
            self._accept(choice, token_id, depth, logprob, found.top_logprobs.get(row, ()))

    def _accept(
        self,
        choice: Choice,
        token_id: int,
        depth: int,
        logprob: float,
        top: tuple[tuple[int, float], ...],
    ) -> None:
        """A new token: show its text, and go on or end."""
        request = choice.request
        if not choice.outputs and not request.ttft_s:
            request.ttft_s = time.perf_counter() - request.submitted_s
        ended = token_id in request.end_ids
        text = "" if ended else choice.text.push(token_id)
        reason: FinishReason | None = None
        if ended or choice.text.stopped:
            reason = "stop"
        elif len(choice.outputs) + 1 >= request.max_tokens:
            reason = "length"
        if reason is not None:
            text += choice.text.flush()
        output = TokenOutput(token_id, text, depth, logprob, top)
        choice.outputs.append(output)
        self._counts.tokens += 1
        if reason is None:
            self.scheduler.append(choice.sequence, token_id)
        queue = self._listeners.get(request)
        if queue is not None:
            queue.put_nowait(StreamedToken(choice.index, output, reason))
        if reason is not None:
            self._finish(choice, reason)

    def _finish(self, choice: Choice, reason: FinishReason) -> None:
        choice.finish_reason = reason
        self.scheduler.end(choice.sequence)
        del self._choices[choice.sequence]
        request = choice.request
        if request.finished:
            request.total_s = time.perf_counter() - request.submitted_s
            queue = self._listeners.get(request)
            if queue is not None:
                queue.put_nowait(None)

    # Settings.

    def _prompt_ids(self, prompt: str | SequenceOf[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = (self.tokenizer.bos_id, *self.tokenizer.encode(prompt))
        elif isinstance(prompt, Iterable):
            ids = tuple(prompt)
            self._check_ids("the prompt", ids)
        else:
            raise EngineError(f"the prompt is {prompt!r}; give text or token ids")
        if not ids:
            raise DataError("the prompt is empty; start it with at least the begin-of-text token")
        if len(ids) > self.config.max_seq:
            raise EngineError(
                f"the prompt has {len(ids)} tokens, a slot holds {self.config.max_seq}; shorten "
                "it or raise engine.max_seq"
            )
        return ids

    def _check_ids(self, what: str, ids: Iterable[object]) -> None:
        vocab = self.model.geometry.vocab_size
        for i in ids:
            if not isinstance(i, Integral) or not 0 <= int(i) < vocab:
                raise EngineError(f"{what} has token id {i!r}; ids are 0 to {vocab - 1}")

    def _rule(self, exit: str | ExitRule) -> ExitRule:
        rule = parse_rule(exit, self.config.max_depth) if isinstance(exit, str) else exit
        if rule.max_depth > self.config.max_depth:
            raise DepthError(
                f"exit rule {rule} goes to {rule.max_depth} recurrences, this engine holds "
                f"{self.config.max_depth}; lower it or raise engine.max_depth"
            )
        if rule.policy not in self._policy_index:
            policy: ExitPolicy = build_policy(rule, self._fitted)
            if policy.reads is Reads.TRUTH:
                raise ExitError(
                    f"exit rule {policy.name!r} needs later recurrences; it cannot decode"
                )
            if policy.reads is Reads.LOGITS and not self.config.logits_exits:
                raise ExitError(
                    f"exit rule {policy.name!r} reads logits; this engine was made with "
                    "engine.logits_exits=false"
                )
            _try(policy, self.model)
            self._policy_index[rule.policy] = self.runner.add_policy(policy)
        return rule

    def _root(self, rule: ExitRule, params: SamplingParams) -> int:
        if not self.config.prefix_cache:
            return self.scheduler.pool.private_root()
        seed = params.seed if self.model.seeded_latent else 0
        return self.scheduler.pool.root((str(rule), seed))

    # What happened.

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is in flight."""
        scheduler, counts = self.scheduler, self._counts
        return {
            "ticks": counts.ticks,
            "busy_s": counts.busy_s,
            "tokens": counts.tokens,
            "core_row_steps": int(counts.rows_by_recurrence.sum()),
            "rows_by_recurrence": counts.rows_by_recurrence[1:].tolist(),
            "prelude_rows": counts.prelude_rows,
            "coda_rows": counts.coda_rows,
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "free_pages": scheduler.pool.free,
            "attention": self.attention,
            "kv_bytes_per_token": self.cache.bytes_per_token,
            **{k: scheduler.counts[k] for k in _SCHEDULER_COUNTS},
            "log": list(scheduler.log),
        }

    def occupancy(self) -> Iterator[list[int]]:
        """Live rows by recurrence, tick by tick, of the last thousands of ticks."""
        for row in self._counts.recent:
            yield row.tolist()


_SCHEDULER_COUNTS = ("admitted", "overtaken", "preempted", "reused_tokens", "longest_wait")


def _try(policy: ExitPolicy, model: LoopedLM) -> None:
    """Score one row of zeros, so that what was fitted to another model is refused here."""
    g = model.geometry
    latent = torch.zeros(1, g.d_model)
    logits = torch.zeros(1, g.vocab_size)
    seen = Observation(r=torch.ones(1).long(), latent=latent, previous=latent, logits=logits)
    policy.score(seen, torch.zeros(1, policy.memory_width(g.vocab_size, g.d_model)))


def _forcing(params: SamplingParams, forced: SequenceOf[int], room: int) -> SamplingParams:
    """Parameters under which just the forced tokens are made."""
    if not forced or len(forced) > room:
        raise EngineError(f"{len(forced)} forced tokens; this prompt leaves room for 1 to {room}")
    return replace(params, max_tokens=len(forced), ignore_eos=True, stop=(), stop_ids=(), n=1)


def _history(choice: Choice) -> History | None:
    if not choice.request.params.needs_history:
        return None
    return History(choice.request.prompt_ids, [o.token_id for o in choice.outputs])
