"""What is charged for checks, by replay and live, is what was run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loopwise.exits import EXITS
from loopwise.exits.base import ExitPolicy, Reads
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.frontier import replay
from loopwise.measure.live import run_live
from loopwise.measure.price import Checks, live_checks, replayed_checks
from loopwise.measure.trace import trace_batch
from loopwise.models.costs import Costs, flops_per_token
from tests.conftest import make_blocks, make_model
from tests.engine.test_reference import FITTED, LIVE

DEPTH = 5
COSTS = Costs(prelude=10, core=100, coda=20, head=220, row=3)


def policy_of(name: str, model: torch.nn.Module) -> ExitPolicy:
    return build_policy(ExitRule(policy=name), FITTED, model)  # type: ignore[arg-type]


def test_checks_are_charged_part_by_part():
    checks = Checks(codas=2.5, heads=0.5, products=7)
    assert checks.flops(COSTS, 4) == 10 + 20 + 220 + 400 + 2.5 * 20 + 0.5 * 220 + 7 * 3
    assert Checks().flops(COSTS, 4) == COSTS.forward(4)


def test_replayed_checks_count_what_was_asked_before_the_exit():
    depth = np.array([1, 2, 4])
    asked = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1]], dtype=bool)
    wanted = {
        "certified": (4 / 3, 3 / 3, 0),
        "kl": (4 / 3, 4 / 3, 0),
        "latent-change": (0, 0, 0),
        "probe": (0, 0, 7 / 3),
        "oracle": (0, 0, 0),
    }
    for name, parts in wanted.items():
        found = replayed_checks(EXITS[name], depth, asked)
        assert (found.codas, found.heads, found.products) == pytest.approx(parts), name


@pytest.mark.parametrize("name", LIVE)
@torch.no_grad()
def test_live_and_replay_agree_where_no_token_reads_another(name):
    """One-token documents: freezing a neighbour changes nothing, so neither do the passes."""
    model = make_model(injection="add", n_core_layers=1)
    whole = make_blocks(documents=3, shuffle=False).batch(0, 3)
    apart = torch.arange(whole.token_ids.numel(), dtype=torch.int32).view_as(whole.document_ids)
    batch = replace(whole, document_ids=apart, positions=torch.zeros_like(whole.positions))
    policy = policy_of(name, model)
    traced = trace_batch(model, batch, DEPTH, [policy])
    score = traced[f"score.{name}"].numpy()
    threshold = float(np.quantile(score[np.isfinite(score)], 0.4))
    rule = ExitRule(policy=name, threshold=threshold, max_depth=DEPTH)
    live = run_live(model, [batch], rule, policy)
    depth = replay(score, rule)
    assert (live.exit_depth.numpy() != depth).mean() < 0.02, "a matter of rounding"
    asked = traced[f"read.{name}"].numpy() if policy.reads is Reads.HIDDEN else None
    ours, theirs = replayed_checks(type(policy), depth, asked), live_checks(policy, live)
    for part in ("codas", "heads", "products"):
        assert getattr(ours, part) == pytest.approx(getattr(theirs, part), rel=0.05, abs=0.02)


@pytest.mark.parametrize("name", LIVE)
def test_a_live_run_is_charged_for_the_rows_it_ran(name):
    model = make_model(injection="add", n_core_layers=1)
    batch = make_blocks(documents=2, shuffle=False).batch(0, 2)
    everywhere = torch.zeros_like(batch.targets).masked_fill(batch.document_ids < 0, -100)
    batch = replace(batch, targets=everywhere)
    policy = policy_of(name, model)
    threshold = {"certified": 1.0}.get(name, 0.05)
    found = run_live(
        model, [batch], ExitRule(policy=name, threshold=threshold, max_depth=4), policy
    )
    n, checks = len(found.exit_depth), live_checks(policy, found)
    assert found.core_row_steps == int(found.exit_depth.sum())
    assert checks.codas == pytest.approx(found.coda_row_steps / n - 1)
    assert checks.heads == pytest.approx(found.head_row_steps / n - 1)
    costs = flops_per_token(model)
    ran = n * costs.prelude + found.core_row_steps * costs.core
    ran += found.coda_row_steps * costs.coda + found.head_row_steps * costs.head
    ran += found.core_row_steps * policy.products * costs.row
    charged = checks.flops(costs, found.core_row_steps / n)
    assert charged == pytest.approx(ran / n)
