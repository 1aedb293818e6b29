"""An ordinary Llama-shaped checkpoint made depth-recurrent: its own layers in and around a loop.

Layers are taken by list, the others dropped. The adapter starts so that depth 1 is the source
without the dropped layers, which is checked before anything is written; the model then needs
training with random depth. Source: McLeish et al. 2025, arXiv:2511.07384.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from loopwise.data.sketch import TRAINED_ON
from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub.chat import template_files, templates_in
from loopwise.hub.formats.base import always
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.models.costs import parameters
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.layers import row_seeds
from loopwise.models.raven import RavenConfig, RavenModel
from loopwise.models.views import PackedView

GATE = 1e-5  # largest difference of logits at depth 1, of the largest logit
PARTS = ("prelude", "core", "coda")
# Of the latent in what a recurrence reads before training, beside the prelude's output. Layers that
# were never looped do not bear their own output long: SmolLM2's loss at depth 8 is 3.9 nats above
# that at depth 1 with a share of 1, 0.5 with this one.
LATENT_SHARE = 0.5
HEALING_TEXT = "TEXT.jsonl"  # what the printed command trains on, to be put in
_GATE_TOKENS = 64
_SHARES = 256  # steps of 1 / 256: bfloat16 holds a share and what is left of 1 exactly
_OUTSIDE = ("embedding.weight", "norm_final.weight", "unembedding.weight")


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """What was made of what.

    Attributes:
        layers: of the source, by part.
        dropped: layers of the source that are in none.
        parameters, source_parameters: unique ones.
        gate_error: largest difference of depth-1 logits from the source without dropped layers, of
            the largest of them.
    """

    source: Path
    out: Path
    layers: dict[str, list[int]]
    dropped: list[int]
    latent_share: float
    parameters: int
    source_parameters: int
    gate_error: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "source": str(self.source), "out": str(self.out)}


def retrofit(
    source: Path, out: Path, layers: Mapping[str, str], *, latent_share: float = LATENT_SHARE
) -> Retrofit:
    """Write the depth-recurrent checkpoint that a ``fixed`` one becomes; weights keep their dtype.

    Args:
        source: a checkpoint of architecture ``fixed``.
        layers: for each of PARTS a list such as ``0-3`` or ``4,6,8-10``; a lone number is so many
            first layers for the prelude and so many last ones for the coda.
        latent_share: of the latent in what recurrences read before training, 0 to 1 in steps of
            1/256; the rest is the prelude's output. At 0 all depths say what depth 1 says, at 1
            depth r runs the core's layers r times in a row.
    Raises:
        ConfigError: a list that is empty, out of range, or shares a layer with another; a share
            that is none.
        CheckpointError: another architecture, an ``out`` that exists, or a failed gate.
    """
    if out.exists():
        raise CheckpointError(f"{str(out)!r} exists already; choose another name")
    if not 0 <= latent_share <= 1:
        raise ConfigError(f"--latent-share {latent_share:g} must lie in 0..1")
    checkpoint = load_checkpoint(source)
    if checkpoint.model.name != "fixed":
        raise CheckpointError(
            f"{str(source)!r} is of architecture {checkpoint.model.name!r}; only 'fixed' ones, as "
            "Llama-shaped checkpoints become, can be retrofitted"
        )
    config: FixedConfig = checkpoint.model.config
    taken = {part: parse_layers(layers[part], part, config.n_layers) for part in PARTS}
    _check_disjoint(taken)
    stored = load_file(checkpoint.path / "model.safetensors")
    state = surgery(stored, taken, latent_share)
    with torch.device("meta"):
        model = RavenModel(raven_config(config, taken, latent_share))
    model.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
    error = gate_error(checkpoint, model, taken)
    if not error <= GATE:
        raise CheckpointError(
            f"depth 1 differs from {str(source)!r} without the dropped layers by {error:.2g} "
            f"of its largest logit, more than {GATE:g}; nothing was written"
        )
    facts: dict[str, Any] = {
        "retrofitted_from": {
            "checkpoint": checkpoint.path.name,
            "weights_hash": checkpoint.weights_hash,
            "layers": taken,
            "latent_share": latent_share,
            "gate_error": error,
        },
        "depth": checkpoint.training.get("depth", always(1)),
    }
    if "converted_from" in checkpoint.training:  # so that texts begin as there, until it is trained
        facts["converted_from"] = checkpoint.training["converted_from"]
    told = ("origin", TRAINED_ON)
    facts |= {name: checkpoint.training[name] for name in told if name in checkpoint.training}
    files = template_files(templates_in(checkpoint.path))
    save_checkpoint(out, model, checkpoint.tokenizer, facts, state=state, files=files)
    kept = {i for of in taken.values() for i in of}
    return Retrofit(
        source=source,
        out=out,
        layers=taken,
        dropped=[i for i in range(config.n_layers) if i not in kept],
        latent_share=latent_share,
        parameters=parameters(model),
        source_parameters=parameters(checkpoint.model),
        gate_error=error,
    )


def retrofit_lines(done: Retrofit) -> list[str]:
    """The summary for people, ending with a command that trains what was made."""
    n_layers = len(done.dropped) + sum(map(len, done.layers.values()))
    ends = [i for i in (0, n_layers - 1) if i in done.dropped]
    named = " and ".join(f"{'first' if i == 0 else 'last'} layer {i}" for i in ends)
    warning = f"warning: the source's {named} dropped, which its embedding and head are used to"
    parts = "; ".join(f"{part} {_spelt(of)}" for part, of in done.layers.items())
    return [
        f"{done.source} -> {done.out}",
        f"layers: {parts}; dropped {_spelt(done.dropped) or 'none'}",
        *([warning] if ends else []),
        f"{done.parameters:,} parameters of {done.source_parameters:,}",
        f"depth 1 equals the source without the dropped layers to {done.gate_error:.2g} of "
        f"the largest logit (at most {GATE:g})",
        "next: heal it, its depth growing, the source teaching, on text like the source's own:",
        f"  {healing(done.source, done.out)}",
    ]


def healing(source: Path, out: Path) -> str:
    """The command that trains a retrofitted checkpoint, to be edited: text, steps and depth."""
    settings = {
        "depth.mean": 4,
        "depth.curriculum": "1-sqrt",
        "objective.distil_from": source,
        "objective.distil_weight": 0.7,
        "optim.name": "adamw",
        "optim.lr": 1e-4,
        "optim.embedding_lr": 3e-5,
        "train.seq": 256,
        "train.steps": 1000,
    }
    words = ["loopwise", "train", "--from", out, "--data", HEALING_TEXT, "--out", f"{out}-healed"]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(map(str, words))


def parse_layers(text: str, part: str, n_layers: int) -> list[int]:
    """``0-3,7`` as layer numbers in the order written.

    A lone number N is the first N layers for ``prelude`` and the last N for ``coda``; for ``core``
    it could be either, and is refused.

    Raises:
        ConfigError: empty, not numbers, backwards, out of range, or a layer named twice.
    """
    if text.strip().isdecimal():
        return _so_many(int(text), part, n_layers)
    out: list[int] = []
    for piece in (p.strip() for p in text.split(",") if p.strip()):
        first, dash, last = piece.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ConfigError(f"--{part} {text!r}: {piece!r} is no layer; write 0-3 or 4,6,8-10")
        low, high = int(first), int(last if dash else first)
        if low > high:
            raise ConfigError(f"--{part} {text!r}: {piece!r} runs backwards; write {high}-{low}")
        if high >= n_layers:
            raise ConfigError(
                f"--{part} {text!r}: there is no layer {high}; the source has 0-{n_layers - 1}"
            )
        out += range(low, high + 1)
    if not out:
        raise ConfigError(f"--{part} {text!r} names no layer; write for example --{part} 0-3")
    twice = [i for i in out if out.count(i) > 1]
    if twice:
        raise ConfigError(f"--{part} {text!r} names layer {twice[0]} twice; leave one out")
    return out


def _so_many(count: int, part: str, n_layers: int) -> list[int]:
    if part == "core":
        raise ConfigError(
            f"--core {count} may mean layer {count} or {count} layers; write a range such as "
            f"10-17, or {count}-{count} for that layer alone"
        )
    if not 1 <= count <= n_layers:
        alone = f" (write {count}-{count} for layer {count} alone)" if count < n_layers else ""
        raise ConfigError(
            f"--{part} {count} asks for {count} layers; the source has {n_layers}, 0-{n_layers - 1}"
            f"{alone}"
        )
    return list(range(count) if part == "prelude" else range(n_layers - count, n_layers))


def raven_config(
    source: FixedConfig, taken: Mapping[str, list[int]], latent_share: float
) -> RavenConfig:
    """The shape of the result: pre-norm blocks as they are, one adapter more."""
    return RavenConfig(
        vocab_size=source.vocab_size,
        d_model=source.d_model,
        n_heads=source.n_heads,
        n_kv_heads=source.n_kv_heads,
        d_ff=source.d_ff,
        n_prelude_layers=len(taken["prelude"]),
        n_core_layers=len(taken["core"]),
        n_coda_layers=len(taken["coda"]),
        block="pre-norm",
        qk_bias=False,
        norm_before_coda=False,
        embedding_scale=1.0,
        latent_init="injection" if latent_share > 0 else "zeros",
        tie_embeddings=source.tie_embeddings,
        rope_base=source.rope_base,
        rope_interleaved=False,
        rope_scaling=source.rope_scaling,
        norm_eps=source.norm_eps,
    )


def surgery(
    source: Mapping[str, Tensor], taken: Mapping[str, list[int]], latent_share: float
) -> dict[str, Tensor]:
    """The result's tensors: those of the layers under their new places, and the adapter."""
    state = {key: source[key] for key in _OUTSIDE if key in source}
    for part in PARTS:
        for new, old in enumerate(taken[part]):
            state |= _layer(source, old, f"{part}_blocks.{new}")
    embedding = source["embedding.weight"]
    d = embedding.shape[1]
    same = torch.eye(d, dtype=embedding.dtype)
    share = round(latent_share * _SHARES) / _SHARES
    state["adapter.weight"] = torch.cat((share * same, (1 - share) * same), dim=1)
    return state


@torch.no_grad()
def gate_error(checkpoint: Checkpoint, model: LoopedLM, taken: Mapping[str, list[int]]) -> float:
    """Largest difference between depth-1 logits and those of the source without other layers.

    As a part of the largest logit: a share such as 0.3 rounds the latent in its last bit.
    """
    order = [i for part in PARTS for i in taken[part]]
    source = checkpoint.model.state_dict()
    with torch.device("meta"):
        dropped = FixedModel(replace(checkpoint.model.config, n_layers=len(order)))
    state = {key: source[key] for key in _OUTSIDE if key in source}
    for new, old in enumerate(order):
        state |= _layer(source, old, f"core_blocks.{new}")
    dropped.load_state_dict(state, assign=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.geometry.vocab_size, (1, _GATE_TOKENS), generator=generator)
    wanted = _depth_one(dropped, ids)
    return float((_depth_one(model, ids) - wanted).abs().max() / wanted.abs().max())


def _depth_one(model: LoopedLM, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])[None]
    view = PackedView(model.geometry.rope, positions, None, model.dtype, ids)
    injection = model.prelude(ids, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    return model.coda(model.core_step(latent, injection, 1, view), 1, view)


def _layer(source: Mapping[str, Tensor], number: int, name: str) -> dict[str, Tensor]:
    """Tensors of a layer of the source under another name."""
    old = f"core_blocks.{number}."
    return {
        f"{name}.{key.removeprefix(old)}": v for key, v in source.items() if key.startswith(old)
    }


def _check_disjoint(taken: Mapping[str, list[int]]) -> None:
    for one, other in combinations(PARTS, 2):
        shared = sorted(set(taken[one]) & set(taken[other]))
        if shared:
            raise ConfigError(
                f"--{one} and --{other} both name layer {', '.join(map(str, shared))}; a layer "
                "belongs to one part"
            )


def _spelt(layers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
