"""Training that starts from a checkpoint: its weights, shape and tokenizer; resuming that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.config import from_table
from loopwise.data import Document
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.hub.chat import templates_in
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.settings import RunConfig
from loopwise.study.training import prepare
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.test_cli import answer, refused, run, sets

SMALL = (
    *("train.seq=48", "train.micro_batch=2", "train.compile=off", "train.dtype=fp32"),
    *("train.eval_blocks=2", "train.eval_depths=[1,2]", "train.save_every=2", "train.steps=4"),
    *("depth.mean=2", "depth.backprop_depth=2"),
)


STILL = ("optim.lr=1e-30", "optim.embedding_lr=1e-30")


@pytest.fixture
def start(tmp_path: Path) -> Path:
    training = {"special_ids": {"bos": 1}}
    save_checkpoint(tmp_path / "start", make_model(), ByteTokenizer(), training)
    return tmp_path / "start"


def train(out: Path, *more: str | Path, settings: tuple[str, ...] = SMALL):  # type: ignore[no-untyped-def]
    arguments = ["--data", "builtin:stories:16", "--out", out, "--json", *more]
    return run("train", *arguments, *sets(*settings))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(path).model.state_dict()


def test_training_goes_on_from_the_weights(start: Path, tmp_path: Path) -> None:
    """With a step of size zero they come back as they were."""
    made = answer(train(tmp_path / "run", "--from", start, settings=(*SMALL, *STILL)))
    before, after = weights(start), weights(Path(made["checkpoint"]))
    for key, value in before.items():
        assert torch.allclose(after[key], value, atol=1e-6), key
    facts = json.loads((Path(made["checkpoint"]) / "training.json").read_text())
    assert facts["special_ids"] == {"bos": 1}
    assert facts["started_from"]["weights_hash"] == load_checkpoint(start).weights_hash
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["architecture"], settings["model"]["d_model"]) == ("recurrent", 32)
    assert settings["start_from"] == str(start)


def test_what_it_was_made_of_and_its_chat_templates_go_along(tmp_path: Path) -> None:
    """They were dropped: a healed instruct model had no template, its card no origin."""
    cut = {"checkpoint": "smol", "layers": {"prelude": [0], "core": [1, 2], "coda": [3]}}
    training = {"retrofitted_from": cut, "converted_from": {"format": "llama", "folder": "x"}}
    training["origin"] = {"base_model": "someone/smol", "license": "mit"}
    files = {"chat_template.jinja": "{{ a }}", "additional_chat_templates/tools.jinja": "{{ b }}"}
    start = tmp_path / "start"
    save_checkpoint(start, make_model(), ByteTokenizer(), training, files=files)
    made = answer(train(tmp_path / "run", "--from", start))
    again = answer(train(tmp_path / "more", "--from", tmp_path / "run"))
    for folder in (Path(made["checkpoint"]), Path(again["checkpoint"])):
        assert templates_in(folder) == {"default": "{{ a }}", "tools": "{{ b }}"}
        facts = load_checkpoint(folder).training
        assert facts["retrofitted_from"] == cut and facts["origin"] == training["origin"]
        assert "converted_from" not in facts, "its texts begin as its training documents did"
    older = tmp_path / "run" / "checkpoints" / "step-0000002"
    assert templates_in(older), "every checkpoint has them"


def test_documents_of_all_its_training_are_known(tmp_path: Path) -> None:
    """Those of the source and those of the run; a resumed run tells the same."""
    source = [Document(f"an older story {i}") for i in range(20)]
    start = tmp_path / "start"
    training = {TRAINED_ON: DocumentSketch.of(source).to_json()}
    save_checkpoint(start, make_model(), ByteTokenizer(), training)
    made = answer(train(tmp_path / "run", "--from", start))
    sketch = DocumentSketch.of_training(load_checkpoint(Path(made["checkpoint"])).training)
    assert sketch is not None
    assert len(sketch.compare(source)[1]) == 20
    own = prepare(from_table(RunConfig, settings_of(tmp_path / "run"))).sketch
    assert sketch.to_json() == (DocumentSketch.of(source) | own).to_json() != own.to_json()
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-0000004")
    (checkpoints / "latest").write_text("step-0000002\n")
    answer(train(tmp_path / "run", "--from", start, "--resume"))
    after = load_checkpoint(tmp_path / "run").training
    assert after["step"] == 4 and after[TRAINED_ON] == sketch.to_json()


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["settings"]


def test_resuming_it_equals_not_having_stopped(start: Path, tmp_path: Path) -> None:
    whole = answer(train(tmp_path / "whole", "--from", start))
    answer(train(tmp_path / "run", "--from", start))
    newest = tmp_path / "run" / "checkpoints" / "step-0000004"
    for file in sorted(newest.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    newest.rmdir()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-0000002\n")
    again = answer(train(tmp_path / "run", "--from", start, "--resume"))
    one, other = weights(Path(whole["checkpoint"])), weights(Path(again["checkpoint"]))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert weights(start)["adapter.weight"].sub(one["adapter.weight"]).abs().max() > 0


def test_matrices_of_a_checkpoint_can_learn_through_factors(start: Path, tmp_path: Path) -> None:
    settings = (*SMALL, "train.low_rank=2")
    made = answer(train(tmp_path / "run", "--from", start, settings=settings))
    before, after = weights(start), weights(Path(made["checkpoint"]))
    moved = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert moved == {k for k in before if k.startswith(("adapter", "core")) and before[k].ndim == 2}
    again = train(tmp_path / "run", "--from", start, "--resume", settings=settings)
    assert answer(again)["loss_nats_by_depth"] == made["loss_nats_by_depth"]


def test_rows_of_padding_are_kept(tmp_path: Path) -> None:
    """Published embeddings have more rows than their tokenizer ids."""
    from loopwise.models.recurrent import RecurrentConfig, RecurrentModel

    torch.manual_seed(0)
    model = RecurrentModel(RecurrentConfig(vocab_size=300, d_model=32, n_heads=4, d_ff=48))
    save_checkpoint(tmp_path / "start", model, ByteTokenizer(), {})
    made = answer(train(tmp_path / "run", "--from", tmp_path / "start"))
    assert weights(Path(made["checkpoint"]))["embedding.weight"].shape == (300, 32)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model.d_model=64", "model.d_model=64"),
        ("architecture=looped", "architecture='looped'"),
        ("tokenizer.kind=byte", "tokenizer.kind='byte'"),
    ],
)
def test_another_shape_or_tokenizer_is_refused(
    start: Path, tmp_path: Path, setting: str, named: str
) -> None:
    result = train(tmp_path / "run", "--from", start, settings=(*SMALL, setting))
    refused(result, "--from keeps the shape and tokenizer", named)
    assert not (tmp_path / "run").exists()


def test_bad_starts_are_one_line_and_leave_no_folder(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused(train(out, "--from", tmp_path / "nowhere"), "no checkpoint at")
    refused(train(out, "--from", start, "--baseline", "flops"), "--from and --baseline")
    (start / "config.json").write_text('{"model_type": "gpt2"}')
    refused(train(out, "--from", start), "foreign checkpoint")
    assert not out.exists()


def test_text_shorter_than_a_block_says_what_fits(tmp_path: Path) -> None:
    """Training alone can take shorter blocks, so it alone offers them."""
    text = tmp_path / "short.txt"
    text.write_text("one\ntwo\n")
    out = ("--data", text, "--held-out", text, "--out", tmp_path / "run", "--set")
    byte = (*("tokenizer.kind=byte", "--set", "data.read.split=line"),)
    refused(run("train", *out, *byte), "10 tokens", "or train with --set train.seq=9 at most")
    refused(run("train", *out, "train.seq=10", "--set", *byte), "add text, or train with")


def test_a_start_set_by_hand_must_fit(start: Path, tmp_path: Path) -> None:
    settings = (*SMALL, f"start_from={start}", "tokenizer.kind=byte")
    refused(train(tmp_path / "run", settings=settings), "loopwise train --from")
