"""Dory: a depth-recurrent nGPT, whose states lie on the unit sphere.

As recurrent.py, except: u(x) = x / |x| stands where norms do, and a layer moves its state towards
what it finds, by a learned rate a channel, instead of adding to it. With e the prelude's output on
the sphere and s the latent, recurrence r is ``s = core(u(s) + e)``, and a layer is

    x = u(x),  x = x + rate1 * (u(attn(x)) - x),  x = u(x),  x = x + rate2 * (u(mlp(x)) - x)

Attention compares unit queries and keys; queries are scaled a channel after their phase, and what
is mixed is gated by sigmoid(G x) and set on the sphere before its projection. The MLP is gated,
with the sphere before its way down. Some layers see a window of the latest tokens only, and turn by
another base. The scales that nGPT learns for rows of matrices are part of those rows here.

Source: Loshchilov et al. 2024, arXiv:2410.01131 (nGPT); transformers' model type ``dory``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, Local, LoopedLM, Rope, check_layers
from loopwise.models.layers import init_linear_

UNIT_EPS = 1e-6  # added to squared lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class DoryConfig:
    """Shape of one Dory."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2  # divides n_heads; fewer means grouped-query attention
    head_dim: int = 64  # need not be d_model / n_heads
    d_ff: int = 704
    n_prelude_layers: int = 2
    n_core_layers: int = 4
    n_coda_layers: int = 2
    local_layers: tuple[int, ...] = ()  # by number: prelude, then core, then coda
    window: int = 1024  # tokens a local layer sees, the token itself counted
    rope_base: float = 10_000_000.0
    local_rope_base: float = 10_000.0
    init_rate: float = 0.05  # by which a layer moves its state at first

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "local_rope_base", "init_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        for name in (*names, "n_core_layers", "window"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("n_prelude_layers", "n_coda_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even: rotary embedding turns pairs"
            )
        n_layers = self.n_prelude_layers + self.n_core_layers + self.n_coda_layers
        check_layers("local_layers", self.local_layers, n_layers)

    @property
    def geometry(self) -> Geometry:
        n_layers = self.n_prelude_layers + self.n_core_layers + self.n_coda_layers
        local = Local(
            layers=tuple(layer in self.local_layers for layer in range(n_layers)),
            window=self.window,
            rope=Rope(head_dim=self.head_dim, base=self.local_rope_base),
        )
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            n_prelude_layers=self.n_prelude_layers,
            n_core_layers=self.n_core_layers,
            n_coda_layers=self.n_coda_layers,
            rope=Rope(
                head_dim=self.head_dim,
                base=self.rope_base,
                local=local if self.local_layers else None,
            ),
        )


class DoryModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "dory"
    config_class = DoryConfig

    def __init__(self, config: DoryConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        blocks = [
            SphereBlock(config, self.geometry, layer) for layer in range(self.geometry.n_layers)
        ]
        n_prelude, n_core = config.n_prelude_layers, config.n_core_layers
        self.prelude_blocks = nn.ModuleList(blocks[:n_prelude])
        self.core_blocks = nn.ModuleList(blocks[n_prelude : n_prelude + n_core])
        self.coda_blocks = nn.ModuleList(blocks[n_prelude + n_core :])
        self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, 1)

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        x = self.embedding(token_ids)
        for block in self.prelude_blocks:
            x = block(x, 1, view)
        return unit(x)

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        return injection

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = unit(latent) + injection
        for block in self.core_blocks:
            x = block(x, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block in self.coda_blocks:
            x = block(x, r, view)
        return unit(x)

    @property
    def head_weight(self) -> Tensor:
        return self.unembedding.weight

    def parts(self) -> dict[str, list[nn.Module]]:
        return {
            "prelude": [self.prelude_blocks],
            "core": [self.core_blocks],
            "coda": [self.coda_blocks],
        }


class SphereBlock(nn.Module):
    """One layer; see the file's header."""

    def __init__(self, config: DoryConfig, geometry: Geometry, layer: int) -> None:
        super().__init__()
        d = config.d_model
        self.attn = SphereAttention(geometry, layer)
        self.mlp = SphereMLP(d, config.d_ff)
        self.rate_attn = nn.Parameter(torch.full((d,), config.init_rate))
        self.rate_mlp = nn.Parameter(torch.full((d,), config.init_rate))

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = unit(x)
        x = unit(x + self.rate_attn * (unit(self.attn(x, r, view)) - x))
        return x + self.rate_mlp * (unit(self.mlp(x)) - x)


class SphereAttention(nn.Module):
    """Attention over unit queries and keys, its result gated."""

    def __init__(self, geometry: Geometry, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads = geometry.n_heads, geometry.n_kv_heads
        self.head_dim = geometry.head_dim
        d, width = geometry.d_model, geometry.n_heads * geometry.head_dim
        kv_width = geometry.n_kv_heads * geometry.head_dim
        self.qkv = nn.Linear(d, width + 2 * kv_width, bias=False)
        self.gate = nn.Linear(d, width, bias=False)
        self.out = nn.Linear(width, d, bias=False)
        # Of unit vectors, so that scores begin with the size they have elsewhere.
        self.query_scale = nn.Parameter(torch.full((width,), float(self.head_dim)))

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=-2)
        scale = self.query_scale.view(self.n_heads, self.head_dim)
        mixed = view.attend(self.layer, r, unit(q), unit(k), v, scale).flatten(-2)
        return self.out(unit(mixed * self.gate(x).sigmoid()))


class SphereMLP(nn.Module):
    """Gated feed-forward layer with the sphere before its way down; gate half first."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(unit(F.silu(gate) * value))


def unit(x: Tensor) -> Tensor:
    """``x (..., width)`` of length 1, as an RMS norm over the root of the width."""
    width = x.shape[-1]
    return F.rms_norm(x, (width,), eps=UNIT_EPS / width) * width**-0.5
