"""Packed weights give the numbers of the weights they are copies of."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from loopwise.engine import Engine, EngineConfig, SamplingParams, packed
from loopwise.errors import EngineError
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.engine.decoding import ARCHITECTURES, build, finish

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not packed.can_pack(torch.bfloat16, CPU), reason="no bfloat16 matrix products here"
)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_packed_layer_equals_the_layer(bias, rows):
    torch.manual_seed(rows)
    layer = nn.Linear(48, 80, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(rows, 48).bfloat16()
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    found = packed.PackedLinear(layer.weight, layer.bias)(x)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=1e-2, atol=1e-3)


@needs_packing
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_linear_layer_is_packed_and_no_parameter_copied(name):
    model = build(name, torch.bfloat16)
    twin = packed.packed(model)
    assert not [m for m in twin.modules() if type(m) is nn.Linear]
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    assert [m for m in model.modules() if type(m) is nn.Linear], "the model itself is as it was"
    hidden = torch.randn(3, model.geometry.d_model).bfloat16()
    found, wanted = packed.packed_head(model)(hidden), model.head(hidden)
    assert torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def forced_logprobs(model, tokens, **config):
    engine = Engine(model, ByteTokenizer(), EngineConfig(max_seq=64, slots=4, **config))
    params = SamplingParams(max_tokens=len(tokens), temperature=0)
    request = engine.submit("once upon", params, forced=tokens)
    finish(engine)
    return engine, torch.tensor(request.generation().completions[0].logprobs)


@needs_packing
@pytest.mark.parametrize("compile", ["off", "on"])
def test_an_engine_decodes_alike_with_and_without(compile, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: real(call, backend="eager", **how))
    model = make_model().bfloat16()
    tokens = list(range(20, 32))
    engine, found = forced_logprobs(model, tokens, compile=compile)
    plain, wanted = forced_logprobs(model, tokens, compile=compile, packed="off")
    assert engine.stats()["weights"] == "packed"
    assert plain.stats()["weights"] == "as stored"
    assert (found - wanted).abs().max() < 0.05


def test_float32_weights_are_used_as_stored():
    engine = Engine(make_model(), ByteTokenizer(), EngineConfig(max_seq=64, slots=4))
    assert engine.stats()["weights"] == "as stored"


@needs_packing
def test_packed_weights_go_with_their_engine():
    gc.collect()
    before = len(packed._PACKED)
    engine = Engine(make_model().bfloat16(), ByteTokenizer(), EngineConfig(max_seq=64))
    assert len(packed._PACKED) > before
    del engine
    gc.collect()
    assert len(packed._PACKED) == before


def test_without_onednn_the_package_still_loads():
    """Builds of torch for Apple's processors have no such operators; looking them up at import
    time was an error of every command that decodes."""
    code = (
        "import torch\n"
        "class Nothing:\n"
        "    def __getattr__(self, name): raise AttributeError(name)\n"
        "torch.ops.mkldnn = Nothing()\n"
        "torch.backends.mkldnn.is_available = lambda: False\n"
        "import loopwise.engine\n"
        "from loopwise.engine.packed import can_pack\n"
        "assert not can_pack(torch.bfloat16, torch.device('cpu'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_packing
def test_a_hooked_model_is_not_packed():
    """A hook on a packed layer was dropped, and what one on another module wrote to was copied."""
    model, seen = make_model().bfloat16(), []
    layer = next(m for m in model.modules() if type(m) is nn.Linear)
    layer.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    engine = Engine(model, ByteTokenizer(), EngineConfig(max_seq=64, slots=4))
    engine.generate(["a"], SamplingParams(max_tokens=2))
    assert engine.stats()["weights"] == "as stored"
    assert seen


def _write(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


@needs_packing
@pytest.mark.parametrize(
    "change",
    [_write, lambda model: model.load_state_dict(model.state_dict()), lambda model: model.float()],
    ids=["written to", "loaded", "another dtype"],
)
def test_weights_that_changed_are_not_decoded_with_half_old(change):
    """Norms and embeddings are the model's own and were new, all products the old ones."""
    model = make_model().bfloat16()
    engine = Engine(model, ByteTokenizer(), EngineConfig(max_seq=64, slots=4))
    engine.generate(["a"], SamplingParams(max_tokens=2))
    change(model)
    with pytest.raises(EngineError, match="weights have changed"):
        engine.generate(["a"], SamplingParams(max_tokens=2))
    if model.dtype == torch.bfloat16:
        plain = Engine(model, ByteTokenizer(), EngineConfig(max_seq=64, slots=4, packed="off"))
        change(model)
        assert plain.generate(["a"], SamplingParams(max_tokens=2))
