"""What the engine takes and refuses, how requests end, and tokens as they are made."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
import torch

from loopwise.engine import Engine, EngineConfig, StreamedToken
from loopwise.engine.reference import ReferenceDecoder
from loopwise.engine.request import Completion, SamplingParams
from loopwise.errors import (
    ConfigError,
    DataError,
    DepthError,
    EngineError,
    ExitError,
    LoopwiseError,
    NonFiniteError,
)
from loopwise.exits.rule import build_policy
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import TINY, make_model
from tests.engine.decoding import (
    MAX_DEPTH,
    TEXT,
    build,
    check,
    check_all_came_back,
    engine_for,
    finish,
    job,
    reference,
    rule_for,
)
from tests.engine.test_reference import FITTED

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def plain(name: str = "add", **changes: Any) -> Engine:
    """float32, shallow, cheap."""
    return engine_for(name, torch.float32, **{"exit": "fixed:2", **changes})


def scripted(engine: Engine, *tokens: int) -> SamplingParams:
    """Parameters under which the engine says ``tokens`` whatever its weights."""
    script = list(tokens)
    real = engine.runner.read

    def read(chunks: Any, wanted: Any) -> torch.Tensor:
        logits = real(chunks, wanted)
        for row, seat in enumerate(wanted.tolist()):
            at = int(engine.table.position[seat])
            logits[row] = 0.0
            logits[row, script[min(at, len(script) - 1)]] = 50.0
        return logits

    engine.runner.read = read  # type: ignore[method-assign]
    return SamplingParams()


def say(tokens: list[int], **params: Any) -> Completion:
    """What an engine that makes ``tokens`` comes to."""
    engine = plain()
    scripted(engine, *tokens)
    params.setdefault("max_tokens", len(tokens))
    return engine.generate([[256]], SamplingParams(**params))[0].completions[0]


# How a request ends.


def test_a_full_prompt_leaves_room_for_one_token_that_need_not_be_fed():
    """U46: every case of a context of 16, with the number of tokens that come."""
    engine = plain(max_seq=16)
    for length, asked, made in ((12, 100, 5), (16, 100, 1), (16, None, 1), (12, 3, 3), (15, 2, 2)):
        params = SamplingParams(max_tokens=asked, ignore_eos=True)
        found = engine.generate([[5] * length], params)[0].completions[0]
        assert (len(found.token_ids), found.finish_reason) == (made, "length")
    with pytest.raises(EngineError, match=r"17 tokens, a slot holds 16; shorten it or raise"):
        engine.submit([5] * 17)
    assert engine.idle


def test_text_gets_a_begin_token_that_counts():
    engine = plain(max_seq=16)
    assert engine.generate(["a" * 15], GREEDY)[0].prompt_ids == (256, *b"a" * 15)
    with pytest.raises(EngineError, match="17 tokens, a slot holds 16"):
        engine.generate(["a" * 16], GREEDY)
    assert engine.generate([""], GREEDY)[0].prompt_ids == (256,)


@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_tokens_below_one_is_refused(value):
    with pytest.raises(ConfigError, match=rf"max_tokens={value}; give a whole number, 1 or more"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("source", ["tokenizer", "engine", "request"])
def test_end_ids_of_every_source_end_a_text(source):
    """U55: one source must not replace another."""
    engine = plain(end_ids=(5,))
    assert engine.end_ids == {5, 257}
    last = {"tokenizer": 257, "engine": 5, "request": 7}[source]
    scripted(engine, 65, last, 66)
    for ignore, ends in ((False, True), (True, source == "request")):
        params = SamplingParams(max_tokens=3, stop_ids=(7,), ignore_eos=ignore)
        found = engine.generate([[256]], params)[0].completions[0]
        assert found.finish_reason == ("stop" if ends else "length")
        assert found.token_ids == ((65, last) if ends else (65, last, 66))
        assert not ends or found.text == "A", "an end token has no text"


def test_a_stop_string_over_tokens_is_never_shown():
    """U35: the first pieces of a stop string wait until it is one or is none."""
    found = say([*b"xyzqwv"], stop=("yzqw",))
    assert (found.text, found.finish_reason) == ("x", "stop")
    assert found.token_ids == tuple(b"xyzqw")
    assert say([*b"xyz!"], stop=("yzqw",)).text == "xyz!"
    assert say([*b"xyz"], stop=("yzqw",)).text == "xyz", "what waits comes out at the end"
    assert say([*b"abcd"], stop=("cd", "bc", "abcd", "x")).text == "a"
    assert say([*b"stop"], stop=("stop",)).text == ""


@pytest.mark.parametrize("text", ["né", "日本", "👨‍👩‍👧", " a", "\u2028"])
def test_streamed_text_never_splits_a_character(text):
    """U37: no replacement mark in any delta, and together they are the whole."""
    tokens = [*text.encode()]
    engine = plain()
    scripted(engine, *tokens)

    async def read() -> list[StreamedToken]:
        params = SamplingParams(max_tokens=len(tokens))
        return [token async for token in engine.stream([256], params)]

    streamed = asyncio.run(read())
    assert "".join(t.output.text for t in streamed) == text == say(tokens).text
    assert not any("\ufffd" in t.output.text for t in streamed)
    cut = say(tokens, max_tokens=len(tokens) - 1).text
    assert cut == bytes(tokens[:-1]).decode("utf-8", "replace")
    assert say([0xFF, 32]).text == "\ufffd "


def test_logprobs_are_finite_where_a_token_cannot_occur():
    """U45: all but two tokens at -inf."""
    engine = plain()

    def read(chunks: Any, wanted: Any) -> torch.Tensor:
        logits = torch.full((len(wanted), 258), -math.inf)
        logits[:, 7:9] = 0.0
        return logits

    engine.runner.read = read
    params = SamplingParams(max_tokens=2, logprobs=5)
    found = engine.generate([[256]], params)[0].completions[0]
    for top in found.top_logprobs:
        assert len(top) == 5
        assert all(math.isfinite(value) for _, value in top)
    assert found.logprobs == pytest.approx([-math.log(2)] * 2)


@pytest.mark.parametrize("params", [{}, {"temperature": 5.0}])
def test_a_head_with_more_rows_than_the_tokenizer_has_ids_only_says_tokens(params):
    """Published heads are padded. One such id ended the tick, and every request in it."""

    class Padded(RecurrentModel):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = super().head(hidden)
            logits[..., 258:] += 5.0
            return logits

    model = Padded(RecurrentConfig(vocab_size=320, **TINY)).eval()
    engine = Engine(model, ByteTokenizer(), EngineConfig(exit="fixed:2", max_depth=2, max_seq=64))
    asked = [SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **params) for i in range(4)]
    found = engine.generate([[i] for i in range(4)], asked)
    for i, generation in enumerate(found):
        made = generation.completions[0].token_ids
        assert len(made) == 12 and max(made) < 258
        rule = engine.default_rule
        decoder = ReferenceDecoder(model, rule, build_policy(rule))
        steps = decoder.generate([i], 12, asked[i], vocab_size=258)
        assert tuple(step.token_id for step in steps)[1:] == made
    assert engine.idle


# Tokens as they are made.


def test_streams_are_what_generate_says_though_one_reader_leaves():
    """Three interleaved streams, one closed early; deltas add up and everything comes back."""
    rule = rule_for("add", "kl")
    jobs = [job(TEXT[:n], rule, 6, seed=n, temperature=1.0) for n in (5, 9)]
    leaver = job(TEXT[:7], rule, 12)
    engine = engine_for("add", chunk=4, page_size=3)

    async def read(j: Any, stop_after: int | None = None) -> list[StreamedToken]:
        tokens = []
        stream = engine.stream(j.prompt, j.params, exit=j.rule)
        async for token in stream:
            tokens.append(token)
            if len(tokens) == stop_after:
                await stream.aclose()
                break
            await asyncio.sleep(0)
        return tokens

    async def all_of_them() -> tuple[list[StreamedToken], ...]:
        return await asyncio.gather(read(jobs[0]), read(leaver, 2), read(jobs[1]))

    first, left, second = asyncio.run(all_of_them())
    assert len(left) == 2
    check_all_came_back(engine)
    assert not engine._listeners
    for j, tokens in zip(jobs, (first, second), strict=True):
        found = engine.generate([j.prompt], j.params, exit=j.rule)[0].completions[0]
        assert tuple(t.output.token_id for t in tokens) == found.token_ids
        assert tuple(t.output.exit_depth for t in tokens) == found.exit_depths
        assert "".join(t.output.text for t in tokens) == found.text
        assert [t.finish_reason for t in tokens] == [None] * 5 + ["length"]
        assert found.token_ids == reference("add", j).token_ids


def test_choices_are_streamed_side_by_side():
    """U47: every index, each complete, the same as without streaming."""
    engine = plain()
    params = SamplingParams(max_tokens=4, temperature=1.0, n=5, seed=3, ignore_eos=True)

    async def read() -> list[StreamedToken]:
        return [token async for token in engine.stream(TEXT[:5], params)]

    streamed = asyncio.run(read())
    found = engine.generate([TEXT[:5]], params)[0].completions
    for index in range(5):
        own = [t for t in streamed if t.index == index]
        assert tuple(t.output.token_id for t in own) == found[index].token_ids
        assert [t.finish_reason for t in own] == [None, None, None, "length"]


def test_a_failing_engine_ends_no_stream_as_if_it_were_complete():
    """The reader of a stream whose engine broke saw it end without a word."""
    engine = plain()

    async def read() -> None:
        seen = 0
        async for _ in engine.stream(TEXT[:5], GREEDY):
            seen += 1

            def broken() -> None:
                raise RuntimeError("out of memory")

            engine.step = broken
        raise AssertionError(f"ended after {seen} tokens")

    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(read())
    assert engine.idle


def test_a_bad_stream_request_is_refused_and_the_others_go_on():
    engine = plain(max_seq=16)

    async def both() -> list[StreamedToken]:
        good = engine.stream([1, 2], GREEDY)
        tokens = [await anext(good)]
        with pytest.raises(EngineError, match="a slot holds 16"):
            await anext(engine.stream([1] * 17, GREEDY))
        return [*tokens, *[t async for t in good]]

    assert len(asyncio.run(both())) == 4
    check_all_came_back(engine)


def test_progress_counts_finished_requests():
    told: list[tuple[int, int]] = []
    plain(slots=1).generate([[1], [2], [3]], GREEDY, progress=lambda *seen: told.append(seen))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_cancelled_request_keeps_what_it_has():
    engine = plain()
    request = engine.submit(TEXT[:5], SamplingParams(max_tokens=20, ignore_eos=True))
    while len(request.choices[0].outputs) < 3:
        engine.step()
    engine.cancel(request)
    check_all_came_back(engine)
    found = request.generation().completions[0]
    assert (len(found.token_ids), found.finish_reason) == (3, "cancelled")


# Bad input: one clear error each, the others unharmed.

BAD_REQUESTS: dict[str, tuple[dict[str, Any], type[LoopwiseError], list[str]]] = {
    "long": ({"prompt": [1] * 40}, EngineError, ["40 tokens", "32", "shorten"]),
    "empty": ({"prompt": []}, DataError, ["the prompt is empty"]),
    "foreign id": ({"prompt": [1, 258]}, EngineError, ["258", "0 to 257"]),
    "negative id": ({"prompt": [-1]}, EngineError, ["-1", "0 to 257"]),
    "fraction": ({"prompt": [1, 2.5]}, EngineError, ["2.5", "0 to 257"]),
    "words": ({"prompt": ["a", "b"]}, EngineError, ["'a'", "0 to 257"]),
    "number": ({"prompt": 7}, EngineError, ["7", "text or token ids"]),
    "surrogate": ({"prompt": "\ud800"}, LoopwiseError, ["U+D800"]),
    "unknown exit": ({"exit": "latnt-change:1"}, ExitError, ["latnt-change", "'latent-change'"]),
    "no threshold": ({"exit": "kl"}, ExitError, ["has no threshold"]),
    "oracle": ({"exit": "oracle:0"}, ExitError, ["'oracle'", "cannot decode"]),
    "too deep": ({"exit": "fixed:6"}, DepthError, ["6", "5", "raise engine.max_depth"]),
    "too deep rule": ({"exit": "kl:1,max=9"}, DepthError, ["9", "5", "raise engine.max_depth"]),
    "depth 0": ({"exit": "fixed:0"}, DepthError, ["0 must be at least 1"]),
    "depth -1": ({"exit": "fixed:-1"}, DepthError, ["-1 must be at least 1"]),
    "depth abc": ({"exit": "fixed:abc"}, ExitError, ["'abc'"]),
    "depth 1000000": ({"exit": "fixed:1000000"}, DepthError, ["1000000", "limit"]),
    "bias": ({"params": SamplingParams(logit_bias={300: 1.0})}, ConfigError, ["300", "257"]),
    "stop id": ({"params": SamplingParams(stop_ids=(999,))}, ConfigError, ["999", "257"]),
    "dict": (
        {"params": {"temperature": 1}},
        EngineError,
        ["{'temperature': 1}", "SamplingParams("],
    ),
    "logprobs": ({"params": SamplingParams(logprobs=259)}, ConfigError, ["259", "258"]),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
def test_a_bad_request_is_one_error_and_the_others_are_unharmed(bad):
    changes, kind, parts = BAD_REQUESTS[bad]
    good = job(TEXT[:5], "fixed:2", 3)
    engine = plain()
    request = good.submit(engine)
    engine.step()
    with pytest.raises(kind) as caught:
        engine.submit(**{"prompt": [1, 2], **changes})
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    finish(engine)
    check(request.generation(), reference("add", good, dtype=torch.float32))


BAD_ENGINES: dict[str, tuple[dict[str, Any], type[LoopwiseError], list[str]]] = {
    "kv": ({"kv_policy": "perloop"}, EngineError, ["'perloop'", "per-loop, last, ring-N"]),
    "exit": ({"exit": "k:1"}, ExitError, ["'k'", "known: fixed, kl"]),
    "exit past depth": ({"exit": "fixed:9"}, DepthError, ["9", "engine.max_depth"]),
    "depth 0": ({"max_depth": 0}, EngineError, ["engine.max_depth=0", "at least 1"]),
    "depth": ({"max_depth": 1_000_000}, EngineError, ["max_depth=1000000", "at most 256"]),
    "half a slot": ({"slots": 2.5}, EngineError, ["engine.slots=2.5", "a whole number"]),
    "page in words": ({"page_size": "32"}, EngineError, ["engine.page_size='32'", "whole number"]),
    "true pages": ({"pages": True}, EngineError, ["engine.pages=True", "whole number"]),
    "no chunk": ({"chunk": None}, EngineError, ["engine.chunk=None", "whole number"]),
    "memory": (
        {"pages": 10**9, "page_size": 32},
        EngineError,
        # 1408 bytes of a token: keys and values of 16 channels, entries 1 + 5 + 5, float32.
        [f"asks for {1408 * 32 * (10**9 + 1)} bytes", "lower engine.pages"],
    ),
    "past all memory": ({"pages": 10**30}, EngineError, ["GiB", "lower engine.pages"]),
    "slots": ({"slots": 0}, EngineError, ["engine.slots=0"]),
    "page": ({"page_size": 0}, EngineError, ["engine.page_size=0"]),
    "pages": ({"pages": 1, "page_size": 16}, EngineError, ["engine.pages=1", "at least 2 of 16"]),
    "delay": ({"coda_delay": -1}, EngineError, ["engine.coda_delay=-1"]),
    "compile": ({"compile": "yes"}, ConfigError, ["compile", "'yes'", "on, off"]),
    "end id": ({"end_ids": (258,)}, EngineError, ["258", "0 to 257"]),
    "unserved": ({"exit": "kl:1", "logits_exits": False}, ExitError, ["'kl'", "logits_exits"]),
}


@pytest.mark.parametrize("bad", BAD_ENGINES)
def test_an_engine_that_cannot_be_is_one_error(bad):
    changes, kind, parts = BAD_ENGINES[bad]
    with pytest.raises(kind) as caught:
        engine_for("add", torch.float32, **changes)
    for part in parts:
        assert part in str(caught.value)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    class Large(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.vocab_size = 400

    with pytest.raises(EngineError, match="400 ids but the model only 258"):
        Engine(build("add"), Large())


def test_a_fixed_model_is_refused_any_depth_but_one():
    with pytest.raises(DepthError, match="depth 8 is past this model's limit of 1"):
        Engine(build("fixed"), ByteTokenizer())


def test_a_rule_that_was_fitted_to_another_model_is_refused_when_it_is_asked_for():
    """It failed in the middle of a tick, and took all that were running with it."""
    state = {**FITTED["probe"], "weight": [1.0] * 8, "mean": [0.0] * 8, "std": [1.0] * 8}
    engine = Engine(build("add"), ByteTokenizer(), EngineConfig(), {"probe": state})
    good = engine.submit([1, 2], GREEDY, exit="fixed:1")
    with pytest.raises(ExitError, match="fitted at d_model 8, the model has 32"):
        engine.submit([1], exit="probe:0.5")
    with pytest.raises(ExitError, match="fitted at d_model 8"):
        engine.submit([1], exit="probe:0.5")
    with pytest.raises(ExitError, match="must be fitted"):
        engine.submit([1], exit="latent-kl:0.5")
    finish(engine)
    assert len(good.generation().completions[0].token_ids) == 4


def test_prompts_and_parameters_must_pair():
    engine = plain()
    with pytest.raises(EngineError, match="2 prompts but 1 params"):
        engine.generate([[1], [2]], [GREEDY])
    with pytest.raises(EngineError, match="a list of prompts"):
        engine.generate("Once upon a time", GREEDY)
    assert engine.generate([], GREEDY) == []
    assert engine.idle


def test_one_bad_prompt_leaves_nothing_of_its_call_behind():
    engine = plain()
    with pytest.raises(DataError, match="empty"):
        engine.generate([[1, 2], []], GREEDY)
    check_all_came_back(engine)
    assert len(engine.generate([[1, 2]], GREEDY)) == 1


@pytest.mark.parametrize("rule", ["fixed:2", "kl:0.01,max=3"])
def test_a_request_without_a_next_token_fails_alone(rule):
    """One row of the embedding is NaN, as an overflow would leave it; only who reads it fails."""
    model = make_model(injection="add", tie_embeddings=False)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "embedding" in n)[66] = math.nan
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 66], [9, 66, 9], [1, 2, 3, 4, 5, 9]]
    engine = Engine(model, ByteTokenizer(), EngineConfig(exit=rule, max_depth=3, page_size=2))
    params = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={66: -100.0})
    together = [engine.submit(p, params) for p in prompts]
    finish(engine)
    later = [engine.submit(p, params) for p in prompts]  # what is shared by now must be sound
    finish(engine)
    for requests in (together, later):
        for i in (1, 2):
            answer = requests[i].generation()
            assert answer.completions[0].finish_reason == "error"
            with pytest.raises(NonFiniteError, match="logits are NaN"):
                _ = answer.text
        for i in (0, 3):
            alone = Engine(model, ByteTokenizer(), engine.config).generate([prompts[i]], params)[0]
            assert requests[i].generation().completions[0].token_ids == (
                alone.completions[0].token_ids
            )


def test_a_reused_beginning_holds_nothing_of_a_broken_request():
    """A prompt broken in its middle left NaN in the places before, where the next request read."""
    model = make_model(injection="add", tie_embeddings=False)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "embedding" in n)[66] = math.nan
    engine = Engine(model, ByteTokenizer(), EngineConfig(exit="fixed:2", max_depth=2, page_size=4))
    start = [1, 2, 3, 4, 5, 6, 7, 8]
    broken = engine.submit([*start, 66], GREEDY)
    finish(engine)
    assert broken.error is not None
    assert len(engine.generate([[*start, 9]], GREEDY)[0].completions[0].token_ids) == 4


def test_a_model_that_breaks_streams_the_error():
    engine = plain()

    def read(chunks: Any, wanted: Any) -> torch.Tensor:
        return torch.full((len(wanted), 258), math.nan)

    engine.runner.read = read

    async def tokens() -> None:
        async for _ in engine.stream([1], GREEDY):
            raise AssertionError("no token can be made")

    with pytest.raises(NonFiniteError, match="258 of 258 logits are NaN"):
        asyncio.run(tokens())
    check_all_came_back(engine)


@pytest.mark.parametrize("call", ["enter", "recur", "read"])
def test_what_a_tick_raises_ends_those_that_run_and_nobody_else(call):
    """They never finished, and the engine was never idle again."""
    engine = plain(slots=2, chunk=4)
    real = getattr(engine.runner, call)
    calls = iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return real(*args)

    setattr(engine.runner, call, failing)
    requests = [engine.submit(TEXT[:9], SamplingParams(max_tokens=4, n=2, ignore_eos=True))]
    requests += [engine.submit(TEXT[i:12], GREEDY) for i in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(engine)
    broken = [r for r in requests if r.finished]
    assert 1 <= len(broken) <= 2 and requests[0] in broken
    for request in broken:
        answer = request.generation()
        assert str(answer.error) == "out of memory"
        assert {c.finish_reason for c in answer.completions} == {"error"}
    finish(engine)
    for i, request in enumerate(requests):
        if request not in broken:
            alone = plain().generate([TEXT[i:12]], GREEDY)[0]
            assert request.generation().completions[0].token_ids == alone.completions[0].token_ids


def test_random_bad_requests_among_good_ones_leave_no_trace():
    rng = random.Random(0)
    engine = plain()
    good = []
    for _ in range(12):
        good.append(engine.submit([rng.randrange(256)], GREEDY))
        changes, kind, _ = BAD_REQUESTS[rng.choice(list(BAD_REQUESTS))]
        with pytest.raises(kind):
            engine.submit(**{"prompt": [1, 2], **changes})
        engine.step()
    finish(engine)
    assert all(len(request.generation().completions[0].token_ids) == 4 for request in good)
    assert engine.config.max_depth == MAX_DEPTH
