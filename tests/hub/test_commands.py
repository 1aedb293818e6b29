"""The commands around published checkpoints: what they print, and one line for bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopwise.models.checkpoint import save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.hub.folders import write_folder
from tests.hub.test_ouro import CONFIG, tensors
from tests.test_cli import answer, refused, run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ouro", CONFIG, tensors())


def test_a_converted_checkpoint_is_inspected_and_decodes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", source, out, "--json")
    made = answer(done)
    assert (made["format"], made["architecture"], made["out"]) == ("ouro", "ouro", str(out))
    assert f"{made['parameters']:,} parameters in float32" in done.stdout
    assert any(line.startswith("note: ") for line in done.stdout.splitlines())
    seen = run("inspect", out, "--tokens", "256", "--depth", "2", "--json")
    facts = answer(seen)
    assert facts["parameters"] == made["parameters"]
    assert facts["cap"]["mean_depth"] == 2
    assert facts["contraction"]["sentence"] in seen.stdout
    text = run("generate", out, "Tom", "--max-tokens", "3", "--json")
    assert len(answer(text)["token_ids"]) <= 3


def test_pickles_and_tokenizers_are_asked_for(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "tokenizer.json").unlink()
    torch.save(tensors(), source / "pytorch_model.bin")
    out = tmp_path / "out"
    refused(run("convert", source, out), "--allow-pickle")
    refused(run("convert", source, out, "--allow-pickle"), "--tokenizer")
    made = answer(run("convert", source, out, "--allow-pickle", "--tokenizer", "byte", "--json"))
    assert made["tokenizer_size"] == 258


def test_bad_sources_and_targets_are_one_line(source: Path, tmp_path: Path) -> None:
    refused(run("convert", tmp_path / "nowhere", tmp_path / "out"), "no checkpoint folder")
    refused(run("convert", source, source), "exists already")
    inside_a_file = source / "config.json" / "out"  # the advice was to free some space and resume
    refused(run("convert", source, inside_a_file), "Not a directory; choose another place")
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(run("convert", source, tmp_path / "out"), "Git LFS pointer")
    assert not (tmp_path / "out").exists()


def test_bad_inspections_are_one_line(source: Path, tmp_path: Path) -> None:
    refused(run("inspect", tmp_path / "nowhere"), "no checkpoint at")
    refused(run("inspect", source), "foreign checkpoint")
    save_checkpoint(tmp_path / "ours", make_model(), ByteTokenizer(), {})
    refused(run("inspect", tmp_path / "ours", "--depth", "2"), "--full-depth")
    refused(run("inspect", tmp_path / "ours", "--data", tmp_path / "no.txt"), "no.txt")
