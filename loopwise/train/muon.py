"""Muon that orthogonalises in the dtype its device multiplies fastest.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al.
2025, arXiv:2502.16982 (updates with the RMS of AdamW's).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from loopwise.train.machine import has_native_bf16


class Muon(torch.optim.Muon):
    """PyTorch's Muon, except that its Newton-Schulz iteration is not bound to bfloat16.

    On a processor without bfloat16 units those products run about 80 times slower than in float32
    (measured on AVX2), which is most of a small model's step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                update = orthogonal(
                    update, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * shape_scale(p, group["adjust_lr_fn"]))
        return loss


def orthogonal(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The matrix with the singular vectors of ``update (rows, columns)`` and values near 1."""
    a, b, c = coefficients
    x = update.bfloat16() if has_native_bf16(update.device) else update.float()
    tall = x.shape[0] > x.shape[1]
    if tall:  # the Gram matrix of the shorter side
        x = x.T
    x = x / x.norm().clamp(min=eps)  # spectral norm at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def shape_scale(p: Tensor, name: str | None) -> float:
    """Factor of the rate by a matrix's shape, as ``torch.optim.Muon(adjust_lr_fn=name)``."""
    rows, columns = p.shape
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
