"""Sampling equals the textbook row by row, and no row cares who shares its batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopwise.engine import sampler
from loopwise.engine.request import LOGPROB_FLOOR, SamplingParams
from loopwise.engine.sampler import History, LogitsError, Sampled, sample, uniforms
from loopwise.errors import ConfigError, NonFiniteError, ShapeError
from loopwise.models.layers import row_seeds, seeded_uniform

INF = float("inf")
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0)
NO_HISTORY = History((), ())


def run(logits: Tensor, *params: SamplingParams, history: History = NO_HISTORY) -> Sampled:
    """Row i has seed i and position 5; one row of logits serves all params."""
    rows = len(params)
    logits = logits.expand(rows, -1) if logits.ndim == 1 else logits
    return sample(logits, params, range(rows), [5] * rows, [history] * rows)


def draws(logits: Sequence[float], params: SamplingParams, n: int) -> Tensor:
    """Share of each token over ``n`` seeds, ``(vocab,)``."""
    rows = torch.tensor(logits).expand(n, -1)
    found = sample(rows, [params] * n, range(n), [3] * n, [NO_HISTORY] * n)
    return torch.bincount(found.token_ids, minlength=len(logits)) / n


# The textbook: lists and float64, one row.


def naive_adjust(x: list[float], p: SamplingParams, history: History) -> list[float]:
    x = [value + p.logit_bias.get(i, 0.0) for i, value in enumerate(x)]
    for i in {*history.prompt_ids, *history.output_ids}:
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(history.output_ids):
        x[i] -= p.frequency_penalty * history.output_ids.count(i) + p.presence_penalty
    return x


def softmax(z: list[float]) -> list[float]:
    weights = [math.exp(value - max(z)) for value in z]
    return [w / math.fsum(weights) for w in weights]


def naive_distribution(x: list[float], p: SamplingParams) -> list[float] | None:
    """Probabilities; None where rounding may decide who stays."""
    z = [(value - max(x)) / p.temperature for value in x]
    first = softmax(z)
    if any(abs(q - p.min_p * max(first)) < 1e-9 for q in first if q < max(first)):
        return None
    z = [v if q >= p.min_p * max(first) else -INF for v, q in zip(z, first, strict=True)]
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    order = order[: p.top_k]
    z = [v if i in order else -INF for i, v in enumerate(z)]
    second = softmax(z)
    kept, mass = set(), 0.0
    for i in order:
        if p.top_p < 1 and abs(mass - p.top_p) < 1e-9:
            return None
        if p.top_p < 1 and mass >= p.top_p:
            break
        kept.add(i)
        mass += second[i]
    final = [q if i in kept else 0.0 for i, q in enumerate(second)]
    return [q / math.fsum(final) for q in final]


def naive_sample(x: list[float], p: SamplingParams, u: float, history: History) -> int | None:
    """The token; None where rounding may decide."""
    x = naive_adjust(x, p, history)
    if p.temperature == 0:
        return x.index(max(x))
    shares = naive_distribution(x, p)
    if shares is None:
        return None
    total = 0.0
    for i, share in enumerate(shares):
        total += share
        if abs(total - u) < 1e-9:
            return None
        if total > u:
            return i
    raise AssertionError("u is below 1")


VOCAB = 12
# Halves, so that equal logits are common.
grid = st.one_of(st.integers(-12, 12).map(lambda v: v / 2), st.floats(-8, 8, width=32))
logits_rows = st.lists(
    st.one_of(grid, grid, grid, st.just(-INF)), min_size=VOCAB, max_size=VOCAB
).filter(lambda row: max(row) > -INF)
some_ids = st.lists(st.integers(0, VOCAB - 1), max_size=8)
histories = st.builds(History, some_ids, some_ids)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, None, 1, 3, 7, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.4, 0.93]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    logprobs=st.sampled_from([None, 0, 3, VOCAB]),
)
seeds = st.integers(-(1 << 63), (1 << 63) - 1)
requests = st.tuples(logits_rows, all_params, seeds, st.integers(0, 1 << 20), histories)
batches = st.lists(requests, min_size=1, max_size=6)
Request = tuple[list[float], SamplingParams, int, int, History]


def sample_requests(batch: list[Request], dtype: torch.dtype = torch.float32) -> Sampled:
    rows, params, seeds, positions, histories = zip(*batch, strict=True)
    return sample(torch.tensor(rows, dtype=dtype), params, seeds, positions, histories)


@settings(deadline=None, max_examples=100)
@given(batches)
def test_every_row_is_the_textbook(batch):
    found = sample_requests(batch)
    for i, (row, params, seed, position, history) in enumerate(batch):
        u = float(uniforms([seed], [position]))
        expected = naive_sample(row, params, u, history)
        token = int(found.token_ids[i])
        assert expected is None or token == expected
        log_p = math.log(softmax(row)[token]) if row[token] > -INF else LOGPROB_FLOOR
        assert float(found.logprobs[i]) == pytest.approx(log_p, abs=1e-5)
        assert row[token] > -INF


@settings(deadline=None, max_examples=60)
@given(batch=batches, data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_u42_neighbours_change_no_bit(batch, data, dtype):
    crowd = sample_requests(batch, dtype)
    order = data.draw(st.permutations(range(len(batch))))
    moved = sample_requests([batch[i] for i in order], dtype)
    for i, request in enumerate(batch):
        alone, j = sample_requests([request], dtype), order.index(i)
        for other, at in ((alone, 0), (moved, j)):
            assert int(other.token_ids[at]) == int(crowd.token_ids[i])
            assert float(other.logprobs[at]) == float(crowd.logprobs[i])
            assert other.top_logprobs.get(at) == crowd.top_logprobs.get(i)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [97, 8192, 50257])
def test_u42_neighbours_change_no_bit_in_large_vocabularies(vocab, threads):
    """Kernels split long rows between threads, and 14 rows are more than are worked on at once."""
    torch.manual_seed(vocab)
    logits = torch.randn(18, vocab) * 3
    params = [
        *(GREEDY, WARM, replace(WARM, top_k=40), replace(WARM, top_p=0.9), GREEDY),
        *(replace(WARM, min_p=0.1), replace(WARM, temperature=4.0, top_p=0.99)),
        *(SamplingParams(repetition_penalty=1.2, logprobs=5), replace(WARM, top_k=200, top_p=0.5)),
    ] * 2
    history = History([1, 2, 3], [4, 4])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        crowd = run(logits, *params, history=history)
        for i in range(18):
            alone = sample(logits[i : i + 1], [params[i]], [i], [5], [history])
            assert torch.equal(alone.token_ids[0], crowd.token_ids[i])
            assert torch.equal(alone.logprobs[0], crowd.logprobs[i])
    finally:
        torch.set_num_threads(before)


def test_u40_a_seed_gives_its_tokens_in_any_company_and_after_a_restart():
    torch.manual_seed(1)
    logits = torch.randn(16, 258)
    alone = [int(sample(logits[t][None], [WARM], [7], [t]).token_ids) for t in range(16)]
    crowd = []
    for t in range(16):
        torch.manual_seed(t)  # the global generator is not asked
        rows = torch.cat((torch.randn(t % 4, 258), logits[t][None], torch.randn(2, 258)))
        n, at = len(rows), t % 4  # greedy ones before it, sampled ones after
        params = [GREEDY] * at + [WARM] * (n - at)
        seeds = [7 if i == at else 99 + i for i in range(n)]
        found = sample(rows, params, seeds, [t + 5 * (i - at) ** 2 for i in range(n)])
        crowd.append(int(found.token_ids[at]))
    assert alone == crowd
    assert alone != [int(sample(logits[t][None], [WARM], [8], [t]).token_ids) for t in range(16)]


# Randomness.


def test_u40_draws_are_those_of_every_earlier_release():
    """A seed a user wrote down gives the same text for ever; never change these."""
    found = uniforms([0, 0, 7, -1, (1 << 63) - 1], [0, 1, 0, 5, 5])
    assert found.tolist() == [
        0.898278141291553,
        0.2763624413478534,
        0.04558657206930822,
        0.7310127696884481,
        0.17898498143225433,
    ]


def test_draws_are_uniform_and_unrelated():
    n = 40_000
    u = uniforms(range(n), [5] * n)
    sigma = (12 * n) ** -0.5
    assert abs(float(u.mean()) - 0.5) < 4 * sigma
    assert 0 < float(u.min()) < 1e-3 and 0.999 < float(u.max()) < 1
    others = {
        "next position": uniforms(range(n), [6] * n),
        "next seed": uniforms(range(1, n + 1), [5] * n),
        "seed + 2^31": uniforms([s + (1 << 31) for s in range(n)], [5] * n),
        "seed + 2^32": uniforms([s + (1 << 32) for s in range(n)], [5] * n),
        "negative": uniforms([-s for s in range(1, n + 1)], [5] * n),
        "latent noise": seeded_uniform(
            torch.stack([row_seeds(torch.tensor(5), s) for s in range(n)]), 1
        ).squeeze(-1),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack((u, other)))[0, 1])
        assert abs(correlation) < 4 * n**-0.5, name
    positions = uniforms([3] * n, range(n))
    assert abs(float(torch.corrcoef(torch.stack((positions[1:], positions[:-1])))[0, 1])) < 0.02
    assert len(positions.unique()) == n


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_an_extreme_draw_still_is_a_token_that_can_occur(u):
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7 - 1e-12, 0.0]], dtype=torch.float64)
    token = int(sampler._draw(p, torch.tensor([u], dtype=torch.float64)))
    assert token == (1 if u == 0 else 3)


SHARES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (WARM, SHARES),
        (replace(WARM, temperature=0.5), [p * p for p in SHARES]),
        (replace(WARM, temperature=2.0), [p**0.5 for p in SHARES]),
        (replace(WARM, top_k=2), [0.4, 0.25, 0, 0, 0, 0]),
        (replace(WARM, top_p=0.7), [0.4, 0.25, 0.15, 0, 0, 0]),
        (replace(WARM, min_p=0.2), [0.4, 0.25, 0.15, 0.1, 0, 0]),
        # 0.4 / 0.8 and 0.65 / 0.8 of what top_k left: two reach 0.75; of the whole, three would.
        (replace(WARM, top_k=3, top_p=0.75), [0.4, 0.25, 0, 0, 0, 0]),
        # The temperature comes first: squared, the third is below 0.2 of the best.
        (replace(WARM, temperature=0.5, min_p=0.2), [0.16, 0.0625, 0, 0, 0, 0]),
        (replace(WARM, logit_bias={5: math.log(10.0)}), [*SHARES[:5], 0.4]),
        (replace(WARM, logit_bias={0: -100}), [0.0, *SHARES[1:]]),
    ],
    ids=["as is", "cold", "hot", "k", "p", "min", "k then p", "cold then min", "bias", "ban"],
)
def test_samples_come_from_the_filtered_distribution(params, expected):
    n = 20_000
    p = torch.tensor(expected, dtype=torch.float64)
    p = p / p.sum()
    found = draws([math.log(share) for share in SHARES], params, n)
    # Tokens that may come did, and the others never.
    assert ((found > 0) == (p > 1e-9)).all()
    assert ((found - p).abs() <= 4.5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


def test_a_wide_nucleus_is_as_exact_as_a_narrow_one():
    """Past the tokens that are looked at first; 1/256 adds up without rounding."""
    for top_p, count in ((0.25, 64), (0.5, 128), (0.75, 192), (0.75 + 1e-6, 193)):
        found = draws([0.0] * 256, replace(WARM, top_p=top_p), 6000)
        assert found.nonzero().squeeze(-1).tolist() == list(range(count))


# Edges of the filters and of the temperature.


def test_greedy_takes_the_best_and_of_equals_the_lowest():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.bfloat16)
    assert run(logits, GREEDY, GREEDY).token_ids.tolist() == [1, 0]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_a_filter_that_leaves_one_token_is_greedy_even_among_equals(changes):
    logits = torch.randn(200, 50).bfloat16().round()
    params = replace(WARM, temperature=5.0, **changes)
    found = sample(logits, [params] * 200, range(200), range(200))
    assert torch.equal(found.token_ids, logits.float().argmax(dim=-1))


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_a_temperature_near_zero_is_greedy_and_does_not_overflow(temperature):
    logits = torch.tensor([[-300.0, 300.0, 299.0, -INF], [3e38, -3e38, 0.0, 1.0]])
    found = run(logits, *[SamplingParams(temperature=temperature)] * 2)
    assert found.token_ids.tolist() == [1, 0]


def test_a_vast_temperature_is_uniform_over_what_can_occur():
    found = draws([3.0, 50.0, -INF, -20.0], SamplingParams(temperature=1e9), 6000)
    assert found[2] == 0 and (found[[0, 1, 3]] - 1 / 3).abs().max() < 0.03


@settings(deadline=None)
@given(st.integers(0, 11), all_params, seeds)
def test_the_only_token_that_can_occur_is_taken(token, params, seed):
    row = [-INF] * VOCAB
    row[token] = -7.0
    found = sample_requests([(row, params, seed, 0, NO_HISTORY)])
    assert found.token_ids.tolist() == [token] and found.logprobs.tolist() == [0.0]


def test_a_top_k_past_the_vocabulary_leaves_all():
    assert (draws([0.0, 0.0, 0.0], replace(WARM, top_k=500), 2000) > 0.25).all()


# Bias and penalties.


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({}, 0),
        ({"logit_bias": {3: 2.5}}, 3),
        ({"repetition_penalty": 2.0}, 1),  # prompt tokens too: 0 is only there
        ({"presence_penalty": 2.0}, 0),  # output tokens only
        ({"frequency_penalty": -1.0}, 2),  # there twice: 1 + 2 > 2
    ],
    ids=str,
)
def test_greedy_heeds_bias_and_penalties(changes, token):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0])
    params = SamplingParams(**changes)
    assert int(run(logits, params, history=History([0], [2, 2])).token_ids) == token


def test_a_repetition_penalty_pushes_negative_logits_further_down():
    params = SamplingParams(repetition_penalty=2.0)
    found = run(torch.tensor([-1.0, -1.5]), params, history=History([0, 0], []))
    assert found.token_ids.tolist() == [1], "-1 doubled is below -1.5"


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(40)
    changed = SamplingParams(temperature=0.3, top_k=2, logit_bias={7: 100}, logprobs=40)
    found = run(logits, changed)
    expected = logits.log_softmax(dim=-1)
    assert found.token_ids.tolist() == [7]
    assert float(found.logprobs) == pytest.approx(float(expected[7]), abs=1e-6)
    assert dict(found.top_logprobs[0])[7] == pytest.approx(float(expected[7]), abs=1e-6)


def test_a_forced_token_is_taken_with_its_own_log_probability():
    logits = torch.randn(3, 40)
    params = [GREEDY, replace(WARM, top_k=1), WARM]
    free = sample(logits, params, range(3), [5] * 3)
    worst = logits.argmin(dim=-1).tolist()
    found = sample(logits, params, range(3), [5] * 3, forced=[worst[0], worst[1], None])
    assert found.token_ids.tolist() == [*worst[:2], int(free.token_ids[2])]
    expected = logits.log_softmax(dim=-1).gather(-1, found.token_ids.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(found.logprobs, expected)


# Alternatives.


def test_alternatives_come_only_to_rows_that_asked():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    asking = SamplingParams(logprobs=3)
    found = run(logits, GREEDY, asking, SamplingParams(logprobs=0), replace(WARM, logprobs=1))
    assert sorted(found.top_logprobs) == [1, 3]
    assert [i for i, _ in found.top_logprobs[1]] == [1, 3, 2]
    assert [i for i, _ in found.top_logprobs[3]] == [1]
    assert found.top_logprobs[1][0][1] == float(found.logprobs[0])


def test_the_first_alternative_is_the_greedy_token_where_rounding_makes_equals():
    close = torch.nextafter(torch.tensor(1e-3), torch.tensor(1.0))
    logits = torch.cat((torch.tensor([1e-3]), close[None], torch.full((5000,), 1e-4)))
    found = run(logits, SamplingParams(logprobs=2))
    assert found.token_ids.tolist() == [1]
    (first, a), (second, b) = found.top_logprobs[0]
    assert (first, second) == (1, 0) and a == b, "the case is no longer the one meant"


def test_u45_log_probabilities_are_finite_and_fit_json():
    logits = torch.full((1, 30), -INF)
    logits[0, [4, 9]] = torch.tensor([1.0, 0.0])
    found = run(logits, SamplingParams(logprobs=5))
    assert [i for i, _ in found.top_logprobs[0]] == [4, 9, 0, 1, 2]
    assert [p for _, p in found.top_logprobs[0]][2:] == [LOGPROB_FLOOR] * 3
    json.dumps([found.logprobs.tolist(), found.top_logprobs], allow_nan=False)
    far = run(torch.tensor([0.0, 1e6, 3e38]), SamplingParams(logprobs=3))
    assert min(p for _, p in far.top_logprobs[0]) == LOGPROB_FLOOR
    hot = run(torch.tensor([0.0, -1e6]), *[SamplingParams(temperature=1e9)] * 20)
    assert set(hot.logprobs.tolist()) == {0.0, LOGPROB_FLOOR}, "the chosen one too"


# Rows of a head that no token has.


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        WARM,
        SamplingParams(temperature=5.0, top_k=2, top_p=0.9, min_p=0.01),
        SamplingParams(logit_bias={6: 100.0}, repetition_penalty=1.5, presence_penalty=1.0),
    ],
)
@pytest.mark.parametrize("best", [6, 2])
def test_a_row_of_the_head_that_no_token_has_is_never_chosen_nor_reported(params, best):
    """Published checkpoints pad their heads; the detokenizer knows no such id."""
    logits = torch.randn(400, 8)
    logits[:, best] += 20.0
    history = History([1], [2, 2])
    rows = [replace(params, seed=i, logprobs=3) for i in range(400)]
    found = sample(logits, rows, range(400), [5] * 400, [history] * 400, vocab_size=5)
    assert found.token_ids.max() < 5
    alternatives = [i for top in found.top_logprobs.values() for i, _ in top]
    assert len(alternatives) == 1200 and max(alternatives) < 5
    cut = sample(
        logits[:, :5],
        [replace(p, logit_bias={}) for p in rows],
        range(400),
        [5] * 400,
        [history] * 400,
    )
    assert torch.equal(found.token_ids, cut.token_ids), "chosen as if they were not there"
    share = logits.log_softmax(-1).gather(-1, found.token_ids.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(found.logprobs, share), "as a forward pass scores it"


def test_a_row_where_nothing_but_padding_is_likely_is_broken():
    logits = torch.tensor([[-INF, -INF, 3.0], [0.0, 1.0, 2.0]])
    for params in (GREEDY, WARM):
        with pytest.raises(LogitsError, match="row 0 has no next token: all 2 logits are -inf"):
            sample(logits, [params] * 2, [0, 1], [5, 5], vocab_size=2)


# The fast path, and what callers may pass.


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_k=3, top_p=0.5, seed=9, stop=("a",))]
)
def test_plain_greedy_rows_never_leave_the_fast_path(monkeypatch, params):
    monkeypatch.setattr(sampler, "_choose", None)
    monkeypatch.setattr(sampler, "_alternatives", None)
    logits = torch.randn(8, 258)
    found = run(logits, *[params] * 8)
    assert torch.equal(found.token_ids, logits.argmax(dim=-1))
    assert torch.equal(found.logprobs, logits.log_softmax(dim=-1).amax(dim=-1))
    assert found.token_ids.dtype == torch.int64 and found.logprobs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_float_is_taken_and_left_alone(dtype):
    logits = torch.randn(6, 40).to(dtype).requires_grad_()
    before = logits.detach().clone()
    params = SamplingParams(temperature=0.8, top_k=9, logit_bias={1: 3}, repetition_penalty=1.5)
    found = run(logits, *[params] * 5, GREEDY, history=History([1], [2]))
    assert torch.equal(logits, before) and not found.logprobs.requires_grad
    transposed = logits.detach().T.contiguous().T
    assert torch.equal(
        run(transposed, *[params] * 5, GREEDY, history=History([1], [2])).token_ids,
        found.token_ids,
    )


def test_it_runs_in_inference_mode():
    with torch.inference_mode():
        logits = torch.randn(3, 40)
        found = run(logits, WARM, GREEDY, SamplingParams(presence_penalty=1, logprobs=2))
    assert found.token_ids.shape == (3,)


def test_no_rows_are_no_error():
    found = sample(torch.empty(0, 258), [], [], [])
    assert found.token_ids.shape == found.logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("value", "says"),
    [(math.nan, "2 of 6 logits are NaN"), (INF, "2 of 6 logits are +inf")],
)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_broken_row_is_named_so_that_the_others_can_go_on(params, value, says):
    logits = torch.randn(4, 6)
    logits[2, [1, 3]] = value
    logits[3] = -INF
    with pytest.raises(LogitsError) as error:
        run(logits, *[params] * 4)
    assert f"row 2 has no next token: {says} (broken rows: [2, 3], of 4)" in str(error.value)
    assert error.value.rows == (2, 3) and isinstance(error.value, NonFiniteError)
    with pytest.raises(LogitsError, match="row 0 has no next token: all 6 logits are -inf"):
        run(logits[3:], params)


def test_penalties_without_history_are_refused():
    with pytest.raises(ConfigError, match="penalties but no history"):
        sample(torch.randn(1, 5), [SamplingParams(presence_penalty=1)], [0], [0])


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.randn(2, 5), [GREEDY], [0], [0]),
        (torch.randn(5), [GREEDY], [0], [0]),
        (torch.randn(1, 5), [GREEDY], [0, 1], [0]),
        (torch.randn(1, 5), [GREEDY], [0], []),
        (torch.randn(1, 5), [GREEDY], [0], [0], []),
    ],
)
def test_arguments_that_disagree_are_refused(arguments):
    with pytest.raises(ShapeError, match="give one of each per row"):
        sample(*arguments)
