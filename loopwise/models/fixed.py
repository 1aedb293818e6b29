"""The plain untied pre-norm transformer, as a looped model of exactly one recurrence.

The non-looped baseline, and the shape in which Llama-like checkpoints load.
Source: Touvron et al. 2023, arXiv:2302.13971.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, RopeScaling, check_heads
from loopwise.models.layers import PreNormBlock, init_linear_


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedConfig:
    """Shape of one plain transformer."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    d_ff: int = 704
    n_layers: int = 4
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None  # only to read checkpoints that have it
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_ff", "n_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads)

    @property
    def geometry(self) -> Geometry:
        head_dim = self.d_model // self.n_heads
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=head_dim,
            n_prelude_layers=0,
            n_core_layers=self.n_layers,
            n_coda_layers=0,
            rope=Rope(head_dim=head_dim, base=self.rope_base, scaling=self.rope_scaling),
            max_depth=1,
        )


class FixedModel(LoopedLM):
    """As recurrent.py, except: the core is the whole stack, run once on the embeddings."""

    name = "fixed"
    config_class = FixedConfig

    def __init__(self, config: FixedConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.core_blocks = nn.ModuleList(
            PreNormBlock(self.geometry, layer, config.d_ff, config.norm_eps)
            for layer in range(config.n_layers)
        )
        self.norm_final = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False)
        init_linear_(self, config.n_layers)

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        return self.embedding(token_ids)

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        return injection

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block in self.core_blocks:
            x = block(x, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        return self.norm_final(latent)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"prelude": [], "core": [self.core_blocks], "coda": []}
