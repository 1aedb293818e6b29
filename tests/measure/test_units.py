"""Units stand alone: what is measured of one depends on nothing around it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import make_model

from loopwise.data import Document, tokenize
from loopwise.data.packing import NO_TARGET
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.live import run_live
from loopwise.measure.units import Span, Units, trace_units, unit_spans
from loopwise.tokenizer import ByteTokenizer

TEXTS = ["a" * 5, "the cat sat on the mat", "b", "to be or not to be, that is the question" * 2]
STORE = tokenize([Document(t) for t in TEXTS], ByteTokenizer())
EVERY = range(len(TEXTS))


def test_a_document_is_its_first_tokens():
    spans = unit_spans(STORE, EVERY, seq=16, kind="document")
    assert [s.document for s in spans] == [0, 1, 2, 3]
    assert [s.n_targets for s in spans] == [6, 16, 2, 16], "the end of text is a target too"


def test_blocks_cover_a_document_up_to_an_end_that_is_too_short():
    spans = unit_spans(STORE, EVERY, seq=16, kind="block")
    assert [(s.document, s.n_targets) for s in spans] == [
        *((0, 6), (1, 16), (2, 2)),
        *[(3, 16)] * 5,
    ]
    of_last = [s for s in spans if s.document == 3]
    assert all(b.start == a.end - 1 for a, b in itertools.pairwise(of_last))
    assert all(s.end <= STORE.offsets[s.document + 1] for s in spans)


def test_units_hold_every_target_once_under_its_own_number():
    spans = unit_spans(STORE, EVERY, seq=16, kind="block")
    units = Units.of(STORE, spans)
    assert units.n_units == len(spans)
    assert units.n_tokens == sum(s.n_targets for s in spans)
    targets = torch.cat([b.targets[b.targets != NO_TARGET] for b in units.batches]).numpy()
    for i, span in enumerate(spans):
        wanted = STORE.token_ids[span.start + 1 : span.end]
        assert targets[units.unit == i].tolist() == wanted.tolist()


def test_many_units_are_cut_into_batches():
    spans = [Span(0, 0, 7)] * 900
    units = Units.of(STORE, spans)
    assert len(units.batches) > 1
    assert all(b.token_ids.numel() <= 2048 for b in units.batches)
    assert np.array_equal(np.sort(units.unit), np.repeat(np.arange(900), 6))


@pytest.mark.parametrize("policy", ["latent-change", "kl"])
def test_a_unit_does_not_care_what_else_is_measured(policy):
    model = make_model()
    rule = ExitRule(policy=policy, threshold=0.3, max_depth=5)
    spans = unit_spans(STORE, EVERY, seq=16, kind="document")
    together = run_live(model, Units.of(STORE, spans).batches, rule, build_policy(rule))
    unit = Units.of(STORE, spans).unit
    for i, span in enumerate(spans):
        alone = run_live(model, Units.of(STORE, [span]).batches, rule, build_policy(rule))
        assert together.exit_depth[unit == i].tolist() == alone.exit_depth.tolist()
        assert torch.allclose(together.loss[unit == i], alone.loss, atol=1e-4)


def test_a_trace_of_units_is_full_depth_and_scores():
    model = make_model()
    units = Units.of(STORE, unit_spans(STORE, EVERY, seq=16, kind="document"))
    policy = build_policy(ExitRule(policy="latent-change"))
    told = []
    seen = trace_units(
        model,
        units,
        4,
        ["loss", "change"],
        [policy],
        lambda done, total: told.append((done, total)),
    )
    assert set(seen) == {"loss", "change", "score.latent-change"}
    assert all(column.shape == (units.n_tokens, 4) for column in seen.values())
    assert np.allclose(seen["change"], seen["score.latent-change"])
    full = ExitRule(policy="fixed", max_depth=4)
    uniform = run_live(model, units.batches, full, build_policy(full))
    assert np.allclose(seen["loss"][:, 3], uniform.loss.numpy(), atol=1e-4)
    assert told == [(i + 1, len(units.batches)) for i in range(len(units.batches))]
