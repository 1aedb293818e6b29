"""Published looped models that loopwise knows of but cannot run yet, and what each would take.

Paper 1's own checkpoint (arXiv:2607.14427, one ``torch.save`` file of config and weights) is not
among them: neither its keys nor its config fields are written down anywhere, so there is nothing to
tell it by, and nothing to check a reading against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loopwise.hub.read import Source


@dataclass(frozen=True)
class Gap:
    """One such model.

    Attributes:
        name: of the model.
        fits: whether a source is of this kind.
        needed: what its mathematics asks of us, in one clause.
    """

    name: str
    fits: Callable[[Source], bool]
    needed: str


def _type(*names: str) -> Callable[[Source], bool]:
    return lambda source: source.config.get("model_type") in names


def _key(part: str) -> Callable[[Source], bool]:
    return lambda source: any(part in key for key in source.shapes)


GAPS = (
    Gap(
        "Inkling 2 loop",
        _type("inkling2_loop"),
        "a mixture of experts and gates between passes",
    ),
    Gap(
        "Mixture of Recursions",
        _key("mor_router"),
        "routers that choose tokens by looking at the whole sequence",
    ),
)


def gap_of(source: Source) -> Gap | None:
    """The known model a source is of, if it is one of these."""
    return next((gap for gap in GAPS if gap.fits(source)), None)
