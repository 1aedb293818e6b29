"""The depth-recurrent transformer: unique prelude, one tied core with re-injection, unique coda.

Source: Geiping et al. 2025, arXiv:2502.05171; Logan 2026, arXiv:2607.14427 (paper 1, stage 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, check_heads
from loopwise.models.layers import SandwichBlock, init_linear_, seeded_normal


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """Shape of one recurrent model. Plain values: building one reads no file and no device."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2  # divides n_heads; fewer means grouped-query attention
    d_ff: int = 704
    n_prelude_layers: int = 1
    n_core_layers: int = 2
    n_coda_layers: int = 1
    injection: Literal["concat", "add"] = "concat"  # how the prelude's output re-enters the core
    latent_init: Literal["zeros", "injection", "noise"] = "zeros"
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    init_depth: int = 8  # recurrences the initial scale of residual projections assumes

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_ff", "n_core_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("n_prelude_layers", "n_coda_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads)
        if self.init_depth < 1:
            raise ConfigError(f"model.init_depth={self.init_depth} must be at least 1")

    @property
    def geometry(self) -> Geometry:
        head_dim = self.d_model // self.n_heads
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=head_dim,
            n_prelude_layers=self.n_prelude_layers,
            n_core_layers=self.n_core_layers,
            n_coda_layers=self.n_coda_layers,
            rope=Rope(head_dim=head_dim, base=self.rope_base),
        )


class RecurrentModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "recurrent"
    config_class = RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        blocks = [
            SandwichBlock(self.geometry, layer, config.d_ff, config.norm_eps)
            for layer in range(self.geometry.n_layers)
        ]
        n_prelude, n_core = config.n_prelude_layers, config.n_core_layers
        self.prelude_blocks = nn.ModuleList(blocks[:n_prelude])
        self.core_blocks = nn.ModuleList(blocks[n_prelude : n_prelude + n_core])
        self.coda_blocks = nn.ModuleList(blocks[n_prelude + n_core :])
        if config.injection == "concat":
            self.adapter = nn.Linear(2 * d, d, bias=False)
        self.norm_final = nn.RMSNorm(d, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, self.geometry.effective_layers(config.init_depth))

    @property
    def seeded_latent(self) -> bool:
        return self.config.latent_init == "noise"

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        # The scale makes a row of the small-std embedding a unit-RMS residual stream.
        x = self.embedding(token_ids) * self.config.d_model**0.5
        for block in self.prelude_blocks:
            x = block(x, 1, view)
        return x

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        if self.config.latent_init == "zeros":
            return torch.zeros_like(injection)
        if self.config.latent_init == "injection":
            return injection
        if seeds is None:
            seeds = torch.zeros(injection.shape[:-1], dtype=torch.int64, device=injection.device)
        return seeded_normal(seeds, injection.shape[-1]).to(injection.dtype)

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        if self.config.injection == "concat":
            x = self.adapter(torch.cat((latent, injection), dim=-1))
        else:
            x = latent + injection
        for block in self.core_blocks:
            x = block(x, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block in self.coda_blocks:
            x = block(x, r, view)
        return self.norm_final(x)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    def parts(self) -> dict[str, list[nn.Module]]:
        adapter = [self.adapter] if self.config.injection == "concat" else []
        return {
            "prelude": [self.prelude_blocks],
            "core": [*adapter, self.core_blocks],
            "coda": [self.coda_blocks],
        }
