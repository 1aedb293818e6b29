"""The caches of transformers: which are taken, and whether one was filled at another depth."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache

from loopwise.errors import ConfigError
from loopwise.hub.auto.plan import LayerIndex
from loopwise.hub.auto.versions import cache_name

CACHE = cache_name()


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache of a call, which has two names.

    Raises:
        ConfigError: both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ConfigError("past_key_values and cache are names of the same thing; give one")
    return past_key_values if cache is None else cache


def check_cache(cache: Any, layers: LayerIndex) -> int:
    """How many tokens ``cache`` holds.

    Raises:
        ConfigError: not a cache of layers, or one for another depth.
    """
    if cache is None:
        return 0
    kind = type(cache).__name__
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ConfigError(
            f"a KV cache of type {kind} is not supported; give a DynamicCache, StaticCache or "
            "another Cache of transformers with one list of layers"
        )
    if len(cache) not in (0, layers.count):
        raise ConfigError(
            f"this {kind} has {len(cache)} layers, and a depth of {layers.depth} needs "
            f"{layers.count} (one for each entry a token leaves); fill it at one depth, and make "
            f"it from model.config.at({layers.depth}) or with DynamicCache()"
        )
    return int(cache.get_seq_length())
