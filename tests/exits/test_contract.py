"""What every exit policy promises, over the table: newcomers are covered at birth."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loopwise.errors import ExitError, ShapeError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.rule import ExitRule, build_policy, why_not_built
from loopwise.measure.frontier import replay

ROWS, D_MODEL, VOCAB, HORIZON = 7, 16, 150, 6
FITTED = {
    "probe": {
        "weight": torch.linspace(-2, 2, D_MODEL).tolist(),
        "bias": -0.3,
        "mean": [0.1] * D_MODEL,
        "std": [1.5] * D_MODEL,
    },
    "latent-kl": {
        "change": {"knots": [-4.0, -2.0, 0.0], "slopes": [1.5, 0.5]},
        "second": {"knots": [-3.0, 0.0], "slopes": [0.4]},
        "offsets": [-1.0, -1.2, -0.9],
    },
    "certified": {"rate": 0.45, "diameter": 9.0, "first_read": 0.5},
}


class HeadAndGate:
    """What rules may take of a model."""

    head_weight = torch.randn(VOCAB, D_MODEL, generator=torch.Generator().manual_seed(3))
    logit_cap = None
    exit_gate = (torch.linspace(-1, 1, D_MODEL), torch.tensor(-0.5))


SHORT = ["short-list-kl", "sketched-kl"]
SHRINKING = ["kl", "latent-change", "cosine", "second-difference", "latent-kl", *SHORT]
NEED_A_PAST = ["fixed", "kl", "min-p-kl", "entropy", "argmax", "second-difference", "latent-kl"]
NEED_A_PAST += [*SHORT, "certified"]
LIVE = [name for name in EXITS if EXITS[name].reads is not Reads.TRUTH]
LOOKAHEAD = [name for name in EXITS if EXITS[name].reads is Reads.TRUTH]


def build(name: str) -> ExitPolicy:
    return build_policy(ExitRule(policy=name), FITTED, HeadAndGate())


def steps(seed: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> list[Observation]:
    """Rows that settle: latent and hidden state contract by 0.4 per recurrence, each on its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(rows, D_MODEL, generator=generator)

    goal, offset, last, shift = (draw() for _ in range(4))
    latents = [(goal + 0.4**r * offset).to(dtype) for r in range(HORIZON + 1)]
    return [
        Observation(
            r=r,
            latent=latents[r],
            previous=latents[r - 1],
            output=coda((last + 0.4**r * shift).to(dtype)),
        )
        for r in range(1, HORIZON + 1)
    ]


def coda(hidden: Tensor) -> Output:
    def head(h: Tensor) -> Tensor:
        # Not a matrix product, which may round a row otherwise in another batch.
        return (h.unsqueeze(1) * HeadAndGate.head_weight.to(h.dtype)).sum(dim=-1)

    return Output(hidden, head)


def hidden(observation: Observation) -> Tensor:
    assert observation.output is not None
    return observation.output.hidden


def empty(policy: ExitPolicy, rows: int = ROWS) -> Tensor:
    return torch.zeros(rows, policy.memory_width(VOCAB, D_MODEL))


def scores(policy: ExitPolicy, seen: list[Observation]) -> Tensor:
    memory, out = empty(policy, len(seen[0].latent)), []
    for observation in seen:
        score, memory = policy.score(again(observation), memory)
        out.append(score)
    return torch.stack(out, dim=1)


def again(observation: Observation) -> Observation:
    """The same, nothing of it read yet."""
    if observation.output is None:
        return observation
    return replace(observation, output=coda(observation.output.hidden))


def pick(observation: Observation, rows: list[int]) -> Observation:
    r = observation.r if isinstance(observation.r, int) else observation.r[rows]
    return Observation(
        r=r,
        latent=observation.latent[rows],
        previous=observation.previous[rows],
        output=coda(hidden(observation)[rows]),
    )


@pytest.mark.parametrize("name", EXITS)
def test_the_table_and_the_policy_agree_on_the_name(name):
    assert EXITS[name].name == name
    assert isinstance(EXITS[name].reads, Reads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIVE)
def test_scores_are_float32_one_per_row_and_memory_keeps_its_shape(name, dtype):
    policy = build(name)
    memory = empty(policy)
    for observation in steps(dtype=dtype):
        score, memory = policy.score(observation, memory)
        assert score.shape == (ROWS,)
        assert score.dtype == torch.float32
        assert not score.isnan().any()
        assert (score >= 0).all(), "a threshold below 0 is refused, as one that does nothing"
        assert memory.shape == (ROWS, policy.memory_width(VOCAB, D_MODEL))
        assert memory.dtype == torch.float32


@pytest.mark.parametrize("name", LIVE)
def test_what_a_policy_does_not_read_it_does_not_need(name):
    policy = build(name)
    if policy.reads.runs_coda:
        return
    full = steps()
    blind = [Observation(r=o.r, latent=o.latent, previous=o.previous) for o in full]
    assert torch.equal(scores(policy, full), scores(policy, blind))


@pytest.mark.parametrize("name", [n for n in LIVE if EXITS[n].reads.runs_coda])
def test_a_policy_that_reads_the_output_says_so_when_there_is_none(name):
    policy, first = build(name), steps()[0]
    blind = Observation(r=1, latent=first.latent, previous=first.previous)
    with pytest.raises(ShapeError, match=f"{name} reads (logits|the hidden state)"):
        policy.score(blind, empty(policy))


def asks(name: str, seen: list[Observation]) -> Tensor:
    """Whose logits were asked for, ``(rows, horizon)``."""
    policy, out = build(name), []
    memory = empty(policy, len(seen[0].latent))
    for observation in map(again, seen):
        _, memory = policy.score(observation, memory)
        assert observation.output is not None
        out.append(observation.output.asked)
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("name", LIVE)
def test_a_policy_asks_for_the_logits_it_declares(name):
    """All, none, or its own choice of rows, which no other row of the batch has a part in."""
    seen = steps()
    found = asks(name, seen)
    if EXITS[name].reads is not Reads.HIDDEN:
        assert found.all() if EXITS[name].reads is Reads.LOGITS else not found.any()
        return
    assert 0 < int(found.sum()) < found.numel()
    for row in range(ROWS):
        assert torch.equal(asks(name, [pick(o, [row]) for o in seen])[0], found[row])


class CountProducts(TorchDispatchMode):
    """Counts products over d_model: numbers that matrix products make of so many terms each.

    Attributes:
        found: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
            assert args[0].shape[-1] == D_MODEL, "products are charged over d_model"
            self.found += out.numel()
        return out


@pytest.mark.parametrize("name", LIVE)
def test_a_check_takes_the_products_it_declares(name):
    """Coda and head are charged apart: here they multiply nothing."""
    policy, memory = build(name), empty(build(name))
    for observation in steps():
        with CountProducts() as count:
            _, memory = policy.score(again(observation), memory)
        # One more row of 128 is what all logits of the list have in common.
        assert count.found == pytest.approx(ROWS * policy.products, rel=0.02)


@pytest.mark.parametrize("name", [n for n in LIVE if EXITS[n].needs_fitting])
def test_what_is_fitted_must_be_there_and_survives_json(name):
    with pytest.raises(ExitError, match=f"'{name}' must be fitted.*loopwise measure"):
        build_policy(ExitRule(policy=name), {}, HeadAndGate())
    policy = build(name)
    state = {name: json.loads(json.dumps(policy.to_state()))}
    other = build_policy(ExitRule(policy=name), state, HeadAndGate())
    assert torch.equal(scores(other, steps()), scores(policy, steps()))
    assert needs_fitting(name)


@pytest.mark.parametrize("name", [n for n in LIVE if EXITS[n].needs_weights])
def test_what_is_made_of_weights_says_so_without_a_model(name):
    with pytest.raises(ExitError, match=f"'{name}' is made of a model's weights; give the model"):
        build_policy(ExitRule(policy=name), FITTED)
    assert why_not_built(name, FITTED, HeadAndGate()) is None


def test_rules_that_need_a_fit_are_named_in_one_place():
    assert [n for n in EXITS if needs_fitting(n)] == ["latent-kl", "certified", "probe"]
    with pytest.raises(ExitError, match="did you mean 'latent-kl'"):
        needs_fitting("latnt-kl")


@pytest.mark.parametrize("name", SHRINKING)
def test_lower_is_more_settled(name):
    found = scores(build(name), steps())
    assert (found[:, 2:] < found[:, 1:-1]).all()
    assert (found >= 0).all()


@pytest.mark.parametrize("name", NEED_A_PAST)
def test_nothing_can_be_said_at_recurrence_one(name):
    assert torch.isposinf(scores(build(name), steps())[:, 0]).all()


@pytest.mark.parametrize("name", LIVE)
def test_a_latent_that_stands_still_scores_no_higher_than_one_that_moves(name):
    policy = build(name)
    moving = steps()
    still = [
        Observation(r=o.r, latent=o.latent, previous=o.latent, output=o.output) for o in moving
    ]
    assert (scores(policy, still) <= scores(policy, moving)).all()


@pytest.mark.parametrize("name", LIVE)
def test_a_row_does_not_care_who_shares_its_batch(name):
    """Alone, in another order, twice, and joined by strangers in the middle of the run."""
    policy, seen = build(name), steps()
    whole = scores(policy, seen)
    for row in range(ROWS):
        alone = scores(policy, [pick(o, [row]) for o in seen])
        # A matrix product may round a row otherwise in another batch: 1e-7 of a logit.
        assert alone == pytest.approx(whole[row : row + 1], rel=1e-5, abs=5e-7)
    order = [5, 0, 0, 3]
    assert scores(policy, [pick(o, order) for o in seen]) == pytest.approx(
        whole[order], rel=1e-5, abs=5e-7
    )


@pytest.mark.parametrize("name", LIVE)
def test_rows_leave_and_join_with_their_memory(name):
    """Half of the rows stop after recurrence 2; a stranger at recurrence 1 takes a seat."""
    policy, seen, strangers = build(name), steps(), steps(seed=9)
    whole, theirs = scores(policy, seen), scores(policy, strangers)
    memory = empty(policy)
    for observation in seen[:2]:
        _, memory = policy.score(observation, memory)
    stay, joins = [6, 1, 4], 2
    memory = torch.cat([memory[stay], empty(policy, 1)])
    for turn in range(2, HORIZON):
        old, new = pick(seen[turn], stay), pick(strangers[turn - 2], [joins])
        mixed = Observation(
            r=torch.tensor([turn + 1] * 3 + [turn - 1]),
            latent=torch.cat([old.latent, new.latent]),
            previous=torch.cat([old.previous, new.previous]),
            output=coda(torch.cat([hidden(old), hidden(new)])),
        )
        score, memory = policy.score(mixed, memory)
        assert score[:3] == pytest.approx(whole[stay, turn], rel=1e-5, abs=5e-7)
        assert score[3:] == pytest.approx(theirs[[joins], turn - 2], rel=1e-5, abs=5e-7)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(LIVE), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_a_stricter_threshold_never_exits_earlier(name, seed, strict, loose):
    """Thresholds from among the scores themselves, where ties are."""
    found = scores(build(name), steps(seed)).numpy()
    finite = np.sort(found[np.isfinite(found)])
    if finite.size == 0:
        return
    low, high = (float(finite[int(q * (finite.size - 1))]) for q in sorted((strict, loose)))
    depths = [
        replay(found, ExitRule(policy=name, threshold=t, max_depth=HORIZON)) for t in (low, high)
    ]
    assert (depths[0] >= depths[1]).all()


@pytest.mark.parametrize("name", LIVE)
def test_a_policy_keeps_nothing_of_its_own(name):
    """The same object serves two runs in turn, and the caller's memory is not written to."""
    policy, seen = build(name), steps()
    first = scores(policy, seen)
    memory = empty(policy)
    before = memory.clone()
    policy.score(seen[0], memory)
    assert torch.equal(memory, before)
    assert torch.equal(scores(policy, seen), first)


@pytest.mark.parametrize("name", LIVE)
def test_no_rows_are_no_trouble(name):
    policy = build(name)
    score, memory = policy.score(pick(steps()[1], []), empty(policy, 0))
    assert score.shape == (0,)
    assert memory.shape[0] == 0


@pytest.mark.parametrize("name", LOOKAHEAD)
def test_an_oracle_refuses_to_decide(name):
    policy = build(name)
    with pytest.raises(ExitError, match=f"'{name}' needs later recurrences"):
        policy.score(steps()[0], empty(policy))
