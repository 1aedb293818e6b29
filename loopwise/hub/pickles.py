"""Pickled weights, loaded weights-only, and what training scripts keep beside them."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopwise.errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth")
# Where training scripts keep the weights among other things, and the settings of the model.
NESTS = ("model", "state_dict", "model_state_dict")
CONFIGS = ("config", "model_config", "model_args", "hparams", "args", "cfg")
# What PyTorch raises for files that were cut or overwritten.
_DAMAGE = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError),
    *(LookupError, ArithmeticError, struct.error),
)
_REFUSED = re.compile(r"GLOBAL ([\w.]+)|class[: ]+([\w.]+)")


def unpickle(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The named tensors of a file, and the settings it holds besides, as plain values.

    Raises:
        CheckpointError: damaged, more than weights and plain values, or no named tensors.
    """
    content = _load(path)
    config: Mapping[str, Any] = {}
    if isinstance(content, dict):
        for name in CONFIGS:
            if isinstance(content.get(name), dict):
                config = content[name]
                content = {key: value for key, value in content.items() if key != name}
                break
        for nest in NESTS:
            if isinstance(content.get(nest), dict):
                content = content[nest]
                break
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not named tensors")
    strange = [key for key, value in content.items() if not isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(
            f"{str(path)!r} holds things that are no tensors: {', '.join(map(str, strange[:5]))}"
        )
    return content, config


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as err:
        # PyTorch's own words go on to advise loading it in a way that runs its code.
        found = _REFUSED.search(str(err))
        kind = next(filter(None, found.groups()), None) if found else None
        reason = f"it asks for {kind}" if kind else "its pickle cannot be read"
        raise CheckpointError(
            f"{str(path)!r} is damaged or holds more than weights, so it was not loaded "
            f"({reason}); save its tensors and plain settings alone"
        ) from None
    except _DAMAGE as err:
        first = (str(err).splitlines() or [type(err).__name__])[0]
        said = type(err).__name__ if "weights_only" in first else first
        raise CheckpointError(
            f"{str(path)!r} is truncated or no PyTorch file ({said}); copy it again"
        ) from None
