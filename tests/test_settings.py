"""Presets, layers of settings, and impossible runs that are refused before any work."""

from __future__ import annotations

import json
import re

import pytest
import torch

from loopwise.config import from_table, to_table
from loopwise.errors import ConfigError, LoopwiseError
from loopwise.models import MODELS
from loopwise.models.costs import parameters
from loopwise.settings import (
    RunConfig,
    build_config,
    explicit_table,
    fixed_baseline,
    preset_names,
    resolved_table,
)
from loopwise.train.recurrence import DepthSampler


def build(*overrides: str, **kwargs) -> RunConfig:
    return build_config(explicit_table(overrides=overrides, **kwargs))


# Presets.


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_whole_run(name):
    config = build(preset=name)
    with torch.device("meta"):
        model = MODELS[config.architecture](config.model_config(config.tokenizer.vocab_size))
    assert parameters(model) > 0
    assert DepthSampler(config.depth).mean == pytest.approx(config.depth.mean, abs=1e-3)


def test_the_paper_preset_has_the_papers_size():
    """d 576, 9/3 heads, FFN 1536, vocabulary 49,152, layers 2/4/2, 57.3M parameters."""
    config = build(preset="paper-135m")
    shape = config.model_config(config.tokenizer.vocab_size)
    with torch.device("meta"):
        model = MODELS[config.architecture](shape)
    assert parameters(model) / 1e6 == pytest.approx(57.3, abs=0.05)
    assert (shape.d_model, shape.n_heads, shape.n_kv_heads, shape.d_ff) == (576, 9, 3, 1536)
    assert (shape.n_prelude_layers, shape.n_core_layers, shape.n_coda_layers) == (2, 4, 2)
    assert shape.vocab_size == 49_152
    train = config.train
    tokens_per_step = train.seq * train.micro_batch * train.accumulation
    assert tokens_per_step == 262_144
    assert tokens_per_step * train.steps == pytest.approx(12.9e9, rel=1e-3)
    assert config.depth.mean == 8.0


def test_the_preset_of_look_ups_is_the_documented_run():
    """Text included: 2.71M parameters, with all 640 ids, learn from 3.07M tokens of it."""
    config = build(preset="lookups")
    assert config.data.sources == ("builtin:lookups:140000",)
    with torch.device("meta"):
        model = MODELS[config.architecture](config.model_config(config.tokenizer.vocab_size))
    geometry, train = model.geometry, config.train
    assert parameters(model) / 1e6 == pytest.approx(2.71, abs=0.01)
    assert (geometry.n_prelude_layers, geometry.n_core_layers, geometry.n_coda_layers) == (1, 2, 0)
    tokens = train.steps * train.seq * train.micro_batch * train.accumulation
    assert tokens / 1e6 == pytest.approx(3.07, abs=0.005)
    assert (config.depth.mean, config.depth.backprop_depth) == (8.0, 4)


def test_an_unknown_preset_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="no preset named 'smal'; did you mean 'small'\\? known:"):
        build(preset="smal")
    names = "flt-base, flt-small, flt-tiny, lookups, paper-135m, small, tiny"
    with pytest.raises(ConfigError, match=f"known: {names}"):
        build(preset="../../etc/passwd")


# Layers.


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\n[train]\nsteps = 11\nseq = 64\n[optim]\nlr = 0.1\n")
    made = build("optim.lr=0.3", file=file, settings={"seed": 2, "data": {"sources": ["x.txt"]}})
    assert made.train.steps == 11, "file over preset"
    assert made.train.seq == 64
    assert made.train.micro_batch == build().train.micro_batch, "preset where the file is silent"
    assert made.seed == 2, "command line over file"
    assert made.optim.lr == 0.3, "--set over all"
    assert made.data.sources == ("x.txt",)


def test_settings_come_back_from_their_resolved_table():
    made = build("model.d_model=64", "train.eval_depths=[1,3]", "depth.max_depth=20")
    table = json.loads(json.dumps(resolved_table(made)))
    again = from_table(RunConfig, table)
    assert resolved_table(again) == resolved_table(made)
    assert again.model_config(300) == made.model_config(300)
    assert table["model"]["n_heads"] == 2, "defaults and presets are filled in"
    assert "vocab_size" not in table["model"]
    assert from_table(RunConfig, to_table(made)) == made


def test_the_architectures_own_settings_are_read():
    table = {
        "architecture": "fixed",
        "model": {"d_model": 64, "n_layers": 3},
        "depth": {"kind": "fixed", "mean": 1},
    }
    fixed = from_table(RunConfig, table)
    assert fixed.model_config(300).n_layers == 3


# Refusals.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=5", "'stepz' in section [train]; did you mean 'steps'?"),
        ("tran.steps=5", "'tran' in the top level; did you mean 'train'?"),
        ("model.d_modle=5", "'d_modle' in section [model]; did you mean 'd_model'?"),
        ("data.read.spli=line", "'spli' in section [data.read]; did you mean 'split'?"),
        ("lr=1", "'lr' in the top level; it belongs in [optim]"),
        ("horizon=3", "it belongs in [measure]"),
        ("steps=3", "it belongs in [train]"),
        ("train.steps=many", "train.steps='many' must be int"),
        ("train.steps=1.5", "train.steps=1.5 must be int"),
        ("train.dtype=fp16", "train.dtype='fp16' is not allowed"),
        ("train.eval_depths=8", "train.eval_depths=8 must be a list"),
        ("train.eval_depths=[1,two]", "must be"),
        ("seed=-1", "seed=-1 must lie in 0.."),
        ("seed=true", "seed=True must be int"),
        ("model.vocab_size=300", "set tokenizer.vocab_size"),
        ("architecture=recurent", "did you mean 'recurrent'"),
        ("data.sources=[]", "data.sources is empty"),
        ("data.sources=a.txt", "data.sources='a.txt' must be a list"),
        ("data.held_out_fraction=0", "held_out_fraction=0.0"),
        ("data.held_out_fraction=1", "held_out_fraction=1.0"),
        ("data.held_out_fraction=nan", "held_out_fraction=nan"),
        ("data.max_documents=1", "max_documents=1"),
        ("data.read.split=page", "'page'"),
        ("data.read.max_document_chars=0", "max_document_chars=0"),
        ("tokenizer.vocab_size=100", "vocab_size=100 must be at least 258"),
        ("tokenizer.train_megabytes=0", "train_megabytes=0"),
        ("tokenizer.train_megabytes=nan", "train_megabytes=nan"),
        ("measure.horizon=0", "measure.horizon=0"),
        ("measure.horizon=-1", "measure.horizon=-1"),
        ("measure.batch=0", "measure.batch=0"),
        ("measure.tokens=0", "measure.tokens=0"),
        ("measure.epsilon=0", "measure.epsilon=0"),
        ("measure.epsilon=-1e-3", "measure.epsilon=-0.001"),
        ("measure.epsilon=nan", "measure.epsilon=nan"),
        ("measure.dtype=fp64", "'fp64'"),
        ('measure.live_rules=["latnt-kl"]', "'latnt-kl'; did you mean 'latent-kl'"),
        ('measure.live_rules=["oracle"]', "'oracle' needs later recurrences, so it cannot"),
        ('measure.live_rules=["fixed"]', "measure.live_rules: exit rule 'fixed' decides"),
        ("measure.live_rules=kl", "measure.live_rules='kl' must be a list"),
        ("depth.mean=0.5", "depth.mean=0.5"),
        ("depth.mean=nan", "depth.mean=nan"),
        ("depth.sigma=0", "depth.sigma=0"),
        ("depth.sigma=nan", "depth.sigma=nan"),
        ("depth.kind=normal", "'normal'"),
        ("depth.backprop_depth=0", "backprop_depth=0"),
        ("depth.max_depth=3", "depth.max_depth=3 must be at least depth.mean=8"),
        ("optim.lr=0", "optim.lr=0"),
        ("optim.lr=nan", "optim.lr=nan"),
        ("optim.beta1=1", "optim.beta1=1"),
        ("optim.momentum=nan", "optim.momentum=nan"),
        ("optim.weight_decay=-1", "weight_decay=-1"),
        ("optim.name=sgd", "optim.name='sgd'"),
        ("train.steps=0", "train.steps=0"),
        ("train.seq=1", "train.seq=1"),
        ("train.micro_batch=0", "train.micro_batch=0"),
        ("train.keep=0", "train.keep=0"),
        ("train.workers=-1", "train.workers=-1"),
        ("model.d_model=0", "model.d_model=0"),
        ("model.d_model=30", "must be a multiple of twice"),
        ("model.n_heads=3", "must be a multiple of twice"),
        ("model.n_heads=0", "model.n_heads=0"),
        ("model.n_kv_heads=3", "must divide"),
        ("model.n_core_layers=0", "model.n_core_layers=0"),
        ("model.n_prelude_layers=-1", "model.n_prelude_layers=-1"),
        ("model.injection=mul", "model.injection='mul'"),
        ("model.d_model=128.0", "model.d_model=128.0 must be int"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_value(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(override)


@pytest.mark.parametrize(
    ("override", "home"),
    [
        ("train.lr=3e-4", "optim"),
        ("optim.steps=5", "train"),
        ("train.horizon=5", "measure"),
        ("train.sources=[1]", "data"),
        ("measure.seq=64", "train"),
        ("model.backprop_depth=2", "depth"),
        ("d_model=64", "model"),
    ],
)
def test_u78_a_setting_in_the_wrong_section_is_sent_to_the_right_one(override, home):
    with pytest.raises(ConfigError, match=rf"belongs in \[{home}\]"):
        build(override)


@pytest.mark.parametrize("override", ["learning_rat=1", "train.learning_rate=1", "optim.learn_r=1"])
def test_u78_the_learning_rate_is_found_by_its_long_name(override):
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        build(override)


def test_the_example_of_a_refused_set_is_a_setting_there_is():
    """Whoever copies the remedy must not run into the next error."""
    with pytest.raises(ConfigError) as caught:
        build("steps 5")
    example = re.search(r"--set (\S+=\S+)$", str(caught.value))
    assert example, caught.value
    build(example.group(1))


@pytest.mark.parametrize("override", ["model=5", "model=[1]", "model=wide", "train=5", "data=x"])
def test_a_section_that_is_not_one_is_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        build(override)


@pytest.mark.parametrize(
    "override",
    [
        "train.eval_depths=[]",
        "train.eval_depths=[0, 4]",
        "train.eval_depths=[-1]",
        "train.eval_blocks=0",
        "depth.mean=inf",
        "optim.lr=inf",
        "optim.weight_decay=nan",
        "measure.epsilon=inf",
        "model.norm_eps=-1.0",
        "model.norm_eps=nan",
        "model.rope_base=-1.0",
        "model.rope_base=nan",
    ],
)
def test_values_that_would_fail_or_mean_nothing_later_are_refused_now(override):
    """After an hour of training is no time to learn that an evaluation depth was 0."""
    with pytest.raises(LoopwiseError, match=re.escape(override.partition("=")[0].split(".")[1])):
        build(override)


def test_a_model_of_one_recurrence_refuses_random_depth():
    table = {"architecture": "fixed"}
    with pytest.raises(ConfigError, match="at most 1 recurrence; set depth.kind=fixed"):
        from_table(RunConfig, table)
    from_table(RunConfig, {**table, "depth": {"kind": "fixed", "mean": 1}})
    with pytest.raises(ConfigError, match="at most 1 recurrence"):
        from_table(RunConfig, {**table, "depth": {"kind": "fixed", "mean": 2}})


def test_settings_are_plain_values_only():
    table = resolved_table(build())
    json.dumps(table, allow_nan=False)


# The non-looped baseline.


def test_the_twin_of_equal_parameters_differs_by_the_adapter_and_the_extra_norms():
    asked = explicit_table(overrides=["tokenizer.vocab_size=300"])
    looped, fixed = build_config(asked), build_config(fixed_baseline(asked, "parameters"))
    made = [parameters(MODELS[c.architecture](c.model_config(300))) for c in (looped, fixed)]
    d, layers = 128, 4
    assert made[0] - made[1] == 2 * d * d + 2 * layers * d
    assert (fixed.train, fixed.optim, fixed.data) == (looped.train, looped.optim, looped.data)
    assert fixed.depth.kind == "fixed"


def test_the_twin_of_equal_flops_unrolls_the_core_at_the_mean_depth():
    fixed = build_config(fixed_baseline(explicit_table(), "flops"))
    assert fixed.model["n_layers"] == 1 + 8 * 2 + 1


def test_only_a_recurrent_run_has_a_twin():
    asked = explicit_table(overrides=["architecture=looped"])
    with pytest.raises(ConfigError, match="'looped'"):
        fixed_baseline(asked, "flops")
