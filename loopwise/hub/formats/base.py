"""The contract of a checkpoint format, and what several of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.train.recurrence import DepthConfig, DepthSampler


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a format makes of a source.

    Attributes:
        architecture: a row of MODELS.
        config: of that architecture.
        keys: where its tensors come from.
        depth: how the recurrence count was drawn in training, as ``training.json`` says it.
        special_ids: where the source's config is known to be wrong about ``bos`` and ``eos``.
        unread: fields of the source's config that nothing was made of.
        notes: what a person should know of this conversion.
    """

    architecture: str
    config: Any
    keys: KeyMap
    depth: dict[str, Any]
    special_ids: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Format(Protocol):
    """One published way to lay out a checkpoint."""

    name: str
    about: str  # whose checkpoints, and what tells them apart

    def recognises(self, source: Source) -> bool:
        """Whether a folder is of this kind, by its config and its keys."""
        ...

    def plan(self, source: Source) -> Plan:
        """Our config and key map for it.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or asks for what we cannot do.
        """
        ...


def is_kind(source: Source, model_type: str, architecture: str) -> bool:
    """Whether the config names this model type or this transformers class."""
    names = source.config.get("architectures")
    named = isinstance(names, list) and architecture in names
    return source.config.get("model_type") == model_type or named


def drawn(mean: int, backprop_depth: int) -> dict[str, Any]:
    """Depths drawn by Huginn's sampler, with their true mean max(mean, backprop) + 1.

    The published sampler has no cut; ours needs one, so far out that the mean does not feel it.
    """
    cut = 8 * max(mean, backprop_depth)
    config = DepthConfig(
        kind="lognormal-poisson",
        mean=float(mean),
        backprop_depth=backprop_depth,
        exact_mean=False,
        max_depth=cut,
    )
    return dict(DepthSampler(config).describe())


def clamped(mean: float, largest: int, backprop_depth: int) -> dict[str, Any]:
    """As :func:`drawn` around ``mean`` alone, with deeper draws set to ``largest``."""
    around = DepthConfig(
        kind="lognormal-poisson",
        mean=mean,
        backprop_depth=1,
        exact_mean=False,
        max_depth=max(largest, round(8 * mean)),
    )
    table = DepthSampler(around).pmf
    kept, beyond = table[:largest].copy(), table[largest:].sum()
    kept[-1] += beyond
    depths, reached = np.arange(1, largest + 1), np.cumsum(kept)
    true_mean = float(kept @ depths)
    named = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        "kind": "lognormal-poisson, clamped",
        "asked_mean": mean,
        "true_mean": true_mean,
        "std": float(np.sqrt(kept @ (depths - true_mean) ** 2)),
        **{name: int(np.searchsorted(reached, q - 1e-12) + 1) for name, q in named.items()},
        "min": 1,
        "max": largest,
        "backprop_depth": backprop_depth,
    }


def always(depth: int, smallest: int | None = None) -> dict[str, Any]:
    """One depth for all of training; ``smallest`` where shallower readings were trained too."""
    config = DepthConfig(kind="fixed", mean=float(depth), backprop_depth=depth)
    return {**DepthSampler(config).describe(), "min": smallest or depth}


def take_llama_attention(
    keys: KeyMap, ours: str, theirs: str, d_model: int, heads: tuple[int, int, int]
) -> None:
    """Separate q, k, v and o projections under our one; ``heads`` = query, key-value, size."""
    n_heads, n_kv_heads, size = heads
    keys.take(
        f"{ours}.qkv.weight",
        (f"{theirs}.q_proj.weight", (n_heads * size, d_model)),
        (f"{theirs}.k_proj.weight", (n_kv_heads * size, d_model)),
        (f"{theirs}.v_proj.weight", (n_kv_heads * size, d_model)),
    )
    keys.take(f"{ours}.out.weight", (f"{theirs}.o_proj.weight", (d_model, n_heads * size)))


def take_llama_mlp(keys: KeyMap, ours: str, theirs: str, d_model: int, d_ff: int) -> None:
    """Separate gate and up projections under our one, gate first."""
    keys.take(
        f"{ours}.up.weight",
        (f"{theirs}.gate_proj.weight", (d_ff, d_model)),
        (f"{theirs}.up_proj.weight", (d_ff, d_model)),
    )
    keys.take(f"{ours}.down.weight", (f"{theirs}.down_proj.weight", (d_model, d_ff)))


def take_llama_ends(keys: KeyMap, vocab_size: int, d_model: int, tied: bool) -> None:
    """Embedding, final norm and head of a Llama-shaped checkpoint."""
    embedding = "model.embed_tokens.weight"
    keys.take("embedding.weight", (embedding, (vocab_size, d_model)))
    keys.take("norm_final.weight", ("model.norm.weight", (d_model,)))
    if tied:
        keys.copies["lm_head.weight"] = embedding
    else:
        keys.take("unembedding.weight", ("lm_head.weight", (vocab_size, d_model)))
