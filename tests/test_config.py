"""Strict settings: what does not belong is refused, with the way to what was meant."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwise.config import from_table, merge, parse_overrides, read_toml, to_table
from loopwise.errors import ConfigError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rate: float = 0.5
    layers: int = 2
    sizes: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"inner.layers={self.layers} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    horizon: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    flag: bool = False
    limit: int | None = None
    width: int | str = 4
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] = "fast"
    folder: Path = Path("x")
    anything: Any = None
    inner: Inner = field(default_factory=Inner)
    other: Other = field(default_factory=Other)


def build(**table: Any) -> Outer:
    return from_table(Outer, {"name": "n", **table})


# Tables to dataclasses.


def test_a_full_table():
    made = build(
        flag=True,
        limit=3,
        colour="blue",
        mode="slow",
        folder="a/b",
        anything={"free": [1]},
        inner={"rate": 1, "sizes": [4, 5]},
    )
    assert made == Outer(
        name="n",
        flag=True,
        limit=3,
        colour=Colour.BLUE,
        mode="slow",
        folder=Path("a/b"),
        anything={"free": [1]},
        inner=Inner(rate=1.0, sizes=(4, 5)),
    )
    assert isinstance(made.inner.rate, float)
    assert isinstance(made.inner.sizes, tuple)


def test_a_table_comes_back():
    made = build(colour="blue", folder="p", limit=1, inner={"sizes": []})
    table = to_table(made)
    assert from_table(Outer, table) == made
    assert from_table(Outer, json.loads(json.dumps(table))) == made
    assert table["inner"] == {"rate": 0.5, "layers": 2, "sizes": []}
    assert table["limit"] == 1
    assert to_table(build())["limit"] is None


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"flagg": 1}, ["'flagg'", "the top level", "did you mean 'flag'", "known there: name, "]),
        ({"inner": {"layer": 1}}, ["'layer'", "[inner]", "did you mean 'layers'", "rate, layers"]),
        ({"inner": {"qqq": 1}}, ["unknown setting 'qqq'", "section [inner]", "known there: rate"]),
        ({"layers": 1}, ["'layers'", "it belongs in [inner]"]),
        ({"horizon": 1}, ["'horizon'", "it belongs in [other]"]),
        ({"inner": {"limit": 1}}, ["'limit'", "[inner]", "it belongs in the top level"]),
        ({"horizn": 1}, ["'horizn'", "did you mean 'horizon' in [other]?"]),
        ({"inner": {"colr": 1}}, ["'colr'", "did you mean 'colour' in the top level?"]),
    ],
)
def test_u78_unknown_keys_say_where_and_what_was_meant(table, parts):
    with pytest.raises(ConfigError) as caught:
        build(**table)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"flag": 1}, ["flag=1", "bool"]),
        ({"flag": "true"}, ["flag='true'", "bool"]),
        ({"name": 3}, ["name=3", "str"]),
        ({"limit": True}, ["limit=True", "int"]),
        ({"limit": 1.5}, ["limit=1.5", "int"]),
        ({"limit": "1"}, ["limit='1'", "int"]),
        ({"width": 1.5}, ["width=1.5"]),
        ({"width": True}, ["width=True"]),
        ({"colour": "rde"}, ["colour='rde'", "did you mean 'red'", "allowed: red, blue"]),
        ({"colour": ["red"]}, ["colour=['red']", "allowed: red, blue"]),
        ({"mode": "fats"}, ["mode='fats'", "did you mean 'fast'", "allowed: fast, slow"]),
        ({"mode": 1}, ["mode=1", "allowed: fast, slow"]),
        ({"inner": 3}, ["inner=3", "section"]),
        ({"inner": []}, ["inner=[]", "section"]),
        ({"inner": {"rate": "fast"}}, ["inner.rate='fast'", "float"]),
        ({"inner": {"rate": True}}, ["inner.rate=True", "float"]),
        ({"inner": {"layers": 2.0}}, ["inner.layers=2.0", "int"]),
        ({"inner": {"sizes": 3}}, ["inner.sizes=3", "list"]),
        ({"inner": {"sizes": "12"}}, ["inner.sizes='12'", "list"]),
        ({"inner": {"sizes": [1, "a"]}}, ["inner.sizes[1]='a'", "int"]),
        ({"inner": {"layers": 0}}, ["inner.layers=0 must be at least 1"]),
        ({"folder": 3}, ["folder=3"]),
        ({"name": None}, ["name=None"]),
    ],
)
def test_u78_values_of_the_wrong_type_are_refused_with_their_path(table, parts):
    with pytest.raises(ConfigError) as caught:
        build(**table)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_setting_is_named():
    with pytest.raises(ConfigError, match="missing setting name"):
        from_table(Outer, {})


# TOML.


def test_toml_is_read(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('name = "é"\n[inner]\nrate = 1e-3\n', encoding="utf-8")
    assert read_toml(file) == {"name": "é", "inner": {"rate": 1e-3}}


@pytest.mark.parametrize("content", [b"[inner\n", b"a = \n", b"a=1\na=2\n", b"\xff\xfe", b"a: 1\n"])
def test_u78_broken_toml_names_the_file(tmp_path, content):
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml.*not valid TOML"):
        read_toml(file)


def test_broken_toml_names_the_line(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("a = 1\nb = \n")
    with pytest.raises(ConfigError, match="line 2"):
        read_toml(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file.*none\.toml"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_toml(tmp_path)


# --set.


@pytest.mark.parametrize(
    ("item", "table"),
    [
        ("seed=1", {"seed": 1}),
        ("optim.lr=3e-4", {"optim": {"lr": 3e-4}}),
        ("a.b.c=true", {"a": {"b": {"c": True}}}),
        ("a=fixed", {"a": "fixed"}),
        ('a="fixed"', {"a": "fixed"}),
        ("a=1.0", {"a": 1.0}),
        ("a=-3", {"a": -3}),
        ("a=inf", {"a": math.inf}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ('a=["x", "y.txt"]', {"a": ["x", "y.txt"]}),
        ("a=k=v", {"a": "k=v"}),
        ("a=", {"a": ""}),
        ("a=builtin:stories", {"a": "builtin:stories"}),
        ("a=/tmp/x y", {"a": "/tmp/x y"}),
        (" a.b = 2", {"a": {"b": 2}}),
        ("a=#5", {"a": "#5"}),
        ("a=1_000", {"a": 1000}),
    ],
)
def test_set_reads_numbers_strings_lists_and_dotted_keys(item, table):
    assert parse_overrides([item]) == table


def test_set_says_no_more_than_one_key():
    """A line end in a value must not smuggle in a second setting, or cut the value."""
    assert parse_overrides(["a=1\nv2=2"]) == {"a": "1\nv2=2"}


def test_later_settings_win_and_sections_merge():
    items = ["a.x=1", "a.y=2", "a.x=3", "b=4"]
    assert parse_overrides(items) == {"a": {"x": 3, "y": 2}, "b": 4}
    assert parse_overrides([]) == {}


@pytest.mark.parametrize("item", ["lr", "=3", "a..b=3", ".a=3", "a.=3", "", "optim.lr 3e-4"])
def test_set_without_a_key_or_a_value_is_refused(item):
    with pytest.raises(ConfigError, match="is not key=value"):
        parse_overrides([item])


def test_a_key_with_spaces_around_its_parts_is_refused_or_trimmed():
    assert parse_overrides(["a . b=1"]) in ({"a": {"b": 1}}, {"a ": {" b": 1}})
    with pytest.raises(ConfigError):
        build(**parse_overrides(["inner . zzz=1"]))


_TABLES = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), _TABLES),
    st.dictionaries(st.sampled_from("abc"), _TABLES),
)
def test_merge_keeps_both_and_changes_neither(base, over):
    copies = json.dumps(base), json.dumps(over)
    out = merge(base, over)
    assert (json.dumps(base), json.dumps(over)) == copies
    assert set(out) == set(base) | set(over)
    for key, value in over.items():
        if not isinstance(value, dict):
            assert out[key] == value
    assert merge(out, over) == out
    assert merge(base, {}) == base
