"""The reference of a study: another model, in bits per byte on the text of each trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from loopwise.errors import CheckpointError, ShapeError, TokenizerError
from loopwise.measure.reference import measure_reference, read_reference, write_reference
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, resolve
from loopwise.settings import MeasureConfig
from loopwise.tokenizer import Tokenizer

Event = dict[str, Any]
Emit = Callable[[Event], None]


def open_reference(config: MeasureConfig) -> Checkpoint | None:
    """The checkpoint of ``measure.reference``, in the dtype of the measurement; None where unset.

    Raises:
        CheckpointError: it is missing or broken.
    """
    if config.reference is None:
        return None
    dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
    try:
        return load_checkpoint(Path(config.reference), dtype)
    except CheckpointError as err:
        raise CheckpointError(f"measure.reference: {err}") from None


def with_whole_path(asked: dict[str, Any]) -> dict[str, Any]:
    """``asked`` with a reference that a run finds again from any working directory.

    Raises:
        CheckpointError: there is none.
    """
    section = asked.get("measure")
    if not isinstance(section, dict) or not isinstance(section.get("reference"), str):
        return asked
    path = Path(section["reference"]).expanduser().absolute()
    try:
        resolve(path)
    except CheckpointError as err:
        raise CheckpointError(f"measure.reference: {err}") from None
    return {**asked, "measure": {**section, "reference": str(path)}}


def reference_stage(
    reference: Checkpoint, tokenizer: Tokenizer, traces: Sequence[Trace], emit: Emit
) -> dict[str, Event]:
    """Measure the reference on the text of each trace, and store it there.

    Args:
        tokenizer: of the traced model.
    Returns:
        What was found, by corpus; what an earlier run stored of this reference is kept.
    Raises:
        ShapeError, TokenizerError: the reference cannot read a text.
    """
    out: dict[str, Event] = {}
    weights = reference.weights_hash
    dtype = str(reference.model.dtype).removeprefix("torch.")
    for trace in traces:
        name = trace.header["corpus"]
        stored = read_reference(trace)
        if stored is not None and (stored["weights_hash"], stored["dtype"]) == (weights, dtype):
            out[name] = stored
            continue

        def report(done: int, total: int, name: str = name) -> None:
            stage = f"reference on {name}"
            emit({"event": "progress", "stage": stage, "done": done, "total": total})

        try:
            out[name] = measure_reference(trace, tokenizer, reference, report)
        except (ShapeError, TokenizerError) as err:  # it cannot read this text
            raise type(err)(f"measure.reference on {name}: {err}") from None
        write_reference(trace, out[name])
    return out
