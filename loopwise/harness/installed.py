"""The installed lm-evaluation-harness, in a version this package knows."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from loopwise.errors import MissingExtraError, require_extra

# What loopwise[eval] asks for. Both ends are tested.
OLDEST, TOO_NEW = (0, 4, 12), (0, 4, 14)


def harness(module: str = "lm_eval") -> Any:
    """A module of the harness.

    Raises:
        MissingExtraError: it is not installed, or in a version that was not tested.
    """
    found = require_extra(module, "eval", "evaluation with lm-evaluation-harness")
    numbers = tuple(int(part) for part in harness_version().split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        oldest, too_new = (".".join(map(str, bound)) for bound in (OLDEST, TOO_NEW))
        raise MissingExtraError(
            f"lm-eval {harness_version()} is installed; loopwise knows versions from {oldest} to "
            f"below {too_new}: pip install 'loopwise[eval]'"
        )
    return found


def harness_version() -> str:
    return version("lm_eval")
