"""What models trained with forks of nanochat share: padding, windows, and a phase that turns back.

Source: github.com/kschwethelm/looped_nanochat (MIT) and the published facts of the FLT code.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source

PAD_TO = 64  # rows of embedding and head are a multiple of it
NORM_EPS = 2.0**-23  # where norms name none, PyTorch takes float32's own


def padded(vocab_size: int) -> int:
    return -(-vocab_size // PAD_TO) * PAD_TO


def take_ends(keys: KeyMap, vocab_size: int, d_model: int) -> None:
    """Embedding and head without their padding: the source cuts those logits off."""
    shape = (padded(vocab_size), d_model)
    for ours, theirs in (("embedding", "transformer.wte"), ("unembedding", "lm_head")):
        keys.take(f"{ours}.weight", (f"{theirs}.weight", shape))
        keys.changes[f"{theirs}.weight"] = lambda rows: rows[:vocab_size]


def turned_back(head_dim: int) -> Callable[[Tensor], Tensor]:
    """Projections ``(heads * head_dim, d_model)`` with the halves of each head exchanged.

    Nanochat turns every pair by minus the usual angle. With its halves exchanged a pair turned the
    usual way is the same pair turned back, so scores are kept; q/k norms there have no weights.
    """

    def change(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)

    return change


def local_layers(fields: Fields, source: Source, n_layers: int) -> tuple[int, ...]:
    """Layers that see a window only: a pattern of S and L, tiled; the last layer sees everything.

    Raises:
        CheckpointError: the pattern has other letters.
    """
    fields.ignore("window_pattern")
    pattern = source.config.get("window_pattern") or "L"
    if not isinstance(pattern, str) or set(pattern.upper()) - {"L", "S"}:
        raise CheckpointError(f"window_pattern={pattern!r} must be made of the letters L and S")
    return tuple(i for i in range(n_layers - 1) if pattern.upper()[i % len(pattern)] == "S")
