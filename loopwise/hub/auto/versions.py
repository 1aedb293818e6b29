"""Which transformers this works with, and what changed its name within that range."""

from __future__ import annotations

import dataclasses

from loopwise.errors import MissingExtraError, require_extra

OLDEST, BELOW = (5, 0), (6, 0)  # as the `hub` extra says


def check_version(version: str) -> None:
    """Refuse a transformers outside the tested range.

    Raises:
        MissingExtraError: naming the version and the range.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= numbers < BELOW:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, BELOW))
        raise MissingExtraError(
            f"loopwise's transformers classes need transformers>={low},<{high}, this is {version}: "
            "pip install 'loopwise[hub]'"
        )


def cache_name() -> str:
    """What transformers calls the KV cache in calls and outputs: ``past_key_values``, or ``cache``.

    It was renamed within 5.x; models are called with the name their outputs carry.
    """
    outputs = require_extra("transformers.modeling_outputs", "hub", "this model")
    fields = {field.name for field in dataclasses.fields(outputs.CausalLMOutputWithPast)}
    return "cache" if "cache" in fields else "past_key_values"
