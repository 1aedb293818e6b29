"""Tables of names: lazy, read-only, and helpful about a wrong name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loopwise.errors import ConfigError, ExitError, MissingExtraError, require_extra
from loopwise.exits import EXITS
from loopwise.models import MODELS
from loopwise.registry import Registry, did_you_mean

ROWS = {"decoder": "json:JSONDecoder", "encoder": "json:JSONEncoder", "gone": "no_such_module:X"}


@pytest.fixture
def table() -> Registry:
    return Registry("thing", ROWS, ConfigError)


def test_looking_up_loads(table):
    import json

    assert table["decoder"] is json.JSONDecoder


def test_listing_loads_nothing(table):
    assert list(table) == ["decoder", "encoder", "gone"]
    assert len(table) == 3
    assert "gone" in table
    assert "missing" not in table
    assert 3 not in table


def test_a_near_name_is_suggested(table):
    with pytest.raises(ConfigError) as caught:
        table["decodr"]
    assert str(caught.value) == (
        "no thing named 'decodr'; did you mean 'decoder'? known: decoder, encoder, gone"
    )


def test_a_name_spelled_out_is_known_by_its_initials():
    assert did_you_mean("learning_rat", ["name", "lr"]) == "; did you mean 'lr'?"
    assert did_you_mean("l-r", ["name"]) == ""


def test_a_far_name_lists_what_there_is(table):
    with pytest.raises(ConfigError) as caught:
        table["zzz"]
    assert str(caught.value) == "no thing named 'zzz'; known: decoder, encoder, gone"


def test_a_row_that_does_not_load_says_its_own_error(table):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        table["gone"]


def test_the_table_does_not_follow_the_mapping_it_was_made_from():
    rows = dict(ROWS)
    made = Registry("thing", rows, ConfigError)
    rows["late"] = "json:JSONDecoder"
    assert "late" not in made


@pytest.mark.parametrize("registry", [EXITS, MODELS], ids=["exits", "models"])
def test_every_row_of_the_packages_tables_loads_under_its_name(registry):
    for name in registry:
        assert registry[name].name == name


def test_wrong_names_raise_the_tables_error():
    with pytest.raises(ExitError, match="did you mean 'kl'"):
        EXITS["kl1"]
    with pytest.raises(ConfigError, match="did you mean 'recurrent'"):
        MODELS["recurent"]


def test_did_you_mean_alone():
    assert did_you_mean("lr", ["lr_", "zz"]) == "; did you mean 'lr_'?"
    assert did_you_mean("qqqq", ["lr"]) == ""
    assert did_you_mean("", []) == ""


def test_listing_tables_imports_no_torch():
    code = (
        "import sys; from loopwise.exits import EXITS; from loopwise.models import MODELS; "
        "assert 'kl' in EXITS and list(MODELS); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_missing_extra_says_how_to_get_it():
    assert require_extra("json", "x", "reading").__name__ == "json"
    with pytest.raises(MissingExtraError, match=r"serving needs the 'serve' extra: pip install"):
        require_extra("no_such_module", "serve", "serving")
    with pytest.raises(MissingExtraError):
        require_extra("no_such_package.part", "serve", "serving")
