"""What bfloat16 changes in a model's answers, depth by depth: rounding in a loop may build up."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.exits.largest import likeliest
from loopwise.measure.evaluate import trajectory
from loopwise.models.base import LoopedLM

DEPTHS = (1, 2, 4, 8)  # and full depth
TOKENS = 64  # of one text; processors without bfloat16 units take long over it
LIMIT_NATS = 0.01  # of mean KL; more at full depth and bfloat16 is warned of


@torch.no_grad()
def precision_report(model: LoopedLM, batch: TokenBatch, full_depth: int | None) -> dict[str, Any]:
    """Differences of bfloat16 from float32 on the first TOKENS of a batch's first text.

    Args:
        model: in float32.
        full_depth: recurrences without exits; the verdict is of that depth, or of the deepest.
    Returns:
        ``rows`` by depth: largest and mean difference of logits, mean and largest
        KL(float32 || bfloat16) in nats, and the share of tokens with another likeliest token;
        ``limit_nats``, ``judged`` (the depth), ``passes`` and a ``sentence``, which says where
        logits are not finite up to that depth, and in which of the two.
    """
    limit = model.geometry.max_depth
    depths = {r for r in (*DEPTHS, full_depth) if r is not None and (limit is None or r <= limit)}
    few = TokenBatch(**{f.name: getattr(batch, f.name)[:1, :TOKENS] for f in fields(batch)})
    exact = logits_at(model, few, depths)
    rounded = logits_at(copy.deepcopy(model).to(torch.bfloat16), few, depths)
    rows = [{"depth": r, **_difference(exact[r], rounded[r])} for r in sorted(depths)]
    judged = full_depth if full_depth in depths else max(depths)
    (seen,) = [row["kl_mean_nats"] for row in rows if row["depth"] == judged]
    broken = _not_finite(exact, rounded, judged)
    passes = broken is None and seen <= LIMIT_NATS
    return {
        "tokens": int(few.token_ids.numel()),
        "rows": rows,
        "limit_nats": LIMIT_NATS,
        "judged": judged,
        "passes": passes,
        "sentence": broken or _verdict(seen, judged),
    }


def _verdict(seen: float, judged: int) -> str:
    what = f"bfloat16 moves the next-token distribution by {seen:.3g} nats at depth {judged}"
    if seen <= LIMIT_NATS:
        return f"{what}, within the limit of {LIMIT_NATS:g}."
    return f"{what}, warning: more than the limit of {LIMIT_NATS:g}. Run it in float32."


def _not_finite(exact: dict[int, Tensor], rounded: dict[int, Tensor], judged: int) -> str | None:
    """What to say of a model that diverges, of whichever precision is the first to."""
    for name, logits, then in (
        ("float32", exact, "The model itself diverges, whatever its precision"),
        ("bfloat16", rounded, "Those of float32 are finite; run it in float32"),
    ):
        bad = [r for r in sorted(logits) if r <= judged and not logits[r].isfinite().all()]
        if bad:
            return f"warning: logits in {name} are not finite at depth {bad[0]}. {then}."
    return None


def precision_lines(found: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [f"float32 against bfloat16, {found['tokens']} tokens"]
    lines.append("  depth   logits: mean, largest      KL in nats: mean, largest   other token")
    for row in found["rows"]:
        lines.append(
            f"  {row['depth']:>5}{row['logits_mean']:>16.2g}{row['logits_max']:>9.2g}"
            f"{row['kl_mean_nats']:>21.2g}{row['kl_max_nats']:>9.2g}{row['other_token']:>14.1%}"
        )
    return [*lines, found["sentence"]]


def logits_at(model: LoopedLM, batch: TokenBatch, depths: Iterable[int]) -> dict[int, Tensor]:
    """Logits ``(tokens, vocab)`` float32 after the asked recurrences."""
    wanted = set(depths)
    return {
        r: model.coda(latent, r, view).flatten(0, -2).float()
        for r, latent, view in trajectory(model, batch, max(wanted))
        if r in wanted
    }


def _difference(exact: Tensor, rounded: Tensor) -> dict[str, float]:
    gap = (exact - rounded).abs()
    logp, logq = (logits.double().log_softmax(dim=-1) for logits in (exact, rounded))
    kl = F.kl_div(logq, logp, reduction="none", log_target=True).sum(dim=-1)
    return {
        "logits_mean": float(gap.mean()),
        "logits_max": float(gap.max()),
        "kl_mean_nats": float(kl.mean()),
        "kl_max_nats": float(kl.max()),
        "other_token": float((likeliest(exact) != likeliest(rounded)).double().mean()),
    }
