"""Every benchmark can be started: names it takes from the package are where it looks for them."""

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
