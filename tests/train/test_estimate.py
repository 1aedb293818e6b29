"""What a run needs: told from the settings alone, and a run that cannot fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loopwise.errors import ConfigError
from loopwise.models import MODELS
from loopwise.models.costs import parameters
from loopwise.settings import build_config, explicit_table, preset_table
from loopwise.study import training
from loopwise.train.estimate import memory_gib
from loopwise.train.machine import free_memory_gib
from tests.train.test_loop import make_trainer


def config(*overrides: str):
    return build_config(explicit_table(overrides=overrides))


def test_a_run_larger_than_the_machine_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(training, "free_memory_gib", lambda device: 0.25)
    with pytest.raises(
        ConfigError, match=r"needs about 0.5 GiB .* cpu has 0.2 GiB free; with --set"
    ):
        training.check_memory(config("device=cpu", "train.dtype=fp32"))
    monkeypatch.setattr(training, "free_memory_gib", lambda device: 64.0)
    training.check_memory(config())
    with pytest.raises(ConfigError, match=r"[\d,]+ parameters"):
        training.check_memory(config("model.d_model=1000000"))
    with pytest.raises(ConfigError, match="no machine holds a model of this shape"):
        training.check_memory(config("model.d_model=1000000000000"))


def test_where_the_machine_does_not_tell_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(training, "free_memory_gib", lambda device: None)
    training.check_memory(config("model.d_model=1000000"))


def test_every_architecture_is_laid_out_without_memory(monkeypatch):
    """The meta device takes none; a model that reads its weights when made would fail here."""
    monkeypatch.setattr(training, "free_memory_gib", lambda device: 1e9)
    for name in MODELS:
        limit = MODELS[name].config_class(vocab_size=258).geometry.max_depth
        depth = [f"depth.mean={limit or 4}", "depth.kind=fixed", "train.seq=64"]
        training.check_memory(config(f"architecture={name}", *depth))
    training.check_memory(config("train.low_rank=4"))
    training.check_memory(build_config(preset_table("paper-135m")))


def test_the_plan_of_a_run_is_what_was_checked(tmp_path, monkeypatch):
    """One formula: what the trainer announces is what the settings were refused by."""
    trainer = make_trainer(tmp_path)
    with torch.device("meta"):
        model = type(trainer.model)(trainer.model.config)
    optimizer = training.make_optimizer(model, trainer.optim, torch.float32)
    planned = training.planned_gib(model, optimizer, trainer.config, trainer.schedule.final)
    assert planned == trainer.estimate()["memory_gib"]


def test_float32_weights_are_their_own_masters(tmp_path):
    """They were counted twice. Here without what a batch adds: bytes per parameter."""
    for dtype, each in (("fp32", 4 + 4 + 8), ("bf16", 2 + 2 + 4 + 4 + 8)):
        trainer = make_trainer(tmp_path, dtype=dtype)
        gib = memory_gib(trainer.model, trainer.optimizer, rows=0, recurrences=0)
        assert gib * 1024**3 == each * parameters(trainer.model), f"{dtype}: + gradient, moments"


MEMINFO = """MemTotal:       16384000 kB
MemFree:          102400 kB
MemAvailable:    3145728 kB
SwapTotal:       4194304 kB
SwapFree:        1048576 kB
HugePages_Total:       0
"""


def test_free_memory_is_what_can_be_had_swap_included(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: MEMINFO)
    assert free_memory_gib(torch.device("cpu")) == 4.0


@pytest.mark.parametrize("said", ["", "MemFree: 5 kB\n", "MemAvailable:\n", "SwapFree: x kB\n"])
def test_another_account_of_memory_is_not_taken(monkeypatch, said):
    """Then all the machine has, free or not."""
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: said)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 2**19, "SC_PAGE_SIZE": 4096}.get)
    assert free_memory_gib(torch.device("cpu")) == 2.0
