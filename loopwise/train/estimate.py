"""What a training run needs, before its first step."""

from __future__ import annotations

import torch

from loopwise.models.base import LoopedLM
from loopwise.models.costs import parameters
from loopwise.train.optim import Optimizer

_KEPT = 22  # tensors of width d_model that a layer keeps per token for its gradient, measured


def memory_gib(model: LoopedLM, optimizer: Optimizer, rows: int, recurrences: int) -> float:
    """Weights, gradients, masters and optimiser state, plus what back-propagation keeps.

    Args:
        rows: tokens of a micro-batch.
        recurrences: of the core that are kept at once.
    """
    n, params, g = parameters(model), optimizer.params, model.geometry
    size = torch.finfo(model.dtype).bits // 8
    with_gradient = sum(p.numel() for p in params.values() if p.requires_grad)
    bases = sum(params[name].numel() for name in optimizer.factors)
    state = (n + with_gradient) * (size + 4) + 8 * optimizer.n_learned + 4 * bases
    layers = g.n_prelude_layers + g.n_coda_layers + g.n_core_layers * recurrences
    activations = _KEPT * g.d_model * size * rows * layers
    logits = rows * g.vocab_size * (4 + size)
    return (state + activations + logits) / 1024**3
