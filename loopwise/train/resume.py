"""What a run needs to go on exactly where it stopped.

Data order, depth draws and noise seeds are pure functions of (seed, step), so the step number
restores them; what remains is the float32 weights (in the checkpoint itself), the optimisers, and
with ``train.low_rank`` the factors and the weights as they were before them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from loopwise.errors import CheckpointError
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import point_to, resolve, save_checkpoint
from loopwise.tokenizer import Tokenizer
from loopwise.train.optim import Optimizer

FACTORS = "low_rank.safetensors"
# What the readers of damaged files raise.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    UnpicklingError,
    SafetensorError,
)


def save_step(
    folder: Path,
    step: int,
    model: LoopedLM,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
    training: dict[str, Any],
    keep: int,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Save ``folder/step-N`` after optimiser step N, move the pointer, then drop the oldest.

    Raises:
        CheckpointError: the disk refused; earlier checkpoints and the pointer are untouched.
        WriteError: it refused the pointer, which stays as it was.
    """
    name = f"step-{step:07d}"
    path = folder / name
    if not path.exists():

        def write_trainer(into: Path) -> None:
            try:
                torch.save(optimizer.state_dict(), into / "optimizer.pt")
            except RuntimeError as err:  # how its writer reports a full disk
                first = str(err).splitlines()[0]
                raise OSError(f"optimizer.pt could not be written whole ({first})") from err
            if optimizer.factors:
                save_file(optimizer.factor_state(), into / FACTORS)
            (into / "state.json").write_text(json.dumps({"step": step}), encoding="utf-8")

        state = {k: v.detach() for k, v in optimizer.masters.items()}
        save_checkpoint(
            path, model, tokenizer, training, state=state, trainer=write_trainer, files=files
        )
    point_to(folder, name)
    for old in sorted(p for p in folder.glob("step-*") if p.is_dir() and p != path)[: -keep + 1]:
        shutil.rmtree(old)
    return path


def clean_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for partial in folder.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def load_step(folder: Path, optimizer: Optimizer) -> int:
    """Restore masters and optimisers from the newest checkpoint of ``folder``; its step.

    Raises:
        CheckpointError: none is there, it holds no trainer state, a part of it is damaged, or it is
            of another model.
    """
    path = resolve(folder)
    state_file = path / "trainer" / "state.json"
    if not state_file.is_file():
        raise CheckpointError(
            f"{str(path)!r} holds no trainer state, so it cannot be resumed; start a new run"
        )
    file = path / "trainer" / FACTORS
    try:
        step = json.loads(state_file.read_text(encoding="utf-8"))["step"]
        state = torch.load(path / "trainer" / "optimizer.pt", weights_only=True)
        factors = load_file(file) if file.is_file() else {}
        masters = load_file(path / "model.safetensors")
    except _UNREADABLE as err:
        first = (str(err) or type(err).__name__).splitlines()[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read to go on ({first}); copy it again, or start a new run"
        ) from err
    sizes = {name: tensor.shape for name, tensor in optimizer.masters.items()}
    if {name: masters[name].shape for name in sizes.keys() & masters.keys()} != sizes:
        raise CheckpointError(
            f"{str(path)!r} holds weights of another model than the run's config.json; put back "
            "the checkpoints of this run, or start a new one"
        )
    wanted = {name: tensor.shape for name, tensor in optimizer.factor_state().items()}
    if {name: tensor.shape for name, tensor in factors.items()} != wanted:
        raise CheckpointError(
            f"{str(path)!r} was trained with other low-rank factors; resume with its own "
            "train.low_rank and train.only"
        )
    optimizer.load_state_dict(state, masters, factors)
    return step
