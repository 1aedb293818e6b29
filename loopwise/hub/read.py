"""A published checkpoint folder: its config, and its tensors one at a time.

Weights are safetensors, whole or in shards with an index. Pickles can run code when they are read,
so they are refused unless asked for, and then read by PyTorch's weights-only loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError
from loopwise.hub.pickles import PICKLES, unpickle

LFS_POINTER = b"version https://git-lfs.github.com"
# What torch.compile, data parallelism and Huginn's pretraining code leave before every key.
WRAPPERS = ("_orig_mod._original_module.", "_orig_mod.", "module.")
DEFAULT_TEMPLATE = "default"  # name of a chat template that has no other
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What a folder or file holds, before anything is made of it.

    Attributes:
        path: of the folder, or of a file that holds all of it.
        config: its ``config.json``, or the settings that lie beside the weights of one file.
        shapes: of every tensor, by key.
        read: loads one tensor by key, in the dtype it is stored in.
        tokenizer: makes the text of a ``tokenizer.json``, where weights and tokenizer are one file.
        special_ids: ``bos`` and ``eos`` of the source's own tokenizer, where it says them.
        chat_templates: by name, where they are in the file of the weights.
        license: where the file of the weights says it.
    """

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], str] | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None

    @property
    def folder(self) -> Path:
        """Where a tokenizer and the like may lie."""
        return self.path.parent if self.path.is_file() else self.path

    def describe(self) -> str:
        """What was found, in one clause."""
        known = {key: self.config.get(key) for key in ("model_type", "architectures")}
        if any(known.values()):
            said = ", ".join(f"{key} {value!r}" for key, value in known.items())
        elif self.config:
            fields = [f"{key}={value!r}" for key, value in self.config.items()]
            said = f"config fields {_some(fields, 8)}"
        else:
            said = "no config"
        keys = sorted(self.shapes)
        spelt = [f"{key} {list(self.shapes[key])}" for key in keys]
        return f"{said}, {len(keys)} tensors ({_some(spelt, 3)})"


def open_source(path: Path, *, allow_pickle: bool = False) -> Source:
    """Look into a folder, or a pickle file; no tensor of a safetensors file is loaded yet.

    A pickle needs no ``config.json`` beside it where the file holds settings itself; whether they
    suffice is for the formats to say.

    Raises:
        CheckpointError: no such folder or file, no config or weights in it, a file that is
            truncated or a Git LFS pointer, a missing shard, or a pickle that was not allowed.
    """
    if path.is_file():
        return _from_file(path, allow_pickle)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint folder at {str(path)!r}; check the path")
    if not (path / "config.json").is_file():
        metas = sorted(path.glob("meta_*.json"))
        if metas:
            return _from_nanochat(path, metas, allow_pickle)
        files = [p for p in path.iterdir() if p.suffix in PICKLES and p.is_file()]
        if len(files) == 1:
            return _from_file(files[0], allow_pickle)
        raise CheckpointError(f"{str(path)!r} has no config.json (found: {_listing(path)})")
    refuse_pointer(path / "config.json")
    config = read_json_object(path / "config.json", CheckpointError)
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return _lazy(path, config, [whole])
    if index.is_file():
        return _lazy(path, config, shards_of(index))
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _lazy(path, config, files)
    if files:
        raise CheckpointError(
            f"{str(path)!r} holds {len(files)} safetensors files and no {index.name} that says "
            "which belong together; copy the index too"
        )
    index = path / "pytorch_model.bin.index.json"
    files = sorted(p for p in path.iterdir() if p.suffix in PICKLES and p.is_file())
    if not files and not index.is_file():
        raise CheckpointError(f"{str(path)!r} has no weights (found: {_listing(path)})")
    if index.is_file():
        files = shards_of(index)
    elif len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(f"{str(path)!r} holds several pickle files ({names}); keep one")
    return _from_pickles(path, config, files, allow_pickle)


def shards_of(index: Path) -> list[Path]:
    """The files an index names.

    Raises:
        CheckpointError: the index is malformed, or some of its files are not there (named).
    """
    refuse_pointer(index)
    table = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{str(index)!r} has no weight_map of keys to files; copy it again")
    names = sorted(set(table.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{str(index.parent)!r} lacks {len(missing)} of the {len(names)} shards its index "
            f"names: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; fetch them"
        )
    return [index.parent / name for name in names]


def refuse_pointer(path: Path) -> None:
    """Raise where a file is only the note that Git LFS leaves in its place."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{str(path)!r} is a Git LFS pointer, not the file itself; run 'git lfs pull' "
                "in that folder, or download the file"
            )


def _lazy(path: Path, config: Mapping[str, Any], files: list[Path]) -> Source:
    shapes: dict[str, Shape] = {}
    homes: dict[str, Any] = {}
    for file in files:
        refuse_pointer(file)
        try:
            handle = safe_open(file, framework="pt")
        except SafetensorError as err:
            raise CheckpointError(
                f"{str(file)!r} is truncated or not safetensors: {err}; copy it again"
            ) from None
        for key in handle.keys():  # noqa: SIM118 - the handle is no mapping
            if key in homes:
                raise CheckpointError(f"{str(path)!r} holds {key} twice; remove the stray file")
            homes[key] = handle
            shapes[key] = tuple(handle.get_slice(key).get_shape())
    return _unwrapped(path, config, shapes, lambda key: homes[key].get_tensor(key))


def _from_nanochat(path: Path, metas: list[Path], allow_pickle: bool) -> Source:
    """A folder of nanochat's scripts: ``meta_STEP.json`` beside ``model_STEP.pt``."""
    if len(metas) > 1:
        raise CheckpointError(
            f"{str(path)!r} holds {len(metas)} checkpoints ({metas[0].stem} .. {metas[-1].stem}); "
            "copy the meta and model files of one to a folder of its own"
        )
    refuse_pointer(metas[0])
    config = read_json_object(metas[0], CheckpointError).get("model_config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(metas[0])!r} has no model_config, which describes the model")
    weights = path / f"{metas[0].stem.replace('meta', 'model')}.pt"
    if not weights.is_file():
        raise CheckpointError(f"{str(path)!r} has no {weights.name} (found: {_listing(path)})")
    return _from_pickles(path, config, [weights], allow_pickle)


def _from_file(path: Path, allow_pickle: bool) -> Source:
    """One file of weights and perhaps settings; a ``config.json`` beside it wins over those."""
    refuse_pointer(path)
    if path.suffix not in PICKLES:
        raise CheckpointError(
            f"{str(path)!r} is a file; give the folder that holds it and its config.json, a GGUF "
            f"file, or one that ends with {', '.join(PICKLES)}"
        )
    _require_allowed(path, [path], allow_pickle)
    beside = path.parent / "config.json"
    tensors, config = unpickle(path)
    if beside.is_file():
        refuse_pointer(beside)
        config = read_json_object(beside, CheckpointError)
    return _in_memory(path, config, tensors)


def _require_allowed(path: Path, files: list[Path], allow_pickle: bool) -> None:
    if not allow_pickle:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            f"{str(path)!r} has its weights in pickle files ({names}), which can run code when "
            "they are read; allow it with --allow-pickle (they are then loaded weights-only)"
        )


def _in_memory(path: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Source:
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return _unwrapped(path, config, shapes, lambda key: tensors[key])


def _from_pickles(
    path: Path, config: Mapping[str, Any], files: list[Path], allow_pickle: bool
) -> Source:
    _require_allowed(path, files, allow_pickle)
    tensors: dict[str, Tensor] = {}
    for file in files:
        refuse_pointer(file)
        tensors |= unpickle(file)[0]
    return _in_memory(path, config, tensors)


def _unwrapped(
    path: Path, config: Mapping[str, Any], shapes: dict[str, Shape], read: Callable[[str], Tensor]
) -> Source:
    """The source under plain keys, where every key carries the prefix of one wrapper."""
    fitting = [p for p in WRAPPERS if shapes and all(key.startswith(p) for key in shapes)]
    if not fitting:
        return Source(path, config, shapes, read)
    prefix = fitting[0]
    plain = {key.removeprefix(prefix): shape for key, shape in shapes.items()}
    return Source(path, config, plain, lambda key: read(prefix + key))


def _some(items: list[str], most: int) -> str:
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def _listing(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    return (", ".join(names[:6]) + (", ..." if len(names) > 6 else "")) or "nothing"
