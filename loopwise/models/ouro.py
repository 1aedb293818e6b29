"""A whole stack of layers as the loop, its output normed after every recurrence.

As looped.py without injection, except: the one norm at the end of the stack is part of the
recurrence, so the normed latent is what the next recurrence, the exit gate and the head all read.

Source: Zhu et al. 2025, arXiv:2510.25741 (Ouro); Nanbeige4.2-3B is the same loop over Llama blocks.
Blocks, with n1 .. n4 for norms:

- ``branch-sandwich`` (Ouro): x = x + n2(attn(n1(x))), x = x + n4(mlp(n3(x)))
- ``pre-norm`` (Nanbeige): x = x + attn(n1(x)), x = x + mlp(n2(x))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, RopeScaling
from loopwise.models.layers import Attention, PreNormBlock, SwiGLU, init_linear_


@dataclass(frozen=True, kw_only=True, slots=True)
class OuroConfig:
    """Shape of one looped stack; the defaults are the choices of Ouro."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 64  # need not be d_model / n_heads
    d_ff: int = 704
    n_layers: int = 4
    block: Literal["branch-sandwich", "pre-norm"] = "branch-sandwich"
    exit_gate: bool = True  # a learned probability of stopping, read from the latent
    tie_embeddings: bool = False
    rope_base: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_layers")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even: rotary embedding turns pairs"
            )

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            n_prelude_layers=0,
            n_core_layers=self.n_layers,
            n_coda_layers=0,
            rope=Rope(head_dim=self.head_dim, base=self.rope_base, scaling=self.rope_scaling),
        )


class OuroModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "ouro"
    config_class = OuroConfig

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        kind = PreNormBlock if config.block == "pre-norm" else BranchSandwichBlock
        self.core_blocks = nn.ModuleList(
            kind(self.geometry, layer, config.d_ff, config.norm_eps)
            for layer in range(config.n_layers)
        )
        self.norm_final = nn.RMSNorm(d, eps=config.norm_eps)
        if config.exit_gate:
            self.gate = nn.Linear(d, 1)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, config.n_layers)
        if config.exit_gate:
            nn.init.zeros_(self.gate.bias)

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        return self.embedding(token_ids)

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        return injection

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block in self.core_blocks:
            x = block(x, r, view)
        return self.norm_final(x)

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        return latent

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    @property
    def exit_gate(self) -> tuple[Tensor, Tensor] | None:
        return (self.gate.weight[0], self.gate.bias[0]) if self.config.exit_gate else None

    def stop_probability(self, latent: Tensor) -> Tensor:
        """The gate's chance that a token still running stops here, ``(...)``.

        With l_r the gate at recurrence r, a token leaves at r with probability
        l_r (1 - l_1) .. (1 - l_{r-1}); the last recurrence takes what is left.

        Raises:
            ConfigError: the model has no exit gate.
        """
        if not self.config.exit_gate:
            raise ConfigError("this model has no exit gate (model.exit_gate is false)")
        return self.gate(latent).squeeze(-1).sigmoid()

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"prelude": [], "core": [self.core_blocks], "coda": []}


class BranchSandwichBlock(nn.Module):
    """Norm before each sub-layer and on its output, before the sum rather than after it."""

    def __init__(self, geometry: Geometry, layer: int, d_ff: int, norm_eps: float) -> None:
        super().__init__()
        d = geometry.d_model
        self.norm_attn_in = nn.RMSNorm(d, eps=norm_eps)
        self.attn = Attention(geometry, layer)
        self.norm_attn_out = nn.RMSNorm(d, eps=norm_eps)
        self.norm_mlp_in = nn.RMSNorm(d, eps=norm_eps)
        self.mlp = SwiGLU(d, d_ff)
        self.norm_mlp_out = nn.RMSNorm(d, eps=norm_eps)

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = x + self.norm_attn_out(self.attn(self.norm_attn_in(x), r, view))
        return x + self.norm_mlp_out(self.mlp(self.norm_mlp_in(x)))
