"""Decoding: the engine, and the slow, obvious reference that it must match.

The names below load their modules on use, so that scheduler and detokenizer stay free of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopwise.engine.engine import Engine
    from loopwise.engine.request import Completion, SamplingParams, TokenOutput
    from loopwise.engine.running import Generation, Request, StreamedToken
    from loopwise.engine.settings import EngineConfig

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "Generation",
    "Request",
    "SamplingParams",
    "StreamedToken",
    "TokenOutput",
]
_MODULE = {
    "Engine": "engine",
    "EngineConfig": "settings",
    **dict.fromkeys(("Completion", "SamplingParams", "TokenOutput"), "request"),
    **dict.fromkeys(("Generation", "Request", "StreamedToken"), "running"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
