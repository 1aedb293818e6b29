"""Checkpoints: a folder that a kill at any moment cannot spoil.

``model.safetensors`` (each tensor once), ``config.json`` (architecture, resolved, versioned),
``tokenizer.json``, ``training.json`` (how it was trained), optional ``exits.json`` (fitted exit
rules) and ``trainer/`` (what resuming needs). Written aside, flushed, renamed; the pointer to the
newest moves last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from loopwise.config import from_table, read_json_object, to_table
from loopwise.errors import CheckpointError, ExitError, TokenizerError
from loopwise.models import MODELS
from loopwise.models.base import LoopedLM
from loopwise.tokenizer import TOKENIZER_FILE, TRAINING_FILE, Tokenizer, load_tokenizer
from loopwise.writing import why_not_written, writing

FORMAT = "loopwise-checkpoint"
VERSION = 1
MODEL_TYPE = (
    "loopwise"  # how transformers tells our config.json from others'; it reads num_loops too
)
USUAL_DEPTH = 8  # recurrences of a model that does not say how it was trained
POINTER = "latest"
_CONFIG_KEYS: dict[str, type] = {"version": int, "architecture": str, "model": dict}
_LFS = b"version https://git-lfs.github.com"


@dataclass(frozen=True)
class Checkpoint:
    """A model with all that was saved beside it.

    The tokenizer knows what ``training`` says besides it: special ids, and how prompts begin.

    Raises:
        CheckpointError: ``training`` says ids that the tokenizer does not have.
    """

    path: Path
    model: LoopedLM
    tokenizer: Tokenizer
    training: dict[str, Any]
    exits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        said = self.training.get("special_ids") or self.tokenizer.special_ids
        try:
            told = self.tokenizer.told_by({**self.training, "special_ids": said})
        except TokenizerError as err:
            raise CheckpointError(f"training.json of {str(self.path)!r}: {err}") from err
        object.__setattr__(self, "tokenizer", told)

    @property
    def weights_hash(self) -> str:
        """sha256 of the weights file: what traces and fitted exit rules are tied to."""
        return file_hash(self.path / "model.safetensors")

    def fitted_policies(self) -> dict[str, Any]:
        """State of the exit policies fitted to these weights, by name.

        Raises:
            ExitError: ``exits.json`` was fitted on other weights.
        """
        if self.exits and self.exits.get("weights_hash") != self.weights_hash:
            raise ExitError(
                f"exits.json of {str(self.path)!r} was fitted on other weights; remove it and "
                "measure again"
            )
        return self.exits.get("policies", {})

    @property
    def trained_mean_depth(self) -> float | None:
        return self.training.get("depth", {}).get("true_mean")

    @property
    def trained_depths(self) -> tuple[int, int] | None:
        """Smallest and largest depth training could draw."""
        depth = self.training.get("depth", {})
        return (depth["min"], depth["max"]) if "min" in depth else None

    @property
    def trained_max_depth(self) -> int | None:
        return self.training.get("depth", {}).get("p99")


def save_checkpoint(
    path: Path,
    model: LoopedLM,
    tokenizer: Tokenizer,
    training: dict[str, Any],
    *,
    state: dict[str, torch.Tensor] | None = None,
    trainer: Callable[[Path], None] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint folder so that it is either whole or absent.

    Args:
        path: the folder; its parent is made, it must not exist.
        training: how it was trained; special ids that the tokenizer was told are added to it.
        state: tensors to save in place of the model's own, by the same names (float32 masters).
        trainer: called with the unfinished folder's ``trainer/`` to write what resuming needs.
        files: texts to write beside the others, by their paths inside the folder.
    Raises:
        CheckpointError: the folder exists, or the disk refuses (nothing is left behind).
    """
    if path.exists():
        raise CheckpointError(f"checkpoint {str(path)!r} exists already; choose another name")
    aside = path.parent / f".partial-{path.name}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        tensors = state if state is not None else unique_tensors(model)
        save_file({k: v.contiguous() for k, v in tensors.items()}, aside / "model.safetensors")
        config = {
            "format": FORMAT,
            "version": VERSION,
            "model_type": MODEL_TYPE,
            "architecture": model.name,
            "model": to_table(model.config),
            "num_loops": usual_depth(training, model.geometry.max_depth),
        }
        _write_json(aside / "config.json", config)
        (aside / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
        said = {"special_ids": tokenizer.special_ids} if tokenizer.special_ids else {}
        _write_json(aside / TRAINING_FILE, {**training, **said})
        for name, text in (files or {}).items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(text, encoding="utf-8")
        if trainer is not None:
            (aside / "trainer").mkdir()
            trainer(aside / "trainer")
        for file in sorted(p for p in aside.rglob("*") if p.is_file()):
            _flush(file)
        _flush(aside)
        aside.rename(path)
        _flush(path.parent)
    except OSError as err:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot save checkpoint {str(path)!r}: {why_not_written(err)} (earlier checkpoints "
            "are untouched)"
        ) from err
    except SafetensorError as err:  # how the writer reports a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot save checkpoint {str(path)!r}: {err}; free some space (earlier checkpoints "
            "are untouched)"
        ) from err


def point_to(folder: Path, name: str) -> None:
    """Make ``folder/latest`` name the newest checkpoint, in one atomic move.

    Raises:
        WriteError: the disk refuses; it names the one before.
    """
    aside = folder / f".{POINTER}"
    with writing(folder / POINTER):
        aside.write_text(name + "\n", encoding="utf-8")
        _flush(aside)
        aside.replace(folder / POINTER)
        _flush(folder)


def resolve(path: Path) -> Path:
    """The checkpoint folder meant by ``path``: itself, or the newest of a run.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {str(path)!r}; check the path")
    for folder in (path, path / "checkpoints"):
        pointer = folder / POINTER
        if pointer.is_file():
            target = folder / pointer.read_text(encoding="utf-8").strip()
            if target.is_dir():
                return target
    if (path / "config.json").is_file() and (path / "model.safetensors").is_file():
        return path
    found = sorted(p.name for p in path.iterdir())[:6] if path.is_dir() else ["a file"]
    raise CheckpointError(
        f"{str(path)!r} is not a loopwise checkpoint (found: {', '.join(found) or 'nothing'}); "
        "give a folder that holds config.json and model.safetensors, or a run folder"
    )


def load_checkpoint(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read a checkpoint strictly.

    Raises:
        CheckpointError: missing, truncated, foreign, of a newer format, or with keys that are
            missing, unknown or misshapen (all named).
    """
    path = resolve(path)
    name, table = read_config(path)
    model_class = MODELS[name]
    model = model_class(from_table(model_class.config_class, table, "model."))
    _load_weights(model, path / "model.safetensors")
    tokenizer_file = path / TOKENIZER_FILE
    if not tokenizer_file.is_file():
        raise CheckpointError(f"{str(path)!r} has no tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_file)
    if tokenizer.vocab_size > model.geometry.vocab_size:
        raise CheckpointError(
            f"{str(path)!r}: tokenizer has {tokenizer.vocab_size} ids but the model "
            f"{model.geometry.vocab_size}; they do not belong together"
        )
    exits_file = path / "exits.json"
    return Checkpoint(
        path=path,
        model=model.to(dtype).eval(),
        tokenizer=tokenizer,
        training=read_json_object(path / TRAINING_FILE, CheckpointError),
        exits=read_json_object(exits_file, CheckpointError) if exits_file.is_file() else {},
    )


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Architecture and model settings of a checkpoint folder, before its weights are read.

    Raises:
        CheckpointError: foreign, of a newer format, or without them.
    """
    return architecture_of(read_json_object(path / "config.json", CheckpointError), path)


def architecture_of(config: Mapping[str, Any], source: Path | str) -> tuple[str, dict[str, Any]]:
    """Architecture and model settings in what a config.json holds.

    Args:
        source: where it comes from, for messages.
    Raises:
        CheckpointError: foreign, of a newer format, or without them.
    """
    if config.get("format") != FORMAT:
        kind = config.get("model_type") or config.get("architectures") or "unknown"
        raise CheckpointError(
            f"{str(source)!r} is a foreign checkpoint (model type {kind}); make a loopwise one of "
            "it with `loopwise convert`"
        )
    version, name, table = (_required(source, config, key) for key in _CONFIG_KEYS)
    if version > VERSION:
        raise CheckpointError(
            f"{str(source)!r} has checkpoint format {version}, this version reads up to {VERSION}; "
            "update loopwise"
        )
    return name, table


def usual_depth(training: Mapping[str, Any], limit: int | None) -> int:
    """Recurrences to run where nobody says: the training mean, within what the weights allow.

    Args:
        training: what ``training.json`` holds.
    """
    mean = training.get("depth", {}).get("true_mean")
    usual = USUAL_DEPTH if mean is None else max(1, round(mean))
    return usual if limit is None else min(usual, limit)


def why_extrapolated(training: Mapping[str, Any], depth: int) -> str | None:
    """Why little is known of results at ``depth``; None within what 99% of training steps ran.

    Args:
        training: what ``training.json`` holds; one that says nothing of depth warns of none.
    """
    drawn = training.get("depth", {})
    usual = drawn.get("p99")
    if usual is None or depth <= usual:
        return None
    most = f", and at most {drawn['max']} in any" if "max" in drawn else ""
    return (
        f"{depth} recurrences are past training, which ran at most {usual} in 99% of its steps"
        f"{most}; results there are extrapolation"
    )


def _required(source: Path | str, config: Mapping[str, Any], key: str) -> Any:
    """One key of config.json, of the right kind."""
    if key not in config:
        raise CheckpointError(f"config.json of {str(source)!r} lacks {key!r}; copy it again")
    if not isinstance(config[key], _CONFIG_KEYS[key]):
        raise CheckpointError(
            f"config.json of {str(source)!r} has {key}={config[key]!r}; it must be "
            f"{_CONFIG_KEYS[key].__name__}"
        )
    return config[key]


def write_exits(checkpoint: Checkpoint, exits: dict[str, Any]) -> Checkpoint:
    """Store fitted exit rules beside the weights they were fitted on, in one atomic move.

    Returns:
        The checkpoint with them.
    Raises:
        WriteError: the disk refuses; what was stored before stays.
    """
    exits = {**exits, "weights_hash": checkpoint.weights_hash}
    aside = checkpoint.path / ".exits.json"
    with writing(checkpoint.path / "exits.json"):
        _write_json(aside, exits)
        _flush(aside)
        aside.replace(checkpoint.path / "exits.json")
    return replace(checkpoint, exits=exits)


def unique_tensors(model: LoopedLM) -> dict[str, torch.Tensor]:
    """The state dict with each storage once, detached."""
    return {k: v.detach() for k, v in model.state_dict().items()}


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_weights(model: LoopedLM, path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{str(path.parent)!r} has no {path.name}")
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise CheckpointError(f"{str(path)!r} is a Git LFS pointer; fetch the real file first")
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as err:
        raise CheckpointError(
            f"{str(path)!r} is truncated or not safetensors: {err}; copy it again"
        ) from None
    own = model.state_dict()
    problems = [f"missing {k}" for k in own if k not in state]
    problems += [f"unknown {k}" for k in state if k not in own]
    problems += [
        f"{k} is {tuple(state[k].shape)}, expected {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise CheckpointError(f"{str(path)!r} does not fit its config: {shown}")
    model.load_state_dict(state)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
