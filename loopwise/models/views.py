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
    """

    def __init__(
        self, rope: Rope, positions: Tensor, document_ids: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.rope = rope
        self.cos, self.sin = rope.tables(positions, dtype)  # (batch, seq, 1, head_dim)
        self.bias = None if document_ids is None else causal_bias(document_ids, dtype)

    def attend(self, layer: int, r: int | Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope.rotate(q, self.cos, self.sin)
        k = self.rope.rotate(k, self.cos, self.sin)
        return mix(q, k, v, self.bias)


class RowsView:
    """A subset of a batch's tokens, at one recurrence; the others keep the entries they left.

    This is the `per-loop` KV policy in parallel: while all live tokens stand at recurrence i, the
    latest entry of every earlier token is its entry min(i, last one), which is just what the policy
    reads. Matrices run over the live rows alone; only the attention itself is laid out in full.

    Args:
        rope, positions, document_ids, dtype: as for :class:`PackedView`.
    """

    def __init__(
        self, rope: Rope, positions: Tensor, document_ids: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.rope = rope
        self.shape = positions.shape  # (batch, seq)
        cos, sin = rope.tables(positions, dtype)
        self._cos, self._sin = cos.flatten(0, 1), sin.flatten(0, 1)
        self._bias = None if document_ids is None else causal_bias(document_ids, dtype)
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = torch.arange(positions.numel(), device=positions.device)

    def select(self, rows: Tensor) -> RowsView:
        """Aim the next calls at flat token indices ``rows (rows,)`` int64; returns itself."""
        self._rows = rows
        return self

    def attend(self, layer: int, r: int | Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, n = self._rows, self._cos.shape[0]
        cos, sin = self._cos[rows], self._sin[rows]
        q, k = self.rope.rotate(q, cos, sin), self.rope.rotate(k, cos, sin)
        if layer not in self._entries:
            self._entries[layer] = k.new_zeros(n, *k.shape[1:]), v.new_zeros(n, *v.shape[1:])
        keys, values = self._entries[layer]
        keys[rows], values[rows] = k, v
        full = q.new_zeros(n, *q.shape[1:])
        full[rows] = q
        full, keys, values = (t.unflatten(0, self.shape) for t in (full, keys, values))
        out = mix(full, keys, values, self._bias)
        return out.flatten(0, 1)[rows]


def causal_bias(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask ``(batch, 1, seq, seq)``: earlier tokens of the same document are visible.

    Finite rather than -inf, so that a padding row which sees nothing but itself stays finite.
    """
    seq = document_ids.shape[-1]
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    visible = same & torch.ones(seq, seq, dtype=torch.bool, device=same.device).tril()
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
