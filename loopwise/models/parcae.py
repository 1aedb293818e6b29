"""Parcae: a loop whose memory of its latent is a diagonal linear system that cannot grow.

As raven.py with pre-norm blocks, except: the latent decays a channel at a time and the injection e
is added through a matrix, ``s = core(exp(-dt exp(A)) s + dt (B e))`` with dt = softplus(b); the
injection is normed; a matrix C reads the latent before the coda; the MLP is relu^2 / 2; queries and
keys are normed a head, without weights. In some layers a table of vectors by token is added to the
values, by gates read from the first channels: these layers ask the view which tokens they run.

Source: arXiv:2604.12946 (Parcae); Zhou et al. 2024, arXiv:2410.17897 (value residuals).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope, check_heads, check_layers
from loopwise.models.layers import Attention, init_linear_, seeded_truncated_normal
from loopwise.models.looped import SquaredReLU
from loopwise.models.nanochat import HeadNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class ParcaeConfig:
    """Shape of one Parcae model."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    d_ff: int = 1024
    n_prelude_layers: int = 2
    n_core_layers: int = 2
    n_coda_layers: int = 2
    value_layers: tuple[int, ...] = (1, 3, 5)  # with values by token; prelude, then core, then coda
    gate_channels: int = 32  # that the gates of those values read
    latent_std: float = 0.0395  # of the noise, which is cut at three; Parcae: sqrt(2 / (5 d_model))
    tie_embeddings: bool = True
    rope_base: float = 50_000.0
    norm_eps: float = 1e-5
    head_norm_eps: float = 2.0**-23
    init_depth: int = 8  # recurrences the initial scale of residual projections assumes

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rope_base", "norm_eps", "head_norm_eps", "latent_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "d_ff", "n_core_layers", "init_depth")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("n_prelude_layers", "n_coda_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name}={getattr(self, name)} must not be negative")
        check_heads(self.d_model, self.n_heads, self.n_heads)
        n_layers = self.n_prelude_layers + self.n_core_layers + self.n_coda_layers
        check_layers("value_layers", self.value_layers, n_layers)
        if self.value_layers and not 1 <= self.gate_channels <= self.d_model:
            raise ConfigError(
                f"model.gate_channels={self.gate_channels} must lie in 1..{self.d_model}"
            )

    @property
    def geometry(self) -> Geometry:
        head_dim = self.d_model // self.n_heads
        return Geometry(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            head_dim=head_dim,
            n_prelude_layers=self.n_prelude_layers,
            n_core_layers=self.n_core_layers,
            n_coda_layers=self.n_coda_layers,
            rope=Rope(head_dim=head_dim, base=self.rope_base, interleaved=True),
        )


class ParcaeModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "parcae"
    config_class = ParcaeConfig

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        blocks = [ValueBlock(config, self.geometry, i) for i in range(self.geometry.n_layers)]
        n_prelude, n_core = config.n_prelude_layers, config.n_core_layers
        self.prelude_blocks = nn.ModuleList(blocks[:n_prelude])
        self.norm_injection = nn.RMSNorm(d, eps=config.norm_eps)
        self.adapter = DiagonalAdapter(d)
        self.core_blocks = nn.ModuleList(blocks[n_prelude : n_prelude + n_core])
        self.readout = nn.Linear(d, d, bias=False)
        self.coda_blocks = nn.ModuleList(blocks[n_prelude + n_core :])
        self.norm_final = nn.RMSNorm(d, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, self.geometry.effective_layers(config.init_depth))
        nn.init.eye_(self.adapter.inject.weight)

    @property
    def seeded_latent(self) -> bool:
        return True

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        x = self.embedding(token_ids)
        for block in self.prelude_blocks:
            x = block(x, 1, view)
        return self.norm_injection(x)

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        if seeds is None:
            seeds = torch.zeros(injection.shape[:-1], dtype=torch.int64, device=injection.device)
        noise = seeded_truncated_normal(seeds, injection.shape[-1])
        return (noise * self.config.latent_std).to(injection.dtype)

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = self.adapter(latent, injection)
        for block in self.core_blocks:
            x = block(x, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = self.readout(latent)
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
            "coda": [self.readout, self.coda_blocks],
        }


class DiagonalAdapter(nn.Module):
    """exp(-dt exp(A)) s + dt (B e): what is kept of the latent shrinks, whatever is learned."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(d_model))  # A
        # softplus of it is log(5) / 2, so that 1 / sqrt(5) of the latent is kept at first.
        first = math.log(math.expm1(math.log(5) / 2))
        self.step = nn.Parameter(torch.full((d_model,), first))  # b
        self.inject = nn.Linear(d_model, d_model, bias=False)  # B

    def forward(self, latent: Tensor, injection: Tensor) -> Tensor:
        dt = F.softplus(self.step)
        return latent * torch.exp(-dt * self.log_rate.exp()) + dt * self.inject(injection)


class ValueBlock(nn.Module):
    """Norm before each sub-layer only; attention adds values by token in some layers."""

    def __init__(self, config: ParcaeConfig, geometry: Geometry, layer: int) -> None:
        super().__init__()
        d, by_token = config.d_model, layer in config.value_layers
        self.norm_attn_in = nn.RMSNorm(d, eps=config.norm_eps)
        self.attn = Attention(geometry, layer, HeadNorm(config.head_norm_eps))
        self.values = ValuesByToken(config) if by_token else None
        self.norm_mlp_in = nn.RMSNorm(d, eps=config.norm_eps)
        self.mlp = SquaredReLU(d, config.d_ff)

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        seen = self.norm_attn_in(x)
        more = None if self.values is None else self.values(seen, view.token_ids)
        x = x + self.attn(seen, r, view, more)
        return x + 0.5 * self.mlp(self.norm_mlp_in(x))


class ValuesByToken(nn.Module):
    """2 sigmoid(G x) V[token]: gates of 0 to 2 a head, from the first channels of x."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.n_heads, self.channels = config.n_heads, config.gate_channels
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.gate = nn.Linear(config.gate_channels, config.n_heads, bias=False)

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """``x (..., d_model)`` and ``token_ids (...)`` to ``(..., n_heads, head_dim)``."""
        opened = 2 * self.gate(x[..., : self.channels]).sigmoid()
        return opened.unsqueeze(-1) * self.embedding(token_ids).unflatten(-1, (self.n_heads, -1))
