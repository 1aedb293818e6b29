"""What a run needs: told from the settings alone, and a run that cannot fit is refused."""

from __future__ import annotations

import pytest
import torch

from loopwise.errors import ConfigError
from loopwise.models import MODELS
from loopwise.settings import build_config, explicit_table, preset_table
from loopwise.study import training
from loopwise.train.machine import free_memory_gib
from tests.train.test_loop import make_trainer


def config(*overrides: str):
    return build_config(explicit_table(overrides=overrides))


def test_a_run_larger_than_the_machine_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(training, "free_memory_gib", lambda device: 0.25)
    with pytest.raises(
        ConfigError, match=r"needs about 0.5 GiB .* cpu has 0.2 GiB free; with --set"
    ):
        training.check_memory(config("device=cpu"))
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
    full = make_trainer(tmp_path / "fp32").estimate()
    assert full["memory_gib"] * 1024**3 > 16 * full["parameters"], "weight, gradient, two moments"


def test_this_machine_tells_what_it_has_or_says_nothing():
    free = free_memory_gib(torch.device("cpu"))
    assert free is None or free > 0
