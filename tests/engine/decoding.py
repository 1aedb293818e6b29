"""Small models, jobs, their reference results, and an engine whose unused storage is poisoned."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from naive import roughen
from torch import Tensor

from loopwise.engine import Engine, EngineConfig, Generation, Request
from loopwise.engine.kv_policy import parse_kv_policy
from loopwise.engine.reference import ReferenceDecoder
from loopwise.engine.request import SamplingParams
from loopwise.exits import EXITS
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.rule import ExitRule, build_policy, parse_rule, why_not_built
from loopwise.models.base import LoopedLM
from loopwise.models.dory import DoryConfig, DoryModel
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.looped import LoopedConfig, LoopedModel
from loopwise.models.loopformer import LoopFormerConfig, LoopFormerModel
from loopwise.models.ouro import OuroConfig, OuroModel
from loopwise.models.parcae import ParcaeConfig, ParcaeModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.engine.test_reference import FITTED

MAX_DEPTH = 5
TEXT = [256, *b"Tom has a red ball. Where is it?"]
SIZES: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48}
RECURRENT: dict[str, dict[str, Any]] = {
    "add": {"injection": "add", "n_core_layers": 1},
    "concat, two cores": {},
    "noise": {"latent_init": "noise", "n_core_layers": 1},
    "starts from the injection": {"latent_init": "injection", "injection": "add"},
    "no prelude, no coda": {"n_prelude_layers": 0, "n_coda_layers": 0, "injection": "add"},
    "two codas, all heads": {"n_coda_layers": 2, "n_kv_heads": 4, "n_core_layers": 1},
}
LOOPED = ["none", "input", "attn-first", "residual-all", "attn-all"]
ARCHITECTURES = [*RECURRENT, *LOOPED, "fixed", "ouro"]
# They ask more of a view: positions; windows, phases by layer and scales; tokens in every layer.
ASKING = ["loopformer", "dory", "dory, no coda", "parcae"]
ARCHITECTURES += ASKING
KV_POLICIES = ["per-loop", "last", "ring-2", "ring-3", "first-then-last"]


@cache
def build(name: str, dtype: torch.dtype = torch.float64) -> LoopedLM:
    """float64 by default: a loop may be chaotic, and would then grow any rounding."""
    model: LoopedLM
    if name in RECURRENT:
        model = make_model(**RECURRENT[name])
    elif name in LOOPED:
        config = LoopedConfig(vocab_size=258, n_layers=1, inject=name, **SIZES)  # type: ignore[arg-type]
        model = LoopedModel(config).eval()
        roughen(model, 1)
    elif name == "ouro":
        model = OuroModel(OuroConfig(vocab_size=258, n_layers=1, head_dim=8, **SIZES)).eval()
        roughen(model, 1)
    elif name in ASKING:
        model = _asking(name).eval()
        roughen(model, 1)
    else:
        model = FixedModel(FixedConfig(vocab_size=258, n_layers=2, **SIZES)).eval()
        roughen(model, 1)
    return model.to(dtype)


def _asking(name: str) -> LoopedLM:
    shape = {"vocab_size": 258, **SIZES}
    layers = {"n_prelude_layers": 1, "n_core_layers": 1, "n_coda_layers": 1}
    if name == "dory":
        return DoryModel(DoryConfig(**shape, **layers, head_dim=8, local_layers=(1, 2), window=3))
    if name == "dory, no coda":
        layers["n_coda_layers"] = 0
        return DoryModel(DoryConfig(**shape, **layers, head_dim=8, local_layers=(1,), window=3))
    del shape["n_kv_heads"]
    if name == "parcae":
        return ParcaeModel(ParcaeConfig(**shape, **layers, value_layers=(0, 1, 2)))
    return LoopFormerModel(
        LoopFormerConfig(**shape, n_layers=1, n_loops=MAX_DEPTH, max_positions=48)
    )


@cache
def live_rules(name: str) -> list[str]:
    """The rules a model can run: a gate belongs to models that carry one."""
    return [
        rule
        for rule in EXITS
        if EXITS[rule].reads not in (Reads.NOTHING, Reads.TRUTH)
        and why_not_built(rule, FITTED, build(name)) is None
    ]


class _Listening(ExitPolicy):
    """Scores of all policies at once, written down; never stops a token."""

    name, reads = "listening", Reads.LOGITS

    def __init__(self, model: str) -> None:
        self.inner = {n: policy_for(model, ExitRule(policy=n)) for n in live_rules(model)}
        self.memory: dict[str, Tensor] = {}
        self.scores: dict[str, set[float]] = {name: set() for name in self.inner}

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        self.widths = {n: p.memory_width(vocab_size, d_model) for n, p in self.inner.items()}
        return 0

    def score(self, seen: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        if seen.r == 1:
            self.memory = {n: torch.zeros(1, width) for n, width in self.widths.items()}
        for name, policy in self.inner.items():
            score, self.memory[name] = policy.score(seen, self.memory[name])
            if score.isfinite().all():
                self.scores[name].add(round(float(score), 9))
        return torch.full((1,), math.inf), memory


def policy_for(name: str, rule: ExitRule) -> ExitPolicy:
    return build_policy(rule, FITTED, build(name))


@cache
def scores_of(name: str) -> dict[str, list[float]]:
    listening = _Listening(name)
    rule = ExitRule(max_depth=MAX_DEPTH)
    reference = ReferenceDecoder(build(name), rule, listening)
    for token_id in TEXT[:14]:
        reference.feed(token_id)
    return {policy: sorted(scores) for policy, scores in listening.scores.items()}


@cache
def rule_for(name: str, policy: str, **changes: Any) -> ExitRule:
    """Threshold in the widest gap near the middle of the scores, so that no rounding decides."""
    if name == "fixed":
        return parse_rule("fixed:1")
    if policy == "fixed":
        return parse_rule("fixed:3")
    ordered = scores_of(name)[policy]
    middle = len(ordered) // 2
    window = ordered[max(middle - 4, 0) : middle + 5]
    gaps = [b - a for a, b in pairwise(window)]
    at = gaps.index(max(gaps))
    threshold = (window[at] + window[at + 1]) / 2
    return replace(ExitRule(policy=policy, threshold=threshold, max_depth=MAX_DEPTH), **changes)


@dataclass(frozen=True)
class Job:
    """A request as a test means it."""

    prompt: tuple[int, ...]
    rule: ExitRule
    params: SamplingParams

    def submit(self, engine: Engine, priority: int = 0) -> Request:
        return engine.submit(self.prompt, self.params, exit=self.rule, priority=priority)


def job(prompt: Iterable[int], rule: ExitRule | str, new_tokens: int = 4, **params: Any) -> Job:
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    params = {"ignore_eos": True, "seed": 0, **params}
    return Job(tuple(prompt), rule, SamplingParams(max_tokens=new_tokens, **params))


@dataclass(frozen=True)
class Answer:
    """What a job comes to: token ids, depths of all that were fed, log-probabilities."""

    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    logprobs: tuple[float, ...]


@cache
def reference(
    name: str, wanted: Job, kv: str = "per-loop", chunk: int = 1, index: int = 0, dtype: Any = None
) -> Answer:
    """By the reference decoder; ``index`` is that of the choice."""
    params, policy = wanted.params, policy_for(name, wanted.rule)
    decoder = ReferenceDecoder(
        build(name, dtype or torch.float64),
        wanted.rule,
        policy,
        params.choice_seed(0),
        parse_kv_policy(kv),
        chunk,
    )
    own = replace(params, seed=params.choice_seed(index))
    assert params.max_tokens is not None
    steps = list(decoder.generate(wanted.prompt, params.max_tokens, own))
    first = len(wanted.prompt)
    made = tuple(s.token_id for s in steps[first:])
    log_p = [s.logits.log_softmax(-1) for s in steps[first - 1 : -1]]
    logprobs = tuple(float(p[i]) for p, i in zip(log_p, made, strict=True))
    return Answer(made, tuple(s.exit_depth for s in steps[:-1]), logprobs)


def answer_of(found: Generation, index: int = 0) -> Answer:
    made = found.completions[index]
    prompt = found.prompt_exit_depths
    if None in prompt[:-1] or index > 0:  # from the cache, or another choice's to compute
        return Answer(made.token_ids, made.exit_depths, made.logprobs)
    assert prompt[-1] == made.exit_depths[0]
    depths = tuple(d for d in prompt if d is not None) + made.exit_depths[1:]
    return Answer(made.token_ids, depths, made.logprobs)


def check(found: Generation, wanted: Answer, what: str = "", index: int = 0) -> None:
    """Tokens and depths equal, log-probabilities within a ten-thousandth."""
    answer = answer_of(found, index)
    assert answer.token_ids == wanted.token_ids, what
    assert answer.depths == wanted.depths[-len(answer.depths) :], what
    if index == 0:
        known = [(a, b) for a, b in zip(found.prompt_exit_depths, wanted.depths, strict=False)]
        assert all(a in (None, b) for a, b in known), what
    gaps = [abs(a - b) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True)]
    assert max(gaps) < 1e-4, what


def engine_for(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Engine:
    """An engine whose unwritten entries are NaN, all but the page of zeros."""
    depth = 1 if name == "fixed" else MAX_DEPTH
    usual: dict[str, Any] = {"exit": f"fixed:{depth}", "max_depth": depth, "max_seq": 32}
    engine = Engine(
        build(name, dtype), ByteTokenizer(), EngineConfig(**{**usual, **changes}), FITTED
    )
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    size = engine.cache.shape.page_size
    for stage, *pools in zip(
        engine.cache.stages, engine.cache.keys, engine.cache.values, strict=True
    ):
        for pool in pools:
            pool[stage.entries * size :] = math.nan


def run(engine: Engine, jobs: Iterable[Job], limit: int = 5000) -> list[Generation]:
    """Submitted together, run to the end."""
    requests = [j.submit(engine) for j in jobs]
    finish(engine, limit)
    return [request.generation() for request in requests]


def finish(engine: Engine, limit: int = 5000) -> None:
    for _ in range(limit):
        if engine.idle:
            check_all_came_back(engine)
            return
        engine.step()
    raise AssertionError(f"the engine hangs: {engine.stats()}")


def check_all_came_back(engine: Engine) -> None:
    """Every slot, seat and page, and nothing is remembered of who is gone."""
    scheduler = engine.scheduler
    assert scheduler.pool.free == scheduler.limits.pages
    assert sorted(scheduler._slots) == list(range(scheduler.limits.slots))
    assert sorted(scheduler._seats) == list(range(scheduler.limits.slots, scheduler.seats))
    ticks = engine._ticks
    assert not ticks._choices
    assert not any(not c.dropped for c in ticks._live)
    assert not any(not c.dropped for _, c in ticks._settled)
