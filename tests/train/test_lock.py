"""Two trainers in one run folder: their checkpoints and logs were mixed, and neither noticed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loopwise.errors import RunFolderError, WriteError
from loopwise.study import commands
from loopwise.train.lock import FILE, only_trainer
from tests.study.test_training import train
from tests.test_cli import answer, refused, run
from tests.train.test_loop import make_trainer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
HOLD = """
import sys
from pathlib import Path
from loopwise.train.lock import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_no_lock_behind(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        said = f"is being trained by process {holder.pid}; wait for it or stop it, then go on with"
        with pytest.raises(RunFolderError, match=said), only_trainer(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
    with only_trainer(tmp_path):
        pass
    assert (tmp_path / FILE).is_file()


def test_a_second_trainer_writes_nothing(tmp_path: Path) -> None:
    """It removed what the first was writing, as leftovers of a killed one."""
    first, second = make_trainer(tmp_path, steps=2), make_trainer(tmp_path, steps=2)
    half = tmp_path / "checkpoints" / ".partial-1"
    half.mkdir(parents=True)
    with only_trainer(tmp_path):
        with pytest.raises(RunFolderError, match="is being trained by process"):
            second.run()
        assert half.is_dir() and not (tmp_path / "metrics.jsonl").exists()
    first.run()
    assert second.run(resume=True)["step"] == 2, "one after the other is no trouble"


def test_resuming_a_run_that_is_at_work_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    answer(train(out))
    with only_trainer(out):
        refused(run("train", "--out", out, "--resume"), "is being trained by process", "--resume")


def test_of_two_runs_that_begin_in_one_folder_the_second_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had found it free before they read their text; the later config.json stayed."""
    out, other = tmp_path / "run", tmp_path / "other"
    read = commands.prepare

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(commands, "prepare", read)
        answer(train(out))
        return read(*arguments)

    monkeypatch.setattr(commands, "prepare", meanwhile)
    refused(train(out, "--set", "seed=7"), "is not empty; go on with --resume")
    assert json.loads((out / "config.json").read_text())["settings"]["seed"] != 7
    other.mkdir()
    with only_trainer(other):
        refused(train(other), "is being trained by process")
    assert [p.name for p in other.iterdir()] == [FILE]
    answer(train(other))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"cannot write .*\.lock"), only_trainer(tmp_path / "no"):
        pass


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    seen: list[str] = []

    def second() -> None:
        try:
            with only_trainer(tmp_path):
                seen.append("held")
        except RunFolderError:
            seen.append("refused")

    with only_trainer(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    second()
    assert seen == ["refused", "held"]
