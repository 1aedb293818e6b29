"""The grid: every cell counted once, collapse recorded by the rule, nothing half-done kept."""

from __future__ import annotations

import errno
import json
import math
import os
import signal

import pytest

from loopwise.errors import ConfigError, DataError, RunFolderError, WriteError
from loopwise.measure.stability import CollapseRule
from loopwise.settings import explicit_table
from loopwise.study.stability import GridConfig, cell_config, cells_of, run_grid
from loopwise.train.metrics import read_metrics
from tests.conftest import full_disk

TINY = [
    "data.sources=['builtin:stories:40']",
    "data.held_out_fraction=0.1",
    "tokenizer.kind=byte",
    "tokenizer.vocab_size=258",
    "model.d_model=32",
    "model.d_ff=64",
    "model.n_layers=2",
    "train.steps=6",
    "train.seq=64",
    "train.micro_batch=2",
    "train.eval_every=6",
    "train.save_every=2",
    "train.compile=off",
    "train.dtype=fp32",
]
GRID = GridConfig(variants=("lt", "flt"), loops=(2, 3), seeds=1)


def run(folder, grid=GRID, overrides=TINY):
    events = []
    return run_grid(explicit_table(overrides=overrides), grid, folder, events.append), events


def test_every_cell_is_trained_judged_and_kept(tmp_path):
    results, _ = run(tmp_path / "grid")
    cells = results["cells"]
    assert [(c["variant"], c["loops"]) for c in cells] == [
        ("lt", 2),
        ("flt", 2),
        ("lt", 3),
        ("flt", 3),
    ]
    for cell in cells:
        assert cell["status"] == "survived"
        assert len(cell["loss_nats_by_depth"]) == max(2 * cell["loops"], 32)
        assert cell["final_loss_nats"] == cell["loss_nats_by_depth"][str(cell["loops"])]
        log = tmp_path / "grid" / "cells" / cell["cell"] / "metrics.jsonl"
        seen = read_metrics(log, "diagnostics")
        assert [e["step"] for e in seen] == list(range(1, 7))
        assert len(seen[0]["latent_norm"]) == cell["loops"]
    again, events = run(tmp_path / "grid")
    assert again["cells"] == cells
    assert not [e for e in events if e["event"] == "step"], "finished cells are not trained again"


def test_a_cell_that_was_killed_is_finished_not_counted(tmp_path):
    class Killed(BaseException):
        pass

    def emit(event):
        if event["event"] == "step" and event["step"] == 4:
            raise Killed

    asked = explicit_table(overrides=TINY)
    with pytest.raises(Killed):
        run_grid(asked, GRID, tmp_path / "grid", emit)
    assert not list((tmp_path / "grid" / "cells").glob("*/cell.json"))
    resumed, _ = run(tmp_path / "grid")
    straight, _ = run(tmp_path / "straight")
    assert resumed["cells"] == straight["cells"]


def test_collapse_is_an_outcome_with_its_step_and_reason(tmp_path):
    rule = CollapseRule(window=2, grace_steps=3, floor_share=0.01)
    grid = GridConfig(variants=("lt",), loops=(2,), seeds=1, collapse=rule)
    results, events = run(tmp_path / "grid", grid)
    (cell,) = results["cells"]
    assert (cell["status"], cell["step"]) == ("collapsed", 4)
    assert "unigram" in cell["reason"]
    assert max(e["step"] for e in events if e["event"] == "step") == 4, "a collapsed cell stops"


def test_a_signal_that_comes_with_a_collapse_stops_the_grid(tmp_path):
    """The collapse ended the run that had noted the signal, and the next cell began."""
    rule = CollapseRule(window=2, grace_steps=3, floor_share=0.01)
    grid = GridConfig(variants=("lt", "flt"), loops=(2,), seeds=1, collapse=rule)
    asked, heard = explicit_table(overrides=TINY), []

    def emit(event):
        heard.append(event)
        if event["event"] == "step" and event["step"] == 4:  # where the rule fires
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_grid(asked, grid, tmp_path / "grid", emit)
    assert {e["cell"] for e in heard if e["event"] == "step"} == {"lt-k2-lr0.02-s0"}
    results, _ = run(tmp_path / "grid", grid)
    assert len(results["cells"]) == 2


def test_memory_is_asked_for_cells_that_are_still_to_be_trained(tmp_path, monkeypatch):
    """A finished grid was refused where the memory had gone since, though nothing was to train."""
    grid = GridConfig(variants=("lt",), loops=(1, 2), seeds=1)
    first, _ = run(tmp_path / "grid", grid)
    monkeypatch.setattr("loopwise.study.training.free_memory_gib", lambda device: 0.0)
    assert run(tmp_path / "grid", grid)[0] == first
    next((tmp_path / "grid").glob("cells/lt-k2-*/cell.json")).unlink()
    with pytest.raises(ConfigError, match="free; with --set lower model.d_model"):
        run(tmp_path / "grid", grid)


def test_a_grid_that_could_not_begin_begins_with_the_same_command(tmp_path, monkeypatch):
    """The folder held a tokenizer alone, and was refused for it."""
    grid = GridConfig(variants=("lt",), loops=(1,), seeds=1)

    def half_written(folder, tokenizer):
        (folder / "tokenizer.json").write_text('{"ty')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("loopwise.study.stability.write_tokenizer", half_written)
        with pytest.raises(WriteError, match=r"grid/tokenizer\.json': No space left .*free some"):
            run(tmp_path / "grid", grid)
    with full_disk(), pytest.raises(WriteError, match=r"new/grid\.json'"):
        run(tmp_path / "new", grid)
    for name in ("grid", "new"):
        assert len(run(tmp_path / name, grid)[0]["cells"]) == 1


def test_a_grid_of_another_configuration_is_refused(tmp_path):
    run(tmp_path / "grid", GridConfig(variants=("lt",), loops=(1,), seeds=1))
    before = (tmp_path / "grid" / "results.json").read_text()
    differs = r"another configuration: grid.variants=\['lt', 'flt'\] \(the run has \['lt'\]\); grid"
    with pytest.raises(RunFolderError, match=differs):
        run(tmp_path / "grid")
    grid = GridConfig(variants=("lt",), loops=(1,), seeds=1)
    with pytest.raises(RunFolderError, match=r": settings.train.steps=7 \(the run has 6\)"):
        run(tmp_path / "grid", grid, [*TINY, "train.steps=7"])
    assert (tmp_path / "grid" / "results.json").read_text() == before


def test_input_that_is_refused_claims_no_folder(tmp_path):
    """It did, and then the mended command was of another configuration."""
    grid = GridConfig(variants=("lt",), loops=(1,), seeds=1)
    with pytest.raises(DataError, match=r"nope.txt"):
        run(tmp_path / "grid", grid, [*TINY, f"data.sources=['{tmp_path / 'nope.txt'}']"])
    with pytest.raises(ConfigError, match="free; with --set lower model.d_model"):
        run(tmp_path / "grid", grid, [*TINY, "model.d_model=1000000"])
    assert not (tmp_path / "grid").exists()
    run(tmp_path / "grid", grid)


def test_a_folder_of_something_else_is_refused_before_the_data_is_read(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(RunFolderError, match="is not empty"):
        run(tmp_path, overrides=[*TINY, "data.sources=['nope.txt']"])
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"status": "survived"}'])
def test_a_broken_cell_says_what_to_do_and_that_works(tmp_path, content):
    grid = GridConfig(variants=("lt",), loops=(1,), seeds=1)
    first, _ = run(tmp_path / "grid", grid)
    (file,) = (tmp_path / "grid").glob("cells/*/cell.json")
    file.write_text(content)
    with pytest.raises(RunFolderError, match=r"cell.json.*; delete that file"):
        run(tmp_path / "grid", grid)
    file.unlink()
    assert run(tmp_path / "grid", grid)[0] == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("lt", "flt-2")}, "no variant 'flt-2'; known: lt, lt-input"),
        ({"variants": ()}, "known: lt"),
        ({"loops": (0,)}, r"loops=\[0\] must each lie in 1..64"),
        ({"loops": (65,)}, "1..64"),
        ({"loops": ()}, "1..64"),
        ({"seeds": 0}, "seeds=0"),
        ({"lrs": (0.0,)}, "above 0"),
        ({"lrs": (0.01, math.inf)}, r"lrs=\[0.01, inf\] must each be above 0 and finite"),
    ],
)
def test_impossible_grids_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        GridConfig(**changes)


def test_the_lab_trains_the_looped_family_alone(tmp_path):
    with pytest.raises(ConfigError, match="not 'recurrent'"):
        run(tmp_path / "grid", overrides=["architecture=recurrent", "model={}"])
    assert not (tmp_path / "grid").exists()


def test_cells_differ_only_in_what_the_grid_says(tmp_path):
    from loopwise.settings import build_config, preset_table

    base = build_config(preset_table("flt-tiny"))
    grid = GridConfig(lrs=(0.01, 0.02))
    cells = list(cells_of(grid, base.optim.lr))
    assert len({c.name for c in cells}) == len(cells) == 5 * 3 * 2 * 3
    config = cell_config(cells[0], grid, base)
    assert config.depth.mean == config.depth.backprop_depth == cells[0].loops
    assert config.optim.lr == 0.01
    assert config.train.diagnostics
    json.dumps(config.model)
