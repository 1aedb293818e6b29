"""Checkpoints: exact both ways, strict on load, safe against what may stand in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopwise.data import generate
from loopwise.errors import CheckpointError, ExitError, LoopwiseError, TokenizerError
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import (
    load_checkpoint,
    point_to,
    resolve,
    save_checkpoint,
    write_exits,
)
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.conftest import make_blocks, make_model

TRAINING = {"step": 7, "seq": 32, "depth": {"true_mean": 3.5, "p99": 11}}


def save(path: Path, model: LoopedLM | None = None, **changes: object) -> Path:
    save_checkpoint(path, model or make_model(**changes), ByteTokenizer(), TRAINING)
    return path


@pytest.fixture
def saved(tmp_path) -> Path:
    return save(tmp_path / "ckpt")


@torch.no_grad()
def logits(model: LoopedLM, depth: int = 3) -> torch.Tensor:
    batch = make_blocks(documents=2, shuffle=False).batch(0, 2)
    *_, (r, latent, view) = trajectory(model, batch, depth)
    return model.coda(latent, r, view)


# Round trips.


@pytest.mark.parametrize(
    "changes",
    [{}, {"injection": "add"}, {"tie_embeddings": False}, {"latent_init": "noise"}],
    ids=["plain", "add", "untied", "noise"],
)
def test_a_checkpoint_comes_back_to_the_bit(tmp_path, changes):
    model = make_model(**changes)
    loaded = load_checkpoint(save(tmp_path / "ckpt", model))
    assert loaded.model.config == model.config
    assert type(loaded.model) is type(model)
    again = loaded.model.state_dict()
    assert list(again) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
    assert torch.equal(logits(loaded.model), logits(model))
    assert not loaded.model.training
    assert loaded.tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert loaded.training == TRAINING
    assert (loaded.trained_mean_depth, loaded.trained_max_depth) == (3.5, 11)
    assert loaded.exits == loaded.fitted_policies() == {}


def test_a_fixed_model_comes_back(tmp_path):
    config = FixedConfig(vocab_size=258, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24, n_layers=2)
    model = FixedModel(config).eval()
    loaded = load_checkpoint(save(tmp_path / "ckpt", model)).model
    assert isinstance(loaded, FixedModel)
    assert torch.equal(logits(loaded, 1), logits(model, 1))


def test_a_trained_tokenizer_comes_back(tmp_path):
    texts = [d.text for d in generate("stories", 0, 0, 10)]
    tokenizer = BPETokenizer.train(texts, 258)
    save_checkpoint(tmp_path / "ckpt", make_model(), tokenizer, TRAINING)
    again = load_checkpoint(tmp_path / "ckpt").tokenizer
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(texts[0]) == tokenizer.encode(texts[0])


def test_a_model_may_have_more_ids_than_its_tokenizer(tmp_path):
    """Vocabularies are padded to round numbers."""
    model = RecurrentModel(
        RecurrentConfig(vocab_size=320, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24)
    )
    loaded = load_checkpoint(save(tmp_path / "ckpt", model))
    assert loaded.model.geometry.vocab_size == 320
    assert loaded.tokenizer.vocab_size == 258


@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_is_stored_once(tmp_path, tied):
    model = make_model(tie_embeddings=tied, d_model=128, d_ff=256)
    path = save(tmp_path / "ckpt", model) / "model.safetensors"
    unique = sum(p.numel() * p.element_size() for p in model.parameters())
    assert unique <= path.stat().st_size < 1.05 * unique
    assert ("unembedding.weight" in load_file(path)) is not tied


def test_an_untied_head_stays_untied(tmp_path):
    loaded = load_checkpoint(save(tmp_path / "ckpt", tie_embeddings=False)).model
    assert loaded.unembedding.weight.data_ptr() != loaded.embedding.weight.data_ptr()
    before = loaded.embedding.weight.clone()
    with torch.no_grad():
        loaded.unembedding.weight.zero_()
    assert torch.equal(loaded.embedding.weight, before)
    assert (logits(loaded) == 0).all()


def test_masters_given_as_state_are_what_is_stored(tmp_path):
    model = make_model().bfloat16()
    state = {k: torch.randn(v.shape) for k, v in model.state_dict().items()}
    save_checkpoint(tmp_path / "ckpt", model, ByteTokenizer(), TRAINING, state=state)
    for name, tensor in load_checkpoint(tmp_path / "ckpt").model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_dtype_can_be_asked_for(saved):
    loaded = load_checkpoint(saved, torch.bfloat16).model
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


_ELSEWHERE = """
import sys, torch
from loopwise.models.checkpoint import load_checkpoint
from loopwise.data import PackedBlocks, generate, tokenize
from loopwise.measure.evaluate import trajectory
from loopwise.tokenizer import ByteTokenizer
model = load_checkpoint(__import__("pathlib").Path(sys.argv[1])).model
blocks = PackedBlocks(tokenize(generate("stories", 0, 0, 2), ByteTokenizer()), 32, 0, shuffle=False)
with torch.no_grad():
    *_, (r, latent, view) = trajectory(model, blocks.batch(0, 2), 3)
    torch.save(model.coda(latent, r, view), sys.argv[2])
"""


def test_a_fresh_process_elsewhere_gives_equal_logits(saved, tmp_path):
    out, elsewhere = tmp_path / "logits.pt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = [sys.executable, "-W", "error", "-c", _ELSEWHERE, str(saved), str(out)]
    subprocess.run(arguments, cwd=elsewhere, check=True, timeout=60)
    assert torch.load(out) == pytest.approx(logits(load_checkpoint(saved).model), abs=1e-6)
    assert list(elsewhere.iterdir()) == []


def test_an_existing_folder_is_not_written_over(saved):
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        save(saved, seed=1)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["ckpt"]


def test_a_leftover_of_a_killed_save_is_replaced(tmp_path):
    leftover = tmp_path / ".partial-ckpt"
    leftover.mkdir()
    (leftover / "junk").write_text("half a file")
    save(tmp_path / "ckpt")
    assert not leftover.exists()
    assert not (tmp_path / "ckpt" / "junk").exists()


def test_a_trainer_that_fails_leaves_nothing(tmp_path):
    def fails(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path / "c", make_model(), ByteTokenizer(), TRAINING, trainer=fails)
    assert list(tmp_path.iterdir()) == []


# What may stand in a folder.


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    table = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in table.items() if v is not None}))


def change_weights(path: Path, change) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_truncated_weights_are_named(saved, left):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load_checkpoint(saved)


def test_weights_that_are_not_safetensors_are_named(saved):
    torch.save({"a": torch.zeros(1)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="not safetensors"):
        load_checkpoint(saved)


def test_a_git_lfs_pointer_is_called_one(saved):
    (saved / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        load_checkpoint(saved)


def test_missing_weights_are_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json and model\.safetensors"):
        load_checkpoint(saved)


def test_missing_keys_are_named(saved):
    change_weights(saved, lambda s: s.pop("adapter.weight"))
    with pytest.raises(CheckpointError, match=r"missing adapter\.weight"):
        load_checkpoint(saved)


def test_unknown_keys_are_named(saved):
    change_weights(saved, lambda s: s.update({"extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unknown extra\.weight"):
        load_checkpoint(saved)


def test_misshapen_keys_are_named_with_both_shapes(saved):
    change_weights(saved, lambda s: s.update({"adapter.weight": torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=r"adapter\.weight is \(3, 5\), expected \(32, 64\)"):
        load_checkpoint(saved)


def test_all_problems_are_told_at_once(saved):
    def spoil(state: dict[str, torch.Tensor]) -> None:
        state["unknown.one"] = torch.zeros(1)
        state["norm_final.weight"] = torch.zeros(3)
        del state["adapter.weight"]

    change_weights(saved, spoil)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)
    for part in ("missing adapter.weight", "unknown unknown.one", "norm_final.weight is (3,)"):
        assert part in str(caught.value)


def test_a_checkpoint_of_another_shape_does_not_fit(saved):
    model = json.loads((saved / "config.json").read_text())["model"]
    change_config(saved, model={**model, "n_core_layers": 3})
    with pytest.raises(CheckpointError, match=r"missing (core|coda)_blocks"):
        load_checkpoint(saved)


def test_a_foreign_config_says_what_it_is(saved):
    (saved / "config.json").write_text('{"model_type": "llama", "hidden_size": 576}')
    with pytest.raises(CheckpointError, match="foreign checkpoint.*llama"):
        load_checkpoint(saved)


def test_a_newer_format_is_refused(saved):
    change_config(saved, version=2)
    with pytest.raises(CheckpointError, match="format 2.*update loopwise"):
        load_checkpoint(saved)


def test_an_unknown_architecture_is_named(saved):
    change_config(saved, architecture="recurent")
    with pytest.raises(LoopwiseError, match="'recurent'; did you mean 'recurrent'"):
        load_checkpoint(saved)


def test_a_config_with_an_unknown_or_impossible_setting_is_refused(saved):
    model = json.loads((saved / "config.json").read_text())["model"]
    change_config(saved, model={**model, "n_head": 3})
    with pytest.raises(LoopwiseError, match="'n_head'.*did you mean 'n_heads'"):
        load_checkpoint(saved)
    change_config(saved, model={**model, "n_heads": 3})
    with pytest.raises(LoopwiseError, match="n_heads=3"):
        load_checkpoint(saved)


@pytest.mark.parametrize("key", ["version", "architecture", "model"])
def test_a_config_that_lacks_a_key_names_it(saved, key):
    change_config(saved, **{key: None})
    with pytest.raises(CheckpointError, match=key):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    "change", [{"version": "1"}, {"model": []}, {"model": "tiny"}, {"architecture": 3}], ids=str
)
def test_a_config_with_a_value_of_the_wrong_kind_is_refused(saved, change):
    change_config(saved, **change)
    with pytest.raises(LoopwiseError):
        load_checkpoint(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
@pytest.mark.parametrize("name", ["config.json", "training.json", "exits.json"])
def test_spoilt_json_is_named(saved, name, content):
    (saved / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_checkpoint(saved)


def test_missing_training_facts_are_named(saved):
    (saved / "training.json").unlink()
    with pytest.raises(CheckpointError, match=r"no training\.json"):
        load_checkpoint(saved)


def test_a_missing_tokenizer_is_named(saved):
    (saved / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_checkpoint(saved)


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe\x00"])
def test_a_spoilt_tokenizer_is_refused(saved, content):
    (saved / "tokenizer.json").write_bytes(content)
    with pytest.raises((TokenizerError, CheckpointError)):
        load_checkpoint(saved)


def test_a_tokenizer_of_another_model_is_refused_with_both_sizes(saved):
    tokenizer = BPETokenizer.train([d.text for d in generate("stories", 0, 0, 10)], 300)
    (saved / "tokenizer.json").write_text(tokenizer.to_json())
    with pytest.raises(CheckpointError, match="tokenizer has 300 ids but the model 258"):
        load_checkpoint(saved)


# Which folder is meant.


def a_run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (1, 2):
        save(run / "checkpoints" / f"step-{step:07d}", seed=step)
    point_to(run / "checkpoints", "step-0000002")
    return run


def test_a_run_its_checkpoints_and_a_step_lead_to_a_checkpoint(tmp_path):
    run = a_run(tmp_path)
    newest = run / "checkpoints" / "step-0000002"
    assert resolve(run) == resolve(run / "checkpoints") == resolve(newest) == newest
    older = run / "checkpoints" / "step-0000001"
    assert resolve(older) == older


def test_the_pointer_decides_not_the_name(tmp_path):
    run = a_run(tmp_path)
    point_to(run / "checkpoints", "step-0000001")
    assert resolve(run).name == "step-0000001"


def test_leftovers_of_killed_saves_are_not_looked_at(tmp_path):
    run = a_run(tmp_path)
    leftover = run / "checkpoints" / ".partial-step-0000003"
    leftover.mkdir()
    (leftover / "config.json").write_text("{")
    (run / "checkpoints" / ".latest").write_text("step-0000")
    assert load_checkpoint(run).path.name == "step-0000002"


def test_a_run_copied_elsewhere_still_resolves(tmp_path):
    run = a_run(tmp_path)
    moved = run.rename(tmp_path / "moved")
    assert load_checkpoint(moved).path == moved / "checkpoints" / "step-0000002"


def test_a_pointer_to_nothing_is_an_error(tmp_path):
    run = a_run(tmp_path)
    (run / "checkpoints" / "latest").write_text("step-0000009\n")
    with pytest.raises(CheckpointError):
        load_checkpoint(run)


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at.*nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_folder_of_something_else_lists_what_was_found(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"found: notes\.txt, pytorch_model\.bin"):
        load_checkpoint(tmp_path)


def test_an_empty_folder_and_a_file_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="found: nothing"):
        load_checkpoint(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="found: a file"):
        load_checkpoint(file)


# Fitted exits.


def test_fitted_exits_are_stored_with_the_weights_they_belong_to(saved):
    checkpoint = load_checkpoint(saved)
    state = {"weight": [0.5] * 32, "bias": 0.0, "mean": [0.0] * 32, "std": [1.0] * 32}
    returned = write_exits(checkpoint, {"policies": {"probe": state}, "fitted_on": ["a"]})
    loaded = load_checkpoint(saved)
    assert returned.fitted_policies() == loaded.fitted_policies() == {"probe": state}
    assert loaded.exits["weights_hash"] == loaded.weights_hash
    assert loaded.exits["fitted_on"] == ["a"]
    assert not (saved / ".exits.json").exists()


def test_exits_fitted_on_other_weights_are_refused(saved):
    write_exits(load_checkpoint(saved), {"policies": {"probe": {}}})
    change_weights(saved, lambda s: s["norm_final.weight"].add_(1))
    loaded = load_checkpoint(saved)
    with pytest.raises(ExitError, match="fitted on other weights"):
        loaded.fitted_policies()


def test_the_weights_hash_follows_the_weights(tmp_path):
    a, b = save(tmp_path / "a"), save(tmp_path / "b", seed=1)
    assert load_checkpoint(a).weights_hash != load_checkpoint(b).weights_hash
    same = save(tmp_path / "c")
    assert load_checkpoint(a).weights_hash == load_checkpoint(same).weights_hash
