"""The pieces that published models are made of, in float64 and one position at a time.

Written from the papers and model cards; nothing here imports the package. A sequence is a list of
``(d,)`` arrays, one a position.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Sequence = list[Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down(silu(gate x) * up x)."""
    opened = gate @ x
    return down @ (opened * sigmoid(opened) * (up @ x))


def frequency(i: int, size: int, base: float, scaling: dict | None = None) -> float:
    """Radians a token that pair ``i`` of a head turns by; ``scaling`` is a config's table."""
    plain = base ** (-2 * i / size)
    if not scaling:
        return plain
    length = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    if wavelength > length / low:
        return plain / scaling["factor"]
    if wavelength < length / high:
        return plain
    share = (length / wavelength - low) / (high - low)
    return (1 - share) * plain / scaling["factor"] + share * plain


def rotate(
    head: Array, position: int, base: float, interleaved: bool, scaling: dict | None = None
) -> Array:
    """One head turned: pairs (0, 1), (2, 3) .. if interleaved, else (i, i + half)."""
    out, half = head.copy(), len(head) // 2
    for i in range(half):
        angle = position * frequency(i, len(head), base, scaling)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[a] = head[a] * math.cos(angle) - head[b] * math.sin(angle)
        out[b] = head[b] * math.cos(angle) + head[a] * math.sin(angle)
    return out


def attend(
    queries: list[Array], keys: list[Array], values: list[Array], window: int | None = None
) -> Sequence:
    """Causal attention; each list has one ``(heads, size)`` a position, key heads shared evenly.

    With a window, over that many of the latest positions, the asking one counted.
    """
    out = []
    for position, query in enumerate(queries):
        n_heads, size = query.shape
        groups = n_heads // keys[0].shape[0]
        mixed = []
        for j in range(n_heads):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            scores = [float(query[j] @ keys[p][j // groups]) / math.sqrt(size) for p in seen]
            shares = [math.exp(score - max(scores)) for score in scores]
            mixed.append(
                sum(
                    s / sum(shares) * values[p][j // groups]
                    for p, s in zip(seen, shares, strict=True)
                )
            )
        out.append(np.concatenate(mixed))
    return out
