"""Storage of keys and values in pages, under any KV policy.

A page holds a few tokens of one request. Within it the entries of one recurrence lie together, so
that what a token reads is mostly contiguous. Page 0 is never handed out: it holds zeros, and every
place that must not be read points there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwise.engine.kv_policy import KVPolicy
from loopwise.errors import EngineError
from loopwise.models.base import Geometry

Ints = NDArray[np.int64]


class Stage:
    """How prelude, core or coda layers address their entries.

    Args:
        policy: what is kept; None is one entry.
        once: of all entries there is room for, only the first is used.

    Attributes:
        entries: kept per token and layer.
        written: by recurrence, the offset of the entry it writes, ``(max_depth + 1,)``.
        read: by recurrence and the other token's latest one, the offset of the entry read, flat
            ``((max_depth + 1) * (max_depth + 1),)``; None where there is one entry only.
    """

    def __init__(
        self, policy: KVPolicy | None, page_size: int, max_depth: int, once: bool = False
    ) -> None:
        self.entries = 1 if policy is None else policy.entries(max_depth)
        depths = range(max_depth + 1)
        self.written: Ints = np.zeros(max_depth + 1, np.int64)
        self.read: Ints | None = None
        if policy is None or self.entries == 1 or once:
            return
        self.written[1:] = [policy.slot(r) * page_size for r in depths if r]
        table = [[policy.read(r, last) if r and last else 0 for last in depths] for r in depths]
        self.read = np.array(table, np.int64).ravel() * page_size


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a cache.

    Attributes:
        pages: that can be handed out, numbered from 1.
        page_size: tokens.
        max_depth: most recurrences of any token.
        coda_every: keep a coda entry for each recurrence, as exit rules that read logits need;
            otherwise one.
    """

    pages: int
    page_size: int
    max_depth: int
    coda_every: bool = True


class KVCache:
    """Keys and values of all attention layers, each ``(entries, n_kv_heads, head_dim)``.

    Source: Kwon et al. 2023, arXiv:2309.06180 (pages).

    Raises:
        EngineError: there is no memory for it.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: KVPolicy,
        shape: CacheShape,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        size, depth = shape.page_size, shape.max_depth
        self.prelude = Stage(None, size, depth)
        self.core = Stage(policy, size, depth)
        kept = policy if shape.coda_every else None
        self.coda = Stage(kept, size, depth)
        self.coda_once = Stage(kept, size, depth, once=True)  # under rules that read no logits
        self.stages = (
            [self.prelude] * geometry.n_prelude_layers
            + [self.core] * geometry.n_core_layers
            + [self.coda] * geometry.n_coda_layers
        )
        width = (geometry.n_kv_heads, geometry.head_dim)
        tokens = (shape.pages + 1) * size

        def pools() -> list[Tensor]:
            sizes = [tokens * stage.entries for stage in self.stages]
            return [torch.zeros(n, *width, dtype=dtype, device=device) for n in sizes]

        entry = 2 * geometry.n_kv_heads * geometry.head_dim * dtype.itemsize
        self.bytes_per_token = entry * sum(stage.entries for stage in self.stages)
        asked = self.bytes_per_token * tokens
        try:
            # All of it once before it is written to: pools that fit one by one and not together
            # would get the process killed.
            torch.empty(asked, dtype=torch.uint8, device=device)
            self.keys, self.values = pools(), pools()
        except (RuntimeError, MemoryError, OverflowError, TypeError) as err:
            raise EngineError(
                f"the KV cache asks for {asked} bytes ({asked / 2**30:.1f} GiB), which {device} "
                "does not have; lower engine.pages, or engine.slots and engine.max_seq that set "
                "it, or engine.max_depth"
            ) from err

    def copy(self, source: int, page: int) -> None:
        """Put all entries of page ``source`` into ``page`` as well, in every layer."""
        for stage, *pools in zip(self.stages, self.keys, self.values, strict=True):
            size = self.shape.page_size * stage.entries
            for pool in pools:
                pool[page * size :][:size] = pool[source * size :][:size]
