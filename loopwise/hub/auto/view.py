"""KVViews over the caches of transformers: one cache layer for each entry a token keeps.

A cache is anything with ``update(keys, values, layer_index, ...)`` of ``(batch, n_kv_heads, tokens,
head_dim)`` that returns all keys and values of that layer so far; None keeps nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.hub.auto.inputs import Inputs
from loopwise.hub.auto.plan import LayerIndex


class BatchView:
    """Every token of the call at the same recurrence.

    Args:
        layers: where entries lie in the cache.
        inputs: where the tokens stand.
        cache: of transformers, or None.
        dtype: of queries and keys.
        token_ids: ``(batch, seq)`` int64 of the call.
    """

    def __init__(
        self,
        layers: LayerIndex,
        inputs: Inputs,
        cache: Any,
        dtype: torch.dtype,
        token_ids: Tensor,
    ) -> None:
        self.layers, self.inputs, self.cache, self._ids = layers, inputs, cache, token_ids
        rope = self.rope = layers.geometry.rope
        # By whether a layer is local; each table is (batch, seq, 1, head_dim).
        self._phases = [rope.tables(inputs.positions, dtype)]
        if rope.local is not None:
            self._phases.append(rope.local.rope.tables(inputs.positions, dtype))
        seq = inputs.positions.shape[1]
        places = torch.arange(inputs.seen, inputs.seen + seq, device=inputs.positions.device)
        self._where = {"cache_position": places}  # the first of 5.x write static caches by it
        # Number of keys and their mask, by whether a layer is local.
        self._bias: dict[bool, tuple[int, Tensor | None]] = {}

    @property
    def positions(self) -> Tensor:
        return self.inputs.positions

    @property
    def token_ids(self) -> Tensor:
        return self._ids

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        local = self.rope.is_local(layer)
        q, k = self.rope.at(layer).turn(q, k, *self._phases[local], scale)
        index = self.layers.of(layer, r if isinstance(r, int) else self.layers.depth)
        return self._mix(q, *self._keep(k, v, index), local)

    def _keep(self, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Store entries ``(batch, seq, heads, head_dim)``; returns all that layer holds by now, as
        the cache lays it out."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.cache is None:
            return k, v
        return self.cache.update(k, v, index, self._where)

    def _mix(self, q: Tensor, keys: Tensor, values: Tensor, local: bool) -> Tensor:
        """Attention of ``q (batch, seq, n_heads, head_dim)`` over all keys; the shape of ``q``."""
        n_keys = keys.shape[-2]
        if local not in self._bias or self._bias[local][0] != n_keys:
            window = self.rope.window if local else None
            self._bias[local] = n_keys, self.inputs.bias(n_keys, q.dtype, window)
        bias = self._bias[local][1]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=bias,
            is_causal=bias is None,
            enable_gqa=q.shape[2] != keys.shape[1],
        )
        return out.transpose(1, 2)


class FrozenView(BatchView):
    """A subset of the call's tokens at one recurrence; the others keep the entries they left.

    Every recurrence stores an entry for every token: its own where it is live, else a copy of its
    last one. A later token that reads entry r then reads entry min(r, last one) of each earlier
    token, which is the `per-loop` KV policy; as :class:`loopwise.models.views.RowsView` does
    without a cache.
    """

    def __init__(
        self,
        layers: LayerIndex,
        inputs: Inputs,
        cache: Any,
        dtype: torch.dtype,
        token_ids: Tensor,
    ) -> None:
        super().__init__(layers, inputs, cache, dtype, token_ids)
        self.shape = inputs.positions.shape  # (batch, seq)
        self._phases = [(cos.flatten(0, 1), sin.flatten(0, 1)) for cos, sin in self._phases]
        self._latest: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, (tokens, heads, head_dim)
        self._rows = torch.arange(inputs.positions.numel(), device=inputs.positions.device)

    def select(self, rows: Tensor) -> FrozenView:
        """Aim the next calls at flat token indices ``rows (rows,)`` int64; returns itself."""
        self._rows = rows
        return self

    @property
    def positions(self) -> Tensor:
        return self.inputs.positions.flatten()[self._rows]

    @property
    def token_ids(self) -> Tensor:
        return self._ids.flatten()[self._rows]

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        rows, local = self._rows, self.rope.is_local(layer)
        cos, sin = self._phases[local]
        n = cos.shape[0]
        q, k = self.rope.at(layer).turn(q, k, cos[rows], sin[rows], scale)
        if layer not in self._latest:  # ones: an early static cache takes zeros for unused places
            self._latest[layer] = k.new_ones(n, *k.shape[1:]), v.new_ones(n, *v.shape[1:])
        latest_k, latest_v = self._latest[layer]
        latest_k[rows], latest_v[rows] = k, v
        full = q.new_zeros(n, *q.shape[1:])
        full[rows] = q
        index = self.layers.of(layer, r if isinstance(r, int) else self.layers.depth)
        keys, values = self._keep(
            latest_k.unflatten(0, self.shape), latest_v.unflatten(0, self.shape), index
        )
        out = self._mix(full.unflatten(0, self.shape), keys, values, local)
        return out.flatten(0, 1)[rows]

    def fill(self, first: int) -> None:
        """Store copies for recurrences ``first`` to the last, which no token has run."""
        if self.cache is None:
            return
        g = self.layers.geometry
        n_prelude, n_before_coda = g.n_prelude_layers, g.n_prelude_layers + g.n_core_layers
        end = g.n_layers if self.layers.coda_entries > 1 else n_before_coda
        for r in range(first, self.layers.depth + 1):
            for layer in range(n_prelude, end):
                k, v = (entries.unflatten(0, self.shape) for entries in self._latest[layer])
                self._keep(k, v, self.layers.of(layer, r))
