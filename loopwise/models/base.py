"""The contract of a looped model: four functions, and what attention may ask of a cache.

Training, teacher-forced measurement, the reference decoder and the engine all drive these four
functions. They differ only in the :class:`KVView` they pass, which is what keeps them equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How Llama 3.1 and later stretch the slow rotary frequencies over a longer context.

    Wavelengths above ``original_length / low_freq_factor`` tokens are slowed by ``factor``, those
    below ``original_length / high_freq_factor`` are kept, and those between are interpolated.
    Source: Llama team 2024, arXiv:2407.21783, and the ``llama3`` type of published configs.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192  # tokens the model was trained on before

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ConfigError(
                f"model.rope_scaling: low_freq_factor={self.low_freq_factor} must be above 0 and "
                f"below high_freq_factor={self.high_freq_factor}"
            )
        if not 1 <= self.factor < math.inf or self.original_length < 1:
            raise ConfigError(
                f"model.rope_scaling: factor={self.factor} and original_length="
                f"{self.original_length} must be at least 1"
            )

    def stretch(self, frequencies: Tensor) -> Tensor:
        """Slowed ``frequencies``, in radians a token."""
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((self.original_length / wavelengths - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary phase of a model (Su et al. 2021, arXiv:2104.09864); the views apply it.

    ``interleaved`` pairs channels (0, 1), (2, 3) ...; otherwise i turns with i + head_dim/2.
    ``turns`` is False where positions enter otherwise: nothing is turned.
    ``local`` says which layers do it in another way.
    """

    head_dim: int
    base: float = 10_000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    turns: bool = True
    local: Local | None = None

    def at(self, layer: int) -> Rope:
        """The phase of an attention layer, numbered as in :class:`Geometry`."""
        return self if self.local is None or not self.is_local(layer) else self.local.rope

    def is_local(self, layer: int) -> bool:
        return self.local is not None and self.local.layers[layer]

    @property
    def window(self) -> int | None:
        """Tokens that local layers see."""
        return None if self.local is None else self.local.window

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for integer ``positions (...)``: each ``(..., 1, head_dim)``.

        The middle axis broadcasts over heads. Computed in float64, returned in ``dtype``.
        """
        half = torch.arange(self.head_dim // 2, dtype=torch.float64, device=positions.device)
        frequencies = self.base ** (-2 * half / self.head_dim)
        if self.scaling is not None:
            frequencies = self.scaling.stretch(frequencies)
        angles = positions.double().unsqueeze(-1) * frequencies
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        angles = angles.unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn ``x (..., heads, head_dim)`` by the phase of :meth:`tables`."""
        if not self.turns:
            return x
        if self.interleaved:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        else:
            low, high = x.chunk(2, dim=-1)
            other = torch.cat((-high, low), dim=-1)
        return x * cos + other * sin

    def turn(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned; ``scale (n_heads, head_dim)`` multiplies queries after it."""
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return (q if scale is None else q * scale), k


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Layers that look back over the latest tokens only, and may turn by a phase of their own."""

    # By number, whether a layer is one of them. Not their numbers: compiled code does not find a
    # number in a tuple whose numbers it takes for variables.
    layers: tuple[bool, ...]
    window: int  # tokens a row sees, itself included
    rope: Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a cache or a cost table must know of a model, and nothing more.

    Attention layers are numbered through: prelude, then core, then coda.
    """

    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_prelude_layers: int
    n_core_layers: int
    n_coda_layers: int
    rope: Rope
    max_depth: int | None = None  # most recurrences the weights allow; None: any
    max_positions: int | None = None  # longest text the weights allow; None: any

    @property
    def n_layers(self) -> int:
        """Physical attention layers, each core layer once."""
        return self.n_prelude_layers + self.n_core_layers + self.n_coda_layers

    def effective_layers(self, depth: int) -> int:
        """Layers a token passes at ``depth`` recurrences."""
        return self.n_prelude_layers + depth * self.n_core_layers + self.n_coda_layers

    def is_core(self, layer: int) -> bool:
        return self.n_prelude_layers <= layer < self.n_prelude_layers + self.n_core_layers


def check_heads(d_model: int, n_heads: int, n_kv_heads: int) -> None:
    """Refuse widths and head counts that attention cannot divide.

    Raises:
        ConfigError: naming the setting and what it must fit.
    """
    if d_model % (2 * n_heads):
        raise ConfigError(
            f"model.d_model={d_model} must be a multiple of twice model.n_heads={n_heads}: "
            "rotary embedding turns pairs of channels"
        )
    if n_heads % n_kv_heads:
        raise ConfigError(f"model.n_kv_heads={n_kv_heads} must divide model.n_heads={n_heads}")


def check_layers(name: str, layers: tuple[int, ...], n_layers: int) -> None:
    """Refuse a list of attention layers that names one there is not.

    Raises:
        ConfigError: naming the setting ``model.NAME`` and the layer.
    """
    beyond = [layer for layer in layers if not 0 <= layer < n_layers]
    if beyond:
        raise ConfigError(f"model.{name} names layer {beyond[0]}; there are 0 to {n_layers - 1}")


class KVView(Protocol):
    """What attention may ask: hand over this call's projections, get the mixed values back.

    A view also knows which tokens its rows are, for models with learned positions or with
    embeddings inside their layers.
    """

    @property
    def positions(self) -> Tensor:
        """Where the rows of this call stand in their texts, ``(...)`` int64."""
        ...

    @property
    def token_ids(self) -> Tensor:
        """The tokens of the rows of this call, ``(...)`` int64."""
        ...

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from the rows of this call to themselves and to earlier tokens.

        Args:
            layer: number of the attention layer, prelude then core then coda.
            r: recurrence of each row, from 1: an int, or ``(rows,)`` int64. The prelude passes 1.
            q: ``(..., n_heads, head_dim)`` before rotary phase.
            k, v: ``(..., n_kv_heads, head_dim)`` before rotary phase.
            scale: ``(n_heads, head_dim)``, multiplies the queries after rotary phase.
        Returns:
            ``(..., n_heads, head_dim)``, dtype of ``q``.
        """
        ...


class LoopedLM(nn.Module):
    """A depth-recurrent language model as four functions over rows of tokens.

    Tensors lead with any axes, written ``...``: ``(batch, seq)`` in training and measurement,
    ``(rows,)`` in decoding, where a row is one live token.

    Attributes:
        name: the row of the MODELS table.
        config, config_class: what rebuilds it.
        geometry: what caches and cost tables must know.
    """

    name: ClassVar[str]
    config_class: ClassVar[type]
    config: Any
    geometry: Geometry

    @property
    def seeded_latent(self) -> bool:
        """Whether `initial_latent` looks at its seeds."""
        return False

    def prelude(self, token_ids: Tensor, view: KVView) -> Tensor:
        """``(...)`` int64 to the injection ``(..., d_model)``: unique layers, once per token."""
        raise NotImplementedError

    def initial_latent(self, injection: Tensor, seeds: Tensor | None = None) -> Tensor:
        """The latent before recurrence 1, ``(..., d_model)``.

        Args:
            injection: ``(..., d_model)``.
            seeds: ``(...)`` int64, one per row, for models that start from noise; the same seed
                gives the same row whatever else is in the call. None means seed 0 everywhere.
        """
        raise NotImplementedError

    def core_step(self, latent: Tensor, injection: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        """One recurrence of every row: ``(..., d_model)`` to ``(..., d_model)``.

        ``r`` counts from 1 and may differ per row.
        """
        raise NotImplementedError

    def coda(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        """Logits ``(..., vocab)`` read from the latent after recurrence ``r``."""
        return self.head(self.hidden(latent, r, view))

    def hidden(self, latent: Tensor, r: int | Tensor, view: KVView) -> Tensor:
        """What the head reads: coda layers and final norm, ``(..., d_model)``."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """Rows of the head, ``(vocab, d_model)``: the weight itself, not a copy."""
        raise NotImplementedError

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap x tanh(logits / cap); None: as they are."""
        return None

    @property
    def exit_gate(self) -> tuple[Tensor, Tensor] | None:
        """Weight ``(d_model,)`` and bias ``()`` of a learned gate over the latent, if any."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        """``(..., d_model)`` to logits ``(..., vocab)``."""
        return self.capped(F.linear(hidden, self.head_weight))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as ``logit_cap`` bounds them."""
        cap = self.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of ``prelude``, of one ``core`` step and of ``coda`` (without the head)."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
