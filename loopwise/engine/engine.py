"""Depth-wise continuous batching: every tick is one recurrence of all live tokens.

A token that settles leaves the core at once and the next one takes its place, so what an exit rule
saves is not computed. Tokens of a prompt are rows like any other and leave as they settle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import Any

import torch

from loopwise.engine.detokenize import Detokenizer
from loopwise.engine.kernels import can_fuse
from loopwise.engine.kv_cache import CacheShape, KVCache
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.engine.packed import can_pack, is_hooked
from loopwise.engine.request import FinishReason, SamplingParams, TokenOutput
from loopwise.engine.rows import RowTable
from loopwise.engine.runner import Calls, Runner
from loopwise.engine.running import Choice, Generation, Request, StreamedToken, forcing
from loopwise.engine.scheduler import Scheduler, Sequence
from loopwise.engine.settings import EngineConfig
from loopwise.engine.ticks import Ticks
from loopwise.errors import DataError, DepthError, EngineError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.evaluate import check_depths
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint
from loopwise.tokenizer import Tokenizer


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
        self._fitted = dict(fitted or {})
        self._policy_index: dict[str, int] = {}
        if calls is None:
            pack = config.packed == "auto" and can_pack(model.dtype, device)
            pack = pack and not is_hooked(model)
            calls = Calls(model, compile=config.compile == "on", pack=pack)
        self.weights = "packed" if calls.packed else "as stored"
        self.runner = Runner(model, self.cache, self.table, calls, seats=seats)
        self.default_rule = self._rule(config.exit)
        start = tokenizer.start
        self.bos_id = start.id if config.bos_id is None else config.bos_id
        self.begins_prompts = start.added or config.bos_id is not None
        self._check_ids("engine.bos_id", [self.bos_id])
        self._check_ids("engine.end_ids", config.end_ids)
        self.end_ids = frozenset((*tokenizer.end_ids, *config.end_ids))
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
        self._driver: asyncio.Task[None] | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, config: EngineConfig | None = None) -> Engine:
        """An engine with the exit rules fitted to the checkpoint.

        Every id that ends a text counts: those the tokenizer knows and those of ``config``.
        """
        config = EngineConfig() if config is None else config
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
            prompt: text, which begins as `Tokenizer.start` says, or token ids as they are to be
                fed.
            exit: when its tokens stop; by default the engine's rule.
            priority: higher starts sooner, and is preempted later.
            forced: tokens to go on with whatever the model says; their log-probabilities are what
                is wanted (teacher forcing under live exits).
        Raises:
            DataError: an empty prompt.
            EngineError: a prompt that leaves no room, ids outside the vocabulary; weights that
                have changed since they were packed.
            ExitError, DepthError: a rule that cannot decide token by token, or past ``max_depth``.
        """
        self.runner.calls.check_weights()
        params = SamplingParams() if params is None else params
        params.check_vocab(self.model.geometry.vocab_size)
        rule = self.default_rule if exit is None else self._rule(exit)
        ids = self._prompt_ids(prompt)
        room = self.config.max_seq - len(ids) + 1  # the last token made need not be fed
        if forced is not None:
            self._check_ids("forced", forced)
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
        root = self._root(rule, params)
        leader = None
        for index in range(params.n):
            self._arrivals += 1
            sequence = Sequence(self._arrivals, list(ids), root, priority, leader)
            leader = leader or sequence
            text = Detokenizer(self.tokenizer, params.stop)
            choice = Choice(request, index, sequence, text, self._policy_index[rule.policy])
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
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts together; results in their order.

        One that fails on the way (:attr:`Generation.error`) leaves the others' results whole.

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
        except BaseException:  # Ctrl-C too: nothing of this call stays in flight
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
        self._ticks.step()

    def _heard(
        self, choice: Choice, output: TokenOutput | None, reason: FinishReason | None
    ) -> None:
        """Pass on what a tick made to whoever streams it."""
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
            policy = build_policy(rule, self._fitted, self.model)
            if policy.reads is Reads.TRUTH:
                raise ExitError(
                    f"exit rule {policy.name!r} needs later recurrences; it cannot decode"
                )
            if policy.reads.runs_coda and not self.config.logits_exits:
                raise ExitError(
                    f"exit rule {policy.name!r} reads logits or what they are made of; this engine "
                    "was made with engine.logits_exits=false"
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
            **{k: scheduler.counts[k] for k in _SCHEDULER_COUNTS},
            "log": list(scheduler.log),
        }

    def occupancy(self) -> Iterator[list[int]]:
        """Live rows by recurrence, tick by tick, of the last thousands of ticks."""
        for row in self._ticks.counts.recent:
            yield row.tolist()


_SCHEDULER_COUNTS = ("admitted", "overtaken", "preempted", "reused_tokens", "longest_wait")


def _try(policy: ExitPolicy, model: LoopedLM) -> None:
    """Score one row of zeros, so that what was fitted to another model is refused here."""
    g = model.geometry
    latent = torch.zeros(1, g.d_model)
    output = Output.known(torch.zeros(1, g.vocab_size), latent)
    seen = Observation(r=torch.ones(1).long(), latent=latent, previous=latent, output=output)
    policy.score(seen, torch.zeros(1, policy.memory_width(g.vocab_size, g.d_model)))
