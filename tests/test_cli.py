"""The command line: one study from end to end, and bad input that ends in one line and code 2."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from loopwise.cli import app
from loopwise.cli.running import command
from loopwise.data import generate
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.study import commands
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.conftest import full_disk

TINY_RUN = [
    "tokenizer.kind=byte",
    "data.held_out_fraction=0.4",
    "train.steps=3",
    "train.seq=48",
    "train.micro_batch=2",
    "train.compile=off",
    "train.dtype=fp32",
    "train.eval_every=2",
    "train.eval_blocks=2",
    "train.eval_depths=[1,3]",
    "train.save_every=2",
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "model.d_ff=24",
    "model.n_core_layers=1",
    "depth.mean=3",
    "depth.backprop_depth=2",
]
TINY_MEASURE = [
    "measure.horizon=5",
    "measure.tokens=500",
    "measure.fit_tokens=200",
    "measure.live_tokens=150",
    "measure.live_thresholds=2",
]


def sets(*items: str) -> list[str]:
    return [part for item in items for part in ("--set", item)]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.stderr, result.exception)
    return strict_json(result.stdout.splitlines()[-1])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(result: Result, *parts: str) -> None:
    """Exit code 2, one line that starts with ``error:`` and holds ``parts``, no traceback."""
    trouble = result.exception
    assert trouble is None or isinstance(trouble, SystemExit), f"a traceback: {trouble!r}"
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == 1, result.stderr
    assert lines[-1] == errors[0], "something follows the error"
    assert "Traceback" not in result.output
    for part in parts:
        assert part in errors[0], errors[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Result]:
    """One tiny study, shared by every test that spoils nothing."""
    root = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        result = run(
            "study",
            *("--data", "builtin:stories:16", "--data", "builtin:ledgers:16"),
            *sets(*TINY_RUN, *TINY_MEASURE),
            *("--seed", "3", "--out", root / "run", "--json"),
        )
    assert result.exit_code == 0, (result.stderr, result.exception)
    return root / "run", result


@pytest.fixture
def a_run(finished, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


# From end to end.


def test_a_study_makes_every_file_it_names(finished):
    folder, result = finished
    made = answer(result)
    assert set(made) == {"run", "report", "checkpoint"}
    assert Path(made["run"]) == folder
    report = Path(made["report"])
    assert report == folder / "report.html"
    assert "<html" in report.read_text().lower()
    assert Path(made["checkpoint"]) == folder / "checkpoints" / "step-0000003"
    for name in ("config.json", "tokenizer.json", "metrics.jsonl", "results.json"):
        assert (folder / name).is_file(), name
    assert list((folder / "plots").iterdir())
    for corpus in ("stories-16", "ledgers-16"):
        assert Trace(folder / "traces" / corpus).horizon == 5
    assert not [p for p in folder.rglob("*") if p.name.startswith((".partial", ".results"))]


def test_results_are_strict_json_and_agree_with_the_traces(finished):
    folder, _ = finished
    results = strict_json((folder / "results.json").read_text())
    assert [c["corpus"] for c in results["convergence"]] == ["stories-16", "ledgers-16"]
    assert [f["corpus"] for f in results["frontiers"]] == ["stories-16", "ledgers-16"]
    assert results["settings"]["seed"] == results["training"]["seed"] == 3
    for convergence in results["convergence"]:
        trace = Trace(folder / "traces" / convergence["corpus"])
        wanted = trace["loss"].astype(float).mean(axis=0)
        assert convergence["loss_nats"]["mean"] == pytest.approx(list(wanted))
        assert wanted[0] < 1.2 * math.log(258), "an untrained model is about uniform"
        assert len(convergence["bits_per_byte"]) == 5


def test_the_config_of_a_run_is_whole(finished):
    folder, _ = finished
    settings = strict_json((folder / "config.json").read_text())["settings"]
    assert settings["train"]["steps"] == 3
    assert settings["model"]["d_model"] == 16
    assert settings["optim"]["lr"] > 0, "defaults are filled in"
    assert settings["data"]["sources"] == ["builtin:stories:16", "builtin:ledgers:16"]


def test_what_is_measured_was_held_out_and_not_fitted_on(finished):
    folder, _ = finished
    training = load_checkpoint(folder).training["data"]
    assert training["held_out_corpora"] == ["stories-16", "ledgers-16"]
    assert 4 <= training["documents"] <= 28


@pytest.fixture
def no_plots(monkeypatch) -> None:
    """Drawing takes seconds; one study and one report draw for all."""
    monkeypatch.setattr("loopwise.study.commands.write_report", lambda run: run / "report.html")


@pytest.mark.usefixtures("no_plots")
def test_a_finished_study_resumes_to_the_same_result(a_run):
    before = strict_json((a_run / "results.json").read_text())
    weights = load_file(a_run / "checkpoints" / "step-0000003" / "model.safetensors")
    traces = files(a_run / "traces")
    (a_run / "results.json").unlink()
    made = answer(run("study", "--out", a_run, "--resume", "--json"))
    assert files(a_run / "traces") == traces, "finished traces are kept"
    after = strict_json((a_run / "results.json").read_text())
    assert after == before
    again = load_file(Path(made["checkpoint"]) / "model.safetensors")
    assert all(np.array_equal(again[k], weights[k]) for k in weights)


@pytest.mark.usefixtures("no_plots")
def test_a_finished_study_of_an_earlier_version_gets_the_rules_that_came_since(a_run):
    """Fitted on what its first rules were fitted on; traces and those rules stay as they are."""
    before = strict_json((a_run / "results.json").read_text())
    traces = files(a_run / "traces")
    file = a_run / "checkpoints" / "step-0000003" / "exits.json"
    exits = strict_json(file.read_text())
    assert set(exits["policies"]) == {"probe", "latent-kl", "certified"}
    older = {**exits, "policies": {"probe": exits["policies"]["probe"]}}
    file.write_text(json.dumps(older))
    answer(run("study", "--out", a_run, "--resume", "--json"))
    assert strict_json(file.read_text()) == exits
    assert files(a_run / "traces") == traces
    assert strict_json((a_run / "results.json").read_text()) == before


@pytest.mark.usefixtures("no_plots")
def test_a_run_stopped_before_its_tokenizer_was_written_resumes(a_run):
    shutil.rmtree(a_run / "checkpoints")
    (a_run / "tokenizer.json").unlink()
    assert run("train", "--out", a_run, "--resume").exit_code == 0
    assert (a_run / "tokenizer.json").is_file()


def test_a_study_killed_between_training_and_measuring_resumes(a_run):
    shutil.rmtree(a_run / "traces")
    for name in ("results.json", "report.html"):
        (a_run / name).unlink()
    (a_run / "checkpoints" / "step-0000003" / "exits.json").unlink()
    answer(run("study", "--out", a_run, "--resume", "--json"))
    assert (a_run / "traces" / "ledgers-16" / "trace.json").is_file()


def test_resuming_with_other_settings_is_not_silently_the_old_run(a_run):
    """An option that is accepted and ignored is a run that is not what was asked for."""
    before = files(a_run)
    result = run("train", "--out", a_run, "--resume", *sets("train.steps=5"))
    if result.exit_code == 0:
        settings = strict_json((a_run / "config.json").read_text())["settings"]
        assert settings["train"]["steps"] == 5, "the new setting was dropped without a word"
    else:
        refused(result, "train.steps")
        assert files(a_run) == before


def test_training_alone(tmp_path):
    out = tmp_path / "run"
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat\n" * 60 + "<|endoftext|>\n" + "a dog ran\n" * 60)
    result = run("train", "--data", text, *sets(*TINY_RUN), "--out", out, "--json")
    made = answer(result)
    assert result.stdout.startswith(f"checkpoint: {made['checkpoint']}\n")
    assert made["event"] == "done"
    assert made["step"] == 3
    assert set(made["loss_nats_by_depth"]) == {"1", "3"}
    assert load_checkpoint(out).training["steps"] == 3


def test_measuring_given_text(finished, tmp_path):
    folder, _ = finished
    text = tmp_path / "fresh.txt"
    pieces = ["Zürich has a lake. " * 12, "Nobody knows the way home. " * 9]
    text.write_text("\n<|endoftext|>\n".join(pieces), encoding="utf-8")
    before = files(folder)
    made = answer(
        run(
            *("measure", folder, "--data", text, "--out", tmp_path / "t", "--json"),
            *sets(*TINY_MEASURE),
        )
    )
    assert made["traces"] == [str(tmp_path / "t" / "fresh")]
    trace = Trace(tmp_path / "t" / "fresh")
    assert made["tokens"] == [trace.n_tokens]
    assert trace.policies == ["cosine", "sketched-kl", "certified", "probe"]
    assert files(folder) == before, "measuring elsewhere changed the run"


def test_measuring_again_what_the_run_held_out(finished, tmp_path):
    folder, _ = finished
    made = answer(run("measure", folder, "--out", tmp_path / "t", "--json", *sets(*TINY_MEASURE)))
    assert len(made["traces"]) == 2
    first, again = Trace(folder / "traces" / "stories-16"), Trace(tmp_path / "t" / "stories-16")
    assert np.array_equal(first["loss"], again["loss"])


# A reference.


@pytest.fixture
def reference(tmp_path) -> Path:
    """Another model, with another tokenizer."""
    tokenizer = BPETokenizer.train([d.text for d in generate("stories", 0, 0, 4)], 300)
    config = FixedConfig(
        vocab_size=tokenizer.vocab_size, d_model=16, n_heads=2, n_kv_heads=2, d_ff=24, n_layers=1
    )
    save_checkpoint(tmp_path / "other", FixedModel(config), tokenizer, {})
    return tmp_path / "other"


def test_a_finished_run_gets_a_reference_and_a_report_with_it(a_run, reference, monkeypatch):
    traces = files(a_run / "traces")
    before = strict_json((a_run / "results.json").read_text())
    monkeypatch.chdir(reference.parent)
    command = ["measure", a_run, *sets("measure.reference=other"), "--json"]
    result = run(*command)
    made = answer(result)
    assert [found["name"] for found in made["references"]] == ["other", "other"]
    assert "stories-16: other, 1 recurrence: " in result.stdout
    now = files(a_run / "traces")
    assert {k: v for k, v in now.items() if not k.endswith("reference.json")} == traces
    after = strict_json((a_run / "results.json").read_text())
    for c, was, found in zip(
        after["convergence"], before["convergence"], made["references"], strict=True
    ):
        assert c == {**was, "reference": found}
        header = Trace(a_run / "traces" / c["corpus"]).header
        assert 0 <= header["n_bytes"] - found["bytes"] < 4
        assert found["best_bits_per_byte"]["mean"] == pytest.approx(min(c["bits_per_byte"]))
    answer(run("report", a_run, "--json"))
    assert "other (" in (a_run / "report.html").read_text()
    stored = {k: v.stat().st_mtime_ns for k in now for v in [a_run / "traces" / k]}
    answer(run(*command))
    again = {k: v.stat().st_mtime_ns for k in now for v in [a_run / "traces" / k]}
    assert again == stored, "the same reference is not measured twice"
    refused(run("measure", a_run), "holds a finished trace")


def test_finished_traces_of_given_text_get_a_reference_if_the_text_is_the_same(
    finished, tmp_path, reference
):
    """Else a measurement that was stopped within it, or forgot it, is made all over again."""
    text, out = tmp_path / "fresh.txt", tmp_path / "t"
    pieces = ["Zürich has a lake. " * 12, "Nobody knows the way home. " * 9]
    text.write_text("\n<|endoftext|>\n".join(pieces), encoding="utf-8")
    command = ["measure", finished[0], "--data", text, "--out", out, *sets(*TINY_MEASURE), "--json"]
    assert answer(run(*command))["references"] == [None]
    traces = files(out)
    with_one = [*command, *sets(f"measure.reference={reference}")]
    (found,) = answer(run(*with_one))["references"]
    assert found["name"] == "other"
    assert {k: v for k, v in files(out).items() if not k.endswith("reference.json")} == traces
    for other in ("measure.horizon=4", "measure.tokens=100"):
        refused(run(*with_one, *sets(other)), "holds a finished trace")
    text.write_text("\n<|endoftext|>\n".join([*pieces, "and more. " * 30]), encoding="utf-8")
    refused(run(*with_one), "holds a finished trace")


def test_traces_beside_another_run_leave_its_results_alone(a_run, tmp_path, reference):
    """They named a corpus of the same name and length, and the reference went to that model."""
    held = ["--data", "builtin:stories:16"]
    other = tmp_path / "another"
    answer(run("train", *held, *sets(*TINY_RUN, "seed=5"), "--out", other, "--json"))
    before = (a_run / "results.json").read_text()
    command = ["measure", other, *held, "--out", a_run / "extra", *sets(*TINY_MEASURE), "--json"]
    answer(run(*command))
    (found,) = answer(run(*command, *sets(f"measure.reference={reference}")))["references"]
    assert found["name"] == "other"
    assert (a_run / "results.json").read_text() == before


def test_a_reference_that_cannot_read_the_text_costs_no_results(tmp_path, reference, no_plots):
    """Its vocabulary lacks a letter of the text, which is seen after hours of training."""
    file = reference / "tokenizer.json"
    lacking = json.loads(file.read_text())
    last = max(lacking["model"]["vocab"].values())
    lacking["model"]["vocab"] |= {"\u00e9\u00e9": lacking["model"]["vocab"].pop("T")}
    lacking["model"]["merges"] = [m for m in lacking["model"]["merges"] if "T" not in "".join(m)]
    assert max(lacking["model"]["vocab"].values()) == last
    file.write_text(json.dumps(lacking))
    command = ["study", "--data", "builtin:stories:16", "--out", tmp_path / "run"]
    command += sets(*TINY_RUN, *TINY_MEASURE, f"measure.reference={reference}")
    refused(run(*command), "measure.reference on stories-16", "no token for the character 'T'")
    results = strict_json((tmp_path / "run" / "results.json").read_text())
    assert results["frontiers"] and results["convergence"][0]["reference"] is None


def test_a_study_with_a_reference(tmp_path, reference, monkeypatch, no_plots):
    """Its settings hold a path that is found from anywhere, and resuming takes either."""
    monkeypatch.chdir(tmp_path)
    command = ["study", "--data", "builtin:stories:16", "--out", "run", "--json"]
    command += sets(*TINY_RUN, *TINY_MEASURE, "measure.reference=other")
    answer(run(*command))
    results = strict_json(Path("run/results.json").read_text())
    assert results["settings"]["measure"]["reference"] == str(reference)
    assert results["convergence"][0]["reference"]["checkpoint"] == str(reference)
    answer(run(*command, "--resume"))
    assert strict_json(Path("run/results.json").read_text()) == results


@pytest.mark.parametrize("command", ["study", "train", "measure"])
def test_a_reference_that_is_none_is_refused_before_long_work(finished, tmp_path, command):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("no model")
    out = tmp_path / "out"
    arguments = [finished[0]] if command == "measure" else sets(*TINY_RUN)
    arguments += ["--data", "builtin:stories:16", "--out", out]
    for path, said in ((tmp_path / "folder", "notes.txt"), (tmp_path / "none", "no checkpoint")):
        result = run(command, *arguments, *sets(f"measure.reference={path}"))
        refused(result, "measure.reference", str(path), said)
        assert not out.exists()


@pytest.mark.parametrize("command", ["study", "measure"])
def test_a_reference_that_is_broken_is_refused_before_long_work(
    finished, tmp_path, reference, command
):
    weights = reference / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    out = tmp_path / "out"
    arguments = [finished[0]] if command == "measure" else sets(*TINY_RUN)
    arguments += ["--data", "builtin:stories:16", "--out", out]
    result = run(command, *arguments, *sets(f"measure.reference={reference}"))
    refused(result, "measure.reference", "truncated")
    assert not out.exists()


def test_frontiers_of_finished_traces(finished):
    folder, _ = finished
    trace = folder / "traces" / "stories-16"
    result = run("frontier", trace, "--json", *sets(*TINY_MEASURE))
    (frontier,) = answer(result)["frontiers"]
    assert "A1 KL" in result.stdout.rpartition("\n{")[0], "people get the table"
    stored = strict_json((folder / "results.json").read_text())["frontiers"][0]
    assert frontier == stored


def test_frontiers_where_the_weights_have_moved(a_run, tmp_path):
    moved = a_run.rename(tmp_path / "moved")
    trace = moved / "traces" / "stories-16"
    header = json.loads((trace / "trace.json").read_text())
    (trace / "trace.json").write_text(json.dumps({**header, "checkpoint": "/nowhere/at/all"}))
    refused(run("frontier", trace), "/nowhere/at/all")
    made = answer(run("frontier", trace, "--checkpoint", moved, "--json", *sets(*TINY_MEASURE)))
    assert made["frontiers"][0]["corpus"] == "stories-16"


def test_a_report_from_results_alone(finished, tmp_path):
    folder, _ = finished
    shutil.copy(folder / "results.json", tmp_path / "results.json")
    result = run("report", tmp_path)
    assert result.stdout == f"report: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").is_file()
    assert answer(run("report", tmp_path, "--json")) == {"report": str(tmp_path / "report.html")}


def test_generated_text_is_what_the_tokens_say(finished):
    folder, _ = finished
    result = run("generate", folder, "Tom has", "--max-tokens", "5", "--depth", "2", "--json")
    made = answer(result)
    assert made["text"] == ByteTokenizer().decode(made["token_ids"])
    assert made["rule"] == "fixed:2"
    assert made["mean_depth"] == 2.0
    assert 1 <= len(made["token_ids"]) <= 5
    assert made["exit_depths"] == [2] * len(made["token_ids"])
    assert "Tom has" in result.stdout
    assert run("generate", folder, "Tom has", "--max-tokens", "5", "--depth", "2", "--json")


@pytest.mark.parametrize(
    "rule",
    ["kl:0.01,max=4", "latent-change:0.5,max=4", "probe:0.4,max=4", "latent-kl:0.01,max=4"],
)
def test_generating_under_each_rule(finished, rule):
    made = answer(run("generate", finished[0], "a", "--max-tokens", 3, "--exit", rule, "--json"))
    assert made["rule"] == rule
    assert all(1 <= d <= 4 for d in made["exit_depths"])


def test_generating_by_default_runs_the_training_mean(finished):
    made = answer(run("generate", finished[0], "", "--max-tokens", "1", "--json"))
    assert made["rule"] == "fixed:3"
    assert made["exit_depths"] == [3]
    assert len(made["token_ids"]) == 1


@pytest.mark.parametrize("temperature", ["0", "0.7", "1e-300", "inf"])
@pytest.mark.parametrize("seed", ["0", "4294967296", "-1"])
def test_any_temperature_and_seed_give_text_or_one_line(finished, temperature, seed):
    result = run(
        *("generate", finished[0], "a", "--max-tokens", "2", "--depth", "1"),
        *("--temperature", temperature, f"--seed={seed}"),
    )
    if result.exit_code != 0:
        refused(result)


# Bad data. ``{t}`` is the test's own folder.

BAD_DATA = {
    "missing": (None, "no file or folder"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b"  \n \n", "not one document"),
    "binary.txt": (b"\x00\x01\x02" * 900, "binary"),
    "latin.txt": ("Käse\n".encode("latin-1") * 900, "is not UTF-8"),
    "short.txt": (b"a few words\n<|endoftext|>\nmore\n", "one block needs 49"),
    "one.txt": (b"one single document " * 90, "cannot be split"),
    "data.csv": (b"a,b\n1,2\n", "files of this type are not read"),
    "bad.jsonl": (b'{"text": "a"\n', "line 1 is not JSON"),
    "other.jsonl": (b'{"body": "a"}\n', "not one document"),
    "cut.txt.gz": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "cannot be read to its end"),
}


@pytest.mark.parametrize("command", ["study", "train"])
@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_one_line_and_leaves_no_folder(tmp_path, name, command):
    content, message = BAD_DATA[name]
    source, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        source.write_bytes(content)
    result = run(command, "--data", source, *sets(*TINY_RUN), "--out", out)
    refused(result, message, *([] if name in ("short.txt", "one.txt") else [name]))
    assert not out.exists(), f"half-written: {sorted(files(out))}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtin:storys", "did you mean 'stories'"),
        ("builtin:stories:0", "is not a number of documents"),
        ("hub:nothing", "must read hub:OWNER/NAME"),
        ("{t}/*.txt", "no file matches"),
        ("{t}", "no .txt, .jsonl, .parquet"),
    ],
)
def test_bad_sources_are_one_line_and_leave_no_folder(tmp_path, source, message):
    (tmp_path / "in").mkdir()
    source, out = source.format(t=tmp_path / "in"), tmp_path / "out"
    refused(run("study", "--data", source, *sets(*TINY_RUN), "--out", out), message)
    assert not out.exists(), f"half-written: {sorted(files(out))}"


def test_bad_held_out_text_is_refused_before_training(tmp_path):
    out = tmp_path / "out"
    result = run(
        *("study", "--data", "builtin:stories:16", "--held-out", tmp_path / "none.txt"),
        *(*sets(*TINY_RUN), "--out", out),
    )
    refused(result, "none.txt")
    assert not out.exists()


def test_held_out_text_too_small_to_measure_is_refused_before_training(tmp_path):
    """One long document can be evaluated in training, but not split into fit and measurement."""
    text, out = tmp_path / "one.txt", tmp_path / "out"
    text.write_text("a single long document " * 60)
    result = run(
        *("study", "--data", "builtin:stories:16", "--held-out", text),
        *(*sets(*TINY_RUN), "--out", out),
    )
    refused(result, "one document")
    assert not out.exists(), "the whole training ran before the refusal"


def test_held_out_text_that_is_learned_from_is_said(tmp_path):
    """It ran without a word, and what it measured was training text."""
    pieces = [f"the cat number {n} sat on the mat. " * 12 for n in range(6)]
    text, other, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out"
    text.write_text("\n<|endoftext|>\n".join(pieces))
    other.write_text("\n<|endoftext|>\n".join([*pieces[:2], "a dog ran. " * 30]))
    arguments = ("--data", text, *sets(*TINY_RUN), "--out", out)
    result = run("train", *arguments, "--held-out", other)
    warnings = [x for x in result.stderr.splitlines() if x.startswith("warning:")]
    assert (
        len(warnings) == 1 and "2 of 3 held-out documents are in the training text" in warnings[0]
    )
    data = load_checkpoint(out).training["data"]
    assert data["held_out_documents_learned_from"] == 2
    shutil.rmtree(out)
    assert "warning:" not in run("train", *arguments).stderr


@pytest.mark.parametrize("way", ["data.read.split=blank-line", "data.read.max_document_chars="])
def test_text_without_separators_is_cut_as_the_message_says(tmp_path, way):
    text, out = tmp_path / "stories.txt", tmp_path / "out"
    text.write_text("\n\n".join(["the cat sat on the mat. " * 20] * 6))
    command = ["train", "--data", text, *sets(*TINY_RUN), "--out", out]
    result = run(*command)
    refused(result, "cannot be split", way)
    typed = next(x for x in result.stderr.split() if x.startswith(way))
    assert run(*command, "--set", typed).exit_code == 0


def test_bytes_that_are_not_utf8_are_taken_as_the_message_says(tmp_path):
    text, out = tmp_path / "latin.txt", tmp_path / "out"
    text.write_bytes("\n<|endoftext|>\n".join(["Käse und Brot. " * 20] * 6).encode("latin-1"))
    command = ["train", "--data", text, *sets(*TINY_RUN), "--out", out]
    refused(run(*command), "--set data.read.encoding_errors=replace")
    assert run(*command, "--set", "data.read.encoding_errors=replace").exit_code == 0


def test_data_can_be_mended_and_the_same_command_run_again(tmp_path):
    """What a refused command leaves must not be in the way of the next."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    command = ["train", "--data", text, *sets(*TINY_RUN), "--out", out]
    refused(run(*command), "a.txt")
    text.write_text("\n<|endoftext|>\n".join(["the cat sat on the mat. " * 20] * 6))
    assert run(*command).exit_code == 0


# Bad settings.


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "train.stepz=1"], ["'stepz'", "did you mean 'steps'"]),
        (["--set", "lr=1"], ["'lr'", "[optim]"]),
        (["--set", "train.steps"], ["is not key=value"]),
        (["--set", "train.steps=many"], ["train.steps='many'"]),
        (["--set", "model=5"], ["model"]),
        (["--preset", "tinny"], ["'tinny'", "did you mean 'tiny'"]),
        (["--set", "architecture=recurent"], ["did you mean 'recurrent'"]),
        (["--set", "model.d_model=30"], ["model.d_model=30", "multiple of twice"]),
        (["--set", "model.n_kv_heads=3"], ["model.n_kv_heads=3"]),
        (["--set", "model.vocab_size=99"], ["tokenizer.vocab_size"]),
        (["--set", "measure.epsilon=nan"], ["measure.epsilon=nan"]),
        (["--set", "measure.epsilon=-1"], ["measure.epsilon=-1"]),
        (["--set", "measure.horizon=0"], ["measure.horizon=0"]),
        (["--set", "measure.horizon=-1"], ["measure.horizon=-1"]),
        (["--set", "depth.mean=0"], ["depth.mean=0"]),
        (["--set", "depth.mean=-1"], ["depth.mean=-1"]),
        (["--set", "depth.mean=inf"], ["depth.mean=inf"]),
        (["--set", "train.eval_depths=[0]"], ["0"]),
        (["--set", "train.eval_depths=[]"], ["eval_depths"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--seed", str(2**70)], ["seed"]),
        (["--config", "{t}/none.toml"], ["none.toml", "check the path"]),
        (["--config", "{t}/broken.toml"], ["broken.toml", "not valid TOML"]),
        (["--config", "{t}/wrong.toml"], ["'steppes'", "did you mean 'steps'"]),
        (["--config", "{t}"], ["config"]),
        (["--set", "tokenizer.kind={t}/none"], ["cannot read a tokenizer"]),
        (["--set", "tokenizer.kind={t}/broken.toml"], ["broken.toml"]),
        (["--set", "device=cuda:99"], ["'cuda:99'"]),
        (["--set", "device=toaster"], ["'toaster'"]),
        (["--set", "model.d_model=1000000"], ["training needs about", "GiB free", "lower model"]),
    ],
    ids=lambda x: " ".join(x)[-40:] if x[0].startswith("--") else "",
)
def test_u78_bad_settings_are_one_line_and_leave_no_folder(tmp_path, arguments, parts):
    (tmp_path / "broken.toml").write_text("[train\n")
    (tmp_path / "wrong.toml").write_text("[train]\nsteppes = 3\n")
    arguments = [a.format(t=tmp_path) for a in arguments]
    out = tmp_path / "out"
    result = run(
        *("study", "--data", "builtin:stories:8", *sets(*TINY_RUN), *arguments, "--out", out)
    )
    refused(result, *parts)
    assert not out.exists(), f"half-written: {sorted(files(out))}"


@pytest.mark.parametrize("override", ["train.steps=5", "seed=3", "model.d_model=16"])
def test_settings_of_training_are_refused_by_commands_on_a_trained_model(finished, override):
    """They were taken and changed nothing."""
    folder, _ = finished
    for arguments in (
        ["measure", folder],
        ["frontier", folder / "traces" / "stories"],
        ["eval", "perplexity", folder, "--data", "builtin:stories:4"],
    ):
        refused(
            run(*arguments, "--set", override),
            f"--set {override.partition('=')[0]} ",
            "data and measure",
        )


# Folders.


@pytest.mark.parametrize("command", ["study", "train"])
def test_a_folder_that_holds_another_run_is_left_alone(a_run, command):
    before = files(a_run)
    result = run(command, "--data", "builtin:stories:8", *sets(*TINY_RUN), "--out", a_run)
    refused(result, "is not empty", "--resume")
    assert files(a_run) == before


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    refused(run("train", *sets(*TINY_RUN), "--out", tmp_path), "is not empty")
    assert files(tmp_path) == {"thesis.tex": b"chapter 1"}


def test_an_out_that_is_a_file_is_left_alone(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    refused(run("train", *sets(*TINY_RUN), "--out", file), "file")
    refused(run("train", *sets(*TINY_RUN), "--out", file / "below"), "below")
    assert file.read_text() == "x"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place nobody can write needs /proc")
@pytest.mark.parametrize("command", ["study", "train", "stability"])
def test_a_folder_that_cannot_be_made_is_one_line(command):
    tiny = [x for x in TINY_RUN if command != "stability" or not x.startswith(("model.", "depth."))]
    result = run(command, "--data", "builtin:stories:16", *sets(*tiny), "--out", "/proc/nope/run")
    refused(result, "cannot write '/proc/nope/run'", "No such file or directory", "another place")


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("name", ["results.json", "traces/stories-16/shard-00000.safetensors"])
def test_a_disk_that_is_full_after_training_is_one_line_and_resumes(a_run, monkeypatch, name):
    """Once there is room again the study goes on from what it has."""
    (a_run / "results.json").unlink()
    if name.startswith("traces"):
        shutil.rmtree(a_run / "traces")
    run_training = commands.train_stage

    def then_full(*args):
        done = run_training(*args)
        later.enter_context(full_disk())
        return done

    with ExitStack() as later, monkeypatch.context() as patch:
        patch.setattr(commands, "train_stage", then_full)
        result = run("study", "--out", a_run, "--resume")
    refused(result, f"cannot write '{a_run / name}'", "free some space")
    assert load_checkpoint(a_run).training["step"] == 3
    assert run("study", "--out", a_run, "--resume").exit_code == 0
    assert (a_run / "results.json").is_file()


def test_a_report_that_cannot_be_written_is_one_line(a_run):
    before = (a_run / "report.html").read_bytes()
    with full_disk():
        refused(run("report", a_run), f"cannot write '{a_run}", "free some space")
    assert (a_run / "report.html").read_bytes() == before


@pytest.mark.parametrize("command", ["study", "train"])
def test_resuming_nothing_is_refused(tmp_path, command):
    out = tmp_path / "out"
    refused(run(command, "--out", out, "--resume"), "no run to resume")
    assert not out.exists()
    out.mkdir()
    refused(run(command, "--out", out, "--resume"), "no run to resume")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"settings": 3}'])
def test_resuming_from_a_spoilt_config_is_one_line(a_run, content):
    (a_run / "config.json").write_bytes(content)
    refused(run("study", "--out", a_run, "--resume"), "config.json")


def test_resuming_a_checkpoint_folder_is_one_line(a_run):
    """Its config.json is of another kind."""
    refused(run("train", "--out", a_run / "checkpoints" / "step-0000003", "--resume"))


def test_a_run_without_a_checkpoint_yet_is_refused_or_started(tmp_path, a_run):
    """Killed before its first save: going on must not end in a traceback."""
    shutil.rmtree(a_run / "checkpoints")
    result = run("train", "--out", a_run, "--resume")
    if result.exit_code != 0:
        refused(result)


def test_measuring_over_finished_traces_is_refused(a_run):
    before = files(a_run)
    refused(run("measure", a_run, *sets(*TINY_MEASURE)), "finished trace", "--out")
    assert files(a_run) == before


def test_measuring_into_a_folder_beside_its_text_spares_the_text(finished, tmp_path):
    """``--data corpora/books --out corpora`` puts the trace of books at corpora/books."""
    books = tmp_path / "corpora" / "books"
    books.mkdir(parents=True)
    for name in "ab":
        (books / f"{name}.txt").write_text(f"{name} long enough text for a block. " * 20)
    before = files(books)
    result = run(
        *("measure", finished[0], "--data", books, "--out", books.parent),
        *sets(*TINY_MEASURE),
    )
    assert files(books) == before, "measuring deleted the text it was given"
    refused(result, "books")


def test_measuring_a_bare_checkpoint_writes_nowhere_unasked(finished, tmp_path):
    """A checkpoint copied out of its run has no run folder two levels up."""
    home = tmp_path / "home"
    checkpoint = home / "models" / "mine"
    shutil.copytree(finished[0] / "checkpoints" / "step-0000003", checkpoint)
    result = run("measure", checkpoint, "--data", "builtin:stories:4", *sets(*TINY_MEASURE))
    assert [p.name for p in home.iterdir()] == ["models"], "traces appeared two folders up"
    if result.exit_code != 0:
        refused(result, "--out")


def test_measuring_a_bare_checkpoint_needs_text(finished, tmp_path):
    checkpoint = tmp_path / "models" / "mine"
    shutil.copytree(finished[0] / "checkpoints" / "step-0000003", checkpoint)
    result = run("measure", checkpoint, "--out", tmp_path / "traces")
    refused(result, "not a run folder", "--data")


def test_a_checkpoint_of_a_run_is_measured_as_the_run_is(finished):
    checkpoint = finished[0] / "checkpoints" / "step-0000003"
    refused(run("measure", checkpoint), "holds a finished trace", "--out")


def test_measuring_says_which_rules_it_stores_with_the_checkpoint(a_run, tmp_path):
    """With --out elsewhere, exits.json of the checkpoint was written without a word."""
    file = a_run / "checkpoints" / "step-0000003" / "exits.json"
    file.unlink()
    command = ["measure", a_run, *sets(*TINY_MEASURE), "--json", "--out"]
    result = run(*command, tmp_path / "first")
    told = answer(result)["fitted"]
    assert told == {"rules": list(json.loads(file.read_text())["policies"]), "file": str(file)}
    assert "probe" in told["rules"]
    plain = run("measure", a_run, *sets(*TINY_MEASURE), "--out", tmp_path / "second")
    assert "fitted rules" not in plain.stdout, "there already"
    file.unlink()
    plain = run("measure", a_run, *sets(*TINY_MEASURE), "--out", tmp_path / "third")
    lines = [line for line in plain.stdout.splitlines() if "fitted" in line]
    assert lines == [f"fitted rules: {', '.join(told['rules'])}; stored in {file}"]


# Broken checkpoints and traces.


def spoil(a_run: Path, how: str) -> None:
    step = a_run / "checkpoints" / "step-0000003"
    weights = step / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif how == "foreign":
        (step / "config.json").write_text('{"model_type": "gpt2"}')
    elif how == "newer":
        config = json.loads((step / "config.json").read_text())
        (step / "config.json").write_text(json.dumps({**config, "version": 99}))
    elif how == "no tokenizer":
        (step / "tokenizer.json").unlink()
    elif how == "lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif how == "no pointer target":
        (a_run / "checkpoints" / "latest").write_text("step-9999999")


@pytest.mark.parametrize("command", ["generate", "measure", "frontier"])
@pytest.mark.parametrize(
    "how", ["cut", "foreign", "newer", "no tokenizer", "lfs", "no pointer target"]
)
def test_a_broken_checkpoint_is_one_line(a_run, tmp_path, how, command):
    spoil(a_run, how)
    arguments = {
        "generate": ["generate", a_run, "Hello"],
        "measure": ["measure", a_run, "--out", tmp_path / "t"],
        "frontier": ["frontier", a_run / "traces" / "stories-16", "--checkpoint", a_run],
    }
    refused(run(*arguments[command]))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("command", ["generate", "measure", "frontier", "report"])
def test_a_path_to_nothing_is_one_line(tmp_path, command):
    more = ["Hello"] if command == "generate" else []
    for path in (tmp_path / "nowhere", tmp_path):
        refused(run(command, path, *more), str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_trace_is_one_line(a_run):
    trace = a_run / "traces" / "stories-16"
    shard = trace / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    refused(run("frontier", trace, "--checkpoint", a_run), "shard-00000", "truncated")


def test_a_trace_of_other_weights_is_one_line(a_run):
    other = a_run / "checkpoints" / "step-0000002"
    trace = a_run / "traces" / "stories-16"
    refused(run("frontier", trace, "--checkpoint", other), "other weights")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": "loopwise-results"}'])
def test_broken_results_are_one_line(tmp_path, content):
    (tmp_path / "results.json").write_bytes(content)
    refused(run("report", tmp_path), "results.json")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


# Bad rules and numbers.


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--depth", "0"], ["--depth 0 must be at least 1"]),
        (["--depth", "-1"], ["--depth -1 must be at least 1"]),
        (["--depth", "100000"], ["past the limit"]),
        (["--exit", "kl:abc"], ["'abc' is not a number"]),
        (["--exit", "kl:nan"], ["not a number"]),
        (["--exit", "kl:-1"], ["'kl:-1'", "no token stops early", "at least 0"]),
        (["--exit", "kl"], ["has no threshold"]),
        (["--exit", "latnt-change:1"], ["did you mean 'latent-change'"]),
        (["--exit", "kl:1,maks=3"], ["no field 'maks'"]),
        (["--exit", "kl:1,max=0"], ["must be at least 1"]),
        (["--exit", "oracle:1"], ["later recurrences"]),
        (["--exit", "kl:1", "--depth", "3"], ["not both"]),
        (["--max-tokens", "-1"], ["max_tokens=-1"]),
        (["--temperature", "-0.5"], ["temperature=-0.5"]),
        (["--temperature", "nan"], ["temperature=nan"]),
    ],
    ids=lambda x: " ".join(x) if x[0].startswith("--") else "",
)
def test_bad_generation_options_are_one_line(finished, arguments, parts):
    refused(run("generate", finished[0], "Hello", *arguments), *parts)


def test_a_prompt_that_is_not_text_is_one_line(finished):
    refused(run("generate", finished[0], "half \ud800"), "surrogate")


def test_a_probe_that_was_never_fitted_is_one_line(a_run):
    (a_run / "checkpoints" / "step-0000003" / "exits.json").unlink()
    refused(run("generate", a_run, "Hello", "--exit", "probe:0.5"), "must be fitted")


def test_exits_of_other_weights_are_one_line(a_run):
    file = a_run / "checkpoints" / "step-0000003" / "exits.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "weights_hash": "other"}))
    refused(run("generate", a_run, "Hello", "--exit", "probe:0.5"), "other weights")


# Usage.


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["nonsense"],
        ["study", "--nonsense"],
        ["study", "--seed", "many"],
        ["study", "stray"],
        ["measure"],
        ["generate", "somewhere"],
        ["report", "a", "b"],
        ["frontier"],
    ],
    ids=" ".join,
)
def test_u78_wrong_usage_ends_with_code_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_errors_stay_off_standard_output(tmp_path):
    result = run("generate", tmp_path, "x", "--json")
    assert result.stdout == ""
    refused(result)


def test_debug_shows_where_it_happened(tmp_path):
    result = run("generate", tmp_path, "x", "--debug")
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "CheckpointError"


def test_denormal_numbers_count_as_zero_while_a_command_runs_and_only_then():
    def product() -> float:
        return float(torch.tensor([1e-38]) * torch.tensor([1e-2]))

    with command(as_json=False, debug=False):
        assert product() == 0
    assert product() > 0
