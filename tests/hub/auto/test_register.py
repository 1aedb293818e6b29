"""When the Auto classes learn of ours, and what that costs those who do not ask."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loopwise.errors import MissingExtraError
from loopwise.hub.auto.register import WHEN_LOADED, register_when_asked
from loopwise.hub.auto.versions import check_version
from tests.hub.auto import folders  # noqa: F401 - nothing is looked up on the hub


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_importing_the_hub_imports_neither_transformers_nor_torch(tmp_path):
    done = run(
        "import loopwise.hub, sys\nassert not {'transformers', 'torch'} & set(sys.modules)\n"
        "import loopwise.hub.convert, loopwise.hub.inspect\n"
        "assert 'transformers' not in sys.modules\n",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_transformers_the_rest_of_the_hub_works(tmp_path):
    """transformers is hidden as if it were not installed."""
    code = """
import sys
sys.modules["transformers"] = None
import loopwise.hub, loopwise.hub.convert, loopwise.hub.retrofit
try:
    import transformers
except ModuleNotFoundError:
    print("hidden")
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "hidden"), done.stderr


@pytest.mark.parametrize("order", ["ours first", "theirs first", "classes first"])
def test_the_order_of_imports_does_not_matter(tmp_path, order):
    pytest.importorskip("transformers")
    lines = {
        "ours": "import loopwise.hub",
        "theirs": "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
        "classes": "from loopwise.hub.auto.model import LoopwiseForCausalLM",
    }
    first = order.split()[0]
    rest = [line for name, line in lines.items() if name != first]
    code = "\n".join(
        [
            lines[first],
            *rest,
            "config = AutoConfig.for_model('loopwise', model={'d_model': 16, 'n_heads': 2,"
            "'d_ff': 24})",
            "model = AutoModelForCausalLM.from_config(config)",
            "assert type(model) is LoopwiseForCausalLM, type(model)",
            "from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING",
            "assert type(config) in TOKENIZER_MAPPING",
        ]
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_model_of_theirs_may_be_what_is_asked_for_first(tmp_path):
    """It loads their layers, which ask for the Auto classes while they are not whole."""
    pytest.importorskip("transformers")
    code = """
import loopwise.hub
from transformers import LlamaForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("loopwise", model={"d_model": 16, "n_heads": 2, "d_ff": 24})
assert type(AutoModelForCausalLM.from_config(config)).__name__ == "LoopwiseForCausalLM"
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_registering_twice_adds_one_finder():
    register_when_asked()
    register_when_asked()
    assert sum(type(f).__name__ == "_Watcher" for f in sys.meta_path) == 1


def test_the_modules_watched_are_those_of_transformers():
    """A guard: a module that transformers renames would never be loaded, and nothing would say."""
    import importlib

    pytest.importorskip("transformers")
    for theirs, ours in WHEN_LOADED.items():
        importlib.import_module(theirs)
        assert ours in sys.modules


@pytest.mark.parametrize("version", ["4.57.6", "6.0.0", "3.5.1"])
def test_u22_other_versions_are_refused_in_one_line(version):
    with pytest.raises(
        MissingExtraError, match=rf"need transformers>=5\.0,<6\.0, this is {version}"
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["5.0.0", "5.24.0", "5.10.dev0"])
def test_versions_in_range(version):
    check_version(version)
