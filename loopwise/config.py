"""Strict settings: TOML in, frozen dataclasses through, resolved JSON out.

Every component keeps a small frozen dataclass beside its code. This module turns nested tables of
plain values into those dataclasses and back, and refuses what does not belong: an unknown key, a
key in the wrong section, a value of the wrong type.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from loopwise.errors import ConfigError, LoopwiseError
from loopwise.registry import did_you_mean, nearest

T = TypeVar("T")


def cache_root() -> Path:
    """Where what can be made again is kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "loopwise"


def preset_names() -> list[str]:
    """The settings that come with the package, by name; torch is not needed to know them."""
    folder = resources.files("loopwise") / "presets"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def from_table(
    cls: type[T], table: Mapping[str, Any], where: str = "", root: type | None = None
) -> T:
    """Build the dataclass ``cls`` from a table of plain values.

    Args:
        cls: a dataclass; fields that are dataclasses themselves are sections.
        table: values as TOML or JSON gives them.
        where: dotted path of this section, for messages.
        root: the dataclass of all sections, where a misplaced key's home is looked up.
    Raises:
        ConfigError: an unknown key, a wrong type, a missing required key, or what the dataclass
            itself refuses.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    root = root or cls
    for key in table:
        if key not in fields:
            raise ConfigError(_unknown_key(root, key, where, fields))
    values = {k: _convert(hints[k], v, f"{where}{k}", root) for k, v in table.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing setting {where}{missing[0]}")
    return cls(**values)


def to_table(config: Any) -> dict[str, Any]:
    """The dataclass as nested plain values, the inverse of :func:`from_table`."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, Path):
            return str(value)
        return value

    return plain(config)


def check_choices(config: Any) -> None:
    """Refuse values outside the ``Literal`` fields of a dataclass; for its ``__post_init__``.

    Raises:
        ConfigError: naming the field, the value and what is allowed.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is typing.Literal:
            _convert(hint, getattr(config, name), name)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it is missing or malformed (with the line).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}; check the path") from None
    except OSError as err:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {err.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {err}") from None


def read_json_object(path: Path, error: type[LoopwiseError]) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Raises:
        error: it is missing, unreadable, or something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{str(path.parent)!r} has no {path.name}") from None
    except OSError as err:
        raise error(f"{str(path)!r} cannot be read: {err.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise error(f"{str(path)!r} is not valid JSON: {err}") from None
    if not isinstance(value, dict):
        raise error(f"{str(path)!r} must hold a JSON object")
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` on top, section by section; neither is changed."""
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Turn ``["train.lr=3e-4", "seed=1"]`` into nested tables; values are TOML, or else text.

    Raises:
        ConfigError: an item without ``=`` or with an empty key.
    """
    out: dict[str, Any] = {}
    for item in items:
        key, eq, text = item.partition("=")
        parts = key.strip().split(".")
        if not eq or not all(parts):
            raise ConfigError(f"--set {item!r} is not key=value; for example --set optim.lr=3e-4")
        try:
            parsed = tomllib.loads(f"v = {text}")
        except tomllib.TOMLDecodeError:
            parsed = {}
        nested: Any = parsed["v"] if set(parsed) == {"v"} else text
        for part in reversed(parts):
            nested = {part: nested}
        out = merge(out, nested)
    return out


def _unknown_key(root: type, key: str, where: str, fields: Mapping[str, Any]) -> str:
    homes = dict(reversed(list(_settings_of(root))))  # the first of one name counts
    if key in homes:
        hint = f"; it belongs in {homes[key]};"
    elif not (hint := did_you_mean(key, fields)):
        near = nearest(key, homes)
        hint = f"; did you mean {near!r} in {homes[near]}?" if near else ";"
    section = f"section [{where.rstrip('.')}]" if where else "the top level"
    return f"unknown setting {key!r} in {section}{hint} known there: {', '.join(fields)}"


def _settings_of(cls: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting of ``cls`` and of its sections, with the place where it is written."""
    place = f"[{path.rstrip('.')}]" if path else "the top level"
    yield from ((f.name, place) for f in dataclasses.fields(cls) if f.init)
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _settings_of(hint, f"{path}{name}.")


def _convert(hint: Any, value: Any, where: str, root: type | None = None) -> Any:
    """``value`` as ``hint`` asks; int is accepted for float, nothing else is bent."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        rest = [h for h in options if h is not type(None)]
        for option in rest[:-1]:
            try:
                return _convert(option, value, where, root)
            except ConfigError:
                continue
        return _convert(rest[-1], value, where, root)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            near = did_you_mean(str(value), [str(a) for a in allowed])
            names = ", ".join(str(a) for a in allowed)
            raise ConfigError(f"{where}={value!r} is not allowed{near or ';'} allowed: {names}")
        return value
    if origin in (tuple, list, Sequence):
        args = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}={value!r} must be a list")
        return tuple(_convert(args[0], v, f"{where}[{i}]", root) for i, v in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} must be a section of settings")
        return from_table(hint, value, f"{where}.", root)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            names = ", ".join(str(e.value) for e in hint)
            near = did_you_mean(str(value), [str(e.value) for e in hint])
            raise ConfigError(
                f"{where}={value!r} is not allowed{near or ';'} allowed: {names}"
            ) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}={value!r} must be {getattr(hint, '__name__', hint)}")
    return value
