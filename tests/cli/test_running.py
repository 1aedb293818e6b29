"""Signals: a command that is stopped says what is kept and how to go on, and that works."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from loopwise.cli.options import PresetOption
from loopwise.errors import DataError
from loopwise.models.checkpoint import load_checkpoint
from loopwise.settings import preset_names
from tests.study.test_stability import TINY
from tests.test_cli import TINY_MEASURE, TINY_RUN, answer, run, sets

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SIGNALS = pytest.mark.parametrize("number", list(CODES))
DATA = ("--data", "builtin:stories:16")


def stops(number: signal.Signals, at_call: int = 1) -> Any:
    """A function that is hit by a signal, in place of one that takes hours."""
    calls = []

    def stopped(*args: object, **options: object) -> float:
        calls.append(args)
        if len(calls) == at_call:
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # the handler runs here
        return 1.0

    return stopped


def last_line(result: Result, number: signal.Signals) -> str:
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == CODES[number], result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert [x for x in lines if x.startswith("stopped")] == lines[-1:], result.stderr
    assert number.name in lines[-1]
    return lines[-1]


@SIGNALS
def test_training_names_the_command_part_that_goes_on(tmp_path, monkeypatch, number):
    out = tmp_path / "my run"
    with monkeypatch.context() as patch:
        patch.setattr("loopwise.train.loop.lr_factor", stops(number, at_call=2))
        result = run("train", *DATA, *sets(*TINY_RUN), "--out", out)
    line = last_line(result, number)
    assert "after step 2, which is saved" in line
    assert load_checkpoint(out).training["step"] == 2
    _, _, typed = line.partition("go on with ")
    assert answer(run("train", *shlex.split(typed), "--json"))["step"] == 3


@SIGNALS
def test_stages_after_training_say_what_is_kept(tmp_path, monkeypatch, number):
    out = tmp_path / "run"
    monkeypatch.setattr("loopwise.study.commands.measure_stage", stops(number))
    result = run("study", *DATA, *sets(*TINY_RUN, *TINY_MEASURE), "--out", out)
    assert f"go on with --resume --out {out}" in last_line(result, number)
    assert load_checkpoint(out).training["step"] == 3


@SIGNALS
def test_before_a_folder_is_made_nothing_is_kept(tmp_path, monkeypatch, number):
    monkeypatch.setattr("loopwise.study.training.read_texts", stops(number))
    for command in ("study", "train", "stability"):
        result = run(command, *DATA, "--out", tmp_path / "run")
        assert "nothing was written; run the command again" in last_line(result, number)
        assert not (tmp_path / "run").exists()
        monkeypatch.setattr("loopwise.study.training.read_texts", stops(number))


def test_a_grid_goes_on_with_the_same_command(tmp_path, monkeypatch):
    grid = ("stability", "--variants", "lt", "--loops", "1", "--seeds", "1", *sets(*TINY))
    with monkeypatch.context() as patch:
        patch.setattr("loopwise.train.loop.lr_factor", stops(signal.SIGTERM, at_call=2))
        result = run(*grid, "--out", tmp_path / "grid")
    line = last_line(result, signal.SIGTERM)
    assert "run the same command again" in line and "--resume" not in line
    monkeypatch.setattr("loopwise.report.write_stability_report", lambda folder: folder)
    assert run(*grid, "--out", tmp_path / "grid").exit_code == 0


@pytest.mark.parametrize("command", ["measure", "generate", "inspect"])
def test_other_commands_end_in_one_line_too(tmp_path, monkeypatch, command):
    places = {
        "measure": "loopwise.study.commands.load_checkpoint",
        "generate": "loopwise.generate.load_checkpoint",
        "inspect": "loopwise.models.checkpoint.load_checkpoint",
    }
    monkeypatch.setattr(places[command], stops(signal.SIGTERM))
    last_line(run(command, tmp_path, *(["Hello"] * (command == "generate"))), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as it was before the command"


def test_what_a_measurement_leaves_is_what_its_folders_hold(tmp_path, monkeypatch):
    """It said that traces and rules were kept before there were any."""
    step = tmp_path / "run" / "checkpoints" / "step-2"
    traces = {"run": tmp_path / "run" / "traces" / "a", "out": tmp_path / "my out" / "a"}
    for folder in (step, *traces.values()):
        folder.mkdir(parents=True)

    def line(*more: str | Path, checkpoint: Path = step) -> str:
        monkeypatch.setattr("loopwise.study.commands.load_checkpoint", stops(signal.SIGTERM))
        return last_line(run("measure", checkpoint, *more), signal.SIGTERM)

    assert "nothing was stored; run the command again" in line()
    (step / "exits.json").write_text("{}")
    assert "; fitted rules are kept; run the command again" in line()
    (traces["run"] / "trace.json").write_text("{}")
    kept = f"finished traces in {tmp_path}/run/traces and fitted rules are kept; run it again with"
    assert kept in line()
    assert "; fitted rules are kept" in line("--out", tmp_path / "my out")
    (traces["out"] / "trace.json").write_text("{}")
    assert f"finished traces in '{tmp_path}/my out' and" in line("--out", tmp_path / "my out")
    assert kept in line(checkpoint=tmp_path / "run")


def test_answers_to_a_file_of_prompts_are_kept(tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("Hello\n")
    out.write_text("answers\n")
    monkeypatch.setattr("loopwise.generate.load_checkpoint", stops(signal.SIGINT))
    result = run("generate", tmp_path, "--prompts", prompts, "--out", out, "--resume")
    assert f"go on with --resume --out {out}" in last_line(result, signal.SIGINT)


def test_every_preset_is_named_by_the_help():
    told: str = PresetOption.__metadata__[0].help  # type: ignore[attr-defined]
    assert all(name in told for name in preset_names())


def test_processes_of_a_library_end_by_its_signal(tmp_path, monkeypatch):
    """lm-evaluation-harness forks a pool and terminates it, with our handler in each process."""
    codes = []

    def forking(*args: object, **options: object) -> None:
        fork = multiprocessing.get_context("fork")
        awake = fork.Event()
        child = fork.Process(target=lambda: (awake.set(), time.sleep(60)))
        child.start()
        awake.wait()
        child.terminate()
        child.join(30)
        codes.append(child.exitcode)
        raise DataError("seen enough")

    monkeypatch.setattr("loopwise.study.commands.load_checkpoint", forking)
    run("measure", tmp_path, *DATA)
    assert codes == [128 + signal.SIGTERM]
