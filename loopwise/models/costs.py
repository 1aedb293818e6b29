"""What a model costs: parameters, FLOPs per token and part, KV bytes. One home for every formula.

A multiply-add counts as two FLOPs. Norms, activations and softmax are left out, as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from loopwise.models.base import Geometry, LoopedLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """FLOPs for one token, forward only, at a given context length.

    ``core`` is one recurrence; ``coda`` excludes ``head``, of which ``row`` is one row: a product
    over d_model.
    """

    prelude: float
    core: float
    coda: float
    head: float
    row: float = 0.0

    def forward(
        self, depth: float, codas: float = 0.0, heads: float = 0.0, rows: float = 0.0
    ) -> float:
        """FLOPs of one token at ``depth`` recurrences; all may be fractional, for a mean.

        Args:
            codas, heads: passes of coda and of head that an exit rule asked for before the exit.
            rows: products over d_model that it took besides.
        """
        once = self.prelude + self.coda + self.head
        checks = codas * self.coda + heads * self.head + rows * self.row
        return once + depth * self.core + checks

    def training(self, depth: float, backprop_depth: float) -> float:
        """Forward and backward of one token; only the last ``backprop_depth`` recurrences learn.

        A backward pass costs twice its forward pass.
        """
        through = min(depth, backprop_depth)
        return self.forward(depth) + 2 * self.forward(through)

    @property
    def check_in_recurrences(self) -> float:
        """Price of one reading of coda and head, in recurrences of the core."""
        return (self.coda + self.head) / self.core

    def cap(self, max_depth: float, mean_depth: float) -> float:
        """Largest possible speed-up of exits at ``mean_depth`` over uniform ``max_depth``.

        (F0 + r_max Fr) / (F0 + mean_depth Fr), with the head in F0; checks taken as free.
        """
        return self.forward(max_depth) / self.forward(mean_depth)


def flops_per_token(model: LoopedLM, context: int = 0) -> Costs:
    """FLOPs of each part of ``model`` for one token that attends to ``context`` others."""
    g = model.geometry
    per_token = 4 * g.n_heads * g.head_dim  # scores and mixing, two FLOPs each
    window = context if g.rope.window is None else min(context, g.rope.window - 1)
    seen = [window if g.rope.is_local(layer) else context for layer in range(g.n_layers)]
    parts = model.parts()
    coda = g.n_prelude_layers + g.n_core_layers
    layers = {
        "prelude": seen[: g.n_prelude_layers],
        "core": seen[g.n_prelude_layers : coda],
        "coda": seen[coda:],
    }
    flops = {p: 2 * _matrix_weights(parts[p]) + sum(layers[p]) * per_token for p in layers}
    return Costs(**flops, head=2 * g.d_model * g.vocab_size, row=2 * g.d_model)


def parameters(model: nn.Module) -> int:
    """Unique parameters: tied tensors count once, the core counts once."""
    return sum(p.numel() for p in model.parameters())


def kv_entries_per_token(
    geometry: Geometry, entries_per_core_layer: float, entries_per_coda_layer: float = 1.0
) -> float:
    """KV entries one token leaves: one per prelude layer, the KV policy's per core layer.

    Exit rules that read logits leave a coda entry at every recurrence they look.
    """
    core = geometry.n_core_layers * entries_per_core_layer
    return geometry.n_prelude_layers + core + geometry.n_coda_layers * entries_per_coda_layer


def kv_bytes_per_token(
    geometry: Geometry,
    entries_per_core_layer: float,
    bytes_per_value: int,
    entries_per_coda_layer: float = 1.0,
) -> float:
    """Bytes of keys and values one token leaves under a KV policy."""
    entry = 2 * geometry.n_kv_heads * geometry.head_dim * bytes_per_value
    n = kv_entries_per_token(geometry, entries_per_core_layer, entries_per_coda_layer)
    return n * entry


def _matrix_weights(modules: Iterable[nn.Module]) -> int:
    linears = [m for root in modules for m in root.modules() if isinstance(m, nn.Linear)]
    return sum(m.weight.numel() for m in linears)
