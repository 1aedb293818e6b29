"""Tiny models and texts that every test can afford."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from loopwise.data import PackedBlocks, TokenBatch, generate, tokenize
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.tokenizer import ByteTokenizer

# A shell starts what runs in its background with interrupts ignored, and tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread: tests run beside one another, and their models are too small to share out.
torch.set_num_threads(1)

TINY = {
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 48,
    "n_prelude_layers": 1,
    "n_core_layers": 2,
    "n_coda_layers": 1,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="minutes long; run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache of token files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """No file may be written past ``room`` bytes meanwhile, for whoever runs this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


def make_model(seed: int = 0, **changes: object) -> RecurrentModel:
    torch.manual_seed(seed)
    config = RecurrentConfig(vocab_size=258, **{**TINY, **changes})
    model = RecurrentModel(config)
    # Fresh weights barely move the output; stretch them so that depth and neighbours matter.
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embedding" not in name:
                p.mul_(3.0)
    return model.eval()


@pytest.fixture
def tiny_model() -> RecurrentModel:
    return make_model()


def make_blocks(
    seq: int = 32, documents: int = 40, first: int = 0, shuffle: bool = True
) -> PackedBlocks:
    store = tokenize(generate("stories", 0, first, documents), ByteTokenizer())
    return PackedBlocks(store, seq, seed=0, shuffle=shuffle)


@pytest.fixture
def blocks() -> PackedBlocks:
    return make_blocks()


@pytest.fixture
def batch(blocks: PackedBlocks) -> TokenBatch:
    return blocks.batch(0, 4)
