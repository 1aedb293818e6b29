"""Attention of one engine call: rows of many requests, each reading its own tokens from pages.

Rows of one request at one recurrence share what they read (the live part of a prompt chunk). They
come as *runs*, where that is little, which go to a compiled kernel if there is one (see `kernels`),
followed by *groups*, where it is more, which are matrix products over a gathered copy with the
grouped query heads as rows. Without the kernel all runs are of one row, and such products too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.engine.kernels import decode_attention
from loopwise.models.base import Rope


@dataclass(frozen=True, slots=True)
class Plan:
    """What the attention of one call must know beside q, k and v.

    Attributes:
        header: number of runs, their rows, tokens they read, groups, rows of the widest group,
            tokens groups read, and whether runs go to the compiled kernel; ``(7,)`` int64 on the
            CPU.
        index: int64, flat: the entry each row writes; for the kernel what `decode_attention` calls
            ``read``, ``sizes`` and ``span``, else what runs read, ``(runs, n_kv_heads, tokens)``;
            rows of the groups, ``(groups, widest)``, counted after those of runs; the place of each
            such row in that table; what groups read, ``(groups, n_kv_heads, tokens)``. But for the
            kernel, what is read counts heads of entries.
        bias: flat, 0 where a token may be read, else -inf: but for the kernel of runs ``(runs,
            tokens)``, of groups ``(groups, widest, tokens)``; dtype of the scores, float32.
        cos, sin: rotary phase of the rows, ``(rows, 1, head_dim)``.
        positions, token_ids: of the rows, ``(rows,)`` int64.
        local: the same call for local layers, where the model has any.
    """

    header: Tensor
    index: Tensor
    bias: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    token_ids: Tensor
    local: Plan | None = None

    @property
    def gathered(self) -> int:
        """Entries that are copied to be read."""
        runs, _, seen, groups, _, seen_by_group, fused = self.header.tolist()
        return max(0 if fused else runs * seen, groups * seen_by_group)


@dataclass(frozen=True, slots=True)
class RowsInPages:
    """The KVView of one engine call.

    Attributes:
        keys, values: pools by attention layer, ``(entries, n_kv_heads, head_dim)``.
        scratch: two flat buffers for what is gathered. Fresh memory of this size would be given
            back to the system after every call, and mapping it again costs more than the products.
    """

    rope: Rope
    plan: Plan
    keys: list[Tensor]
    values: list[Tensor]
    scratch: Tensor

    @property
    def positions(self) -> Tensor:
        return self.plan.positions

    @property
    def token_ids(self) -> Tensor:
        return self.plan.token_ids

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        plan, rope = self.plan, self.rope.at(layer)
        if plan.local is not None and self.rope.is_local(layer):
            plan = plan.local
        q, k = rope.turn(q, k, plan.cos, plan.sin, scale)
        return torch.ops.loopwise.attend_pages(
            q,
            k,
            v,
            self.keys[layer],
            self.values[layer],
            self.scratch,
            plan.header,
            plan.index,
            plan.bias,
        )


def _attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scratch: Tensor,
    header: Tensor,
    index: Tensor,
    bias: Tensor,
) -> Tensor:
    """Write the rows' entries, then mix what each may read.

    Args:
        q: ``(rows, n_heads, head_dim)``, already turned.
        k, v: ``(rows, n_kv_heads, head_dim)``.
    Returns:
        ``(rows, n_heads, head_dim)``.
    """
    rows, n_heads, head_dim = q.shape
    n_kv = k.shape[1]
    shared = n_heads // n_kv  # query heads per key head
    runs, run_rows, seen, groups, widest, seen_by_group, fused = header.tolist()
    written, at, bias_at = index[:rows], rows, 0
    out = torch.empty((rows, n_heads, head_dim), dtype=q.dtype, device=q.device)
    if fused and runs:
        at += runs * seen + runs + 2 * run_rows
        read, sizes, span = index[rows:at].split((runs * seen, runs, 2 * run_rows))
        decode_attention(q, k, v, key_pool, value_pool, written, read, sizes, span, out)
    else:
        key_pool.index_copy_(0, written, k)
        value_pool.index_copy_(0, written, v)
    if runs and not fused:
        read = index[at : at + runs * n_kv * seen]
        at, bias_at = at + read.numel(), runs * seen
        asked = q[:runs].view(runs, n_kv, shared, head_dim)
        allowed = bias[:bias_at].view(runs, 1, 1, seen)
        mixed = _mix(asked, key_pool, value_pool, read, allowed, scratch)
        out[:runs] = mixed.view(runs, n_heads, head_dim)
    if groups:
        cells = groups * widest
        members, places = index[at : at + cells], index[at + cells : at + cells + rows - run_rows]
        at += cells + rows - run_rows
        read = index[at : at + groups * n_kv * seen_by_group]
        asked = q[run_rows:][members].view(groups, widest, n_kv, shared, head_dim)
        asked = asked.permute(0, 2, 3, 1, 4).reshape(groups, n_kv, shared * widest, head_dim)
        allowed = bias[bias_at : bias_at + cells * seen_by_group]
        allowed = allowed.view(groups, 1, widest, seen_by_group).repeat(1, 1, shared, 1)
        mixed = _mix(asked, key_pool, value_pool, read, allowed, scratch)
        mixed = mixed.view(groups, n_kv, shared, widest, head_dim).permute(0, 3, 1, 2, 4)
        out[run_rows:] = mixed.reshape(cells, n_heads, head_dim)[places]
    return out


# An operator of its own, so that a compiled core step calls it as a whole. Defined by hand: what
# `torch.library.custom_op` wraps around a call costs more than the attention of a small batch.
_LIBRARY = torch.library.Library("loopwise", "DEF")
_LIBRARY.define(
    "attend_pages(Tensor q, Tensor k, Tensor v, Tensor(a!) key_pool, Tensor(b!) value_pool, "
    "Tensor(c!) scratch, Tensor header, Tensor index, Tensor bias) -> Tensor"
)
_LIBRARY.impl("attend_pages", _attend_pages, "CompositeExplicitAutograd")
torch.library.register_fake(
    "loopwise::attend_pages", lambda q, *_: q.new_empty(q.shape), lib=_LIBRARY
)


def _mix(
    q: Tensor, key_pool: Tensor, value_pool: Tensor, read: Tensor, bias: Tensor, scratch: Tensor
) -> Tensor:
    """Attention of ``q (groups, n_kv_heads, queries, head_dim)`` over the entries at ``read``."""
    groups, n_kv, _, head_dim = q.shape
    shape = (groups, n_kv, read.numel() // (groups * n_kv), head_dim)
    size = read.numel() * head_dim
    keys = _take(key_pool.view(-1, head_dim), read, scratch[0, :size]).view(shape)
    values = _take(value_pool.view(-1, head_dim), read, scratch[1, :size]).view(shape)
    scores = q @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores.mul_(head_dim**-0.5).add_(bias)
    return scores.softmax(dim=-1).to(q.dtype) @ values


def _take(pool: Tensor, read: Tensor, out: Tensor) -> Tensor:
    return torch.index_select(pool, 0, read, out=out.view(-1, pool.shape[1]))
