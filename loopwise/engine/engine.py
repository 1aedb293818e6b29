"""Depth-wise continuous batching: every tick is one recurrence of all live tokens.

A token that settles leaves the core at once and the next one takes its place, so what an exit rule
saves is not computed. Tokens of a prompt are rows like any other and leave as they settle.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from numbers import Integral
from typing import Any

from loopwise.engine.detokenize import Detokenizer
from loopwise.engine.kernels import can_fuse
from loopwise.engine.kv_cache import CacheShape, KVCache
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.engine.packed import can_pack, is_hooked
from loopwise.engine.progress import Told, bar
from loopwise.engine.request import FinishReason, SamplingParams, TokenOutput
from loopwise.engine.rows import RowTable
from loopwise.engine.rules import Rules
from loopwise.engine.runner import Calls, Runner
from loopwise.engine.running import Choice, Generation, Request, StreamedToken, forcing
from loopwise.engine.scheduler import Scheduler
from loopwise.engine.sequence import Sequence
from loopwise.engine.settings import EngineConfig
from loopwise.engine.ticks import Ticks
from loopwise.errors import DataError, EngineError, telling_which
from loopwise.exits.rule import ExitRule
from loopwise.measure.evaluate import check_depths
from loopwise.measure.tiers import tiers_of
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint
from loopwise.tokenizer import Tokenizer


class Engine:
    """Decodes many requests together, each token at the depth it needs.

    Args:
        model: moved nowhere; frozen.
        tokenizer: of the model.
        calls: of another engine of the same model, to compile once for both.
        fitted, tiers: state of fitted exit policies, and calibrated exit rules, by name
            (``exits.json``).
        training: how the model was trained (``training.json``).
    Raises:
        EngineError: settings that do not fit together or do not fit the model.
        ExitError, DepthError: an exit rule that cannot run here.
    """

    def __init__(
        self,
        model: LoopedLM,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        fitted: Mapping[str, Any] | None = None,
        calls: Calls | None = None,
        *,
        tiers: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        geometry = model.geometry
        if tokenizer.vocab_size > geometry.vocab_size:
            raise EngineError(
                f"the tokenizer has {tokenizer.vocab_size} ids but the model only "
                f"{geometry.vocab_size}; they do not belong together"
            )
        check_depths(model, [config.max_depth])
        limit = geometry.max_positions
        if limit is not None and config.max_seq > limit:
            raise EngineError(
                f"engine.max_seq={config.max_seq} is past the {limit} positions this model has "
                "learned; lower it"
            )
        self.model, self.tokenizer, self.config = model.eval(), tokenizer, config
        self.kv_policy = parse_kv_policy(config.kv_policy)
        limits = config.limits()
        shape = CacheShape(
            limits.pages, limits.page_size, config.max_depth, coda_every=config.logits_exits
        )
        device = next(model.parameters()).device
        self.cache = KVCache(geometry, self.kv_policy, shape, model.dtype, device)
        static = config.batching == "static"
        self.scheduler = Scheduler(limits, self.kv_policy.exact, whole_batches=static)
        seats = self.scheduler.seats
        fused = config.kernels == "auto" and can_fuse(model.dtype, device)
        self.table = RowTable(
            self.cache,
            seats=seats,
            slots=limits.slots,
            max_seq=limits.max_seq,
            rope=geometry.rope,
            n_heads=geometry.n_heads,
            fused=fused,
        )
        self.attention = "compiled kernel" if fused else "tensor operations"
        if calls is None:
            pack = config.packed == "auto" and can_pack(model.dtype, device)
            pack = pack and not is_hooked(model)
            calls = Calls(model, compile=config.compile == "on", pack=pack)
        self.weights = "packed" if calls.packed else "as stored"
        self.runner = Runner(model, self.cache, self.table, calls, seats=seats)
        self.rules = Rules(
            model,
            config,
            self.runner.add_policy,
            fitted=fitted or {},
            tiers=tiers or {},
            training=training or {},
        )
        self.default_rule = self.rules.find(config.exit)
        start = tokenizer.start
        self.bos_id = start.id if config.bos_id is None else config.bos_id
        self.begins_prompts = start.added or config.bos_id is not None
        self._ids("engine.bos_id", [self.bos_id])
        self.end_ids = frozenset((*tokenizer.end_ids, *self._ids("engine.end_ids", config.end_ids)))
        self._arrivals = 0
        self._ticks = Ticks(
            config,
            self.scheduler,
            self.table,
            self.runner,
            self._heard,
            tokenizer.vocab_size,
        )
        self._listeners: dict[Request, asyncio.Queue[StreamedToken | None]] = {}
        self._awaited: dict[Request, deque[Request]] = {}  # where each goes once it has ended
        self._driver: asyncio.Task[None] | None = None

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        calls: Calls | None = None,
    ) -> Engine:
        """An engine with the exit rules fitted to the checkpoint, and its tiers by name.

        What is not known to hold is logged and kept in :meth:`stats`: depths past training, and a
        tier under another KV policy than it was calibrated for. Every id that ends a text counts:
        those the tokenizer knows and those of ``config``.

        Raises:
            ExitError: ``exits.json`` is damaged or of other weights; see the class for others.
        """
        return cls(
            checkpoint.model,
            checkpoint.tokenizer,
            config,
            checkpoint.fitted_policies(),
            calls,
            tiers=tiers_of(checkpoint),
            training=checkpoint.training,
        )

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
            prompt: text, which begins as `Tokenizer.start` says (an empty one is the start token
                alone), or token ids as they are to be fed.
            params: a request without a seed is given one, which :class:`Generation` has.
            exit: when its tokens stop, by rule or tier; by default the engine's rule.
            priority: higher starts sooner, and is preempted later.
            forced: tokens to go on with whatever the model says; their log-probabilities are what
                is wanted (teacher forcing under live exits).
        Raises:
            DataError: no token ids.
            EngineError: a prompt that leaves no room, ids the tokenizer does not have; weights
                that have changed since they were packed.
            ConfigError: parameters this vocabulary cannot do.
            ExitError, DepthError: a rule or tier that there is not, that cannot decide token by
                token, or past ``max_depth``.
        """
        self.runner.calls.check_weights()
        params = self._checked(params).seeded()
        rule = self.default_rule if exit is None else self.rules.find(exit)
        ids = self._prompt_ids(prompt)
        room = self.config.max_seq - len(ids) + 1  # the last token made need not be fed
        if forced is not None:
            forced = self._ids("forced", forced)
            params = forcing(params, forced, room)
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
        root = self._root(request)
        leader = None
        for index in range(params.n):
            self._arrivals += 1
            sequence = Sequence(self._arrivals, list(ids), root, priority, leader)
            leader = leader or sequence
            text = Detokenizer(self.tokenizer, params.stop)
            choice = Choice(request, index, sequence, text, self.rules.index[rule.policy])
            request.choices.append(choice)
            self._ticks.add(choice)
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request at whatever point it is; what it has stays readable."""
        for choice in request.choices:
            if choice.finish_reason is None:
                self._ticks.finish(choice, "cancelled")

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        exit: str | ExitRule | None = None,
        progress: Told | None = None,
    ) -> list[Generation]:
        """Decode prompts together; results in their order.

        One that fails on the way (:attr:`Generation.error`) leaves the others' results whole.

        Args:
            params: for all, or one per prompt.
            progress: told (finished, all) whenever one has finished; None: a bar where stderr is a
                terminal.
        Raises:
            LoopwiseError: what :meth:`submit` refuses, before anything is decoded; begins with the
                index of the prompt.
        """
        if isinstance(prompts, str):
            raise EngineError(f"generate takes a list of prompts; write [{prompts[:20]!r}]")
        each = list(params) if isinstance(params, SequenceOf) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts but {len(each)} params; give one of each")
        rule = None if exit is None else self.rules.find(exit)
        if not isinstance(params, SequenceOf):
            self._checked(params)  # what is wrong for all is not the fault of a prompt
        requests: list[Request] = []
        try:
            for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
                with telling_which(f"prompt {index}"):
                    requests.append(self.submit(prompt, p, exit=rule))
            with bar(len(requests)) if progress is None else nullcontext(progress) as told:
                for done, _ in enumerate(self.as_completed(requests), 1):
                    told(done, len(requests))
        except BaseException:  # Ctrl-C too: nothing of this call stays in flight
            for request in requests:
                self.cancel(request)
            raise
        return [r.generation() for r in requests]

    def as_completed(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Step until all of ``requests`` have ended; each as soon as it has.

        Raises:
            EngineError: one of them is waited for already, and would be heard of there alone.
        """
        ended: deque[Request] = deque()
        awaited = []
        try:
            for request in dict.fromkeys(requests):
                if request in self._awaited:
                    raise EngineError("a request is waited for twice; wait for it in one place")
                if request.finished:
                    ended.append(request)
                else:
                    self._awaited[request] = ended
                    awaited.append(request)
            for _ in range(len(ended) + len(awaited)):
                while not ended:
                    self.step()
                yield ended.popleft()
        finally:
            for request in awaited:
                self._awaited.pop(request, None)

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
        self._ticks.step()

    def _heard(
        self, choice: Choice, output: TokenOutput | None, reason: FinishReason | None
    ) -> None:
        """Pass on what a tick made to whoever streams it or waits for its end."""
        if output is None and choice.request.finished:
            ended = self._awaited.pop(choice.request, None)
            if ended is not None:
                ended.append(choice.request)
        queue = self._listeners.get(choice.request)
        if queue is None:
            return
        if output is not None:
            queue.put_nowait(StreamedToken(choice.index, output, reason))
        elif choice.request.finished:
            queue.put_nowait(None)

    # Settings.

    def _prompt_ids(self, prompt: str | SequenceOf[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            text = self.tokenizer.encode(prompt)
            ids = (self.bos_id, *text) if self.begins_prompts or not text else tuple(text)
        elif isinstance(prompt, Iterable):
            ids = self._ids("the prompt", prompt)
        else:
            raise EngineError(f"the prompt is {prompt!r}; give text or token ids")
        if not ids:
            raise DataError("the prompt is empty; start it with at least the begin-of-text token")
        if len(ids) > self.config.max_seq:
            raise EngineError(
                f"the prompt has {len(ids)} tokens, a slot holds {self.config.max_seq}; shorten "
                "it or raise max_seq"
            )
        return ids

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise EngineError(
                f"params={params!r} are no SamplingParams; write SamplingParams(max_tokens=16, ...)"
            )
        params.check_vocab(self.tokenizer.vocab_size)
        return params

    def _ids(self, what: str, ids: Iterable[object]) -> tuple[int, ...]:
        """Ids as plain integers, all of them the tokenizer's; a model may have more rows."""
        vocab = self.tokenizer.vocab_size
        plain = []
        for i in ids:
            if not isinstance(i, Integral) or not 0 <= int(i) < vocab:
                raise EngineError(f"{what} has token id {i!r}; ids are 0 to {vocab - 1}")
            plain.append(int(i))
        return tuple(plain)

    def _root(self, request: Request) -> int:
        if not self.config.prefix_cache:
            return self.scheduler.pool.private_root()
        seed = request.seed if self.model.seeded_latent else 0
        return self.scheduler.pool.root((str(request.rule), seed))

    # What happened.

    def stats(self) -> dict[str, Any]:
        """Counts since the start, what is in flight, and settings that results depend on."""
        scheduler, counts = self.scheduler, self._ticks.counts
        return {
            "ticks": counts.ticks,
            "busy_s": counts.busy_s,
            "model_s": self.runner.model_s,
            "tokens": counts.tokens,
            "slot_ticks": counts.slot_ticks,
            "core_row_steps": int(counts.rows_by_recurrence.sum()),
            "rows_by_recurrence": counts.rows_by_recurrence[1:].tolist(),
            "prelude_rows": counts.prelude_rows,
            "coda_rows": self.runner.coda_rows,
            "head_rows": self.runner.head_rows,
            "coda_passes": counts.coda_passes,
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "free_pages": scheduler.pool.free,
            "attention": self.attention,
            "weights": self.weights,
            "kv_bytes_per_token": self.cache.bytes_per_token,
            "end_ids": sorted(self.end_ids),
            "chunk": self.config.chunk,
            **{k: scheduler.counts[k] for k in _SCHEDULER_COUNTS},
            "log": [*self.rules.warnings, *scheduler.log],
        }

    def occupancy(self) -> Iterator[list[int]]:
        """Live rows by recurrence, tick by tick, of the last thousands of ticks."""
        for row in self._ticks.counts.recent:
            yield row.tolist()


_SCHEDULER_COUNTS = ("admitted", "overtaken", "preempted", "reused_tokens", "longest_wait")
