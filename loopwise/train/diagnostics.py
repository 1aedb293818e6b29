"""Why a loop breaks, seen from inside: gradient and latent norms, step by step.

Everything is taken from tensors the step has made anyway and stays on the device until the step is
over, when one copy brings all scalars. Off, it costs nothing; on, it leaves training bit-equal.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class Diagnostics:
    """Norms of one optimiser step.

    Source: Fu et al. 2026, arXiv:2605.18797 (gradient norm per layer and at each iteration's
    output; hidden norm per iteration = mean over tokens of the L2 norm).
    """

    def __init__(self) -> None:
        self._latent_norms: dict[int, list[Tensor]] = defaultdict(list)
        self._latent_grads: dict[int, list[Tensor]] = defaultdict(list)

    def watch(self, latent: Tensor, r: int) -> None:
        """Note the latent ``(batch, seq, d_model)`` after recurrence ``r``.

        And its gradient, where one flows: not before the window of truncated back-propagation.
        """
        norm = latent.detach().float().norm(dim=-1).mean()
        self._latent_norms[r].append(norm)
        if latent.requires_grad:
            latent.register_hook(lambda grad: self._note_gradient(grad, r))

    def _note_gradient(self, grad: Tensor, r: int) -> None:
        self._latent_grads[r].append(grad.detach().float().norm())

    def collect(self, gradients: dict[str, Tensor]) -> dict[str, Any]:
        """The step's norms as plain numbers, and a clean slate.

        Args:
            gradients: of the float32 masters, by parameter name, before clipping.
        Returns:
            ``latent_norm`` and ``latent_grad_norm`` by recurrence (mean over micro-batches; the
            gradients' squares are summed), ``grad_norm_attn`` and ``grad_norm_mlp`` by block.
        """
        scalars: list[Tensor] = []
        places: list[tuple[str, str]] = []

        def add(table: str, key: str, value: Tensor) -> None:
            scalars.append(value)
            places.append((table, key))

        for r, norms in sorted(self._latent_norms.items()):
            add("latent_norm", str(r), torch.stack(norms).mean())
        for r, norms in sorted(self._latent_grads.items()):
            add("latent_grad_norm", str(r), torch.stack(norms).norm())
        for (block, part), grads in _by_block(gradients).items():
            add(f"grad_norm_{part}", block, torch.stack([g.norm() for g in grads]).norm())
        self._latent_norms.clear()
        self._latent_grads.clear()
        out: dict[str, dict[str, float]] = defaultdict(dict)
        values = torch.stack(scalars).tolist() if scalars else []
        for (table, key), value in zip(places, values, strict=True):
            out[table][key] = value
        return dict(out)


def _by_block(gradients: dict[str, Tensor]) -> dict[tuple[str, str], list[Tensor]]:
    """Gradients by (``core_blocks.0``, ``attn`` or ``mlp``); norms, embedding and head left out."""
    out: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for name, grad in gradients.items():
        pieces = name.split(".")
        if len(pieces) < 4 or grad.ndim != 2:
            continue
        part = "mlp" if "mlp" in pieces else "attn"
        out[".".join(pieces[:2]), part].append(grad)
    return dict(sorted(out.items()))


def gradients_of(masters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that are there, by name."""
    return {name: m.grad for name, m in masters.items() if m.grad is not None}
