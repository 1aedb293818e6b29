"""Results as plain values: what the report reads, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loopwise
from loopwise.measure.convergence import settled_depth, summarise
from loopwise.measure.reference import read_reference
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.costs import flops_per_token, parameters
from loopwise.settings import RunConfig, resolved_table
from loopwise.tokenizer import Tokenizer
from loopwise.train.metrics import finite
from loopwise.writing import write_whole

PASSAGE_TOKENS = 160


def collect_results(
    checkpoint: Checkpoint, traces: list[Trace], frontiers: list[dict[str, Any]], config: RunConfig
) -> dict[str, Any]:
    """Everything a report shows."""
    costs = flops_per_token(checkpoint.model, context=int(checkpoint.training.get("seq", 256)) // 2)
    geometry = checkpoint.model.geometry
    return {
        "format": "loopwise-results",
        "version": 1,
        "loopwise": loopwise.__version__,
        "model": {
            "architecture": checkpoint.model.name,
            "parameters": parameters(checkpoint.model),
            "d_model": geometry.d_model,
            "vocab_size": geometry.vocab_size,
            "layers": [geometry.n_prelude_layers, geometry.n_core_layers, geometry.n_coda_layers],
            "flops_per_token": {
                "prelude": costs.prelude,
                "core": costs.core,
                "coda": costs.coda,
                "head": costs.head,
            },
        },
        "training": checkpoint.training,
        "settings": resolved_table(config),
        "convergence": [_convergence(t, checkpoint, config.measure.epsilon) for t in traces],
        "frontiers": frontiers,
    }


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    """Write ``results.json`` in one move; numbers that are not finite become null.

    Raises:
        WriteError: the disk refuses.
    """
    path = folder / "results.json"
    write_whole(path, json.dumps(finite(results), indent=1, allow_nan=False))
    return path


def add_references(results: dict[str, Any], traces: list[Trace]) -> None:
    """Put what is stored beside traces of a run into its results."""
    measured = {t.header["corpus"]: (t.n_tokens, read_reference(t)) for t in traces}
    for c in results["convergence"]:
        tokens, found = measured.get(c["corpus"], (None, None))
        if tokens == c["tokens"]:
            c["reference"] = found


def passage(trace: Trace, tokenizer: Tokenizer, epsilon: float) -> list[dict[str, Any]]:
    """The start of the trace's text with each token's settled depth, for people to read."""
    depth = settled_depth(trace["kl_prev"][:PASSAGE_TOKENS], epsilon)
    target = trace["target"][:PASSAGE_TOKENS]
    return [
        {"text": tokenizer.decode([int(t)]), "depth": int(d)}
        for t, d in zip(target, depth, strict=True)
    ]


def _convergence(trace: Trace, checkpoint: Checkpoint, epsilon: float) -> dict[str, Any]:
    return {
        **summarise(trace, checkpoint.tokenizer, epsilon),
        "passage": passage(trace, checkpoint.tokenizer, epsilon),
        "reference": read_reference(trace),
    }
