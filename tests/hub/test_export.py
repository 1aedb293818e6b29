"""Checkpoints to hand out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loopwise.cli import app
from loopwise.data import Document
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.errors import CheckpointError
from loopwise.hub.export import export_checkpoint
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint, write_exits
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def run(request, tmp_path: Path) -> Path:
    def trainer(into: Path) -> None:
        (into / "optimizer.pt").write_bytes(b"state")

    sources = ["/home/somebody/texts/a.txt.xz", "builtin:stories", "hub:owner/name"]
    training = {
        "depth": {"true_mean": 4.0},
        "data": {"sources": sources, "tokens": 9},
        "started_from": {"checkpoint": "/home/somebody/runs/x", "weights_hash": "0"},
        TRAINED_ON: DocumentSketch.of([Document("a story")]).to_json(),
    }
    model = make_model(tie_embeddings=request.param)
    save_checkpoint(tmp_path / "run", model, ByteTokenizer(), training, trainer=trainer)
    write_exits(load_checkpoint(tmp_path / "run"), {"policies": {"probe": {"weight": [1.0]}}})
    return tmp_path / "run"


def test_float32_keeps_weights_training_and_rules_and_drops_the_trainer(run, tmp_path):
    before = load_checkpoint(run)
    done = export_checkpoint(before, tmp_path / "out", "fp32")
    after = load_checkpoint(tmp_path / "out")
    assert done["exits"] and after.fitted_policies() == before.fitted_policies()
    assert not (tmp_path / "out" / "trainer").exists()
    assert after.trained_mean_depth == 4.0
    assert after.training["exported_from"] == before.weights_hash
    assert after.training[TRAINED_ON] == before.training[TRAINED_ON]
    sources = after.training["data"]["sources"]
    assert sources == ["a.txt.xz", "builtin:stories", "hub:owner/name"]
    assert "somebody" not in (tmp_path / "out" / "training.json").read_text()
    for name, tensor in before.model.state_dict().items():
        assert tensor.equal(after.model.state_dict()[name])


def test_bfloat16_halves_the_file_and_leaves_the_rules_behind(run, tmp_path):
    before = load_checkpoint(run)
    whole = export_checkpoint(before, tmp_path / "whole", "fp32")["bytes"]
    done = export_checkpoint(before, tmp_path / "out", "bf16")
    assert done["bytes"] == pytest.approx(whole / 2, rel=0.1)
    after = load_checkpoint(tmp_path / "out")
    assert not done["exits"] and after.fitted_policies() == {}
    for name, tensor in before.model.state_dict().items():
        assert tensor.bfloat16().float().equal(after.model.state_dict()[name])
        assert after.model.state_dict()[name].dtype == torch.float32


def test_nothing_is_written_over(run, tmp_path):
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(load_checkpoint(run), run, "fp32")


def test_the_command_says_what_it_made(run, tmp_path):
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--dtype", "bf16"])
    assert result.exit_code == 0, result.stderr
    assert "MiB of weights" in result.stdout and "loopwise measure" in result.stdout
