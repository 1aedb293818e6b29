"""Imports go down one list only, and importing the package touches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import loopwise

PACKAGE = Path(loopwise.__file__).parent
# Imports go down this list only; neighbours on one line do not import each other.
ORDER = """
__main__
cli
calibrate
bench
study harness generate display
settings
server
hub report
train engine
measure
models exits
data
config tokenizer
byte_level special_ids
registry writing
errors
"""
LAYER = {name: level for level, line in enumerate(ORDER.split("\n")) for name in line.split()}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """``loopwise.exits.kl`` belongs to ``exits``; the package itself to no part."""
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and module of every import of our own, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            # ``from loopwise import measure`` imports a part, not the package.
            names = [f"loopwise.{a.name}" for a in node.names] if module == "loopwise" else [module]
            found += [(node.lineno, name) for name in names]
    return [(line, name) for line, name in found if name.split(".")[0] == "loopwise"]


def test_every_part_of_the_package_has_a_place_in_the_order():
    parts = {part_of(name_of(path)) for path in MODULES} - {""}
    assert parts <= set(LAYER), "place the newcomer in ORDER and in docs/architecture.md"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path):
    own = part_of(name_of(path))
    for line, module in imports_of(path):
        other = part_of(module)
        if other in ("", own) or other.startswith("__"):
            continue
        assert own, f"{path}:{line}: the package itself imports {module}"
        assert LAYER[own] < LAYER[other], f"{path}:{line}: {own} imports {module}"


def test_the_order_is_read_right():
    """A guard against a test that looks at nothing."""
    assert LAYER["cli"] < LAYER["measure"] < LAYER["errors"]
    edges = {(part_of(name_of(p)), part_of(m)) for p in MODULES for _, m in imports_of(p)}
    assert {("measure", "exits"), ("exits", "registry"), ("train", "models")} <= edges


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_importing_the_package_is_light_and_touches_nothing(tmp_path):
    code = """
import sys, logging
import loopwise
assert loopwise.__version__
heavy = {"torch", "numpy", "tokenizers", "rich", "typer", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
assert not logging.getLogger().handlers
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_imports_no_torch_to_say_help(tmp_path):
    code = """
import sys
from loopwise.cli import app
try:
    app(["--help"])
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert "torch" not in sys.modules and "matplotlib" not in sys.modules
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("study", "train", "measure", "frontier", "report", "generate"):
        assert name in done.stdout


def test_importing_everything_leaves_globals_alone(tmp_path):
    """No seed drawn, no thread count set, no file made, no backend chosen at import."""
    code = f"""
import importlib, random
import numpy, torch, typer, rich.console, rich.markdown  # rich draws an id when it is loaded
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
for name in {[name_of(p) for p in MODULES]!r}:
    importlib.import_module(name)
after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
assert before == after
assert (threads, dtype) == (torch.get_num_threads(), torch.get_default_dtype())
assert torch.is_grad_enabled() and not torch.cuda.is_initialized()
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
