"""Muon's own iteration against PyTorch's, and its independence of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopwise.train import muon
from loopwise.train.muon import Muon


def trained(kind: type[torch.optim.Muon], scale: str, shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape))
    optimizer = kind([p], lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    for _ in range(4):
        p.grad = torch.randn(shape)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_in_bfloat16_it_is_pytorchs_muon(monkeypatch, scale, shape) -> None:
    monkeypatch.setattr(muon, "has_native_bf16", lambda device: True)
    ours, theirs = trained(Muon, scale, shape), trained(torch.optim.Muon, scale, shape)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_without_bfloat16_units_no_product_is_bfloat16(monkeypatch) -> None:
    monkeypatch.setattr(muon, "has_native_bf16", lambda device: False)
    update = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    out = muon.orthogonal(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert out.dtype == torch.float32
    # Source: Jordan et al. 2024: the coefficients bring singular values into about [0.7, 1.2].
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.6 and values.max() < 1.3
