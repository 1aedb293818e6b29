"""Small checkpoint folders of other projects, and what a converted one says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from loopwise.engine.reference import ReferenceDecoder
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.layers import row_seeds
from loopwise.models.views import PackedView
from loopwise.tokenizer import ByteTokenizer

VOCAB = 260  # the byte tokenizer's 258 and two rows of padding
IDS = [256, 84, 111, 109, 32, 104, 97, 115]
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, Tensor]


def fill(shapes: Shapes, seed: int = 0) -> Tensors:
    """Random float32 weights; norms vary around one, so that none hides behind another."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in key or "ln_" in key:
            tensors[key] = 1 + 0.3 * noise
        elif "wte" in key or "embed" in key or len(shape) != 2:
            tensors[key] = 0.5 * noise
        else:
            tensors[key] = noise / math.sqrt(shape[-1])
    return tensors


def write_folder(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """One safetensors file, config and byte tokenizer."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    save_file(tensors, path / "model.safetensors")
    return path


def converted(source: Path, dtype: torch.dtype = torch.float64) -> LoopedLM:
    """The model that a source becomes, through the folder on disk."""
    out = source.parent / f"{source.name}-converted"
    if not out.exists():
        convert(source, out)
    return load_checkpoint(out, dtype).model


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {key: tensor.double().numpy() for key, tensor in tensors.items()}


@torch.no_grad()
def first_latent(model: LoopedLM, ids: list[int] = IDS) -> Tensor:
    """The latent before recurrence 1, ``(tokens, d_model)``."""
    positions = torch.arange(len(ids))
    injection = torch.zeros(len(ids), model.geometry.d_model, dtype=model.dtype)
    return model.initial_latent(injection, row_seeds(positions))


@torch.no_grad()
def forward(model: LoopedLM, depth: int, ids: list[int] = IDS) -> Tensor:
    """Logits ``(tokens, vocab)`` of a whole pass at one depth."""
    positions = torch.arange(len(ids))[None]
    tokens = torch.tensor([ids])
    view = PackedView(model.geometry.rope, positions, None, model.dtype, tokens)
    injection = model.prelude(tokens, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)[0]


def decode(model: LoopedLM, depth: int, ids: list[int] = IDS) -> Tensor:
    """Logits ``(tokens, vocab)`` of the reference decoder, fed one token after another."""
    rule = parse_rule(f"fixed:{depth}")
    decoder = ReferenceDecoder(model, rule, build_policy(rule))
    return torch.stack([decoder.feed(token).logits for token in ids])


def gap(left: Tensor, right: Any) -> float:
    return float((left.double() - torch.as_tensor(right)).abs().max())
