"""The stability page says what results and logs say, in one file that fetches nothing."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopwise.errors import RunFolderError
from loopwise.report import print_stability, stability_facts, words, write_stability_report
from loopwise.report.stability_facts import binned, over_seeds, read_lab

STEPS, FLOOR, LAYERS = 120, 5.5, 2
RULE = {"window": 20, "grace_steps": 60, "floor_share": 1.0, "max_latent_rms": 1000.0}
Results = dict[str, Any]


def collapses(variant: str, loops: int, lr: float, seed: int) -> int | None:
    """The step at which a made-up run stops."""
    if variant == "lt" and loops == 6:
        return 90 + seed
    if variant == "fla" and lr > 0.02 and loops == 6 and seed == 1:
        return 77
    return None


def record(variant: str, loops: int, lr: float, seed: int) -> dict[str, Any]:
    stop = collapses(variant, loops, lr, seed)
    cell = {
        "cell": f"{variant}-k{loops}-lr{lr:g}-s{seed}",
        **{"variant": variant, "loops": loops, "lr": lr, "seed": seed},
        "status": "collapsed" if stop else "survived",
        "step": stop or STEPS,
        "reason": f"mean loss is <too> high at step {stop}" if stop else None,
    }
    if stop is None:
        losses = {
            str(r): 3.1 + 0.05 * abs(r - loops) + 0.01 * seed for r in range(1, 2 * loops + 1)
        }
        cell |= {
            "loss_nats_by_depth": losses,
            "final_loss_nats": losses[str(loops)],
            "spectrum": {"radius": 0.8 + 0.01 * seed, "norm": 2.345},
        }
    return cell


def write_log(cell: dict[str, Any], folder: Path, diagnostics: bool = True) -> None:
    rng = np.random.default_rng(cell["seed"])
    broken, loops = cell["status"] == "collapsed", cell["loops"]
    lines = []
    for step in range(1, cell["step"] + 1):
        loss = 3.2 + 4 * math.exp(-step / 20) + (0.04 * max(0, step - 40) if broken else 0)
        norm = (1 + 0.3 * rng.random()) * (1.06 ** min(step, 120) if broken else 1)
        at: dict[str, Any] = {"segment": 1, "step": step}
        lost = broken and step == cell["step"]
        lines.append(
            {**at, "event": "step", "loss_nats": None if lost else loss, "grad_norm": norm}
        )
        growth = 1.02 ** (min(step, 100) if broken else 1)
        by_loop = {str(r): 12.0 * growth**r for r in range(1, loops + 1)}
        lines.append(
            {
                **at,
                "event": "diagnostics",
                "latent_norm": by_loop,
                "latent_grad_norm": {r: (step > 1) / n for r, n in by_loop.items()},
                "grad_norm_attn": {f"core_blocks.{i}": 0.1 * (i + 1) for i in range(LAYERS)},
                "grad_norm_mlp": {f"core_blocks.{i}": 0.4 * (i + 1) for i in range(LAYERS)},
            }
        )
    folder.mkdir(parents=True)
    kept = [line for line in lines if diagnostics or line["event"] == "step"]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def write_grid(
    folder: Path,
    variants: tuple[str, ...] = ("lt", "fla", "flt"),
    loops: tuple[int, ...] = (3, 6),
    lrs: tuple[float, ...] = (0.02, 0.05),
    seeds: int = 3,
    logs: bool = True,
    diagnostics: bool = True,
) -> Results:
    cells = [
        record(variant, k, lr, seed)
        for seed, k, lr, variant in itertools.product(range(seeds), loops, lrs, variants)
    ]
    results = {
        "format": "loopwise-stability",
        "version": 1,
        "loopwise": "0.1.0",
        "grid": {
            "variants": list(variants),
            "loops": list(loops),
            "seeds": seeds,
            "lrs": list(lrs),
            "random_depth": False,
            "collapse": RULE,
        },
        "settings": {
            "model": {"d_model": 144, "n_layers": LAYERS},
            "data": {"sources": ["builtin:stories:300"]},
            "optim": {"lr": 0.02},
            "train": {"steps": STEPS, "seq": 128, "micro_batch": 4, "accumulation": 2},
        },
        "unigram_nats": FLOOR,
        "cells": cells,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    for cell in cells if logs else []:
        write_log(cell, folder / "cells" / cell["cell"], diagnostics)
    return results


def plain(html: str) -> str:
    """The words of the page, tables and drawings included."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder)
    write_stability_report(folder)
    return folder


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_fetches_nothing(html: str) -> None:
    targets = re.findall(r'\b(?:src|href|xlink:href)="([^"]*)"', html)
    assert all(t.startswith(("#", "data:image/png")) for t in targets)
    assert "<script" not in html and "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def test_every_figure_is_inline_captioned_and_a_png(folder: Path, html: str) -> None:
    files = {p.stem for p in (folder / "plots").glob("*.png")}
    assert html.count("<svg") == html.count("<figcaption>") == len(files)
    for name in ("verdict-lt", "loss-k6-lr0-02", "oscillation-k3-lr0-05", "latent-flt-lr0-02"):
        assert name in files
    assert {"growth-lr0-02", "layers-mlp-k6-lr0-02", "test-time-k6-lr0-02"} <= files
    assert "var(--kl)" in html and "#0b62ad" not in html.split("</style>")[1]


def test_every_cell_has_its_row_and_collapses_are_marked(html: str) -> None:
    results = [record(v, k, lr, s) for v in ("lt", "fla", "flt") for k in (3, 6)
               for lr in (0.02, 0.05) for s in range(3)]  # fmt: skip
    text = plain(html)
    for cell in results:
        stop = f"{cell['variant']} {cell['loops']} {cell['lr']:g} {cell['seed']} {cell['status']}"
        assert f"{stop} {cell['step']}" in text, cell["cell"]
    assert "× 0/3" in text and "step 91" in text  # all of lt at 6 loops
    assert "2/3" in text and "× 77" in text  # one seed of fla
    assert "is &lt;too&gt; high" in html
    assert "lt ×" in text


def test_numbers_come_from_results_and_logs(folder: Path, html: str) -> None:
    lab, text = read_lab(folder), plain(html)
    run = next(r for r in lab.runs if r.record["cell"] == "lt-k6-lr0.02-s0")
    first, last = run.latent_ends
    growth = [1.02**s for s in range(82, 91)]  # the last tenth of 90 steps
    assert first == pytest.approx(12 * np.mean(growth))
    assert last == pytest.approx(12 * np.mean([g**6 for g in growth]))
    swing = np.lib.stride_tricks.sliding_window_view(run.grad_norm[:90], lab.window).std(axis=1)
    assert lab.typical_oscillation(run) == pytest.approx(np.median(swing))
    for number in (first, last, last / first, float(np.median(swing))):
        assert words.significant(number) in text
    assert f"running standard deviation of the gradient norm over the last {lab.window} st" in text
    for fact in ("5.500 nats", "122,880 a run, 1,024 a step", "after step 60", "last 20 steps",
                 "12,000", "3.110", "2.35"):  # fmt: skip
        assert fact in text, fact
    assert "lt: every seed survived at K = 3 (lr 0.02); K = 3 (lr 0.05)." in text


def test_a_grid_of_one_cell_has_a_page(tmp_path: Path) -> None:
    write_grid(tmp_path, ("flt",), (1,), (0.02,), seeds=1)
    text = plain(write_stability_report(tmp_path).read_text(encoding="utf-8"))
    assert "1/1" in text and "3.100" in text


@pytest.mark.parametrize("logs", [False, True])
def test_missing_diagnostics_are_named(tmp_path: Path, logs: bool) -> None:
    write_grid(tmp_path, ("lt", "new"), (6,), (0.02,), seeds=2, logs=logs, diagnostics=False)
    text = plain(write_stability_report(tmp_path).read_text(encoding="utf-8"))
    assert "hold no such measurement" in text
    assert (tmp_path / "plots" / "loss-k6-lr0-02.png").is_file() == logs


def test_a_grid_where_all_collapsed_is_a_result(tmp_path: Path) -> None:
    results = write_grid(tmp_path, ("lt",), (6,), (0.02,), seeds=1, logs=False)
    results["cells"][0]["step"] = None  # a gradient that was not finite names no step
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    text = plain(write_stability_report(tmp_path).read_text(encoding="utf-8"))
    assert "No run survived to be judged" in text and "0/1" in text


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"format": "loopwise-results"},
        {"version": 2},
        {"cells": []},
        {"cells": [{"cell": "x"}]},
        {"grid": {"variants": [], "loops": [], "seeds": 1, "collapse": {}}},
        {"settings": []},
    ],
)
def test_bad_results_are_refused(tmp_path: Path, change: dict[str, Any] | None) -> None:
    if change is not None:
        results = write_grid(tmp_path, ("lt",), (3,), (0.02,), seeds=1, logs=False)
        (tmp_path / "results.json").write_text(json.dumps(results | change), encoding="utf-8")
    with pytest.raises(RunFolderError, match="loopwise stability"):
        write_stability_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_terminal_table(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    print_stability(results, folder)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    lt = next(line for line in lines if line[:3] == ["6", "0.02", "0/3"])
    assert lt[3:5] == ["3/3", "–"]
    fla = next(line for line in lines if line[:3] == ["6", "0.05", "2/3"])
    assert fla[3:5] == ["1/3", "3.110"] and fla[-1] == words.significant(12 * 1.02**6)
    print_stability(write_grid(tmp_path, ("flt",), (3,), (0.02,), seeds=1, logs=False))
    bare = next(s for s in capsys.readouterr().out.splitlines() if "flt" in s).split()
    assert bare == ["flt", "3", "1/1", "0/1", "3.100", "–", "–"]


def test_recurrences_keep_their_numbers_where_the_first_have_no_gradient(tmp_path: Path) -> None:
    """A window of back-propagation that begins at recurrence 2."""
    log = tmp_path / "metrics.jsonl"
    event = {"segment": 1, "step": 1, "event": "diagnostics", "latent_grad_norm": {"3": 3, "2": 2}}
    log.write_text(json.dumps(event) + "\n")
    found = stability_facts._read_run(record("lt", 3, 0.02, 0), log, 1).latent_grad
    assert found.shape == (1, 3)
    assert math.isnan(found[0, 0]) and list(found[0, 1:]) == [2.0, 3.0]


def test_bins_and_seeds_pass_over_what_is_missing() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan])
    np.testing.assert_array_equal(binned(values, 2), [2.0, 5.0, np.nan])
    mid, low, high = over_seeds([values, np.array([3.0, np.nan, np.nan])])
    np.testing.assert_array_equal(mid, [2.0, 3.0, np.nan, 5.0, np.nan])
    assert (low[0], high[0]) == (1.0, 3.0)
