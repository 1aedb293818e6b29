"""KVViews over whole sequences: training, teacher-forced measurement, live exits in parallel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.models.base import Rope


class PackedView:
    """Every token of the batch at the same recurrence; nothing is stored between calls.

    Documents packed into one sequence do not see one another.

    Args:
        rope: the model's rotary phase.
        positions: ``(batch, seq)`` int, position of each token in its document.
        document_ids: ``(batch, seq)`` int; None where each sequence is one document.
        dtype: of queries and keys.
        token_ids: ``(batch, seq)`` int64, for models that ask for them past the prelude.
    """

    def __init__(
        self,
        rope: Rope,
        positions: Tensor,
        document_ids: Tensor | None,
        dtype: torch.dtype,
        token_ids: Tensor | None = None,
    ) -> None:
        self.rope, self.positions, self._ids = rope, positions, token_ids
        self.usual = Reach(rope, positions, document_ids, dtype)
        self.local = Reach.of_local(rope, positions, document_ids, dtype)

    @property
    def token_ids(self) -> Tensor:
        return told(self._ids)

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        reach = self.local if self.local is not None and self.rope.is_local(layer) else self.usual
        q, k = reach.rope.turn(q, k, reach.cos, reach.sin, scale)
        return mix(q, k, v, reach.bias)


class RowsView:
    """A subset of a batch's tokens, at one recurrence; the others keep the entries they left.

    This is the `per-loop` KV policy in parallel: while all live tokens stand at recurrence i, the
    latest entry of every earlier token is its entry min(i, last one), which is just what the policy
    reads. Matrices run over the live rows alone; only the attention itself is laid out in full.

    Args:
        rope, positions, document_ids, dtype, token_ids: as for :class:`PackedView`.
    """

    def __init__(
        self,
        rope: Rope,
        positions: Tensor,
        document_ids: Tensor | None,
        dtype: torch.dtype,
        token_ids: Tensor | None = None,
    ) -> None:
        self.rope = rope
        self.shape = positions.shape  # (batch, seq)
        self._positions = positions.flatten()
        self._ids = None if token_ids is None else token_ids.flatten()
        self._usual = Reach(rope, positions, document_ids, dtype)
        self._local = Reach.of_local(rope, positions, document_ids, dtype)
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = torch.arange(positions.numel(), device=positions.device)

    @property
    def positions(self) -> Tensor:
        return self._positions[self._rows]

    @property
    def token_ids(self) -> Tensor:
        return told(self._ids)[self._rows]

    def select(self, rows: Tensor) -> RowsView:
        """Aim the next calls at flat token indices ``rows (rows,)`` int64; returns itself."""
        self._rows = rows
        return self

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        local = self._local is not None and self.rope.is_local(layer)
        reach = self._local if self._local is not None and local else self._usual
        rows, n = self._rows, self._positions.shape[0]
        cos, sin = (t.flatten(0, 1)[rows] for t in (reach.cos, reach.sin))
        q, k = reach.rope.turn(q, k, cos, sin, scale)
        if layer not in self._entries:
            self._entries[layer] = k.new_zeros(n, *k.shape[1:]), v.new_zeros(n, *v.shape[1:])
        keys, values = self._entries[layer]
        keys[rows], values[rows] = k, v
        full = q.new_zeros(n, *q.shape[1:])
        full[rows] = q
        full, keys, values = (t.unflatten(0, self.shape) for t in (full, keys, values))
        out = mix(full, keys, values, reach.bias)
        return out.flatten(0, 1)[rows]


class Reach:
    """How some layers turn, and what they let a token see.

    Attributes:
        rope: their phase.
        cos, sin: of the tokens, ``(batch, seq, 1, head_dim)``.
        bias: additive mask ``(batch or 1, 1, seq, seq)``; None where causal order alone decides.
    """

    def __init__(
        self,
        rope: Rope,
        positions: Tensor,
        document_ids: Tensor | None,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        self.rope = rope
        self.cos, self.sin = rope.tables(positions, dtype)
        if window is not None and document_ids is None:
            document_ids = torch.zeros_like(positions[:1])
        self.bias = None if document_ids is None else causal_bias(document_ids, dtype, window)

    @classmethod
    def of_local(
        cls, rope: Rope, positions: Tensor, document_ids: Tensor | None, dtype: torch.dtype
    ) -> Reach | None:
        """That of a model's local layers, if it has any."""
        if rope.local is None:
            return None
        return cls(rope.local.rope, positions, document_ids, dtype, rope.local.window)


def told(token_ids: Tensor | None) -> Tensor:
    """The tokens a view was made with."""
    assert token_ids is not None, "the model asks for tokens this view was not told of"
    return token_ids


def causal_bias(document_ids: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Additive mask ``(batch, 1, seq, seq)``: earlier tokens of the same document are visible,
    with a ``window`` the latest ones alone, the token itself counted.

    Finite rather than -inf, so that a padding row which sees nothing but itself stays finite.
    """
    seq = document_ids.shape[-1]
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    visible = same & torch.ones(seq, seq, dtype=torch.bool, device=same.device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    bias = torch.zeros(visible.shape, dtype=dtype, device=same.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min / 2).unsqueeze(1)


def mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Causal attention over ``(batch, seq, heads, head_dim)``; key heads are repeated to fit."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None
    ).transpose(1, 2)
