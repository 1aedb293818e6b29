"""Fitting A2: logistic regression from the latent to "the argmax will still change"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError
from loopwise.exits.largest import likeliest
from loopwise.exits.probe import Probe
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM

_L2 = 1e-4


@torch.no_grad()
def probe_examples(
    model: LoopedLM, batches: Iterable[TokenBatch], horizon: int, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Latents and labels at every recurrence from 1 to ``max_depth``.

    A label is 1 where some later recurrence up to ``horizon`` has another argmax.

    Returns:
        ``(examples, d_model)`` float32 and ``(examples,)`` float32 in {0, 1}.
    """
    latents, labels = [], []
    for batch in batches:
        rows = (batch.targets.flatten() != NO_TARGET).nonzero().squeeze(-1)
        kept, argmax = [], []
        for r, latent, view in trajectory(model, batch, horizon):
            argmax.append(likeliest(model.coda(latent, r, view).flatten(0, -2)[rows]))
            if r <= max_depth:
                kept.append(latent.flatten(0, -2)[rows].float())
        answers = torch.stack(argmax)  # (horizon, rows)
        differs_later = answers != answers[-1]
        will_change = differs_later.flip(0).cummax(dim=0).values.flip(0)
        # Changing and coming back to the final answer counts as changing.
        latents.append(torch.cat(kept))
        labels.append(will_change[: len(kept)].flatten().float())
    if not latents:
        raise DataError("no text to fit the probe on; give more held-out data")
    return torch.cat(latents), torch.cat(labels)


def fit_probe(latents: Tensor, labels: Tensor) -> Probe:
    """Logistic regression with a small L2 penalty, by L-BFGS."""
    mean, std = latents.mean(dim=0), latents.std(dim=0).clamp_min(1e-6)
    z = (latents - mean) / std
    weight = torch.zeros(z.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=100, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = z @ weight + bias
        loss = F.binary_cross_entropy_with_logits(logits, labels) + _L2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return Probe(weight=weight.detach(), bias=bias.item(), mean=mean, std=std)


def judge_probe(probability: NDArray, label: NDArray, bins: int = 10) -> dict[str, Any]:
    """AUROC and calibration of predicted probabilities against outcomes, on a split not fitted on.

    Args:
        probability: ``(examples,)`` in [0, 1].
        label: ``(examples,)`` bool.
    """
    edges = np.linspace(0, 1, bins + 1)
    index = np.clip(np.digitize(probability, edges) - 1, 0, bins - 1)
    rows = []
    for i in range(bins):
        of = index == i
        if of.any():
            rows.append(
                {
                    "predicted": float(probability[of].mean()),
                    "observed": float(label[of].mean()),
                    "share": float(of.mean()),
                }
            )
    error = sum(row["share"] * abs(row["predicted"] - row["observed"]) for row in rows)
    return {
        "auroc": auroc(probability, label),
        "positive_share": float(label.mean()),
        "calibration": rows,
        "calibration_error": error,
    }


def auroc(score: NDArray, label: NDArray) -> float:
    """Area under the ROC curve by ranks (Mann-Whitney), ties counted half; NaN for one class."""
    label = label.astype(bool)
    positives, negatives = int(label.sum()), int((~label).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = ranks[inverse][label].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))
