"""The certificate: an argmax it vouches for stays, in float64; and what it reads, and when."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopwise.errors import ExitError
from loopwise.exits.base import Observation, Output
from loopwise.exits.certified import Certified, allowed_distance
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.certified_fit import head_diameter

D = 6


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Weights:
    exit_gate = None

    def __init__(self, head: Tensor, cap: float | None = None) -> None:
        self.head_weight, self.logit_cap = head, cap

    def head(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.head_weight.to(hidden.dtype).T
        cap = self.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def certified(head: Tensor, rate: float = 0.5, first_read: float = 1e9) -> Certified:
    state = {"rate": rate, "diameter": head_diameter(head), "first_read": first_read}
    return build_policy(ExitRule(policy="certified"), {"certified": state}, Weights(head))  # type: ignore[return-value]


def distances_of(head: Tensor) -> Tensor:
    return (head - head.mean(0)).norm(dim=-1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 40),
    scale=st.floats(0.05, 5),
    capped=st.booleans(),
)
def test_no_move_within_the_allowed_distance_changes_the_argmax(seed, vocab, scale, capped):
    """Straight at every rival, which is the worst a move can do; and in random directions."""
    head = scale * draw(seed, vocab, D) + draw(seed + 1, D)
    weights, hidden = Weights(head, 4.0 if capped else None), draw(seed + 2, 3, D)
    logits = weights.head(hidden)
    diameter = max(float(torch.cdist(head, head).max()), 1e-12)
    allowed = allowed_distance(logits, distances_of(head), diameter)
    best = logits.argmax(-1)
    for row in range(3):
        rivals = head - head[best[row]]
        away = torch.cat((rivals, draw(seed + 3, 20, D)))
        away = away / away.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        moved = hidden[row] + allowed[row] * (1 - 1e-9) * away
        raw = moved @ head.T  # a cap keeps the order
        kept = raw[:, best[row]]
        assert (kept >= raw.amax(-1) - 1e-9 * raw.abs().amax()).all()


def test_the_allowed_distance_is_no_less_than_by_the_diameter_alone():
    """margin / D, as the proposition has it, is what the distances of the rows improve on."""
    head, hidden = draw(1, 50, D), draw(2, 30, D)
    logits, diameter = hidden @ head.T, head_diameter(head)
    margin = logits.topk(2).values.diff().neg().squeeze(1)
    allowed = allowed_distance(logits, distances_of(head), diameter)
    assert (allowed >= margin / diameter - 1e-12).all()
    assert (allowed > 1.1 * margin / diameter).any()
    apart = torch.cdist(head, head)[logits.argmax(-1)]
    gaps = logits.amax(-1, keepdim=True) - logits
    exact = (gaps / apart).masked_fill(gaps == 0, torch.inf).amin(-1)
    assert (allowed <= exact + 1e-12).all(), "never more than what is true of each pair"


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(0.05, 0.9),
    threshold=st.sampled_from([1.0, 0.5]),
)
def test_a_certified_token_keeps_its_argmax_where_steps_shrink_by_the_rate(seed, rate, threshold):
    """The longest step that is certified, then straight at the nearest rival, as far as may be."""
    head, here = draw(seed, 12, D), draw(seed + 1, 8, D)
    policy, weights = certified(head, rate), Weights(head)
    direction = draw(seed + 2, 8, D)
    direction /= direction.norm(dim=-1, keepdim=True)
    unit = last_score(policy, weights, [here - direction, here])
    length = threshold * (1 - 1e-3) / unit.double()[:, None]  # float32 policies round
    certain = last_score(policy, weights, [here - length * direction, here]) <= threshold
    assert certain[length.squeeze(1) > 0.01].all(), "what rounding leaves alone"
    rows, best = torch.arange(8), weights.head(here).argmax(-1)
    apart = torch.cdist(head, head)[best]
    gaps = weights.head(here).amax(-1, keepdim=True) - weights.head(here)
    rival = (gaps / apart).masked_fill(apart == 0, torch.inf).argmin(-1)
    straight = head[rival] - head[best]
    straight /= straight.norm(dim=-1, keepdim=True)
    for _ in range(200):  # 0.9**200 of the first step is left
        length = length * rate
        here = here + length * straight
        logits = weights.head(here)
        assert (logits[rows, best] >= logits.amax(-1) - 1e-9 * logits.abs().amax()).all()


def last_score(policy: Certified, weights: Weights, hidden: list[Tensor]) -> Tensor:
    return run(policy, weights, hidden)[0][:, -1]


def run(policy: Certified, weights: Weights, hidden: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores and whose logits were asked for, ``(rows, recurrences)``."""
    memory = torch.zeros(len(hidden[0]), policy.memory_width(len(weights.head_weight), D))
    scores, asked = [], []
    for r, h in enumerate(hidden, start=1):
        output = Output(h, weights.head)
        seen = Observation(r=r, latent=h, previous=h, output=output)
        score, memory = policy.score(seen, memory)
        scores.append(score)
        asked.append(output.asked)
    return torch.stack(scores, dim=1), torch.stack(asked, dim=1)


def settling(seed: int = 3, rows: int = 40, n: int = 9) -> list[Tensor]:
    goal, offset = draw(seed, 2, rows, D).float()
    return [goal + 0.5**r * offset for r in range(n)]


def test_the_head_is_read_when_the_cheap_test_fires_and_again_only_where_it_may_have_changed():
    head = draw(4, 30, D).float()
    policy, hidden = certified(head, 0.5, first_read=0.4), settling()
    scores, asked = run(policy, Weights(head), hidden)
    steps = torch.stack([(b - a).norm(dim=-1) for a, b in itertools.pairwise(hidden)], 1)
    assert not asked[:, 0].any() and torch.isposinf(scores[:, 0]).all()
    for row in range(len(scores)):
        believed = 0.4
        for r in range(1, len(hidden)):
            ahead = float(steps[row, r - 1])  # rate 0.5: as far again as the last step
            assert bool(asked[row, r]) is (ahead <= believed)
            if asked[row, r]:
                logits = hidden[r][row : row + 1] @ head.T
                found = allowed_distance(logits, policy.distances, policy.diameter)
                believed = float(found)
            assert float(scores[row, r]) == pytest.approx(ahead / believed, rel=1e-4)
    assert (scores[~asked] > 1).all(), "nothing is certified unread"
    certified_rows = (scores <= 1).any(1)
    assert certified_rows.float().mean() > 0.5
    reads = asked.cumsum(1).gather(1, (scores <= 1).float().argmax(1, keepdim=True)).squeeze(1)
    assert reads[certified_rows].float().mean() < 2.5


def test_a_tie_is_certified_only_where_nothing_moves():
    head = torch.eye(D)[:2]
    still = torch.tensor([[1.0, 1.0, 0, 0, 0, 0]])
    scores, _ = run(certified(head), Weights(head), [still - 1, still, still])
    assert scores[0, 1] > 1e6
    assert scores[0, 2] == 0


def test_one_word_is_always_certified():
    head = torch.ones(1, D)
    scores, _ = run(certified(head), Weights(head), settling(rows=2))
    assert (scores[:, 1:] == 0).all()


def test_the_state_survives_json_and_damage_is_refused():
    policy = certified(draw(5, 9, D).float(), rate=0.625, first_read=0.1234)
    state = json.loads(json.dumps(policy.to_state()))
    assert set(state) == {"rate", "diameter", "first_read"}
    weights = Weights(draw(5, 9, D).float())
    again = build_policy(ExitRule(policy="certified"), {"certified": state}, weights)
    assert again.to_state() == policy.to_state()
    for damage in ({"rate": 1.0}, {"rate": 0.0}, {"rate": float("nan")}, {"diameter": -1.0}):
        with pytest.raises(ExitError, match="'certified' is damaged.*loopwise measure"):
            Certified.build({**state, **damage}, weights)
