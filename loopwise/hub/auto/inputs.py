"""Masks and positions as users give them, as rows of tokens need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where the tokens of a call stand.

    Attributes:
        positions: in their texts, ``(batch, seq)`` int64.
        real: which tokens of cache and call together are no padding, ``(batch, seen + seq)`` bool;
            None where all are.
        documents: which of several texts in one row a token belongs to, ``(batch, seq)`` int64;
            None where each row is one.
        seen: tokens the cache holds already.
    """

    positions: Tensor
    real: Tensor | None
    documents: Tensor | None
    seen: int

    @property
    def live(self) -> Tensor:
        """Which tokens of the call are no padding, ``(batch, seq)`` bool."""
        if self.real is None:
            return torch.ones_like(self.positions, dtype=torch.bool)
        return self.real[:, self.seen :]

    def bias(self, n_keys: int, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Additive mask ``(batch, 1, seq, n_keys)``, or None where causal order alone decides.

        With a ``window`` a token sees the latest ones alone, itself counted.

        A token sees itself whatever the mask says, so that padding stays finite.
        """
        batch, seq = self.positions.shape
        if self.real is None and self.documents is None and n_keys == seq and window is None:
            return None  # no cache, or an empty one
        device = self.positions.device
        query = torch.arange(self.seen, self.seen + seq, device=device).unsqueeze(-1)
        key = torch.arange(n_keys, device=device)
        seen = (key <= query).expand(batch, seq, n_keys)
        if window is not None:
            seen = seen & (key > query - window)
        if self.real is not None:
            real = torch.zeros(batch, n_keys, dtype=torch.bool, device=device)
            real[:, : self.real.shape[1]] = self.real
            seen = seen & real.unsqueeze(1)
        if self.documents is not None:
            seen = seen & (self.documents.unsqueeze(-1) == self.documents.unsqueeze(-2))
        bias = torch.zeros(batch, seq, n_keys, dtype=dtype, device=device)
        return bias.masked_fill_(~(seen | (key == query)), torch.finfo(dtype).min / 2).unsqueeze(1)


def read_inputs(
    token_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, seen: int
) -> Inputs:
    """Positions and visibility of ``token_ids (batch, seq)``.

    Args:
        attention_mask: ``(batch, seen + seq)`` int, bool or float, 1 for text and 0 for padding on
            either side.
        position_ids: ``(batch or 1, seq)`` int; by default counted along the mask. Without a mask
            and a cache, each jump in them begins another text that does not see the ones before.
        seen: tokens in the cache.
    Raises:
        ShapeError: a mask or positions of another shape, or a mask of other values.
    """
    batch, seq = token_ids.shape
    real = None
    if attention_mask is not None:
        real = _real(attention_mask, batch, seen + seq)
    documents = None
    if position_ids is not None:
        if position_ids.shape not in ((seq,), (1, seq), (batch, seq)):
            raise ShapeError(
                f"position_ids is {tuple(position_ids.shape)}, expected (batch={batch}, seq={seq})"
            )
        positions = position_ids.expand(batch, seq).long()
        if attention_mask is None and seen == 0:
            jumps = positions.diff(dim=1) != 1
            if bool(jumps.any()):
                first = torch.zeros(batch, 1, dtype=torch.int64, device=jumps.device)
                documents = torch.cat((first, jumps.cumsum(dim=1)), dim=1)
    elif real is not None:
        positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)[:, seen:]
    else:
        positions = torch.arange(seen, seen + seq, device=token_ids.device).expand(batch, seq)
    return Inputs(positions, real, documents, seen)


def _real(mask: Tensor, batch: int, total: int) -> Tensor | None:
    if mask.shape != (batch, total):
        raise ShapeError(
            f"attention_mask is {tuple(mask.shape)}, expected (batch={batch}, tokens={total}): one "
            "value for each token of the cache and of this call, 1 for text and 0 for padding"
        )
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(
            "attention_mask holds values other than 0 and 1; masks that are added to scores or "
            "number documents are not taken, give 1 for text and 0 for padding"
        )
    real = mask != 0
    return None if bool(real.all()) else real
