"""The Raven family: Huginn, and ordinary transformers retrofitted with the same loop.

As recurrent.py, except: what surrounds the core differs from one published model to the next, so it
is a setting. With e the prelude's output and s the latent, recurrence r is
``s = core(adapter [s, e])``; the coda reads ``norm_final(s)`` (Huginn) or ``s`` (retrofits).

Source: Geiping et al. 2025, arXiv:2502.05171 (Huginn); McLeish et al. 2025, arXiv:2511.07384
(retrofits). Blocks, with n1 .. n4 for norms:

- ``sandwich`` (Huginn): x = n2(attn(n1(x)) + x), x = n4(mlp(n3(x)) + x)
- ``pre-norm`` (Llama retrofits): x = attn(n1(x)) + x, x = mlp(n2(x)) + x
- ``post-norm`` (OLMo 2 retrofits): x = n1(attn(x)) + x, x = n2(mlp(x)) + x
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, RopeScaling, check_heads
from loopwise.models.layers import (
    Attention,
    PreNormBlock,
    SandwichBlock,
    SwiGLU,
    choose,
    init_linear_,
    seeded_truncated_normal,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RavenConfig:
    """Shape of one Raven model; the defaults are the choices of Huginn."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 4
    d_ff: int = 704
    n_prelude_layers: int = 2
    n_core_layers: int = 4
    n_coda_layers: int = 2
    block: Literal["sandwich", "pre-norm", "post-norm"] = "sandwich"
    qk_bias: bool = True  # added to queries and keys before rotary phase
    qk_norm: bool = False  # over the whole width of queries and of keys, before they are split
    norm_before_coda: bool = True  # the final norm is applied to what leaves the loop too
    embedding_scale: float = 16.0  # Huginn: sqrt(d_model)
    latent_init: Literal["noise", "zeros", "injection"] = "noise"
    latent_std: float = 0.632  # of the noise, which is cut at three of them; Huginn: sqrt(2/5)
    skip_first_adapter: bool = False  # recurrence 1 starts from the prelude's output as it is
    tie_embeddings: bool = True
    rope_base: float = 50_000.0
    rope_interleaved: bool = True
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    init_depth: int = 32  # recurrences the initial scale of residual projections assumes

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps", "embedding_scale", "latent_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_ff", "n_core_layers")
        for name in (*names, "init_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("n_prelude_layers", "n_coda_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative")
        check_heads(self.d_model, self.n_heads, self.n_kv_heads)
        if self.qk_bias and self.qk_norm:
            raise ConfigError("model.qk_bias and model.qk_norm exclude one another; switch one off")
        if self.qk_bias and self.n_heads != self.n_kv_heads:
            raise ConfigError(
                f"model.qk_bias needs model.n_kv_heads={self.n_kv_heads} to equal "
                f"model.n_heads={self.n_heads}: queries and keys share one tensor"
            )

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
            rope=Rope(
                head_dim=head_dim,
                base=self.rope_base,
                interleaved=self.rope_interleaved,
                scaling=self.rope_scaling,
            ),
        )


class RavenModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "raven"
    config_class = RavenConfig

    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        blocks = [self._block(layer) for layer in range(self.geometry.n_layers)]
        n_prelude, n_core = config.n_prelude_layers, config.n_core_layers
        self.prelude_blocks = nn.ModuleList(blocks[:n_prelude])
        self.adapter = nn.Linear(2 * d, d, bias=False)  # of [latent, injection], in this order
        self.core_blocks = nn.ModuleList(blocks[n_prelude : n_prelude + n_core])
        self.coda_blocks = nn.ModuleList(blocks[n_prelude + n_core :])
        self.norm_final = nn.RMSNorm(d, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, self.geometry.effective_layers(config.init_depth))

    def _block(self, layer: int) -> nn.Module:
        c = self.config
        before_phase: nn.Module | None = None
        if c.qk_bias:
            before_phase = QKBias(self.geometry)
        elif c.qk_norm:
            before_phase = QKNorm(self.geometry, c.norm_eps)
        kinds = {"sandwich": SandwichBlock, "pre-norm": PreNormBlock, "post-norm": PostNormBlock}
        return kinds[c.block](self.geometry, layer, c.d_ff, c.norm_eps, before_phase)

    @property
    def seeded_latent(self) -> bool:
        return self.config.latent_init == "noise"

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        x = self.embedding(token_ids) * self.config.embedding_scale
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
        noise = seeded_truncated_normal(seeds, injection.shape[-1])
        return (noise * self.config.latent_std).to(injection.dtype)

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = self.adapter(torch.cat((latent, injection), dim=-1))
        if self.config.skip_first_adapter:
            first = (r == 1) if isinstance(r, int) else (r == 1).unsqueeze(-1)  # all, or per row
            x = choose(first, injection, x)
        for block in self.core_blocks:
            x = block(x, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = self.norm_final(latent) if self.config.norm_before_coda else latent
        for block in self.coda_blocks:
            x = block(x, r, view)
        return self.norm_final(x)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    def parts(self) -> dict[str, list[nn.Module]]:
        return {
            "prelude": [self.prelude_blocks],
            "core": [self.adapter, self.core_blocks],
            "coda": [self.coda_blocks],
        }


class PostNormBlock(nn.Module):
    """A norm on each branch before it joins the sum: the OLMo 2 shape (arXiv:2501.00656)."""

    def __init__(
        self,
        geometry: Geometry,
        layer: int,
        d_ff: int,
        norm_eps: float,
        before_phase: nn.Module | None = None,
    ) -> None:
        super().__init__()
        d = geometry.d_model
        self.attn = Attention(geometry, layer, before_phase)
        self.norm_attn_out = nn.RMSNorm(d, eps=norm_eps)
        self.mlp = SwiGLU(d, d_ff)
        self.norm_mlp_out = nn.RMSNorm(d, eps=norm_eps)

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = x + self.norm_attn_out(self.attn(x, r, view))
        return x + self.norm_mlp_out(self.mlp(x))


class QKBias(nn.Module):
    """A learned vector added to each head of the queries (bias[0]) and of the keys (bias[1])."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, geometry.n_heads, geometry.head_dim))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + self.bias[0], k + self.bias[1]


class QKNorm(nn.Module):
    """RMS norms with weights over the whole width: all heads of a token are normed as one."""

    def __init__(self, geometry: Geometry, norm_eps: float) -> None:
        super().__init__()
        self.query = nn.RMSNorm(geometry.n_heads * geometry.head_dim, eps=norm_eps)
        self.key = nn.RMSNorm(geometry.n_kv_heads * geometry.head_dim, eps=norm_eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(q.flatten(-2)).view_as(q), self.key(k.flatten(-2)).view_as(k)
