"""LoopFormer: one stack of layers that is told where on its way it stands, and how far it steps.

As looped.py without injection, except: positions are learned and added to the embedding; norms have
no weights, and every layer scales what it reads and gates what it adds by numbers made from the
time t and the step size dt. With m = modulation(t, dt) and RMS norms n,

    x = x + m_gate1 * attn(n(x) * (1 + m_scale1)),  x = x + m_gate2 * mlp(n(x) * (1 + m_scale2))

The way from t = 0 to t = 1 is cut into steps before it begins, so how many there are is part of
the model here: with K = ``n_loops``, recurrence r stands at t = (r - 1) / K and steps by 1 / K, and
there are no more than K. A token that leaves at r < K leaves on its way, at t = r / K; a shorter
way of larger steps, which training scored too, is the same weights with a smaller ``n_loops``.

Source: Jeddi et al. 2026, arXiv:2602.11451.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.config import check_choices
from loopwise.errors import ConfigError
from loopwise.models.base import Geometry, KVView, LoopedLM, Rope
from loopwise.models.layers import Attention, init_linear_


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFormerConfig:
    """Shape of one LoopFormer, and into how many steps its way is cut."""

    vocab_size: int = 4096
    d_model: int = 256
    n_heads: int = 4
    d_ff: int = 640
    n_layers: int = 3
    n_loops: int = 8  # steps of the way, and the most recurrences of a token
    max_positions: int = 1024  # longest text: positions are learned
    time_width: int = 256  # channels of the sinusoids that times and step sizes are written in
    tie_embeddings: bool = True
    norm_eps: float = 2.0**-23

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"model.norm_eps={self.norm_eps} must be above 0 and finite")
        names = ("vocab_size", "d_model", "n_heads", "d_ff", "n_layers", "n_loops")
        for name in (*names, "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.time_width < 2 or self.time_width % 2:
            raise ConfigError(f"model.time_width={self.time_width} must be even and above 0")
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} must be a multiple of model.n_heads={self.n_heads}"
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
            n_prelude_layers=0,
            n_core_layers=self.n_layers,
            n_coda_layers=0,
            rope=Rope(head_dim=head_dim, turns=False),
            max_depth=self.n_loops,
            max_positions=self.max_positions,
        )


class LoopFormerModel(LoopedLM):
    """Four functions over one set of weights; see :class:`loopwise.models.base.LoopedLM`."""

    name = "loopformer"
    config_class = LoopFormerConfig

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.max_positions, d)
        self.modulation = Modulation(config)
        self.core_blocks = nn.ModuleList(
            ModulatedBlock(config, self.geometry, layer) for layer in range(config.n_layers)
        )
        self.norm_final = nn.RMSNorm(d, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(d, config.vocab_size, bias=False)
        init_linear_(self, config.n_layers)
        for layer in self.modulation.layers:  # every layer begins as the identity
            assert isinstance(layer, nn.Linear), "one projection a layer"
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        return self.embedding(token_ids) + self.position_embedding(view.positions)

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        return injection

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = latent
        for block, told in zip(self.core_blocks, self.modulation(r), strict=True):
            x = block(x, told, r, view)
        return x

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        return self.norm_final(latent)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.config.tie_embeddings else self.unembedding.weight

    def parts(self) -> dict[str, list[nn.Module]]:
        # Without the modulation: its n_loops rows serve all tokens of a call.
        return {"prelude": [], "core": [self.core_blocks], "coda": []}


class Modulation(nn.Module):
    """What each layer is told at each recurrence: its gates and scales, from time and step size."""

    def __init__(self, config: LoopFormerConfig) -> None:
        super().__init__()
        self.n_loops = config.n_loops
        self.time = Sinusoids(config.time_width, config.d_model)
        self.step = Sinusoids(config.time_width, config.d_model)
        self.layers = nn.ModuleList(
            nn.Linear(config.d_model, 4 * config.d_model) for _ in range(config.n_layers)
        )

    def forward(self, r: int | Tensor) -> list[tuple[Tensor, ...]]:
        """By layer: gate of attention, gate of MLP, scale of attention, scale of MLP.

        Each is ``(d_model,)`` for an int ``r``, else ``(rows, d_model)``.
        """
        device = self.time.project_in.weight.device
        times = torch.arange(self.n_loops, dtype=torch.float64, device=device) / self.n_loops
        seen = F.silu(self.time(times) + self.step(torch.full_like(times, 1 / self.n_loops)))
        return [layer(seen)[r - 1].chunk(4, dim=-1) for layer in self.layers]


class Sinusoids(nn.Module):
    """Numbers as cosines and sines of 1 .. 1/10000 radians a unit, through a two-layer MLP."""

    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.n_waves = width // 2
        self.project_in = nn.Linear(width, d_model)
        self.project_out = nn.Linear(d_model, d_model)

    def forward(self, numbers: Tensor) -> Tensor:
        """``(n,)`` float64 to ``(n, d_model)``."""
        steps = torch.arange(self.n_waves, dtype=torch.float64, device=numbers.device)
        angles = numbers.unsqueeze(-1) * 10_000.0 ** (-steps / self.n_waves)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.project_out(F.silu(self.project_in(waves.to(self.project_in.weight.dtype))))


class ModulatedBlock(nn.Module):
    """Attention and MLP that read scaled norms and are gated; see the file's header."""

    def __init__(self, config: LoopFormerConfig, geometry: Geometry, layer: int) -> None:
        super().__init__()
        d = config.d_model
        self.norm = nn.RMSNorm(d, eps=config.norm_eps, elementwise_affine=False)
        self.attn = Attention(geometry, layer)
        self.mlp = Gelu(d, config.d_ff)

    def forward(self, x: Tensor, told: tuple[Tensor, ...], r: int | Tensor, view: KVView) -> Tensor:
        gate_attn, gate_mlp, scale_attn, scale_mlp = told
        x = x + gate_attn * self.attn(self.norm(x) * (1 + scale_attn), r, view)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp))


class Gelu(nn.Module):
    """gelu(x W) W' (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact rather than by tanh."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))
