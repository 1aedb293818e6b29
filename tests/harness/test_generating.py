"""Generation requests: settings of the harness, and the engine's own answers."""

from __future__ import annotations

import pytest

from loopwise.engine import Engine, EngineConfig, SamplingParams
from loopwise.errors import ConfigError
from loopwise.harness.generating import MAX_NEW_TOKENS, ask, sampling
from loopwise.harness.model import LoopwiseLM
from tests.conftest import make_model
from tests.harness.cases import loaded, request


@pytest.fixture
def checkpoint(tmp_path):
    return loaded(tmp_path / "checkpoint", make_model().double())


def test_settings_of_the_harness_become_sampling_settings():
    greedy = sampling({"until": ["\n", "", "Q:"], "max_gen_toks": 7, "do_sample": False})
    assert greedy == SamplingParams(stop=("\n", "Q:"), max_tokens=7, seed=0)
    short = sampling({"until": "\n"})
    assert short == SamplingParams(stop=("\n",), max_tokens=MAX_NEW_TOKENS, seed=0)
    drawn = sampling({"do_sample": True, "top_p": 0.9, "max_new_tokens": 3, "seed": 5})
    assert drawn == SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, seed=5)
    assert sampling({"temperature": 0.7}).temperature == 0.7
    assert sampling({"temperature": 0.0}).temperature == 0.0


def test_without_sampling_the_best_token_wins_whatever_else_is_said():
    asked = sampling({"do_sample": False, "temperature": 0.9, "top_k": 1, "top_p": 0.5})
    assert asked == SamplingParams(max_tokens=MAX_NEW_TOKENS, seed=0)


def test_a_setting_nobody_looks_at_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'max_gen_toks'"):
        sampling({"max_gen_tok": 5})
    with pytest.raises(ConfigError, match="num_beams"):
        sampling({"num_beams": 4})


def test_answers_are_the_engines_and_end_before_a_stop_string(checkpoint):
    model = LoopwiseLM(checkpoint, depth=3)
    texts = ["Tom has a red ball.", "x", ""]
    settings = {"until": [], "max_gen_toks": 12}
    found = model.generate_until([request("generate_until", t, settings) for t in texts])
    engine = Engine.from_checkpoint(checkpoint, EngineConfig(exit="fixed:3", max_depth=3))
    wanted = [g.text for g in engine.generate(texts, SamplingParams(max_tokens=12))]
    assert found == wanted
    stop = wanted[0][4]
    cut = model.generate_until([request("generate_until", texts[0], {**settings, "until": [stop]})])
    assert cut == [wanted[0][: wanted[0].index(stop)]]


def test_what_was_run_is_counted(checkpoint):
    model = LoopwiseLM(checkpoint, depth=3)
    model.generate_until([request("generate_until", "abc", {"max_gen_toks": 5})])
    told = model.get_model_info()["ran"]
    assert told["scored_tokens"] == 5
    assert told["tokens"] == 4 + 4, "bos and three bytes, and all but the last that was made"
    assert (told["mean_depth"], told["mean_depth_scored"]) == (3.0, 3.0)
    assert told["requests_by_kind"] == {"generate_until": 1}


def test_neighbours_do_not_change_an_answer(checkpoint):
    settings = {"max_gen_toks": 8}
    texts = ["Tom has", "a", "Where is the blue ball of Mia?", "Q"]
    model = LoopwiseLM(checkpoint, exit="latent-change:0.8,max=6")
    together = model.generate_until([request("generate_until", t, settings) for t in texts])
    alone = [model.generate_until([request("generate_until", t, settings)])[0] for t in texts]
    assert together == alone


def test_repeats_of_one_sampled_request_differ_and_come_back_the_same(checkpoint):
    model = LoopwiseLM(checkpoint, depth=2)
    asked = [request("generate_until", "Tom", {"do_sample": True, "max_gen_toks": 16})] * 3
    first = model.generate_until(asked)
    assert len(set(first)) == 3
    assert model.generate_until(asked) == first


def test_prompts_are_cut_from_the_left_to_leave_room_for_the_answer(checkpoint):
    encoder = LoopwiseLM(checkpoint, depth=1).encoder
    text = "".join(chr(97 + i % 26) for i in range(70))
    (asked,) = ask(encoder, [(text, {"max_gen_toks": 20})], 64)
    assert asked.truncated
    assert asked.prompt_ids == list(text[-44:].encode())
    (short,) = ask(encoder, [(text[:43], {"max_gen_toks": 20})], 64)
    assert not short.truncated, "43 bytes and the start token just fit"
    with pytest.raises(ConfigError, match="leaves no room"):
        ask(encoder, [("a", {"max_gen_toks": 64})], 64)
