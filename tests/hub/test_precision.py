"""Float32 beside bfloat16 by depth (U11): the numbers, and the warning past a stated limit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from loopwise.data import PackedBlocks, tokenize
from loopwise.data.documents import Document
from loopwise.hub import precision
from loopwise.hub.inspect import inspect_checkpoint, inspect_lines
from loopwise.hub.precision import LIMIT_NATS, TOKENS, precision_lines, precision_report
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.hub.folders import forward
from tests.naive import roughen


def batch_of(text: str):
    return PackedBlocks(tokenize([Document(text)], ByteTokenizer()), 80, seed=0).batch(0, 1)


TEXT = "Mia had 3 apples. Tom took one, and Ann ate the rest of them. " * 4


def rough(gain: float = 1.0) -> LoopedLM:
    model = make_model()
    roughen(model, 1, gain)
    return model.eval()


def test_rows_are_differences_of_two_passes() -> None:
    model, batch = rough(), batch_of(TEXT)
    found = precision_report(model, batch, 3)
    assert [row["depth"] for row in found["rows"]] == [1, 2, 3, 4, 8]
    assert found["tokens"] == TOKENS
    ids = batch.token_ids[0, :TOKENS].tolist()
    for row in found["rows"]:
        exact = forward(model, row["depth"], ids)
        rounded = forward(copy.deepcopy(model).to(torch.bfloat16), row["depth"], ids).float()
        assert row["logits_max"] == pytest.approx(float((exact - rounded).abs().max()), rel=1e-5)
        p, q = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        assert row["kl_mean_nats"] == pytest.approx(float(kl.mean()), rel=1e-5)
        assert row["kl_max_nats"] >= row["kl_mean_nats"] > 0
    assert model.dtype == torch.float32, "the model itself is left alone"


@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_a_gap_past_the_limit_at_trained_depth_is_warned_of(gain: float) -> None:
    found = precision_report(rough(gain), batch_of(TEXT), 8)
    seen = found["rows"][-1]["kl_mean_nats"]
    assert (found["judged"], found["passes"]) == (8, seen <= LIMIT_NATS)
    said = precision_lines(found)[-1]
    assert ("warning: more than the limit of 0.01. Run it in float32." in said) is (gain > 1)


@pytest.mark.parametrize("broken", ["float32", "bfloat16"])
def test_a_model_that_diverges_is_not_laid_to_bfloat16(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = precision.logits_at

    def from_depth_4(model: LoopedLM, *given: Any) -> dict[int, torch.Tensor]:
        found = own(model, *given)
        if broken == "float32" or model.dtype == torch.bfloat16:
            found = {r: x if r < 4 else torch.full_like(x, torch.inf) for r, x in found.items()}
        return found

    monkeypatch.setattr(precision, "logits_at", from_depth_4)
    found = precision_report(rough(), batch_of(TEXT), 8)
    assert f"warning: logits in {broken} are not finite at depth 4." in found["sentence"]
    assert ("run it in float32" in found["sentence"]) is (broken == "bfloat16")
    assert found["passes"] is False
    assert precision_report(rough(), batch_of(TEXT), 3)["passes"], "judged before that"


def test_no_deeper_than_the_weights_allow_and_shown_with_the_rest(tmp_path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 258, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24}
    once = precision_report(FixedModel(FixedConfig(**shape, n_layers=2)), batch_of(TEXT), 1)
    assert [row["depth"] for row in once["rows"]] == [1]
    from tests.hub.test_inspect import FEW, TRAINED, saved

    checkpoint: Checkpoint = saved(tmp_path, rough(), TRAINED)
    facts = inspect_checkpoint(checkpoint, tokens=FEW)
    assert [row["depth"] for row in facts["precision"]["rows"]] == [1, 2, 4, 6, 8]
    assert facts["precision"]["judged"] == facts["full_depth"] == 6
    assert facts["precision"]["sentence"] in inspect_lines(facts)
