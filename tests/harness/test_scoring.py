"""Log-likelihoods equal those of their definition, whatever shares a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import DepthError, EngineError, ExitError
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.harness.encoding import Encoder
from loopwise.harness.scoring import Piece, Scorer, batch_of
from tests.conftest import make_model
from tests.harness.cases import PAIRS, loaded, log_softmax_of, naive_pair

RULES = ["latent-change:0.8,max=6", "kl:0.1,max=6", "entropy:0.01,min=2,max=6,patience=2"]


@pytest.fixture
def checkpoint(tmp_path):
    return loaded(tmp_path / "checkpoint", make_model().double())


def pieces_of(checkpoint, pairs=PAIRS):
    return [Piece([*a, *b], len(b)) for a, b in Encoder(checkpoint).pairs(pairs)]


def scores_of(checkpoint, rule, pairs=PAIRS, **options):
    scorer = Scorer(checkpoint, parse_rule(rule), **options)
    return scorer.score(pieces_of(checkpoint, pairs)), scorer.tally


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("model", [{}, {"latent_init": "noise"}], ids=["zeros", "noise"])
def test_uniform_depth_equals_the_full_softmax_of_each_request_alone(tmp_path, depth, model):
    checkpoint = loaded(tmp_path / "checkpoint", make_model(**model).double())
    found, tally = scores_of(checkpoint, f"fixed:{depth}")
    for pair, score in zip(PAIRS, found, strict=True):
        wanted, greedy = naive_pair(checkpoint.model, checkpoint.tokenizer, pair, depth)
        assert score.logprob == pytest.approx(wanted, abs=1e-4)
        assert score.is_greedy == greedy
    rows = sum(len(piece.token_ids) - 1 for piece in pieces_of(checkpoint))
    assert (tally.rows, tally.core_row_steps) == (rows, rows * depth)


def test_greedy_means_that_decoding_makes_the_continuation(checkpoint):
    given = [256, *b"Tom"]
    made = []
    for _ in range(5):
        made.append(int(log_softmax_of(checkpoint.model, given + made, 3)[-1].argmax()))
    right = Piece([*given, *made], 5)
    wrong = Piece([*given, *made[:-1], (made[-1] + 1) % 256], 5)
    found = Scorer(checkpoint, parse_rule("fixed:3")).score([right, wrong])
    assert [score.is_greedy for score in found] == [True, False]


@pytest.mark.parametrize("rule", RULES)
def test_live_exits_equal_decoding_token_by_token(checkpoint, rule):
    """Scores, exit depths and the work that was done, against the slow decoder."""
    found, tally = scores_of(checkpoint, rule)
    steps = scored_depth = 0
    for piece, score in zip(pieces_of(checkpoint), found, strict=True):
        wanted = parse_rule(rule)
        decoder = ReferenceDecoder(
            checkpoint.model, wanted, build_policy(wanted, None, checkpoint.model)
        )
        fed = [decoder.feed(token) for token in piece.token_ids[:-1]]
        logits = torch.stack([f.logits for f in fed]).double().log_softmax(-1)[-piece.n_scored :]
        scored = torch.tensor(piece.token_ids[-piece.n_scored :])
        assert score.logprob == pytest.approx(
            float(logits.gather(1, scored[:, None]).sum()), abs=1e-4
        )
        depths = [f.exit_depth for f in fed]
        steps += sum(depths)
        scored_depth += sum(depths[-piece.n_scored :])
    assert (tally.core_row_steps, tally.scored_depth) == (steps, scored_depth)
    assert 1 < tally.to_json()["mean_depth"] < 6, "exits at different depths, or nothing is tested"


@pytest.mark.parametrize("rule", ["fixed:3", *RULES])
def test_u27_u30_scores_do_not_depend_on_who_shares_a_batch(checkpoint, rule):
    together, tally = scores_of(checkpoint, rule)
    for batch in (1, 2, 3):
        found, other = scores_of(checkpoint, rule, batch=batch)
        assert [s.is_greedy for s in found] == [s.is_greedy for s in together]
        for one, other_score in zip(found, together, strict=True):
            assert one.logprob == pytest.approx(other_score.logprob, abs=1e-5)
        assert (other.rows, other.core_row_steps) == (tally.rows, tally.core_row_steps)
    backwards, _ = scores_of(checkpoint, rule, PAIRS[::-1])
    assert [s.logprob for s in backwards[::-1]] == pytest.approx(
        [s.logprob for s in together], abs=1e-5
    )


def test_the_parallel_pass_equals_the_engine_and_other_kv_policies_do_not(checkpoint):
    rule = "latent-change:0.8,max=6"
    parallel, tally = scores_of(checkpoint, rule)
    scorer = Scorer(checkpoint, parse_rule(rule))
    stepwise = scorer._stepwise(pieces_of(checkpoint))
    assert [s.logprob for s in stepwise] == pytest.approx([s.logprob for s in parallel], abs=1e-4)
    assert [s.is_greedy for s in stepwise] == [s.is_greedy for s in parallel]
    assert scorer.tally.scored_depth == tally.scored_depth
    last, _ = scores_of(checkpoint, rule, kv_policy="last")
    assert max(abs(a.logprob - b.logprob) for a, b in zip(last, parallel, strict=True)) > 1e-3


def test_approximate_kv_policies_score_as_the_engine_serves_alone_and_in_a_crowd(checkpoint):
    rule = "latent-change:0.8,max=6"
    crowd, _ = scores_of(checkpoint, rule, kv_policy="last")
    alone = [scores_of(checkpoint, rule, [pair], kv_policy="last")[0][0] for pair in PAIRS]
    assert [s.logprob for s in alone] == pytest.approx([s.logprob for s in crowd], abs=1e-4)


def test_a_piece_with_nothing_to_score_costs_nothing(checkpoint):
    found, tally = scores_of(checkpoint, "fixed:2", [("abc", "")])
    assert (found[0].logprob, found[0].is_greedy, tally.rows) == (0.0, True, 0)


def test_padding_belongs_to_no_document_and_is_not_work():
    batch = batch_of([Piece([1, 2, 3, 4], 2), Piece([5, 6], 1)])
    assert batch.token_ids.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch.targets.tolist() == [[-100, 3, 4], [6, -100, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, -1, -1]]


def test_logits_larger_than_one_piece_give_the_same(checkpoint, monkeypatch):
    whole, _ = scores_of(checkpoint, "fixed:2")
    monkeypatch.setattr("loopwise.harness.scoring._LOGITS", 258 * 3)
    pieces, _ = scores_of(checkpoint, "fixed:2")
    assert [s.logprob for s in pieces] == pytest.approx([s.logprob for s in whole], abs=1e-9)
    monkeypatch.setattr("loopwise.harness.scoring._BATCH_TOKENS", 1)
    alone, _ = scores_of(checkpoint, "fixed:2")
    assert [s.logprob for s in alone] == pytest.approx([s.logprob for s in whole], abs=1e-5)


def test_rules_that_cannot_be_served_are_refused(checkpoint):
    with pytest.raises(ExitError, match="later recurrences"):
        Scorer(checkpoint, parse_rule("oracle:0.1"))
    with pytest.raises(ExitError, match="fitted"):
        Scorer(checkpoint, parse_rule("probe:0.1"))
    with pytest.raises(EngineError, match="did you mean 'last'"):
        Scorer(checkpoint, parse_rule("fixed:2"), kv_policy="lst")
    limited = replace(checkpoint.model.geometry, max_depth=1)
    checkpoint.model.geometry = limited
    with pytest.raises(DepthError, match="limit of 1"):
        Scorer(checkpoint, parse_rule("fixed:2"))


def test_nothing_run_is_reported_as_nothing(checkpoint):
    told = Scorer(checkpoint, parse_rule("fixed:2")).tally.to_json()
    assert (told["mean_depth"], told["tokens_per_s"], told["tokens"]) == (None, None, 0)
    assert not any(isinstance(v, float) and math.isnan(v) for v in told.values())
