"""What may be asked of a calibration, and the events it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loopwise.errors import ConfigError
from loopwise.measure.tiers import tier_names
from loopwise.measure.units import UNITS, UnitKind

Event = dict[str, Any]
Emit = Callable[[Event], None]
MOST_NATS = 100.0  # of a budget; worse than no model at all


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """What the command line asks for beside the text.

    Attributes:
        budgets: nats above full depth, one for each tier.
        names: of the tiers; by default by the number of budgets.
        rules: exit policies that compete; by default the cheap ones.
        depth: full depth, which budgets are counted from; by default the training mean.
        min_depth, patience: of every rule.
        confidence: that a tier keeps its budget, each tier by itself.
        units: judged, at most; by default three times the fewest.
        unit: what is drawn independently: ``document``, or ``block`` where documents are few and
            their parts as good as unrelated.
        force: offer exit rules that watch a model settle though it does not converge.
        wall: time the finalists of each tier; else charged compute alone decides.
        allow_training_data: take the text even if it was trained on.
    """

    budgets: tuple[float, ...] = (0.01,)
    names: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    depth: int | None = None
    min_depth: int = 1
    patience: int = 1
    confidence: float = 0.95
    units: int | None = None
    unit: UnitKind = "document"
    seed: int = 0
    force: bool = False
    wall: bool = True
    allow_training_data: bool = False

    def __post_init__(self) -> None:
        if not self.budgets:
            raise ConfigError("--budget is empty; write for example --budget 0.01")
        for budget in self.budgets:
            if not 0 < budget <= MOST_NATS:
                raise ConfigError(
                    f"--budget {budget:g} must be a number of nats above 0, at most {MOST_NATS:g}"
                )
        if len(set(self.budgets)) < len(self.budgets):
            raise ConfigError("--budget names a budget twice; leave one out")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"--confidence {self.confidence:g} must lie between 0 and 1")
        if self.units is not None and self.units < 1:
            raise ConfigError(f"--units {self.units} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} must be at least 0")
        if self.unit not in UNITS:
            raise ConfigError(f"--unit {self.unit!r} must be {' or '.join(UNITS)}")
        tier_names(self.budgets, self.names)  # refuses bad names before any work


def progress(stage: str, done: int, total: int) -> Event:
    return {"event": "progress", "stage": stage, "done": done, "total": total}


def warning(text: str) -> Event:
    return {"event": "warning", "text": text}
