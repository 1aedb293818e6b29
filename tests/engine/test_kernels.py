"""The compiled attention equals attention by hand, and engines decode alike with it and without."""

from __future__ import annotations

import pytest
import torch

from loopwise.engine import Completion, Engine, EngineConfig, SamplingParams, kernels, rows
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.engine.decoding import build

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not kernels.can_fuse(torch.float32, CPU), reason="there is no C compiler here"
)


@pytest.fixture
def three_threads():
    """Rows are shared out, and none may read before all have written."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("shared", [1, 3, 40])
def test_it_equals_attention_by_hand(dtype, head_dim, shared, three_threads):
    """Runs of 1, 45 and 2 rows, and 3 that only write; keys and values lie in one tensor."""
    torch.manual_seed(head_dim)
    sizes, n_kv, seen, entries = torch.tensor([1, 45, 2]), 2, 117, 400
    asked = int(sizes.sum())
    rows = asked + 3
    keys, values = (torch.randn(entries, n_kv, head_dim).to(dtype) for _ in range(2))
    q = (3 * torch.randn(rows, n_kv * shared, head_dim)).to(dtype)
    k, v = torch.randn(rows, 2 * n_kv, head_dim).to(dtype).split(n_kv, dim=1)
    read = torch.randint(1, entries - rows, (3, seen))
    written = torch.arange(entries - rows, entries)
    # Rows of the long run see 40 entries and their own: from 0, 1, .. on. The others see from one
    # entry to all there are.
    long = torch.arange(45)
    begin = torch.cat((torch.tensor([116]), long, torch.tensor([0, 3])))
    end = torch.cat((torch.tensor([117]), long + 41, torch.tensor([seen, 77])))
    read[1, 40:85] = written[1:46]
    for run, rows_of in enumerate((begin[:1], begin[1:46], begin[46:])):
        last = (end[:1], end[1:46], end[46:])[run].max()
        read[run, : rows_of.min()] = read[run, last:] = 0
    keys[0] = values[0] = torch.nan  # what may not be read is not looked at
    out = torch.full((rows, n_kv * shared, head_dim), 7.0, dtype=dtype)
    span = torch.cat((begin, end))
    kernels.decode_attention(q, k, v, keys, values, written, read.flatten(), sizes, span, out)
    assert torch.equal(keys[written], k) and torch.equal(values[written], v)
    assert (out[asked:] == 7.0).all(), "rows of groups are somebody else's"
    run_of = torch.arange(3).repeat_interleave(sizes)
    for row in range(asked):
        which = read[run_of[row], begin[row] : end[row]]
        for head in range(n_kv * shared):
            key, value = (pool[which, head // shared].double() for pool in (keys, values))
            weight = (key @ q[row, head].double() / head_dim**0.5).softmax(0)
            gap = (out[row, head].double() - weight @ value).abs().max()
            # bfloat16 rounds once, on the way out: 8 bits.
            assert gap < (4e-6 if dtype == torch.float32 else 2e-2), (row, head)


def attend_by_hand(q, keys, values, dtype=torch.float32):
    """One row that reads all of a pool, the last entry its own."""
    keys, values = keys.to(dtype).unsqueeze(1), values.to(dtype).unsqueeze(1)
    n = len(keys)
    out = torch.empty(1, 1, q.shape[-1], dtype=dtype)
    kernels.decode_attention(
        q.to(dtype),
        keys[-1:].clone(),
        values[-1:].clone(),
        keys,
        values,
        torch.tensor([n - 1]),
        torch.arange(n),
        torch.tensor([1]),
        torch.tensor([0, n]),
        out,
    )
    return out.flatten()


@needs_compiler
def test_extreme_scores_stay_numbers():
    q = torch.full((1, 1, 8), 1e3)
    keys = torch.tensor([[1e3] * 8, [-1e3] * 8, [1e3] * 8])
    values = torch.arange(24.0).view(3, 8)
    assert torch.allclose(attend_by_hand(q, keys, values), (values[0] + values[2]) / 2)


@needs_compiler
def test_what_leaves_in_bfloat16_is_rounded_as_torch_rounds():
    """Half-way cases to even, and what is no number."""
    values = torch.tensor(
        [
            [1.0, 1.0078125, -1.0, 3.3e38, 1e-30, 0.0, 2.0, 5.0],
            [1.0078125, 1.015625, -1.0078125, 3.3e38, 1e-30, 0.0, 1.0, 0.0],
        ]
    )
    found = attend_by_hand(torch.zeros(1, 1, 8), torch.zeros(2, 8), values, torch.bfloat16)
    exact = values.bfloat16().double().mean(0).float()  # the weights are equal; three lie half-way
    assert torch.equal(found, exact.bfloat16())
    assert found[:3].tolist() == [1.0, 1.015625, -1.0]
    values[0, 0] = torch.nan
    found = attend_by_hand(torch.zeros(1, 1, 8), torch.zeros(2, 8), values, torch.bfloat16)
    assert found[0].isnan() and not found[1:4].isnan().any()


@needs_compiler
def test_loading_it_leaves_denormal_numbers_alone():
    assert torch.tensor(1e-310, dtype=torch.float64).mul(0.5).item() > 0
    assert 5e-324 * 1.0 > 0


@needs_compiler
@pytest.mark.parametrize("name", ["add", "dory"])
@pytest.mark.parametrize("work", [0, 16_000, 10**9])
def test_an_engine_decodes_the_same_with_it_and_without(name, work, monkeypatch):
    """Chunks in the kernel, as matrix products, and some of both in one call; local layers too."""
    mixed = []

    def made(setting: str) -> list[Completion]:
        config = EngineConfig(
            exit="fixed:4",
            max_depth=4,
            slots=3,
            max_seq=96,
            chunk=24,
            prefill_rows=72,
            kernels=setting,
        )
        engine = Engine(build(name, torch.float32), ByteTokenizer(), config)
        assert engine.stats()["attention"].startswith("compiled" if setting == "auto" else "tensor")
        batch = engine.table.batch

        def seen(chunks):
            found = batch(chunks)
            mixed.append(bool(found.groups) and max(found.runs, default=0) > 1)
            return found

        monkeypatch.setattr(engine.table, "batch", seen)
        prompts = ["Tom has a red ball and " + "a blue one and " * 3, "Where", "a b c d " * 4]
        return [g.completions[0] for g in engine.generate(prompts, SamplingParams(max_tokens=9))]

    monkeypatch.setattr(rows, "FEW_WORK", {torch.float32: work})
    fused = made("auto")
    assert any(mixed) is (work == 16_000), "runs of several rows and groups in one call"
    for a, b in zip(fused, made("off"), strict=True):
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


@needs_compiler
def test_other_dtypes_than_the_pools_are_refused():
    """It would read past the end of narrower values."""
    pool, one = torch.zeros(2, 1, 8), torch.zeros(1, 1, 8)
    where, span = torch.tensor([1]), torch.tensor([0, 1])
    with pytest.raises(AssertionError, match="one dtype"):
        kernels.decode_attention(
            one.bfloat16(), one, one, pool, pool.clone(), where, where, where, span, one.clone()
        )


def test_compiled_code_is_told_the_layout_that_comes():
    """Results are contiguous, whatever the queries are."""
    q = torch.empty(3, 8, 4, device="meta").transpose(1, 2)
    rest = [torch.empty(3, 2, 8, device="meta") for _ in range(8)]
    assert torch.ops.loopwise.attend_pages(q, *rest).is_contiguous()
