"""What a request may ask for, and the one line it gets when it may not."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from loopwise.engine.request import LOGPROB_FLOOR, LogitBias, SamplingParams, TokenOutput
from loopwise.errors import ConfigError

NAN, INF = float("nan"), float("inf")
REFUSED = [
    ("temperature", -0.1, "temperature=-0.1; give a number, 0 up to 1e+09"),
    ("temperature", NAN, "temperature=nan"),
    ("temperature", INF, "temperature=inf"),
    ("temperature", 10**400, "give a number, 0 up to 1e+09"),
    ("temperature", "1", "temperature='1'; give a number"),
    ("temperature", None, "temperature=None"),
    ("temperature", True, "temperature=True"),
    ("top_k", 0, "top_k=0; give a whole number, 1 or more; None turns it off"),
    ("top_k", -1, "top_k=-1"),
    ("top_k", 2.0, "top_k=2.0"),
    ("top_p", 0, "top_p=0; give a number, more than 0 up to 1"),
    ("top_p", 1.01, "top_p=1.01"),
    ("top_p", NAN, "top_p=nan"),
    ("min_p", -0.1, "min_p=-0.1; give a number, 0 up to 1"),
    ("min_p", 1.1, "min_p=1.1"),
    ("repetition_penalty", 0.0, "repetition_penalty=0.0; give a number, 0.01 up to 100"),
    ("repetition_penalty", INF, "repetition_penalty=inf"),
    ("presence_penalty", 2.1, "presence_penalty=2.1; give a number, -2 up to 2"),
    ("frequency_penalty", -2.1, "frequency_penalty=-2.1"),
    ("frequency_penalty", NAN, "frequency_penalty=nan"),
    ("logit_bias", {5: 101.0}, "logit_bias of token 5=101.0; give a number, -100 up to 100"),
    ("logit_bias", {5: NAN}, "logit_bias of token 5=nan"),
    ("logit_bias", {-1: 1.0}, "logit_bias id=-1; give a whole number, 0 or more"),
    ("logit_bias", {"5": 1.0}, "logit_bias id='5'"),
    ("logit_bias", [(5, 1.0)], "give a mapping of token ids to numbers"),
    ("stop", "end", "stop='end'; give a tuple of strings"),
    ("stop", ("",), "none of them empty"),
    ("stop", (5,), "give a tuple of strings"),
    ("stop_ids", (-1,), "stop_ids id=-1"),
    ("stop_ids", 5, "stop_ids=5; give a tuple of token ids"),
    ("ignore_eos", 1, "ignore_eos=1; give true or false"),
    ("seed", 1 << 63, "seed=9223372036854775808; give a whole number, -9223372036854775808 to"),
    ("seed", 1.5, "seed=1.5"),
    ("logprobs", -1, "logprobs=-1; give a whole number, 0 or more; None turns them off"),
    ("logprobs", True, "logprobs=True"),
    ("n", 0, "n=0; give a whole number, 1 or more"),
]


@pytest.mark.parametrize(
    ("name", "value", "says"), REFUSED, ids=[f"{n}={v}" for n, v, _ in REFUSED]
)
def test_what_is_not_allowed_is_refused_with_the_remedy(name, value, says):
    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**{name: value})
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [0, -1])
def test_u46_no_tokens_or_fewer_are_refused(value):
    with pytest.raises(ConfigError, match=f"max_tokens={value}.*1 or more; None is as many as fit"):
        SamplingParams(max_tokens=value)


def test_the_edges_are_allowed():
    for changes in (
        {"temperature": 5e-324},
        {"temperature": 1e9},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(1 << 63)},
        {"logprobs": 0},
        {"max_tokens": 1},
    ):
        SamplingParams(**changes)


def test_a_misspelt_field_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_values_come_out_plain_whatever_number_came_in():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), min_p=0, stop=["a"])
    assert type(params.temperature) is float and params.temperature == 0.5
    assert type(params.top_k) is int and type(params.min_p) is float
    assert params.stop == ("a",)


def test_nothing_can_change_after_the_check():
    biases = {7: 1.0, 3: -1}
    params = SamplingParams(logit_bias=biases)
    biases[5] = 1e9
    assert params.logit_bias == {3: -1.0, 7: 1.0}
    assert list(params.logit_bias) == [3, 7]
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0
    with pytest.raises(FrozenInstanceError):
        params.temperature = 2.0


def test_equal_requests_are_equal_keys():
    a = SamplingParams(logit_bias={1: 2.0, 0: 1.0}, stop=("x",))
    b = SamplingParams(logit_bias={0: 1, 1: 2}, stop=("x",))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != replace(a, seed=1)
    assert hash(LogitBias({})) == hash(LogitBias({}))


def test_a_request_survives_pickling_and_replacing():
    params = SamplingParams(temperature=1.0, logit_bias={4: 0.5}, seed=7)
    again = pickle.loads(pickle.dumps(params))
    assert again == params and again.is_plain_greedy == params.is_plain_greedy
    assert replace(params, temperature=0.0, logit_bias={}).is_plain_greedy
    with pytest.raises(ConfigError):
        replace(params, top_p=2.0)


@pytest.mark.parametrize(
    ("changes", "plain", "changing", "history"),
    [
        ({}, True, False, False),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "logprobs": 5}, True, False, False),
        ({"temperature": 0.1}, False, False, False),
        ({"logit_bias": {1: 1.0}}, False, True, False),
        ({"repetition_penalty": 1.1}, False, True, True),
        ({"presence_penalty": 0.1}, False, True, True),
        ({"frequency_penalty": -0.1}, False, True, True),
    ],
)
def test_a_request_knows_what_its_sampling_costs(changes, plain, changing, history):
    params = SamplingParams(**changes)
    found = (params.is_plain_greedy, params.changes_logits, params.needs_history)
    assert found == (plain, changing, history)


def test_u55_end_ids_are_the_union_of_all_sources():
    assert SamplingParams(stop_ids=(9,)).end_ids([5, 7]) == {5, 7, 9}
    assert SamplingParams(stop_ids=(9,), ignore_eos=True).end_ids([5, 7]) == {9}
    assert SamplingParams(ignore_eos=True).end_ids([5]) == frozenset()


def test_u47_choices_have_seeds_of_their_own():
    first, second = SamplingParams(seed=7), SamplingParams(seed=8)
    assert first.choice_seed(0) == 7, "one choice alone is the first of several"
    seeds = [p.choice_seed(i) for p in (first, second) for i in range(100)]
    assert len(set(seeds)) == 200
    assert seeds == [p.choice_seed(i) for p in (first, second) for i in range(100)]
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)


def test_choice_seeds_are_the_same_in_every_process():
    code = (
        "from loopwise.engine.request import SamplingParams as S; import sys;"
        "assert 'torch' not in sys.modules; print(S(seed=7).choice_seed(3))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == SamplingParams(seed=7).choice_seed(3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_bias": {258: 1.0}}, "logit_bias names token 258; .* ids are 0 to 257"),
        ({"stop_ids": (300,)}, "stop_ids names token 300"),
        ({"logprobs": 259}, "logprobs=259; this tokenizer has 258 ids"),
    ],
)
def test_what_the_vocabulary_lacks_is_refused(changes, says):
    params = SamplingParams(**changes)
    with pytest.raises(ConfigError, match=says):
        params.check_vocab(258)
    params.check_vocab(301)


def test_u45_the_floor_is_a_finite_float():
    output = TokenOutput(5, "", 2, LOGPROB_FLOOR, ((5, LOGPROB_FLOOR),))
    assert np.isfinite(output.logprob) and type(output.logprob) is float
