"""The cells of ``allocation_grid``: small models that differ from a base in one thing each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loopwise.config import merge, parse_overrides, read_json_object
from loopwise.errors import ConfigError, RunFolderError
from loopwise.settings import differing, explicit_table
from loopwise.study import train_command
from loopwise.writing import write_whole

DONE = "trained.json"  # in a cell's folder once its training has ended
FULL_DEPTH = 8  # recurrences against which all cells are judged
BUILTIN = "builtin:stories:4000"

_BASE = (
    *("tokenizer.vocab_size=2048", "data.max_documents=10000"),
    *("model.d_model=128", "model.n_heads=2", "model.n_kv_heads=1", "model.d_ff=352"),
    *("model.n_prelude_layers=1", "model.n_core_layers=2", "model.n_coda_layers=1"),
    *("depth.mean=8", "depth.backprop_depth=4"),
    *("train.steps=400", "train.seq=256", "train.micro_batch=4"),
    *("train.eval_every=100000", "train.save_every=100000", "train.keep=1"),
    *("train.eval_blocks=16", "train.eval_depths=[1,2,4,8]"),
)
_SMALL = ("model.d_model=64", "model.d_ff=176")
_LOOK_UPS = (f'data.sources=["{BUILTIN}"]', "data.held_out=[]", "data.held_out_fraction=0.1")
BASE = "base"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    BASE: (),
    "mean 4": ("depth.mean=4",),
    "small": _SMALL,
    "small, mean 4": (*_SMALL, "depth.mean=4"),
    # As many parameters in all: the layers outside the core change with d_ff too.
    "core of 1": ("model.n_core_layers=1", "model.d_ff=512"),
    "core of 4": ("model.n_core_layers=4", "model.d_ff=192"),
    "tokens x0.5": ("train.steps=200",),
    "tokens x3": ("train.steps=1200",),
    "sigma 0.25": ("depth.sigma=0.25",),
    "sigma 1": ("depth.sigma=1.0",),
    "fixed depth": ("depth.kind=fixed",),
    "fixed point": ("objective.fixed_point_weight=0.05",),
    "loss on every": ("train.loss_on=every",),
    "loss on last third": ("train.loss_on=last-third",),
    "depth per micro-batch": (
        "depth.per=micro-batch",
        "train.micro_batch=1",
        "train.accumulation=4",
    ),
    "look-ups": _LOOK_UPS,
    "look-ups, tokens x3": (*_LOOK_UPS, "train.steps=1200"),
}
SMOKE_CELLS = (BASE, "look-ups")
_SMOKE = (
    *("tokenizer.vocab_size=300", "model.d_model=32", "model.d_ff=64"),
    *("train.steps=4", "train.seq=64", "train.eval_blocks=2", "train.compile=off"),
    *("data.max_documents=200",),
)


@dataclass(frozen=True)
class Cell:
    """One model: a variant and a seed of its weights, its order of text and its depths."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.replace(',', '').replace(' ', '-')}-s{self.seed}"

    def settings(self, data: str, held_out: str, smoke: bool) -> dict[str, Any]:
        """What is asked of ``loopwise train``."""
        asked = explicit_table(
            settings={"data": {"sources": [data], "held_out": [held_out]}, "seed": self.seed},
            overrides=_BASE,
        )
        for overrides in (VARIANTS[self.variant], _SMOKE if smoke else ()):
            asked = merge(asked, parse_overrides(overrides))
        return asked


def train(
    cell: Cell, folder: Path, settings: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Train a cell into ``folder``, go on with it, or read what it came to.

    Raises:
        ConfigError: the folder holds a cell of other settings.
    """
    file = folder / DONE
    if file.is_file():
        stored = read_json_object(folder / "config.json", RunFolderError)["settings"]
        other = differing(stored, settings)
        if other:
            raise ConfigError(f"{str(folder)!r} was trained with {other[0]}; choose another --out")
    else:

        def emit(event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] % 50 == 0:
                shown = (event["loss_nats"], event["tokens_per_s"])
                say(
                    "{}: step {}, {:.3f} nats, {:,.0f} tokens/s".format(
                        cell.name, event["step"], *shown
                    )
                )

        torch.compiler.reset()  # cells of many shapes would use up the recompilations allowed
        resume = (folder / "config.json").is_file()
        write_whole(file, json.dumps(train_command(settings, folder, emit, resume)))
    return json.loads(file.read_text())
