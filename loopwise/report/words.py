"""Numbers as people read them; None is a dash."""

from __future__ import annotations

import math
from typing import Any

DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"


def number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return DASH
    text = f"{value:,.{digits}f}"
    return text.replace("-", MINUS) if float(text.replace(",", "")) else text.lstrip("-")


def signed(value: float | None, digits: int = 4) -> str:
    """With its sign, for differences."""
    if value is None:
        return DASH
    text = number(value, digits)
    return f"+{text}" if value > 0 and float(text.replace(",", "")) else text


def small(value: float | None) -> str:
    """Two significant figures, for quantities that span decades."""
    return DASH if value is None else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def significant(value: float | None, digits: int = 3) -> str:
    """So many significant figures: in full from 0.001 to a million, else as a power of ten."""
    if value is None:
        return DASH
    if value and not 1e-3 <= abs(value) < 1e6:
        return small(value)
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return number(value, max(0, places))


def percent(value: float | None, digits: int = 0) -> str:
    return DASH if value is None else f"{number(100 * value, digits)}%"


def count(value: float | None) -> str:
    """1.2k, 3.4M, 12.9B; small ones in full."""
    if value is None:
        return DASH
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio, such as a speed-up."""
    return DASH if value is None else f"{number(value)}{TIMES}"


def interval(low: float | None, high: float | None, digits: int = 2) -> str:
    if low is None or high is None:
        return DASH
    return f"{number(low, digits)} to {number(high, digits)}"


def shortened(name: str, most: int) -> str:
    """A name of at most so many characters; the end of a long one tells it from its like."""
    if len(name) <= most:
        return name
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def depth(value: float | None) -> str:
    """A depth: whole ones without decimals."""
    whole = value is not None and abs(value - round(value)) < 1e-6
    return number(value, 0 if whole else 2)


def recurrences(count: int) -> str:
    return f"{count} recurrence{'' if count == 1 else 's'}"


def reference_line(reference: dict[str, Any]) -> str:
    """A reference beside the model, in bits per byte."""
    theirs, best = reference["bits_per_byte"]["mean"], reference["best_bits_per_byte"]["mean"]
    above = reference["above_bits_per_byte"]
    return (
        f"{reference['name']}, {recurrences(reference['depth'])}: {number(theirs, 3)} bits per "
        f"byte; this model at its best depth, {reference['best_depth']}: {number(best, 3)}, "
        f"{signed(above['mean'], 3)} ({interval(above['low'], above['high'], 3)})"
    )
