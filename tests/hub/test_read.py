"""Reading a source folder: what is broken, missing or dangerous is named and nothing is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loopwise.errors import CheckpointError
from loopwise.hub.convert import convert
from loopwise.hub.read import open_source
from loopwise.models.checkpoint import load_checkpoint
from tests.hub.folders import Tensors, forward, gap, write_folder
from tests.hub.test_ouro import CONFIG, tensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ouro", CONFIG, tensors())


def refused(source: Path, **options: Any) -> str:
    """The one line of a conversion that must fail and leave nothing."""
    out = source.parent / "out"
    with pytest.raises(CheckpointError) as failure:
        convert(source, out, **options)
    assert not out.exists() and not list(source.parent.glob(".partial*"))
    assert "\n" not in str(failure.value)
    return str(failure.value)


def shard(source: Path) -> list[Path]:
    """The weights in two files and an index, as large models are published."""
    whole, names = (
        tensors(),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    )
    home = {key: names[i % 2] for i, key in enumerate(sorted(whole))}
    for name in names:
        save_file({k: v for k, v in whole.items() if home[k] == name}, source / name)
    index = {"metadata": {"total_size": 1}, "weight_map": home}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "model.safetensors").unlink()
    return [source / name for name in names]


def pickled(source: Path, content: Any, name: str = "pytorch_model.bin") -> Path:
    (source / "model.safetensors").unlink()
    torch.save(content, source / name)
    return source / name


def logits(folder: Path) -> torch.Tensor:
    return forward(load_checkpoint(folder).model, 2)


def test_shards_equal_the_whole(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole")
    shard(source)
    convert(source, tmp_path / "sharded")
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "sharded"))


def test_a_missing_shard_is_named(source: Path) -> None:
    shard(source)[1].unlink()
    message = refused(source)
    assert "lacks 1 of the 2 shards" in message and "model-00002-of-00002.safetensors" in message


def test_shards_without_an_index_are_not_guessed_at(source: Path) -> None:
    shard(source)
    (source / "model.safetensors.index.json").unlink()
    assert "2 safetensors files and no model.safetensors.index.json" in refused(source)


def test_a_shard_that_lacks_its_keys_is_noticed(source: Path) -> None:
    first, second = shard(source)
    save_file({"lm_head.weight": tensors()["lm_head.weight"]}, first)
    save_file({"lm_head.weight": tensors()["lm_head.weight"]}, second)
    assert "holds lm_head.weight twice" in refused(source)
    save_file({"model.norm.weight": tensors()["model.norm.weight"]}, second)
    assert "missing" in refused(source) and "more" in refused(source)


@pytest.mark.parametrize("index", [b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b"{"])
def test_a_malformed_index_is_named(source: Path, index: bytes) -> None:
    shard(source)
    (source / "model.safetensors.index.json").write_bytes(index)
    assert "model.safetensors.index.json" in refused(source)


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_weights_are_named(source: Path, left: int) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert "model.safetensors' is truncated or not safetensors" in refused(source)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_called_one(source: Path, name: str) -> None:
    (source / name).write_bytes(POINTER)
    assert f"{name}' is a Git LFS pointer" in refused(source)


def test_a_pointer_among_shards_is_called_one(source: Path) -> None:
    shard(source)[0].write_bytes(POINTER)
    assert "model-00001-of-00002.safetensors' is a Git LFS pointer" in refused(source)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "checkpoint.pt", "weights.pth"])
def test_pickles_are_refused_unless_asked_for(source: Path, tmp_path: Path, name: str) -> None:
    convert(source, tmp_path / "safe")
    pickled(source, tensors(), name)
    message = refused(source)
    assert name in message and "--allow-pickle" in message
    convert(source, tmp_path / "pickled", allow_pickle=True)
    assert torch.equal(logits(tmp_path / "safe"), logits(tmp_path / "pickled"))


@pytest.mark.parametrize("nest", ["model", "state_dict", "model_state_dict"])
def test_weights_may_stand_inside_a_training_checkpoint(
    source: Path, tmp_path: Path, nest: str
) -> None:
    wrapped = {f"module.{key}": value for key, value in tensors().items()}
    pickled(source, {nest: wrapped, "step": 7, "optimizer": {"lr": 1.0}})
    convert(source, tmp_path / "out", allow_pickle=True)


class Bomb:
    """What a malicious pickle does: call a function while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return shutil.rmtree, (str(self.path),)


def test_code_in_a_pickle_is_never_run(source: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    pickled(source, {"model.norm.weight": Bomb(victim)})
    message = refused(source, allow_pickle=True)
    assert "holds more than weights" in message and "it asks for shutil.rmtree" in message
    assert "weights_only" not in message and "torch.load" not in message, "advice to run it anyway"
    assert victim.is_dir()


@pytest.mark.parametrize("left", [0, 9, 2000, -10])
def test_damaged_pickles_are_named(source: Path, left: int) -> None:
    file = pickled(source, tensors())
    file.write_bytes(file.read_bytes()[:left])
    message = refused(source, allow_pickle=True)
    assert "pytorch_model.bin'" in message and "weights_only" not in message


@pytest.mark.parametrize("content", [b"Q.", b"M\x01", b"X", b"h\x01.", b"c\xe3\x86", b"\x8a\x82"])
def test_pickles_of_noise_are_named(source: Path, content: bytes) -> None:
    """An empty stack, a number cut short, and others that each fail in a way of their own."""
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x02" + content)
    assert "pytorch_model.bin' is truncated or no PyTorch" in refused(source, allow_pickle=True)


@pytest.mark.parametrize("error", [IndexError, struct.error, AssertionError, TypeError])
def test_whatever_pytorch_finds_wrong_is_one_line(
    source: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    pickled(source, tensors())
    monkeypatch.setattr(torch, "load", fail)
    assert f"is truncated or no PyTorch file ({error.__name__})" in refused(
        source, allow_pickle=True
    )


@pytest.mark.parametrize("content", [[1, 2], {}, {"model.norm.weight": 3}, 7])
def test_pickles_of_something_else_are_named(source: Path, content: Any) -> None:
    pickled(source, content)
    assert "pytorch_model.bin' holds" in refused(source, allow_pickle=True)


PAPER = {
    "config": {"d_model": 576, "n_core": 4},
    "state_dict": {"core.0.attn.q.weight": torch.zeros(3, 5)},
}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_file_of_settings_and_weights_is_described(tmp_path: Path, kind: str) -> None:
    """As paper 1 left its checkpoint; nobody has written down what its keys mean."""
    (tmp_path / "s1").mkdir()
    torch.save(PAPER, tmp_path / "s1" / "s1.pt")
    source = tmp_path / "s1" / "s1.pt" if kind == "file" else tmp_path / "s1"
    message = refused(source)
    assert "s1.pt" in message and "--allow-pickle" in message
    message = refused(source, allow_pickle=True)
    assert "config fields d_model=576, n_core=4" in message
    assert "1 tensors (core.0.attn.q.weight [3, 5])" in message
    assert "its config fields and keys must be mapped in a file of loopwise/hub/formats" in message


def test_one_file_of_a_known_layout_is_converted(source: Path, tmp_path: Path) -> None:
    """Settings inside it or beside it, the tokenizer beside it."""
    convert(source, tmp_path / "safe")
    file = pickled(
        source,
        {"model": tensors(), "config": json.loads((source / "config.json").read_text())},
        "s1.pt",
    )
    (source / "config.json").rename(source / "config.json.away")
    convert(file, tmp_path / "inside", allow_pickle=True)
    convert(source, tmp_path / "in folder", allow_pickle=True)
    (source / "config.json.away").rename(source / "config.json")
    convert(file, tmp_path / "beside", allow_pickle=True)
    for out in ("inside", "in folder", "beside"):
        assert torch.equal(logits(tmp_path / "safe"), logits(tmp_path / out))


def test_a_file_of_another_kind_is_one_line(source: Path) -> None:
    assert "give the folder that holds it" in refused(source / "model.safetensors")
    pointer = source / "a.pt"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in refused(pointer)


def test_views_of_one_tensor_are_stored_apart(source: Path, tmp_path: Path) -> None:
    """A pickle may hold several weights as parts of one buffer."""
    state = tensors()
    norms = torch.stack(
        [state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"]]
    )
    state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"] = norms
    pickled(source, state)
    convert(source, tmp_path / "out", allow_pickle=True)
    assert torch.equal(load_checkpoint(tmp_path / "out").model.norm_final.weight, norms[0])


def test_two_pickles_are_not_guessed_between(source: Path) -> None:
    torch.save(tensors(), pickled(source, tensors()).with_name("other.pt"))
    assert "several pickle files" in refused(source, allow_pickle=True)


def spoil(source: Path, change: Callable[[Tensors], Any]) -> str:
    state = tensors()
    change(state)
    save_file(state, source / "model.safetensors")
    return refused(source)


def test_all_wrong_keys_are_told_at_once(source: Path) -> None:
    def change(state: Tensors) -> None:
        del state["model.norm.weight"]
        state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)
        state["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 5)

    message = spoil(source, change)
    assert "missing model.norm.weight" in message
    assert "unknown model.layers.0.self_attn.q_norm.weight" in message
    assert "model.layers.1.mlp.up_proj.weight is (3, 5), expected (20, 16)" in message


def test_a_layer_too_many_is_unknown_not_dropped(source: Path) -> None:
    def change(state: Tensors) -> None:
        extra = {k.replace("layers.1", "layers.2"): v for k, v in state.items() if "layers.1" in k}
        state.update({key: value.clone() for key, value in extra.items()})

    message = spoil(source, change)
    assert "unknown model.layers.2." in message and "and 3 more" in message


def test_quantised_and_spoilt_values_are_refused(source: Path) -> None:
    key = "model.layers.0.mlp.down_proj.weight"
    message = spoil(source, lambda s: s.update({key: s[key].to(torch.int8)}))
    assert f"{key} is stored as int8" in message
    message = spoil(source, lambda s: s[key].view(-1)[3].fill_(float("nan")))
    assert f"{key} holds values that are not finite" in message


def test_what_is_not_there_is_named(source: Path, tmp_path: Path) -> None:
    assert "no checkpoint folder at" in refused(tmp_path / "nowhere")
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(source)
    (source / "model.safetensors").unlink()
    assert "has no weights (found: config.json)" in refused(source)
    (source / "config.json").unlink()
    assert "has no config.json (found: nothing)" in refused(source)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_spoilt_config_is_named(source: Path, content: bytes) -> None:
    (source / "config.json").write_bytes(content)
    assert "config.json" in refused(source)


def test_looking_into_a_folder_loads_no_tensor(source: Path) -> None:
    found = open_source(source)
    assert found.shapes["lm_head.weight"] == (260, 16)
    assert gap(found.read("lm_head.weight"), tensors()["lm_head.weight"]) == 0
