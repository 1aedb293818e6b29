"""Replay finds every rule's score in a trace, recorded or not, and it is what the rule says."""

from __future__ import annotations

import numpy as np
import pytest

from loopwise.errors import ExitError, TraceError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.latent_kl_fit import fit_latent_kl
from loopwise.measure.scores import (
    follows_from_columns,
    recorded_asks,
    recorded_score,
    why_unknown,
)
from loopwise.measure.trace import Trace, TraceInfo, write_trace
from tests.conftest import make_blocks, make_model

HORIZON = 6
INFO = TraceInfo("somewhere", "abc", "stories", "def", 4.0, (1, 12))
PROBE = {"weight": [0.1] * 32, "bias": 0.0, "mean": [0.0] * 32, "std": [1.0] * 32}
# The gate belongs to models that carry one, and this one does not.
LIVE = [name for name in EXITS if name != "gate" and EXITS[name].reads is not Reads.TRUTH]
RECORDED = ["min-p-kl", "cosine", "short-list-kl", "sketched-kl", "certified", "probe"]
DERIVED = [name for name in LIVE if name not in RECORDED]
CERTIFIED = {"rate": 0.3, "diameter": 3.0, "first_read": 0.5}


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> tuple[Trace, Trace, dict]:
    """One with the standard columns alone, one with every score recorded, and what was fitted."""
    folder = tmp_path_factory.mktemp("scores")
    model, blocks = make_model(injection="add"), make_blocks(documents=2, shuffle=False)
    bare = write_trace(model, blocks, folder / "bare", INFO, horizon=HORIZON)
    r = np.arange(1, HORIZON + 1)
    policy = fit_latent_kl(bare["change"], bare["second"], bare["kl_prev"], r)
    fitted = {"probe": PROBE, "latent-kl": policy.to_state(), "certified": CERTIFIED}
    policies = [build_policy(ExitRule(policy=name), fitted, model) for name in LIVE]
    full = write_trace(model, blocks, folder / "full", INFO, horizon=HORIZON, policies=policies)
    return bare, full, fitted


@pytest.mark.parametrize("name", LIVE)
def test_recorded_scores_come_first(traces, name):
    _, full, fitted = traces
    assert np.array_equal(recorded_score(full, name, fitted), full[f"score.{name}"])


@pytest.mark.parametrize("name", DERIVED)
def test_columns_say_what_the_policy_said(traces, name):
    """To the bit: one formula, one home. Only the predicted KL may round apart."""
    bare, full, fitted = traces
    found = recorded_score(bare, name, fitted)
    assert found.dtype == np.float32
    if name == "latent-kl":
        assert found == pytest.approx(full[f"score.{name}"], rel=1e-5)
    else:
        assert np.array_equal(found, full[f"score.{name}"])
    assert np.isfinite(found[:, 1:]).all() or name == "fixed"


@pytest.mark.parametrize("name", RECORDED)
def test_what_no_column_knows_is_refused(traces, name):
    bare, _, fitted = traces
    with pytest.raises(TraceError, match=f"'{name}' was not recorded.*measure again"):
        recorded_score(bare, name, fitted)


@pytest.mark.parametrize("name", LIVE)
def test_why_a_score_is_unknown_is_said_where_it_would_be_refused(traces, name):
    bare, full, fitted = traces
    for trace in (bare, full):
        for known in (fitted, {}):
            try:
                recorded_score(trace, name, known)
                found = True
            except (ExitError, TraceError):
                found = False
            why = why_unknown(trace, name, known)
            assert (why is None) is found, (name, why)
            assert why is None or "measure" in why, "a reason comes with what to do"
    assert follows_from_columns(name) is (name in DERIVED)


@pytest.mark.parametrize("name", LIVE)
def test_a_trace_says_whose_logits_a_policy_asked_for(traces, name):
    _, full, _ = traces
    found = recorded_asks(full, name)
    if EXITS[name].reads is not Reads.HIDDEN:
        assert found is None
        return
    assert found.dtype == bool and found.shape == (full.n_tokens, HORIZON)
    if name == "certified":
        score = full["score.certified"]
        assert found[score <= 1].all(), "nothing is certified unread"
        assert 0 < found.sum() < found.size
    else:
        assert found[:, 0].all() and not found[:, 1:].any(), "in full at recurrence 1 alone"


def test_an_oracle_has_no_recorded_score(traces):
    with pytest.raises(TraceError, match="'oracle' looks ahead"):
        recorded_score(traces[1], "oracle")


def test_a_rule_without_its_fit_and_a_wrong_name_are_refused(traces):
    with pytest.raises(ExitError, match="must be fitted"):
        recorded_score(traces[0], "latent-kl")
    with pytest.raises(ExitError, match="did you mean 'margin'"):
        recorded_score(traces[0], "margn")


def test_a_model_fits_its_own_trace(traces):
    """The prediction orders tokens as the KL does, far better than chance."""
    _, full, _ = traces
    kl, predicted = full["kl_prev"][:, 1:].ravel(), full["score.latent-kl"][:, 1:].ravel()
    ranks = [np.argsort(np.argsort(values)) for values in (kl, predicted)]
    assert np.corrcoef(*ranks)[0, 1] > 0.5
