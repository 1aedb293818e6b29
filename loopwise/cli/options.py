"""Options many commands share, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loopwise.config import preset_names
from loopwise.errors import ConfigError

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="Text: files, folders, globs, hub:OWNER/NAME, wikitext2, builtin:stories."
    ),
]
HeldOutOption = Annotated[
    list[str] | None,
    typer.Option("--held-out", help="Text to measure on; by default a part of --data."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, e.g. --set optim.lr=3e-4.")
]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help=f"One of: {', '.join(preset_names())}.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder.")]
BaselineOption = Annotated[
    Literal["parameters", "flops"] | None,
    typer.Option("--baseline", help="Train the non-looped twin of the settings instead."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Last line on stdout is one JSON object.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def settings_table(
    preset: str | None,
    config: Path | None,
    set_: list[str] | None,
    data: list[str] | None,
    held_out: list[str] | None,
    seed: int | None,
    baseline: Literal["parameters", "flops"] | None = None,
) -> dict[str, Any]:
    """What the command line asks for, as one table."""
    from loopwise.settings import explicit_table, fixed_baseline

    table: dict[str, Any] = {}
    if data:
        table["data"] = {"sources": data}
    if held_out:
        table.setdefault("data", {})["held_out"] = held_out
    if seed is not None:
        table["seed"] = seed
    asked = explicit_table(preset=preset, file=config, overrides=set_ or (), settings=table)
    return asked if baseline is None else fixed_baseline(asked, baseline)


def measuring_table(
    config: Path | None, set_: list[str] | None, data: list[str] | None = None
) -> dict[str, Any]:
    """What a command on a trained model is asked for; a TOML file may say more than it reads.

    Raises:
        ConfigError: a setting on the command line that only training reads.
    """
    from loopwise.settings import RunConfig

    others = RunConfig.__dataclass_fields__.keys() - {"data", "measure"}
    for key in (override.partition("=")[0].strip() for override in set_ or ()):
        if key.partition(".")[0] in others:
            raise ConfigError(
                f"--set {key} changes nothing about a model that is trained; leave it out: "
                "settings of data and measure are read here"
            )
    return settings_table(None, config, set_, data, None, None)


def listed(text: str, kind: type, option: str) -> list[Any]:
    """``"6,9,12"`` as a list of ``kind``."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be a comma list of {kind.__name__}") from None
