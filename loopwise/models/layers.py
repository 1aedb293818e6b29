"""Layers the architectures share. None of them sees a cache: attention talks to a KVView."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.models.base import Geometry, KVView


class Attention(nn.Module):
    """Grouped-query attention; rotary phase, masks and storage belong to the view.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).

    Args:
        geometry, layer: of the model, and the number of this layer in it.
        before_phase: what changes queries ``(..., n_heads, head_dim)`` and keys ``(...,
            n_kv_heads, head_dim)`` before the view turns them: a bias, a norm.
    """

    def __init__(
        self, geometry: Geometry, layer: int, before_phase: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads = geometry.n_heads, geometry.n_kv_heads
        self.head_dim = geometry.head_dim
        d = geometry.d_model
        width = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.qkv = nn.Linear(d, width, bias=False)
        self.out = nn.Linear(self.n_heads * self.head_dim, d, bias=False)
        self.before_phase = before_phase

    def forward(
        self, x: Tensor, r: int | Tensor, view: KVView, more: Tensor | None = None
    ) -> Tensor:
        """``x (..., d_model)`` to ``(..., d_model)``.

        Args:
            more: ``(..., n_kv_heads, head_dim)``, added to the values.
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=-2)
        if self.before_phase is not None:
            q, k = self.before_phase(q, k)
        if more is not None:
            v = v + more
        return self.out(view.attend(self.layer, r, q, k, v).flatten(-2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv:2002.05202); gate half first."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class SandwichBlock(nn.Module):
    """Norm before each sub-layer and after each residual sum, which bounds what is looped.

    Source: Geiping et al. 2025, arXiv:2502.05171, section 3.1: x = n2(attn(n1(x)) + x).
    """

    def __init__(
        self,
        geometry: Geometry,
        layer: int,
        d_ff: int,
        norm_eps: float,
        before_phase: nn.Module | None = None,
        mlp: type[nn.Module] = SwiGLU,
    ) -> None:
        super().__init__()
        d = geometry.d_model
        self.norm_attn_in = nn.RMSNorm(d, eps=norm_eps)
        self.attn = Attention(geometry, layer, before_phase)
        self.norm_attn_out = nn.RMSNorm(d, eps=norm_eps)
        self.norm_mlp_in = nn.RMSNorm(d, eps=norm_eps)
        self.mlp = mlp(d, d_ff)
        self.norm_mlp_out = nn.RMSNorm(d, eps=norm_eps)

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = self.norm_attn_out(x + self.attn(self.norm_attn_in(x), r, view))
        return self.norm_mlp_out(x + self.mlp(self.norm_mlp_in(x)))


class PreNormBlock(nn.Module):
    """Norm before each sub-layer only: the Llama shape (Touvron et al. 2023, arXiv:2302.13971)."""

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
        self.norm_attn_in = nn.RMSNorm(d, eps=norm_eps)
        self.attn = Attention(geometry, layer, before_phase)
        self.norm_mlp_in = nn.RMSNorm(d, eps=norm_eps)
        self.mlp = SwiGLU(d, d_ff)

    def forward(self, x: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        x = x + self.attn(self.norm_attn_in(x), r, view)
        return x + self.mlp(self.norm_mlp_in(x))


def choose(first: Tensor | bool, at_first: Tensor, later: Tensor) -> Tensor:
    """Per row: one thing at recurrence 1, another afterwards."""
    if isinstance(first, bool):
        return at_first if first else later
    return torch.where(first, at_first, later)


def init_linear_(module: nn.Module, n_effective_layers: float) -> None:
    """Initialise every matrix below ``module`` in place, as Huginn does.

    In-projections get std sqrt(2/(5 d_in)), projections back into the residual stream a further
    1/sqrt(2 n_effective_layers). Source: Takase et al. 2023, arXiv:2312.16903; Geiping et al. 2025.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Linear, nn.Embedding)):
            fan_in = child.weight.shape[1]
            std = (2 / (5 * fan_in)) ** 0.5
            if name.endswith((".out", "mlp.down")):
                std /= (2 * n_effective_layers) ** 0.5
            nn.init.trunc_normal_(child.weight, std=std, a=-3 * std, b=3 * std)


def row_seeds(positions: Tensor, request_seed: int | Tensor = 0) -> Tensor:
    """Noise seeds of rows by (request seed, position), int64 of the shape of ``positions``."""
    return ((request_seed % (1 << 31)) << 32) + positions.long()


def seeded_truncated_normal(seeds: Tensor, width: int, cut: float = 3.0) -> Tensor:
    """Standard normal noise without its tails past ``cut``, by each row's seed alone.

    Args:
        seeds: ``(...)`` int64.
        width: channels.
        cut: largest magnitude; the standard deviation is that of the whole normal, not the cut one.
    Returns:
        ``(..., width)`` float32.
    """
    tail = torch.special.ndtr(torch.tensor(-cut, dtype=torch.float64, device=seeds.device))
    inside = tail + (1 - 2 * tail) * seeded_uniform(seeds, width)
    return torch.special.ndtri(inside).float()


def seeded_normal(seeds: Tensor, width: int) -> Tensor:
    """Standard normal noise that depends on each row's seed alone (Box-Muller).

    Args:
        seeds: ``(...)`` int64.
        width: channels.
    Returns:
        ``(..., width)`` float32.
    """
    half = (width + 1) // 2
    uniform = seeded_uniform(seeds, 2 * half)
    radius = (-2 * uniform[..., :half].log()).sqrt()
    angle = 2 * torch.pi * uniform[..., half:]
    both = torch.cat((radius * angle.cos(), radius * angle.sin()), dim=-1)
    return both[..., :width].float()


def seeded_uniform(seeds: Tensor, width: int) -> Tensor:
    """Uniform draws in (0, 1) that depend on each row's seed alone.

    Counter-based (the SplitMix64 finaliser), so they are the same on every device, in any batch and
    any order.

    Args:
        seeds: ``(...)`` int64.
        width: channels.
    Returns:
        ``(..., width)`` float64.
    """

    def shift(x: Tensor, n: int) -> Tensor:  # logical, not arithmetic
        return (x >> n) & ((1 << (64 - n)) - 1)

    def mix(x: Tensor) -> Tensor:
        x = (x ^ shift(x, 30)) * -4658895280553007687
        x = (x ^ shift(x, 27)) * -7723592293110705685
        return x ^ shift(x, 31)

    channel = torch.arange(width, dtype=torch.int64, device=seeds.device)
    bits = mix(mix(seeds.long()).unsqueeze(-1) + channel * -7046029254386353131)
    return (shift(bits, 11).double() + 0.5) * 2.0**-53
