"""What the README promises a stranger."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from loopwise.cli import app
from loopwise.models.checkpoint import save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    part.strip()
    for text in [*SHELL, *re.findall(r"`(loopwise [^`]+)`", README)]
    for line in text.splitlines()
    for part in line.split("&&")
    if part.strip().startswith("loopwise")
]


def test_the_two_commands_stand_there():
    assert "pip install . && loopwise study" in README
    assert 'pip install ".[test]" && pytest' in README


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_is_one_the_command_line_takes(command):
    """Parsed by the real parser with the real options; nothing is run."""
    group = get_command(app)
    names = shlex.split(command)[1:]
    while names and names[0] in getattr(group, "commands", {}):
        group = group.commands[names.pop(0)]
    assert not hasattr(group, "commands"), f"no such command: {command}"
    if names:
        group.make_context(command, names)


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "runs" / "study", make_model(), ByteTokenizer(), {"seq": 32})
    exec(compile(block, "README.md", "exec"), {})
    shown = re.findall(r"\(([\d, ]+)\)$", capsys.readouterr().out, re.MULTILINE)
    depths = [int(d) for each in shown for d in each.split(",") if d]
    assert len(shown) == 2, "two prompts, two answers"
    assert all(1 <= d <= 8 for d in depths)


def test_every_folder_in_the_map_exists():
    for name in re.findall(r"`((?:loopwise|docs)/[\w/.]*)`", README):
        assert (Path(__file__).parents[1] / name).exists(), name
