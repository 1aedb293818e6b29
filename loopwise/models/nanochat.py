"""The looped model of nanochat's looped fork: Huginn's loop in nanochat's dress.

As raven.py, except: the embedding is normed rather than scaled; queries and keys are normed a head,
without weights; the MLP is relu^2; the loop norms its latent after every recurrence, and it is the
normed one that goes on; the adapter reads [injection, latent], in this order; logits are capped.

Source: github.com/kschwethelm/looped_nanochat; Geiping et al. 2025, arXiv:2502.05171.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import (
    Geometry,
    KVView,
    Local,
    LoopedLM,
    Rope,
    check_heads,
    check_layers,
)
from loopwise.models.layers import SandwichBlock, init_linear_, seeded_normal
from loopwise.models.looped import SquaredReLU


@dataclass(frozen=True, kw_only=True, slots=True)
class NanochatConfig:
    """Shape of one looped nanochat model."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 4
    d_ff: int = 1024
    n_prelude_layers: int = 2
    n_core_layers: int = 4
    n_coda_layers: int = 2
    injection: Literal["concat", "none"] = "concat"  # none: the prelude's output starts the loop
    latent_init: Literal["injection", "noise"] = "injection"
    local_layers: tuple[int, ...] = ()  # by number: prelude, then core, then coda
    window: int = 1025  # tokens a local layer sees, the token itself counted
    logit_cap: float | None = 15.0  # logits are cap x tanh(logits / cap)
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    init_depth: int = 4  # recurrences the initial scale of residual projections assumes

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"model.{name}={value} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_ff", "n_core_layers")
        for name in (*names, "window", "init_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("n_prelude_layers", "n_coda_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads)
        n_layers = self.n_prelude_layers + self.n_core_layers + self.n_coda_layers
        check_layers("local_layers", self.local_layers, n_layers)
        if self.injection == "none" and self.latent_init == "noise":
            raise ConfigError(
                "model.injection=none with model.latent_init=noise would never see the prompt"
            )

    @property
    def geometry(self) -> Geometry:
        head_dim = self.d_model // self.n_heads
        rope = Rope(head_dim=head_dim, base=self.rope_base)
        n_layers = self.n_prelude_layers + self.n_core_layers + self.n_coda_layers
        layers = tuple(layer in self.local_layers for layer in range(n_layers))
        local = Local(layers=layers, window=self.window, rope=rope)
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=head_dim,
            n_prelude_layers=self.n_prelude_layers,
            n_core_layers=self.n_core_layers,
            n_coda_layers=self.n_coda_layers,
            rope=replace(rope, local=local) if self.local_layers else rope,
        )


class NanochatModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "nanochat"
    config_class = NanochatConfig

    def __init__(self, config: NanochatConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d, eps = config.d_model, config.norm_eps
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.norm_embedding = nn.RMSNorm(d, eps=eps)
        blocks = [
            SandwichBlock(self.geometry, layer, config.d_ff, eps, HeadNorm(eps), SquaredReLU)
            for layer in range(self.geometry.n_layers)
        ]
        n_prelude, n_core = config.n_prelude_layers, config.n_core_layers
        self.prelude_blocks = nn.ModuleList(blocks[:n_prelude])
        if config.injection == "concat":
            self.adapter = nn.Linear(2 * d, d, bias=False)  # of [injection, latent]
        self.core_blocks = nn.ModuleList(blocks[n_prelude : n_prelude + n_core])
        self.norm_latent = nn.RMSNorm(d, eps=eps)
        self.coda_blocks = nn.ModuleList(blocks[n_prelude + n_core :])
        self.norm_final = nn.RMSNorm(d, eps=eps)
        self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, self.geometry.effective_layers(config.init_depth))

    @property
    def seeded_latent(self) -> bool:
        return self.config.latent_init == "noise"

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        x = self.norm_embedding(self.embedding(token_ids))
        for block in self.prelude_blocks:
            x = block(x, 1, view)
        return x

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        if self.config.latent_init == "injection":
            return injection
        if seeds is None:
            seeds = torch.zeros(injection.shape[:-1], dtype=torch.int64, device=injection.device)
        d = injection.shape[-1]
        return (seeded_normal(seeds, d) * d**-0.5).to(injection.dtype)

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        if self.config.injection == "concat":
            x = self.adapter(torch.cat((injection, latent), dim=-1))
        for block in self.core_blocks:
            x = block(x, r, view)
        return self.norm_latent(x)

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block in self.coda_blocks:
            x = block(x, r, view)
        return self.norm_final(x)

    @property
    def head_weight(self) -> Tensor:
        return self.unembedding.weight

    @property
    def logit_cap(self) -> float | None:
        return self.config.logit_cap

    def parts(self) -> dict[str, list[nn.Module]]:
        adapter = [self.adapter] if self.config.injection == "concat" else []
        return {
            "prelude": [self.prelude_blocks],
            "core": [*adapter, self.core_blocks],
            "coda": [self.coda_blocks],
        }


class HeadNorm(nn.Module):
    """RMS norm of each query and key head; without weights it commutes with the phase after it."""

    def __init__(self, norm_eps: float) -> None:
        super().__init__()
        self.eps = norm_eps

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        size = (q.shape[-1],)
        return F.rms_norm(q, size, eps=self.eps), F.rms_norm(k, size, eps=self.eps)
