"""The reference decoder equals the full forward pass, and live measurement, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopwise.data import TokenBatch
from loopwise.engine.reference import DecodedToken, ReferenceDecoder
from loopwise.engine.request import SamplingParams
from loopwise.errors import DataError, DepthError, ExitError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.exits.probe import Probe
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.live import run_live
from loopwise.models.base import LoopedLM
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.layers import row_seeds
from loopwise.models.views import PackedView
from tests.conftest import make_model

PROMPT = [256, *b"Tom has a red ball"]
FITTED = {
    "probe": Probe(
        weight=torch.linspace(-1, 1, 32), bias=0.0, mean=torch.zeros(32), std=torch.ones(32)
    ).to_state(),
    "latent-kl": {
        "change": {"knots": [-3.0, -1.0, 0.0], "slopes": [1.5, 0.8]},
        "second": {"knots": [-2.0, 0.0], "slopes": [0.4]},
        "offsets": [-1.0, -1.2, -0.9],
    },
    "certified": {"rate": 0.3, "diameter": 3.0, "first_read": 0.5},
}
# The gate belongs to models that carry one: tests/engine/decoding.py has one.
LIVE = [
    name for name in EXITS if name not in ("fixed", "gate") and EXITS[name].reads is not Reads.TRUTH
]


def fixed_model() -> FixedModel:
    torch.manual_seed(0)
    config = FixedConfig(vocab_size=258, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, n_layers=2)
    return FixedModel(config).eval()


def decoder(model: LoopedLM, rule: str | ExitRule, seed: int = 0) -> ReferenceDecoder:
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    return ReferenceDecoder(model, rule, build_policy(rule, FITTED, model), seed)


def as_batch(ids: list[int]) -> TokenBatch:
    """One document, each token predicting the next; the last predicts token 0."""
    n = len(ids)
    return TokenBatch(
        token_ids=torch.tensor([ids]),
        targets=torch.tensor([[*ids[1:], 0]]),
        document_ids=torch.zeros(1, n, dtype=torch.int32),
        positions=torch.arange(n, dtype=torch.int32)[None],
        hops=torch.zeros(1, n, dtype=torch.uint8),
    )


@torch.no_grad()
def forward(model: LoopedLM, ids: list[int], depth: int, seed: int = 0) -> torch.Tensor:
    """Logits of every token ``(tokens, vocab)`` of a full pass at uniform depth."""
    batch = as_batch(ids)
    view = PackedView(model.geometry.rope, batch.positions, None, model.dtype, batch.token_ids)
    injection = model.prelude(batch.token_ids, view)
    latent = model.initial_latent(injection, row_seeds(batch.positions, seed))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)[0]


def decode(
    decoder: ReferenceDecoder, n: int = 8, temperature: float = 0.0, end_ids: tuple[int, ...] = ()
) -> list[DecodedToken]:
    params = SamplingParams(temperature=temperature, seed=decoder.seed)
    return list(decoder.generate(PROMPT, n, params, frozenset(end_ids)))


SHAPES = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "add": {"injection": "add"},
    "noise": {"latent_init": "noise"},
    "injection start": {"latent_init": "injection"},
    "no prelude, no coda": {"n_prelude_layers": 0, "n_coda_layers": 0},
    "two codas, all heads": {"n_coda_layers": 2, "n_kv_heads": 4},
}


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_equals_the_full_forward_pass(shape, depth):
    model = make_model(**SHAPES[shape]).double()  # the loop may be chaotic: it grows any rounding
    steps = decode(decoder(model, f"fixed:{depth}"))
    ids = [s.token_id for s in steps]
    assert ids[: len(PROMPT)] == PROMPT
    assert len(ids) == len(PROMPT) + 8
    whole = forward(model, ids, depth)
    found = torch.stack([s.logits for s in steps])
    assert (found - whole).abs().max() < 1e-5
    assert ids[len(PROMPT) :] == whole.argmax(-1).tolist()[len(PROMPT) - 1 : -1]
    assert {s.exit_depth for s in steps} == {depth}


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_float32_decoding_stays_within_a_ten_thousandth(depth):
    model = make_model(injection="add")
    steps = decode(decoder(model, f"fixed:{depth}"))
    whole = forward(model, [s.token_id for s in steps], depth)
    assert (torch.stack([s.logits for s in steps]) - whole).abs().max() < 1e-4


def test_depth_matters_to_the_models_of_these_tests():
    model = make_model()
    assert (forward(model, PROMPT, 2) - forward(model, PROMPT, 4)).abs().max() > 0.1


def spread_threshold(model: LoopedLM, policy: str, ids: list[int], share: float = 0.5) -> float:
    """In the widest gap near the middle of the scores, so that no rounding decides."""
    rule = ExitRule(policy=policy, threshold=-1.0, max_depth=6)
    scores = []
    plain = build_policy(rule, FITTED, model)

    class Listening:
        name, reads, memory_width = plain.name, plain.reads, plain.memory_width

        def score(self, observation, memory):
            score, memory = plain.score(observation, memory)
            scores.append(float(score))
            return score, memory

    reference = ReferenceDecoder(model, rule, Listening())
    for token_id in ids:
        reference.feed(token_id)
    ordered = torch.tensor(sorted({round(s, 9) for s in scores if s < 1e9}))
    near = int(share * len(ordered))
    window = ordered[max(near - 4, 0) : near + 5]
    widest = int(window.diff().argmax())
    return float(window[widest : widest + 2].mean())


@pytest.mark.parametrize("changes", [{}, {"min_depth": 2, "patience": 2}], ids=["plain", "patient"])
@pytest.mark.parametrize("shape", ["add", "noise", "no prelude, no coda"])
@pytest.mark.parametrize("policy", LIVE)
def test_exits_and_losses_equal_live_measurement(policy, shape, changes):
    model = make_model(**{"n_core_layers": 1, "injection": "add", **SHAPES[shape]})
    ids = [*PROMPT, *b". Where is the ball? It is here"]
    threshold = spread_threshold(model, policy, ids)
    rule = replace(ExitRule(policy=policy, threshold=threshold, max_depth=6), **changes)
    reference = decoder(model, rule)
    steps = [reference.feed(i) for i in ids]
    batch = as_batch(ids)
    found = run_live(model, [batch], rule, build_policy(rule, FITTED, model))
    depths = [s.exit_depth for s in steps]
    assert len(set(depths)) >= 2, "one depth for all tests little"
    assert found.exit_depth.tolist() == depths
    log_p = torch.stack([s.logits for s in steps]).log_softmax(-1)
    losses = -log_p.gather(1, batch.targets[0][:, None]).squeeze(1)
    assert (found.loss - losses).abs().max() < 1e-4
    assert found.argmax.tolist() == log_p.argmax(-1).tolist()


def test_a_token_never_depends_on_what_comes_after_it():
    model = make_model(injection="add", n_core_layers=1)
    rule = f"kl:{spread_threshold(model, 'kl', PROMPT)}"
    whole = decode(decoder(model, rule), 5)
    reference = decoder(model, rule)
    for step in whole[: len(PROMPT)]:
        again = reference.feed(step.token_id)
        assert again.exit_depth == step.exit_depth
        assert torch.equal(again.logits, step.logits)


def test_two_decoders_in_one_process_do_not_meet():
    """Fed in turns, each gives what it gives alone."""
    model, other = make_model(), make_model(seed=3)
    alone = [[d.feed(i).logits for i in PROMPT] for d in (decoder(model, "fixed:3"),)]
    a, b = decoder(model, "fixed:3"), decoder(other, "fixed:2")
    for n, i in enumerate(PROMPT):
        assert torch.equal(a.feed(i).logits, alone[0][n])
        b.feed(i)


# Noise and sampling.


def test_a_noise_start_belongs_to_the_seed():
    model = make_model(latent_init="noise")

    def run(seed: int) -> torch.Tensor:
        return torch.stack([s.logits for s in decode(decoder(model, "fixed:2", seed), 4)])

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))
    torch.manual_seed(99)
    again = run(5)
    torch.manual_seed(1)
    assert torch.equal(again, run(5)), "the global generator was asked"


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_noise_start_equals_the_forward_pass_of_its_seed(seed):
    model = make_model(latent_init="noise")
    steps = decode(decoder(model, "fixed:2", seed), 4)
    whole = forward(model, [s.token_id for s in steps], 2, seed)
    assert (torch.stack([s.logits for s in steps]) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("seed", [2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("shape", ["plain", "noise"])
def test_large_seeds_work(shape, seed):
    """Seeds that people take from clocks and hashes are past 31 bits."""
    steps = decode(decoder(make_model(**SHAPES[shape]), "fixed:1", seed), 2, temperature=1.0)
    assert len(steps) == len(PROMPT) + 2


def test_sampling_follows_its_seed_and_temperature():
    model = make_model()

    def run(seed: int, temperature: float) -> list[int]:
        steps = decode(decoder(model, "fixed:2", seed), 20, temperature=temperature)
        return [s.token_id for s in steps]

    assert run(1, 1.0) == run(1, 1.0)
    assert run(1, 5.0) != run(2, 5.0)
    assert run(1, 0.0) == run(2, 0.0)
    assert run(1, 1e-6) == run(1, 0.0), "near zero, sampling is greedy"


# Ends and refusals.


def test_decoding_stops_at_the_end_token_which_is_fed_too():
    model = make_model()
    first = decode(decoder(model, "fixed:2"), 1)[-1].token_id
    steps = decode(decoder(model, "fixed:2"), 50, end_ids=(first,))
    assert [s.token_id for s in steps] == [*PROMPT, first]


def test_an_end_token_in_the_prompt_does_not_end_it():
    model = make_model()
    steps = decode(decoder(model, "fixed:1"), 3, end_ids=(PROMPT[2],))
    assert len(steps) > len(PROMPT)


def test_no_new_tokens_just_reads_the_prompt():
    assert len(decode(decoder(make_model(), "fixed:2"), 0)) == len(PROMPT)


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="prompt is empty"):
        list(decoder(make_model(), "fixed:2").generate([], 3))


def test_the_oracle_cannot_decode():
    with pytest.raises(ExitError, match="'oracle' needs later recurrences"):
        decoder(make_model(), "oracle:0")


def test_a_fixed_model_decodes_at_depth_one_only():
    model = fixed_model()
    steps = decode(decoder(model, "fixed:1"))
    whole = forward(model, [s.token_id for s in steps], 1)
    assert (torch.stack([s.logits for s in steps]) - whole).abs().max() < 1e-4
    for rule in ("fixed:2", "kl:1e-3,max=2"):
        with pytest.raises(DepthError, match="limit of 1"):
            decoder(model, rule)


def test_decoding_leaves_no_graph():
    assert not decode(decoder(make_model(), "fixed:2"), 1)[-1].logits.requires_grad
