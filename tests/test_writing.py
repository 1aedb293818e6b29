"""Writing: whole or not there, and a disk that refuses is one line with the path and the reason."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from loopwise.errors import WriteError
from loopwise.writing import append_line, make_folder, write_whole, writing
from tests.conftest import full_disk


def test_a_refused_file_leaves_the_one_before(tmp_path):
    path = tmp_path / "results.json"
    write_whole(path, "before")
    with full_disk(), pytest.raises(WriteError, match=r"results.json': File too large; free some"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"], "nothing is left beside it"


def test_the_one_before_is_replaced_by_what_is_on_disk(tmp_path, monkeypatch):
    """A power cut between the two left an empty file."""
    path = tmp_path / "results.json"
    write_whole(path, "before")
    flushed = []

    def fsync(number):
        assert path.read_text() == "before"
        flushed.append((tmp_path / ".results.json").read_text())

    monkeypatch.setattr("loopwise.writing.os.fsync", fsync)
    write_whole(path, "after")
    assert (flushed, path.read_text()) == (["after"], "after")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_stopped_while_writing_leaves_nothing_beside(tmp_path, monkeypatch, stop):
    def stopped(number):
        raise stop

    monkeypatch.setattr("loopwise.writing.os.fsync", stopped)
    with pytest.raises(stop):
        write_whole(tmp_path / "grid.json", "{}")
    assert not list(tmp_path.iterdir()), "and the folder would be refused as not empty"


def test_lines_are_added_until_the_disk_is_full(tmp_path):
    path = tmp_path / "log.jsonl"
    append_line(path, "one")
    append_line(path, "two")
    with full_disk(), pytest.raises(WriteError, match=r"log.jsonl': File too large"):
        append_line(path, "three")
    assert path.read_text() == "one\ntwo\n"


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match=r"file/run': Not a directory; choose another place"):
        make_folder(tmp_path / "file" / "run")


def test_tensors_that_do_not_fit_are_refused_too(tmp_path):
    path = tmp_path / "shard.safetensors"
    with (
        full_disk(),
        pytest.raises(WriteError, match=r"cannot write .*shard.safetensors"),
        writing(path),
    ):
        save_file({"x": torch.zeros(4)}, path)


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        _ = 1 / 0
