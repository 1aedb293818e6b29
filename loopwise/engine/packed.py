"""Weights in the layout of the processor's bfloat16 matrix products.

A product of few rows otherwise spends most of its time on bringing the weight into that layout, at
every call. A packed weight gives the same numbers; it is a second copy in memory.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from loopwise.models.base import LoopedLM

Model = TypeVar("Model", bound=nn.Module)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this dtype are faster for it here."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def is_hooked(model: nn.Module) -> bool:
    """Whether calls of some module are watched or changed; a packed twin would not have it."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def state_of(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where each lies, and how often it has been written to."""
    return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]


def packed(model: Model) -> Model:
    """A model of the same parameters whose linear layers multiply by packed copies of them."""
    shared = itertools.chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return twin


def packed_head(model: LoopedLM) -> Callable[[Tensor], Tensor]:
    """The model's ``head`` with a packed weight."""
    product = PackedLinear(model.head_weight)
    return lambda hidden: model.capped(product(hidden))


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference; later changes of ``weight`` do not reach it (see `state_of`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.width = len(weight)
        self.number = next(_NUMBERS)
        # Here and below what torch.compile itself calls on frozen bfloat16 weights. Looked up when
        # used: builds without oneDNN, as those for Apple's processors, have neither.
        _PACKED[self.number] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        weakref.finalize(self, _PACKED.pop, self.number)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.loopwise.packed_linear(x, self.bias, self.number, self.width)


# Packed weights are opaque: a compiled function can hold their numbers only.
_NUMBERS = itertools.count()
_PACKED: dict[int, Tensor] = {}


def _packed_linear(x: Tensor, bias: Tensor | None, number: int, width: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, _PACKED[number], bias, "none", [], "")


_LIBRARY = torch.library.Library("loopwise", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor? bias, int number, int width) -> Tensor")
_LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "loopwise::packed_linear",
    lambda x, bias, number, width: x.new_empty(*x.shape[:-1], width),
    lib=_LIBRARY,
)
