"""What callers of an engine see: ids, seeds, many prompts at once."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from loopwise.engine import Engine, EngineConfig, SamplingParams
from loopwise.errors import ConfigError, EngineError, LoopwiseError
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import TINY, make_model

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
WARM = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def plain(**config: object) -> Engine:
    usual = {"exit": "fixed:2", "max_depth": 2, "max_seq": 32, "slots": 4, **config}
    return Engine(make_model(injection="add"), ByteTokenizer(), EngineConfig(**usual))


# Ids.


@pytest.fixture(scope="module")
def padded() -> Engine:
    """Rows of the head past the tokenizer's 258 ids, as published checkpoints have them."""
    model = RecurrentModel(RecurrentConfig(vocab_size=320, **TINY)).eval()
    return Engine(model, ByteTokenizer(), EngineConfig(exit="fixed:2", max_depth=2, max_seq=32))


@pytest.mark.parametrize(
    ("changes", "kind", "name"),
    [
        ({"prompt": [1, 300]}, EngineError, "the prompt"),
        ({"forced": [300]}, EngineError, "forced"),
        ({"params": SamplingParams(stop_ids=(300,))}, ConfigError, "stop_ids"),
        ({"params": SamplingParams(logit_bias={300: 1.0})}, ConfigError, "logit_bias"),
    ],
)
def test_ids_that_only_the_model_has_are_refused_at_once(padded, changes, kind, name):
    """They were taken, and ended a tick with all that ran when their text was asked for."""
    with pytest.raises(kind, match=rf"{name} .*300.* 0 to 257") as caught:
        padded.submit(**{"prompt": [1], **changes})
    assert "\n" not in str(caught.value)
    assert padded.idle


def test_an_end_id_that_only_the_model_has_is_refused(padded):
    with pytest.raises(EngineError, match=r"end_ids has token id 300; ids are 0 to 257"):
        Engine(padded.model, ByteTokenizer(), EngineConfig(end_ids=(300,)))


def test_ids_of_arrays_come_back_as_plain_integers():
    """json.dumps refused what came of an array."""
    answer = plain().generate([np.array([256, 65])], GREEDY)[0]
    assert json.loads(json.dumps(answer.prompt_ids)) == [256, 65]
    engine = plain()
    request = engine.submit([256], forced=np.array([65, 66]))
    while not engine.idle:
        engine.step()
    assert request.generation().completions[0].token_ids == (65, 66)


# Seeds.


@pytest.mark.parametrize("start", ["noise", "zeros"])
def test_a_request_without_a_seed_is_its_own_and_can_be_repeated(start):
    """U40: two calls without a seed said the same."""
    model = make_model(injection="add", latent_init=start)
    engine = Engine(model, ByteTokenizer(), EngineConfig(exit="fixed:2", max_depth=2, max_seq=32))
    first, second = engine.generate(["Tom has"] * 2, WARM)
    assert first.seed != second.seed
    assert first.text != second.text
    for wanted in (first, second):
        again = SamplingParams(
            max_tokens=12, temperature=1.0, ignore_eos=True, seed=json.loads(str(wanted.seed))
        )
        assert engine.generate(["Tom has"], again)[0].text == wanted.text
        assert float(wanted.seed) == wanted.seed, "a seed that other JSON readers keep"


def test_choices_without_a_seed_differ_and_can_be_repeated():
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, n=4)
    engine = plain()
    found = engine.generate(["Tom has"], params)[0]
    assert len({c.token_ids for c in found.completions}) == 4
    again = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, n=4, seed=found.seed)
    assert [c.text for c in engine.generate(["Tom has"], again)[0].completions] == [
        c.text for c in found.completions
    ]


def test_greedy_decoding_needs_no_seed():
    """Latents that start from noise start alike; what was cached for one serves the next."""
    model = make_model(injection="add", latent_init="noise")
    config = EngineConfig(exit="fixed:2", max_depth=2, max_seq=32, page_size=2)
    engine = Engine(model, ByteTokenizer(), config)
    first = engine.generate(["Tom has"], GREEDY)[0]
    second = engine.generate(["Tom has"], GREEDY)[0]
    assert first.text == second.text
    assert (first.seed, second.seed) == (0, 0)
    assert second.reused_tokens > 0


# Many at once.


def test_a_bad_prompt_of_many_is_named():
    engine = plain()
    for bad in ([1] * 40, [300], "\ud800", []):
        with pytest.raises(LoopwiseError, match=r"^prompt 2: "):
            engine.generate([[1], [2], bad, [3]], GREEDY)
        assert engine.idle
    with pytest.raises(ConfigError, match=r"^stop_ids names token 999"):
        engine.generate([[1], [2]], SamplingParams(stop_ids=(999,)))


def test_requests_come_as_they_end():
    engine = plain(slots=2)
    lengths = (9, 2, 5, 1)
    requests = [
        engine.submit([i], SamplingParams(max_tokens=n, ignore_eos=True))
        for i, n in enumerate(lengths)
    ]
    engine.cancel(requests[3])
    seen = [requests.index(r) for r in engine.as_completed(requests)]
    assert seen == [3, 1, 2, 0]
    assert list(engine.as_completed([])) == []
    assert not engine._awaited


def test_who_stops_listening_leaves_nothing_behind():
    engine = plain(slots=2)
    requests = [engine.submit([i], GREEDY) for i in range(4)]
    ends = engine.as_completed(requests)
    next(ends)
    with pytest.raises(EngineError, match="waited for twice"):  # it never came to an end
        next(engine.as_completed(requests))
    assert len(engine._awaited) == 2, "two of four have ended, in one tick"
    ends.close()
    assert not engine._awaited
    assert all(r.finished for r in engine.as_completed(requests))


def test_ticks_do_not_look_at_requests_that_wait(monkeypatch):
    """Every tick asked every request whether it had finished."""
    engine, asked = plain(slots=2), []
    kind = type(engine.submit([1], GREEDY))
    real = kind.finished.fget
    monkeypatch.setattr(kind, "finished", property(lambda self: asked.append(1) or real(self)))
    engine.generate([[i] for i in range(40)], GREEDY)
    assert engine.stats()["ticks"] > 100
    assert len(asked) < 10 * 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_terminals_only(monkeypatch, terminal):
    told: list[int] = []
    for progress, prompts, drawn in (
        (None, [[1], [2]], terminal),
        (None, [[1]], False),
        (lambda done, of: told.append(done), [[1], [2]], False),
    ):
        err = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr("sys.stderr", err)
        monkeypatch.setenv("TERM", "xterm")
        plain().generate(prompts, GREEDY, progress=progress)
        assert ("prompts" in err.getvalue()) == drawn
    assert told == [1, 2]
