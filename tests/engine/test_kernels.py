"""The compiled decode attention equals the tensor operations it stands in for."""

from __future__ import annotations

import pytest
import torch

from loopwise.engine import Engine, EngineConfig, SamplingParams, kernels
from loopwise.engine.attention import _mix
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not kernels.can_fuse(torch.float32, CPU), reason="there is no C compiler here"
)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("shared", [1, 3])
def test_it_equals_gathered_products(dtype, head_dim, shared):
    torch.manual_seed(head_dim)
    rows, n_kv, seen, entries = 5, 2, 37, 200
    keys, values = (torch.randn(entries * n_kv, head_dim).to(dtype) for _ in range(2))
    q = (3 * torch.randn(rows, n_kv, shared, head_dim)).to(dtype)
    read = torch.randint(1, entries * n_kv, (rows, n_kv, seen))
    lengths = torch.tensor([1, 2, 20, 36, 37])
    unseen = torch.arange(seen) >= lengths[:, None]
    read[unseen[:, None].expand_as(read)] = 0
    bias = torch.zeros(rows, seen).masked_fill(unseen, -torch.inf)
    keys[0] = values[0] = torch.nan  # what may not be read is not looked at
    found = kernels.decode_attention(q, keys, values, read.flatten(), bias.flatten())
    assert found.dtype == dtype
    keys[0] = values[0] = 0
    scratch = torch.empty(2, read.numel() * head_dim, dtype=torch.float64)
    allowed = bias.view(rows, 1, 1, seen).double()
    pools = keys.double(), values.double()
    wanted = _mix(q.double(), *pools, read.flatten(), allowed, scratch)
    # bfloat16 rounds once, on the way out: 8 bits.
    assert (found.double() - wanted).abs().max() < (2e-6 if dtype == torch.float32 else 2e-2)


@needs_compiler
def test_extreme_scores_stay_numbers():
    q = torch.full((1, 1, 1, 8), 1e3)
    keys = torch.tensor([[0.0] * 8, [1e3] * 8, [-1e3] * 8, [1e3] * 8])
    values = torch.arange(32.0).view(4, 8)
    found = kernels.decode_attention(q, keys, values, torch.tensor([1, 2, 3]), torch.zeros(3))
    assert torch.allclose(found.flatten(), (values[1] + values[3]) / 2)


@needs_compiler
def test_loading_it_leaves_denormal_numbers_alone():
    assert torch.tensor(1e-310, dtype=torch.float64).mul(0.5).item() > 0
    assert 5e-324 * 1.0 > 0


@needs_compiler
def test_an_engine_decodes_the_same_with_it_and_without():
    def made(setting: str) -> list[object]:
        config = EngineConfig(exit="fixed:4", max_depth=4, slots=3, max_seq=64, kernels=setting)
        engine = Engine(make_model(injection="add"), ByteTokenizer(), config)
        assert engine.stats()["attention"].startswith("compiled" if setting == "auto" else "tensor")
        prompts = ["Tom has a red ball", "Where", "a b c d"]
        return [g.completions[0] for g in engine.generate(prompts, SamplingParams(max_tokens=9))]

    for a, b in zip(made("auto"), made("off"), strict=True):
        assert a.token_ids == b.token_ids
        assert torch.tensor(a.logprobs).sub(torch.tensor(b.logprobs)).abs().max() < 1e-4


def test_without_a_compiler_the_engine_says_so(monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    kernels._library.cache_clear()
    try:
        config = EngineConfig(exit="fixed:2", max_depth=2, slots=1, max_seq=32)
        engine = Engine(make_model(), ByteTokenizer(), config)
        assert engine.stats()["attention"] == "tensor operations"
        assert engine.generate(["a"], SamplingParams(max_tokens=2))
    finally:
        kernels._library.cache_clear()


def test_a_compiler_that_fails_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_FLAGS", ("--no-such-flag-at-all",))
    kernels._library.cache_clear()
    try:
        assert not kernels.can_fuse(torch.float32, CPU)
        assert list((tmp_path / "loopwise" / "kernels").iterdir()) == [], "nothing half-built stays"
    finally:
        kernels._library.cache_clear()
