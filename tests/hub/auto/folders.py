"""Small loopwise checkpoints of every architecture, and what loopwise itself makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from naive import roughen
from torch import Tensor

from loopwise.engine.reference import ReferenceDecoder
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import save_checkpoint
from loopwise.models.dory import DoryConfig, DoryModel
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.models.layers import row_seeds
from loopwise.models.looped import LoopedConfig, LoopedModel
from loopwise.models.loopformer import LoopFormerConfig, LoopFormerModel
from loopwise.models.nanochat import NanochatConfig, NanochatModel
from loopwise.models.ouro import OuroConfig, OuroModel
from loopwise.models.parcae import ParcaeConfig, ParcaeModel
from loopwise.models.raven import RavenConfig, RavenModel
from loopwise.models.views import PackedView
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is on the hub
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

IDS = [256, *b"Tom has a red ball. Where"]
TRAINING = {"seq": 32, "depth": {"true_mean": 3.2, "min": 1, "max": 8, "p99": 7}}
SIZES: dict[str, Any] = {"vocab_size": 258, "d_model": 32, "n_heads": 4, "n_kv_heads": 2}
ARCHITECTURES = ["recurrent", "untied", "noise", "bare", "looped", "fixed", "raven", "ouro"]
ARCHITECTURES += ["nanochat", "loopformer", "dory", "parcae"]


def build(name: str, dtype: torch.dtype = torch.float64) -> LoopedLM:
    """float64 by default: a loop may be chaotic, and would then grow any rounding."""
    torch.manual_seed(0)
    model: LoopedLM
    changes: dict[str, dict[str, Any]] = {
        "recurrent": {},
        "untied": {"tie_embeddings": False},
        "noise": {"latent_init": "noise", "n_coda_layers": 2},
        "bare": {"n_prelude_layers": 0, "n_coda_layers": 0, "injection": "add"},
    }
    if name in changes:
        return make_model(**changes[name]).to(dtype)
    if name == "looped":
        model = LoopedModel(LoopedConfig(n_layers=2, d_ff=48, **SIZES))
    elif name == "fixed":
        model = FixedModel(FixedConfig(n_layers=2, d_ff=48, **SIZES))
    elif name == "raven":
        model = RavenModel(RavenConfig(d_ff=48, **{**SIZES, "n_kv_heads": 4}))
    elif name == "ouro":
        model = OuroModel(OuroConfig(n_layers=2, head_dim=8, d_ff=48, **SIZES))
    elif name == "loopformer":
        shape = {key: size for key, size in SIZES.items() if key != "n_kv_heads"}
        model = LoopFormerModel(LoopFormerConfig(n_layers=2, d_ff=48, max_positions=40, **shape))
    elif name == "dory":
        layers = {"n_prelude_layers": 1, "n_core_layers": 2, "n_coda_layers": 1}
        model = DoryModel(
            DoryConfig(d_ff=48, head_dim=8, local_layers=(0, 2, 3), window=5, **layers, **SIZES)
        )
    elif name == "parcae":
        shape = {key: size for key, size in SIZES.items() if key != "n_kv_heads"}
        model = ParcaeModel(
            ParcaeConfig(d_ff=48, n_prelude_layers=1, value_layers=(0, 2, 4), **shape)
        )
    else:
        model = NanochatModel(NanochatConfig(d_ff=48, n_core_layers=2, **SIZES))
    roughen(model, 1)
    return model.to(dtype).eval()


def saved(folder: Path, name: str = "recurrent", dtype: torch.dtype = torch.float64) -> Path:
    """A checkpoint folder with the byte tokenizer."""
    path = folder / name
    save_checkpoint(path, build(name, dtype), ByteTokenizer(), TRAINING)
    return path


def depths_of(model: LoopedLM) -> list[int]:
    """Depths worth a test."""
    limit = model.geometry.max_depth
    return [1, 2, 4] if limit is None else [limit]


@torch.no_grad()
def plain_forward(model: LoopedLM, depth: int, ids: Sequence[int] = IDS) -> Tensor:
    """Logits ``(tokens, vocab)`` of loopwise's own whole pass."""
    positions = torch.arange(len(ids))[None]
    tokens = torch.tensor([list(ids)])
    view = PackedView(model.geometry.rope, positions, None, model.dtype, tokens)
    injection = model.prelude(tokens, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)[0]


def reference(
    model: LoopedLM, rule_text: str, ids: Sequence[int] = IDS, fitted: Any = None
) -> tuple[Tensor, list[int]]:
    """Logits ``(tokens, vocab)`` float32 and depths of decoding one token after another."""
    rule = parse_rule(rule_text)
    decoder = ReferenceDecoder(model, rule, build_policy(rule, fitted, model))
    fed = [decoder.feed(token) for token in ids]
    return torch.stack([token.logits for token in fed]), [token.exit_depth for token in fed]


def gap(left: Tensor, right: Tensor) -> float:
    return float((left.detach().double() - right.detach().double()).abs().max())
