"""From the keys of a source to ours: every one accounted for, or all that is wrong in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopwise.errors import CheckpointError
from loopwise.hub.read import Shape, Source

SHOWN = 8  # problems an error message spells out
Change = Callable[[Tensor], Tensor]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KeyMap:
    """Where each of our tensors comes from.

    Attributes:
        pieces: our key to the source's keys and shapes, laid one under another along axis 0.
        changes: what is done to a tensor of the source before it is laid down, by its key.
        factors: what multiplies the rows of a piece, by our key and the source's: key and shape of
            a vector of the source, and what is done to it first.
        copies: keys a source may hold besides, equal to another of its keys (a tied head).
        tables: keys a source may hold besides, with what they must hold (rotary tables).
    """

    pieces: dict[str, tuple[tuple[str, Shape], ...]] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    factors: dict[tuple[str, str], tuple[str, Shape, Change]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)

    def take(self, ours: str, *sources: tuple[str, Shape]) -> None:
        assert ours not in self.pieces, f"{ours} is taken twice"
        self.pieces[ours] = sources

    def scale_rows(self, ours: str, theirs: str, by: str, change: Change) -> None:
        """Row i of the piece ``theirs`` of ``ours`` is multiplied by number i of ``by``."""
        rows = {key: shape[:1] for key, shape in self.pieces[ours]}
        self.factors[ours, theirs] = by, rows[theirs], change

    def expected(self) -> dict[str, Shape]:
        """Shape of every key the source must hold."""
        vectors = {key: shape for key, shape, _ in self.factors.values()}
        pieces = {key: shape for sources in self.pieces.values() for key, shape in sources}
        return pieces | vectors


def assemble(source: Source, keys: KeyMap, own: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The source's tensors under our keys, in the dtype they are stored in.

    Args:
        own: shape of every tensor of the model that is to hold them.
    Raises:
        CheckpointError: keys that are missing, unknown or misshapen (all named), tied tensors that
            differ, a rotary table of another base, or values that are no plain floats.
    """
    assert set(keys.pieces) == set(own), set(keys.pieces) ^ set(own)
    _check_shapes(source, keys)
    _check_values(source, keys)
    state = {}
    for ours, sources in keys.pieces.items():
        parts = []
        for key, _ in sources:
            part = _read(source, key)
            part = keys.changes[key](part) if key in keys.changes else part
            if (ours, key) in keys.factors:
                by, _, change = keys.factors[ours, key]
                wide = torch.promote_types(part.dtype, torch.float32)
                factor = change(_read(source, by).to(wide)).unsqueeze(-1)
                part = (part.to(wide) * factor).to(part.dtype)
            parts.append(part)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole.untyped_storage().nbytes() != whole.nbytes:  # a view, as pickles may hold
            whole = whole.clone()
        state[ours] = whole.reshape(own[ours])
    return state


def _check_shapes(source: Source, keys: KeyMap) -> None:
    expected = keys.expected()
    optional = {key: expected[of] for key, of in keys.copies.items()}
    optional |= {key: tuple(table.shape) for key, table in keys.tables.items()}
    problems = [f"missing {key}" for key in expected if key not in source.shapes]
    for key, shape in source.shapes.items():
        wanted = expected.get(key, optional.get(key))
        if wanted is None:
            problems.append(f"unknown {key}")
        elif shape != wanted:
            problems.append(f"{key} is {shape}, expected {wanted}")
    if problems:
        shown = "; ".join(problems[:SHOWN])
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"the weights of {str(source.path)!r} do not fit its config: {shown}{more}"
        )


def _check_values(source: Source, keys: KeyMap) -> None:
    for key, of in keys.copies.items():
        if key in source.shapes and not torch.equal(source.read(key), source.read(of)):
            raise CheckpointError(
                f"{str(source.path)!r} says {key} and {of} are one tensor, but they differ; "
                "set the tie in config.json to what the weights are"
            )
    for key, table in keys.tables.items():
        # A hundredth: bfloat16 keeps these to a few thousandths.
        if key in source.shapes and (source.read(key).double() - table).abs().max() > 0.01:
            raise CheckpointError(
                f"{key} of {str(source.path)!r} is not the rotary table its config describes"
            )


def _read(source: Source, key: str) -> Tensor:
    """A tensor of the source, which must hold plain finite floats."""
    tensor = source.read(key)
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{key} is stored as {str(tensor.dtype).removeprefix('torch.')}; loopwise reads "
            "unquantised floats (float64, float32, bfloat16, float16)"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{key} holds values that are not finite numbers; copy it again")
    return tensor
