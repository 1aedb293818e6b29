"""Decoding: the engine, and the slow, obvious reference that it must match."""

from loopwise.engine.engine import Engine, EngineConfig, Generation, StreamedToken
from loopwise.engine.request import Completion, SamplingParams, TokenOutput

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "Generation",
    "SamplingParams",
    "StreamedToken",
    "TokenOutput",
]
