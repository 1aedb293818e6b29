"""The settings of a run: one section per component, presets as TOML files in the package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from loopwise.config import (
    check_choices,
    from_table,
    merge,
    parse_overrides,
    preset_names,
    read_toml,
    to_table,
)
from loopwise.data import ReadOptions
from loopwise.errors import ConfigError, ExitError
from loopwise.exits import EXITS
from loopwise.exits.base import Reads
from loopwise.models import MODELS
from loopwise.registry import did_you_mean
from loopwise.train.loop import TrainConfig
from loopwise.train.loss import ObjectiveConfig
from loopwise.train.optim import OptimConfig
from loopwise.train.recurrence import DepthConfig

DEFAULT_PRESET = "tiny"
Match = Literal["parameters", "flops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text is learned from and measured on."""

    sources: tuple[str, ...] = ("builtin:stories", "builtin:ledgers")
    held_out: tuple[str, ...] = ()  # measured as they are; empty: a part of each source
    held_out_fraction: float = 0.02
    max_documents: int | None = None  # of each source
    read: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("data.sources is empty; name a file, a folder or builtin:stories")
        if not 0 < self.held_out_fraction < 1:
            raise ConfigError(
                f"data.held_out_fraction={self.held_out_fraction} must lie between 0 and 1"
            )
        if self.max_documents is not None and self.max_documents < 2:
            raise ConfigError(f"data.max_documents={self.max_documents} must be at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """``bpe`` is trained on the data; ``byte`` needs none; a path loads a tokenizer.json."""

    kind: str = "bpe"
    vocab_size: int = 4096  # of a trained one
    train_megabytes: float = 20.0  # text it is trained on, at most

    def __post_init__(self) -> None:
        if self.vocab_size < 258:
            raise ConfigError(
                f"tokenizer.vocab_size={self.vocab_size} must be at least 258 (every byte)"
            )
        if not self.train_megabytes > 0:
            raise ConfigError(f"tokenizer.train_megabytes={self.train_megabytes} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """How far, on how much text, and with which criterion a frozen model is measured."""

    horizon: int = 32  # recurrences
    tokens: int = 40_000  # of each corpus, at most
    fit_tokens: int = 10_000  # the fitted rules' own split, taken before the measured text
    live_tokens: int = 10_000  # of the first corpus's trace, run again under live exits
    live_thresholds: int = 6
    # The rules that are run live as well; every other rule is judged by replay.
    live_rules: tuple[str, ...] = ("kl", "latent-change", "probe", "latent-kl")
    epsilon: float = 1e-3  # nats, KL to the previous recurrence below which a token has settled
    batch: int = 8  # sequences
    dtype: Literal["fp32", "bf16"] = "fp32"
    # Checkpoint of another model, measured on the same text in bits per byte, its own depth.
    reference: str | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("horizon", "tokens", "fit_tokens", "live_tokens", "live_thresholds", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"measure.{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"measure.epsilon={self.epsilon} must be a number above 0, finite")
        for name in self.live_rules:
            _check_live_rule(name)


def _check_live_rule(name: str) -> None:
    try:
        reads = EXITS[name].reads
    except ExitError as err:
        raise ConfigError(f"measure.live_rules: {err}") from None
    if reads is Reads.TRUTH:
        raise ConfigError(
            f"measure.live_rules: exit rule {name!r} needs later recurrences, so it cannot run "
            "live; leave it out, it is replayed anyway"
        )
    if reads is Reads.NOTHING:
        raise ConfigError(
            f"measure.live_rules: exit rule {name!r} decides nothing token by token; leave it out, "
            "uniform depth is always measured"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything a run depends on; resolved and written beside its results."""

    seed: int = 0
    device: str = "auto"
    start_from: str | None = None  # checkpoint whose weights training begins with: train --from
    architecture: str = "recurrent"
    model: Any = field(default_factory=dict)  # the architecture's own dataclass, as a table
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError(f"seed={self.seed} must lie in 0..{(1 << 31) - 1}")
        if not isinstance(self.model, Mapping):
            raise ConfigError(f"model={self.model!r} must be a section of settings")
        if "vocab_size" in self.model:
            raise ConfigError("model.vocab_size comes from the tokenizer; set tokenizer.vocab_size")
        # Refuses impossible shapes before any work.
        geometry = self.model_config(self.tokenizer.vocab_size).geometry
        limit, positions = geometry.max_depth, geometry.max_positions
        if positions is not None and self.train.seq > positions:
            raise ConfigError(
                f"train.seq={self.train.seq} is past the {positions} positions of architecture "
                f"{self.architecture!r}; lower it or raise model.max_positions"
            )
        if limit is not None and (self.depth.kind != "fixed" or self.depth.mean > limit):
            raise ConfigError(
                f"architecture {self.architecture!r} runs at most {limit} "
                f"recurrence{'s' if limit > 1 else ''}; "
                f"set depth.kind=fixed and depth.mean={limit}"
            )

    def model_config(self, vocab_size: int) -> Any:
        """The architecture's dataclass at this vocabulary size."""
        model_class = MODELS[self.architecture]
        table = {**self.model, "vocab_size": vocab_size}
        return from_table(model_class.config_class, table, "model.", root=RunConfig)


def explicit_table(
    *,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What was asked for: preset, then TOML file, then command-line settings, then ``--set``.

    Raises:
        ConfigError: an unknown preset, a file or an override that cannot be read.
    """
    table = preset_table(preset) if preset is not None else {}
    if file is not None:
        table = merge(table, read_toml(file))
    return merge(merge(table, settings or {}), parse_overrides(overrides))


def preset_table(name: str) -> dict[str, Any]:
    """The settings of a preset.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in preset_names():
        hint = did_you_mean(name, preset_names()) or ";"
        raise ConfigError(f"no preset named {name!r}{hint} known: {', '.join(preset_names())}")
    return read_toml(Path(str(resources.files("loopwise") / "presets" / f"{name}.toml")))


def build_config(asked: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> RunConfig:
    """A run's settings: what was asked for, over a base (the default preset).

    Raises:
        ConfigError: an unknown key, a wrong type, an impossible value.
    """
    below = preset_table(DEFAULT_PRESET) if base is None else base
    if asked.get("architecture", "recurrent") != below.get("architecture", "recurrent"):
        # Shape and depth of one architecture mean nothing to another.
        below = {k: v for k, v in below.items() if k not in ("model", "depth")}
    table = merge(below, asked)
    of_model = MODELS[table.get("architecture", "recurrent")].config_class.__dataclass_fields__
    for key in asked:  # a run does not know the settings of its architecture by name
        if key in of_model and key not in RunConfig.__dataclass_fields__:
            raise ConfigError(f"unknown setting {key!r} in the top level; it belongs in [model]")
    return from_table(RunConfig, table)


def fixed_baseline(asked: Mapping[str, Any], match: Match) -> dict[str, Any]:
    """The non-looped twin of a recurrent run: the same text, width, steps and optimiser.

    Args:
        asked: settings of the recurrent run, as :func:`explicit_table` gives them.
        match: ``parameters`` keeps the unique layers; ``flops`` unrolls the core at the mean depth,
            so that a token costs the same and the parameters are many more.
    Raises:
        ConfigError: the run is not of the recurrent architecture.
    """
    config = build_config(asked)
    if config.architecture != "recurrent":
        raise ConfigError(
            f"--baseline is the twin of architecture 'recurrent', not {config.architecture!r}"
        )
    geometry = config.model_config(config.tokenizer.vocab_size).geometry
    depth = 1 if match == "parameters" else round(config.depth.mean)
    kept = ("d_model", "n_heads", "n_kv_heads", "d_ff", "tie_embeddings", "rope_base", "norm_eps")
    full = resolved_table(config)
    return {
        **full,
        "architecture": "fixed",
        "model": {
            **{key: full["model"][key] for key in kept},
            "n_layers": geometry.effective_layers(depth),
        },
        "depth": {"kind": "fixed", "mean": 1.0, "backprop_depth": 1},
    }


def differing(stored: Mapping[str, Any], asked: Mapping[str, Any], where: str = "") -> list[str]:
    """Settings that ``asked`` names with another value than ``stored``, as ``"key=value"``."""
    out: list[str] = []
    for key, value in asked.items():
        have = stored.get(key)
        if isinstance(value, Mapping) and isinstance(have, Mapping):
            out += differing(have, value, f"{where}{key}.")
        elif have != (list(value) if isinstance(value, tuple) else value):
            out.append(f"{where}{key}={value!r} (the run has {have!r})")
    return out


def resolved_table(config: RunConfig) -> dict[str, Any]:
    """All settings with their defaults filled in, as plain values."""
    table = to_table(config)
    model = to_table(config.model_config(config.tokenizer.vocab_size))
    model.pop("vocab_size")
    return {**table, "model": model}
