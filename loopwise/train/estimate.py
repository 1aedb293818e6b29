"""What a training run needs, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopwise.models.base import LoopedLM
from loopwise.models.costs import parameters
from loopwise.train.optim import Optimizer
from loopwise.train.recurrence import DepthSampler

if TYPE_CHECKING:
    from loopwise.train.loop import TrainConfig

_KEPT = 22  # tensors of width d_model that a layer keeps per token for its gradient, measured


def planned_gib(
    model: LoopedLM, optimizer: Optimizer, config: TrainConfig, depth: DepthSampler
) -> float:
    """Memory of a run, GiB; a model on the meta device will do, and then nothing is taken.

    Args:
        depth: the distribution the run ends with.
    """
    through = min(depth.config.backprop_depth, depth.quantile(0.99))
    kept = 1 if config.checkpoint_recurrences else through
    return memory_gib(model, optimizer, config.seq * config.micro_batch, kept)


def memory_gib(model: LoopedLM, optimizer: Optimizer, rows: int, recurrences: int) -> float:
    """Weights, gradients, masters and optimiser state, plus what back-propagation keeps.

    Args:
        rows: tokens of a micro-batch.
        recurrences: of the core that are kept at once.
    """
    n, params, g = parameters(model), optimizer.params, model.geometry
    size = torch.finfo(model.dtype).bits // 8
    master = 0 if model.dtype == torch.float32 else 4  # in float32 parameters are their own
    with_gradient = sum(p.numel() for p in params.values() if p.requires_grad)
    bases = sum(params[name].numel() for name in optimizer.factors)
    state = (n + with_gradient) * (size + master) + 8 * optimizer.n_learned + 4 * bases
    layers = g.n_prelude_layers + g.n_coda_layers + g.n_core_layers * recurrences
    activations = _KEPT * g.d_model * size * rows * layers
    logits = rows * g.vocab_size * (4 + size)
    return (state + activations + logits) / 1024**3
