"""A checkpoint to hand out: nothing that only its own training needs, weights in a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loopwise.hub.chat import template_files, templates_in
from loopwise.models.checkpoint import (
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    unique_tensors,
    write_exits,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_checkpoint(checkpoint: Checkpoint, out: Path, dtype: str) -> dict[str, Any]:
    """Write the model, tokenizer and what is known of its training to a new folder.

    Paths of the machine it was trained on shrink to their last part. Exit rules go along where the
    weights are the same numbers; they were fitted to those.

    Args:
        dtype: a name in DTYPES.
    Returns:
        ``out``, ``bytes`` of the weights, and whether ``exits`` went along.
    Raises:
        CheckpointError: ``out`` exists, or the disk refuses.
    """
    tensors = unique_tensors(checkpoint.model)
    made = {name: t.to(DTYPES[dtype]) for name, t in tensors.items()}
    training = {**_without_paths(checkpoint.training), "exported_from": checkpoint.weights_hash}
    templates = template_files(templates_in(checkpoint.path))
    save_checkpoint(
        out, checkpoint.model, checkpoint.tokenizer, training, state=made, files=templates
    )
    same = all(made[name].float().equal(t.float()) for name, t in tensors.items())
    if checkpoint.exits and same:
        kept = {k: v for k, v in checkpoint.exits.items() if k != "weights_hash"}
        write_exits(load_checkpoint(out), kept)
    size = (out / "model.safetensors").stat().st_size
    return {"out": str(out), "bytes": size, "exits": bool(checkpoint.exits) and same}


def _without_paths(training: dict[str, Any]) -> dict[str, Any]:
    """``training.json`` with sources and start by name, not by where they lay."""
    out = dict(training)
    if "sources" in out.get("data", {}):
        out["data"] = {**out["data"], "sources": [_name(s) for s in out["data"]["sources"]]}
    if "started_from" in out:
        start = out["started_from"]
        out["started_from"] = {**start, "checkpoint": _name(start["checkpoint"])}
    return out


def _name(source: str) -> str:
    return source if source.startswith(("hub:", "builtin:")) else Path(source).name
