"""Models that ask more of a view than attention: every way of running them gives the same.

Learned positions and a clock (LoopFormer); windows, a phase by layer and scaled queries (Dory);
tokens in every layer (Parcae).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from loopwise.bench.baselines import generate_in_step, generate_padded
from loopwise.bench.workload import Job
from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import ShapeError
from loopwise.measure.evaluate import trajectory
from loopwise.measure.live import run_live
from loopwise.models.base import Local, Rope
from loopwise.models.layers import row_seeds
from loopwise.models.views import causal_bias
from loopwise.train.loss import LoopedLoss
from tests.engine.decoding import (
    ASKING,
    MAX_DEPTH,
    TEXT,
    build,
    check,
    engine_for,
    job,
    policy_for,
    reference,
    rule_for,
    run,
)
from tests.engine.test_reference import as_batch, forward


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("depth", [1, 2, MAX_DEPTH])
def test_decoding_equals_the_full_forward_pass(name, depth):
    rule = rule_for(name, "fixed", max_depth=depth)
    decoder = ReferenceDecoder(build(name), rule, policy_for(name, rule))
    found = torch.stack([decoder.feed(token).logits for token in TEXT])
    whole = forward(build(name), TEXT, rule.max_depth)
    assert (found - whole).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["latent-change", "kl"])
@pytest.mark.parametrize("name", ASKING)
def test_exits_and_losses_equal_live_measurement(name, policy):
    rule = rule_for(name, policy)
    decoder = ReferenceDecoder(build(name), rule, policy_for(name, rule))
    steps = [decoder.feed(token) for token in TEXT]
    batch = as_batch(TEXT)
    found = run_live(build(name), [batch], rule, policy_for(name, rule))
    assert found.exit_depth.tolist() == [s.exit_depth for s in steps]
    assert len(set(found.exit_depth.tolist())) >= 2, "one depth for all tests little"
    log_p = torch.stack([s.logits for s in steps]).log_softmax(-1)
    losses = -log_p.gather(1, batch.targets[0][:, None]).squeeze(1)
    assert (found.loss - losses).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["fixed", "latent-change", "kl"])
@pytest.mark.parametrize("chunk", [32, 7, 1])
@pytest.mark.parametrize("name", ASKING)
def test_prompts_longer_than_the_window_in_chunks_of_any_size(name, chunk, policy):
    """Groups of a chunk share what they read: from what its first row sees to its last row."""
    rule = rule_for(name, policy)
    jobs = [job(TEXT[:27], rule, 4), job(TEXT[:2], rule, 9), job(TEXT[5:20], rule, 3)]
    found = run(engine_for(name, chunk=chunk, page_size=4, slots=3), jobs)
    for generation, wanted in zip(found, jobs, strict=True):
        check(generation, reference(name, wanted), name)


@pytest.mark.parametrize("name", ASKING)
def test_the_engine_in_float32_with_and_without_the_compiled_kernel(name):
    wanted = job(TEXT[:11], rule_for(name, "fixed"), 5)
    for kernels in ("auto", "off"):
        found = run(engine_for(name, torch.float32, kernels=kernels), [wanted])[0]
        check(found, reference(name, wanted), kernels)


@pytest.mark.parametrize("name", ASKING)
def test_baselines_decode_the_same_tokens(name):
    engine = engine_for(name)
    jobs = [Job(tuple(TEXT[i : i + 6]), (), 5) for i in (0, 3, 9)]
    wanted = [run(engine, [job(j.prompt, "fixed:3", 5)])[0] for j in jobs]
    tokens = [list(w.completions[0].token_ids) for w in wanted]
    assert generate_in_step(engine_for(name), jobs, 3) == tokens
    if not build(name).seeded_latent:  # its noise belongs to positions there, to nothing here
        assert generate_padded(build(name), jobs, 3, pad=256) == tokens


@pytest.mark.parametrize("name", ASKING)
def test_training_sees_what_measurement_sees(name):
    model, batch = build(name, torch.float64), as_batch(TEXT)
    found = LoopedLoss(model, backprop_depth=2)(batch, 3, row_seeds(batch.positions))
    *_, (r, latent, view) = trajectory(model, batch, 3)
    log_p = model.coda(latent, r, view)[0].log_softmax(-1)
    wanted = -log_p.gather(1, batch.targets[0][:, None]).sum()
    assert (found - wanted).detach().abs() < 1e-3


def test_texts_past_the_learned_positions_are_refused_by_name():
    rule = rule_for("loopformer", "fixed")
    decoder = ReferenceDecoder(build("loopformer"), rule, policy_for("loopformer", rule))
    decoder.position = 48
    with pytest.raises(ShapeError, match="49 tokens are past this model's limit of 48"):
        decoder.feed(1)
    for run_past in (
        lambda: run_live(build("loopformer"), [as_batch([1] * 49)], rule, decoder.policy),
        lambda: LoopedLoss(build("loopformer"), backprop_depth=1)(as_batch([1] * 49), 1),
    ):
        with pytest.raises(ShapeError, match="49 tokens"):
            run_past()


def test_a_window_counts_the_token_itself_and_stops_at_documents():
    """By hand: two documents of four and three tokens, a window of two."""
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    seen = causal_bias(ids, torch.float64, window=2)[0, 0] == 0
    wanted = np.zeros((7, 7), bool)
    for row, columns in enumerate([[0], [0, 1], [1, 2], [2, 3], [4], [4, 5], [5, 6]]):
        wanted[row, columns] = True
    assert np.array_equal(seen.numpy(), wanted)


def test_a_rope_that_does_not_turn_and_layers_with_their_own():
    x = torch.randn(5, 2, 8)
    still = Rope(head_dim=8, turns=False)
    q, k = still.turn(x, 2 * x, *still.tables(torch.arange(5), torch.float32))
    assert torch.equal(q, x) and torch.equal(k, 2 * x)
    local = Rope(head_dim=8, base=10.0)
    rope = Rope(head_dim=8, local=Local(layers=(False, True, False), window=3, rope=local))
    assert rope.at(0) is rope and rope.at(1) is local
    assert [rope.is_local(layer) for layer in (0, 1, 2)] == [False, True, False]
    assert rope.window == 3 and still.window is None


@pytest.mark.parametrize("name", [*ASKING, "concat, two cores", "attn-all"])
def test_compiled_stages_give_the_same_for_any_number_of_rows(name, monkeypatch):
    """One row alone and several; where sizes vary, dynamo missed layers numbered by a tuple."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: real(call, backend="eager", **how))
    jobs = [job(TEXT[:9], rule_for(name, "latent-change"), 3), job(TEXT[:3], "fixed:2", 3)]
    for generation, wanted in zip(run(engine_for(name, compile="on"), jobs), jobs, strict=True):
        check(generation, reference(name, wanted), name)


def test_compiled_models_of_equal_shapes_are_told_apart(monkeypatch):
    """Compiled code is found by code object, and weights of one shape are all it then looks at."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: real(call, backend="eager", **how))
    for name in ("attn-all", "none"):
        asked = job(TEXT[:9], "fixed:3", 3)
        [generation] = run(engine_for(name, compile="on"), [asked])
        check(generation, reference(name, asked), name)


def test_scales_multiply_queries_after_their_phase():
    rope, scale = Rope(head_dim=4), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    x: Tensor = torch.randn(3, 1, 4)
    cos, sin = rope.tables(torch.arange(3), torch.float32)
    q, k = rope.turn(x, x, cos, sin, scale)
    assert torch.equal(q, rope.rotate(x, cos, sin) * scale)
    assert torch.equal(k, rope.rotate(x, cos, sin))
