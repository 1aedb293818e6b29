"""The looped family: one stack of layers applied again and again, in the five variants of paper 2.

Source: Fu et al. 2026, arXiv:2605.18797. With x0 = norm(embedding) and h = norm(output of the last
layer at the previous recurrence), recurrence r > 1 differs by ``inject``:

- ``none`` (LT): starts from h
- ``input`` (LT-input): starts from norm(x0 + h)
- ``attn-first`` (LT-attn-first): starts from x0; h is the query of the first layer
- ``residual-all`` (FLA): starts from x0; x = norm(x + h) before every layer
- ``attn-all`` (FLT = FLA with attention injection): starts from x0; h is the query of every layer

Recurrence 1 is ordinary self-attention in all of them, and no variant adds a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, check_heads
from loopwise.models.layers import SwiGLU, choose, init_linear_

Inject = Literal["none", "input", "attn-first", "residual-all", "attn-all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopedConfig:
    """Shape of one looped model; the defaults are the choices of paper 2."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 2
    n_kv_heads: int = 2
    d_ff: int = 1024
    n_layers: int = 4
    inject: Inject = "attn-all"
    mlp: Literal["relu2", "swiglu"] = "relu2"
    learned_norms: bool = False  # weights on the norms between layers; q/k norms never have any
    qk_norm: bool = True
    tie_embeddings: bool = False
    zero_init_out: bool = True  # projections back into the residual stream start at zero
    logit_cap: float | None = 15.0  # logits are cap x tanh(logits / cap)
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "d_ff", "n_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("rope_base", "norm_eps", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"model.{name}={value} must be above 0 and finite")
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
            rope=Rope(head_dim=head_dim, base=self.rope_base),
        )


class LoopedModel(LoopedLM):
    """The whole stack is the core; prelude and coda are embedding and head."""

    name = "looped"
    config_class = LoopedConfig

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.norm_embedding = self._norm()
        self.norm_latent = self._norm()
        self.core_blocks = nn.ModuleList(
            LoopedBlock(config, self.geometry, layer) for layer in range(config.n_layers)
        )
        self.norm_final = self._norm()
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, config.n_layers)
        if config.zero_init_out:
            for block in self.core_blocks:
                assert isinstance(block, LoopedBlock), "core_blocks holds LoopedBlocks"
                nn.init.zeros_(block.out.weight)
                nn.init.zeros_(block.mlp.down.weight)

    def _norm(self) -> nn.RMSNorm:
        c = self.config
        return nn.RMSNorm(c.d_model, eps=c.norm_eps, elementwise_affine=c.learned_norms)

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        return self.norm_embedding(self.embedding(token_ids))

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        return torch.zeros_like(injection)  # recurrence 1 does not read it

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        h = self.norm_latent(latent)
        first = (r == 1) if isinstance(r, int) else (r == 1).unsqueeze(-1)  # of all, or per row
        inject = self.config.inject
        x = injection
        if inject == "none":
            x = choose(first, injection, h)
        elif inject == "input":
            x = choose(first, injection, self.norm_latent(injection + h))
        for index, block in enumerate(self.core_blocks):
            if inject == "residual-all":
                x = choose(first, x, self.norm_latent(x + h))
            asks = inject == "attn-all" or (inject == "attn-first" and index == 0)
            x = block(x, h if asks else None, first, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        return self.norm_final(latent)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    @property
    def logit_cap(self) -> float | None:
        return self.config.logit_cap

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"prelude": [], "core": [self.core_blocks], "coda": []}


class LoopedBlock(nn.Module):
    """x += Attn(query from norm(h) or norm(x); keys, values from norm(x)); x += MLP(norm(x))."""

    def __init__(self, config: LoopedConfig, geometry: Geometry, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim, self.n_kv_heads = geometry.head_dim, geometry.n_kv_heads
        self.qk_norm, self.eps = config.qk_norm, config.norm_eps
        d = config.d_model

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(d, eps=config.norm_eps, elementwise_affine=config.learned_norms)

        self.norm_attn = norm()
        self.query = nn.Linear(d, geometry.n_heads * self.head_dim, bias=False)
        self.key_value = nn.Linear(d, 2 * geometry.n_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(geometry.n_heads * self.head_dim, d, bias=False)
        self.norm_mlp = norm()
        self.mlp = SwiGLU(d, config.d_ff) if config.mlp == "swiglu" else SquaredReLU(d, config.d_ff)

    def forward(
        self, x: Tensor, h: Tensor | None, first: Tensor | bool, r: int | Tensor, view: KVView
    ) -> Tensor:
        """``x (..., d_model)``; ``h`` asks instead of ``x`` in rows past recurrence 1."""
        seen = self.norm_attn(x)
        asker = seen if h is None else choose(first, seen, self.norm_attn(h))
        q = self.query(asker).unflatten(-1, (-1, self.head_dim))
        k, v = self.key_value(seen).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)
        if self.qk_norm:
            # Without weights a norm commutes with the rotation the view applies afterwards.
            q, k = (F.rms_norm(t, (self.head_dim,), eps=self.eps) for t in (q, k))
        x = x + self.out(view.attend(self.layer, r, q, k, v).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class SquaredReLU(nn.Module):
    """relu(x W)^2 W' (So et al. 2021, arXiv:2109.08668)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())
