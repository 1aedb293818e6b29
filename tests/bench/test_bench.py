"""The benchmarks measure what they say, on a model of no size."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from loopwise.bench.baselines import (
    drive_padded,
    drive_reference,
    generate_in_step,
    generate_padded,
)
from loopwise.bench.commands import COMMANDS, BenchOptions, keep_result, last_line
from loopwise.bench.drive import drive, figures, force
from loopwise.bench.quality import judge
from loopwise.bench.workload import Job, Lengths, make_jobs
from loopwise.cli import app
from loopwise.data import Document, ReadOptions, ReadReport, read_documents
from loopwise.engine import Engine, EngineConfig, SamplingParams
from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import ConfigError, DataError
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.models.checkpoint import save_checkpoint
from loopwise.tokenizer import BPETokenizer, ByteTokenizer
from tests.conftest import make_model

OPTIONS = BenchOptions(
    data=("builtin:stories:40",),
    exit="latent-change:0.5",
    depth=4,
    batch=3,
    seeds=1,
    wall=False,  # of exits alone, which has tests of its own
    smoke=True,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    training = {"seq": 32, "depth": {"true_mean": 4.0}}
    save_checkpoint(tmp_path / "model", make_model(injection="add"), ByteTokenizer(), training)
    return tmp_path / "model"


def jobs(n: int = 5, lengths: Lengths | None = None) -> list[Job]:
    documents = read_documents(["builtin:stories:40"], ReadOptions(), ReadReport())
    lengths = Lengths((3, 9), (2, 6)) if lengths is None else lengths
    return make_jobs(documents, ByteTokenizer(), lengths, n, seed=1)


def engine(**changes: object) -> Engine:
    config = {"exit": "fixed:4", "max_depth": 4, "slots": 3, "max_seq": 32, **changes}
    return Engine(make_model(injection="add"), ByteTokenizer(), EngineConfig(**config))


def greedy(found: Engine, of: list[Job]) -> list[list[int]]:
    params = [SamplingParams(max_tokens=j.new_tokens, ignore_eos=True) for j in of]
    made = found.generate([j.prompt for j in of], params)
    return [list(g.completions[0].token_ids) for g in made]


def test_jobs_have_the_lengths_asked_for_and_go_on_as_the_text_does():
    found = jobs(20)
    assert found == jobs(20), "the same seed, the same jobs"
    assert {len(j.prompt) for j in found} <= set(range(3, 10))
    assert all(len(j.continuation) == j.new_tokens for j in found)
    with pytest.raises(DataError, match="one job needs"):
        jobs(1, Lengths((10**6, 10**6), (1, 1)))


def test_a_prompt_is_begun_once_where_one_token_begins_and_ends_texts():
    documents = [Document("ab cd"), Document("ef")] * 400
    tokenizer = BPETokenizer.train(["ab cd ef"], 300)
    assert tokenizer.bos_id == tokenizer.eos_id
    found = make_jobs(documents, tokenizer, Lengths((3, 9), (2, 6)), 40, seed=1)
    assert all(job.prompt[0] == tokenizer.bos_id != job.prompt[1] for job in found)


def test_jobs_keep_to_one_document_each():
    short, long = "".join(map(chr, range(65, 73))), "".join(map(chr, range(97, 123))) * 4
    documents = [Document(short), Document(long), Document(long[:20])] * 20
    tokenizer = ByteTokenizer()
    found = make_jobs(documents, tokenizer, Lengths((5, 15), (10, 20)), 60, seed=1)
    begins = 0
    for job in found:
        ids = (*job.prompt[1:], *job.continuation)
        assert job.prompt[0] == tokenizer.bos_id
        assert tokenizer.decode(ids) in long, "not the short one, and never two"
        begins += tokenizer.decode(ids).startswith("abcd")
        ended = job.continuation[-1] == tokenizer.eos_id
        assert tokenizer.eos_id not in ids[:-1]
        assert ended or len(job.continuation) == job.new_tokens
    assert 20 < begins < 60, "a long document makes several"


def test_documents_too_short_for_any_prompt_are_joined():
    tokenizer = ByteTokenizer()
    (job,) = make_jobs([Document("abcd")] * 40, tokenizer, Lengths((9, 9), (8, 8)), 1, seed=1)
    a, b, c, d = tokenizer.encode("abcd")
    end = tokenizer.eos_id
    assert job.prompt == (tokenizer.bos_id, a, b, c, d, end, a, b, c)
    assert job.continuation == (d, end, a, b, c, d, end, a)


def test_the_padded_loop_decodes_what_the_engine_decodes():
    found = engine()
    of = jobs()
    assert generate_padded(found.model, of, 4, pad=256) == greedy(found, of)


def test_a_padded_pass_counts_what_runs_for_padding_and_for_those_that_are_done():
    found = engine()
    of = [Job((1, 2, 3), (), 2), Job((4,), (), 5)]
    passed = drive_padded(found.model, of, 4, 256, batch_size=2)
    assert passed.new_tokens == 7
    assert passed.row_steps == 4 * passed.fed == 4 * 2 * (3 + 5 - 1)
    assert passed.slot_ticks == 4 * 2 * 5
    assert len(passed.ttft_s) == 2
    assert len(passed.gaps_s) == 1 + 4, "no gap before a token that nobody waits for"


def test_the_reference_is_told_in_the_units_of_the_others():
    found, rule = engine(exit="latent-change:0.5"), parse_rule("latent-change:0.5", 4)
    (job,) = jobs(1)
    decoder = ReferenceDecoder(found.model, rule, build_policy(rule, {}, found.model))
    ours, theirs = drive(found, [job]), drive_reference(decoder, job)
    assert (theirs.new_tokens, theirs.fed) == (ours.new_tokens, ours.fed)
    assert theirs.row_steps == ours.row_steps
    assert theirs.depths.tolist() == ours.depths.tolist()
    assert len(theirs.gaps_s) == len(ours.gaps_s)


def test_the_bare_loop_decodes_what_the_engine_decodes():
    of = [Job(j.prompt[:3], (), 5) for j in jobs(3)]
    assert generate_in_step(engine(), of, 4) == greedy(engine(), of)


@pytest.mark.parametrize("batching", ["lockstep", "static"])
def test_other_batching_decodes_the_same_tokens_in_more_ticks(batching):
    of = jobs(7)
    rule = "latent-change:0.5"
    # Settled rows do not wait for a pass together: that trades ticks for passes.
    usual, other = engine(exit=rule, coda_delay=0), engine(exit=rule, batching=batching)
    assert greedy(other, of) == greedy(usual, of)
    assert other.stats()["core_row_steps"] == usual.stats()["core_row_steps"]
    assert other.stats()["ticks"] > usual.stats()["ticks"]


def test_a_pass_counts_what_ran():
    of = jobs()
    found = drive(engine(), of)
    assert found.new_tokens == sum(j.new_tokens for j in of)
    assert found.row_steps == 4 * found.fed
    assert found.mean_depth == 4.0
    assert len(found.ttft_s) == len(of)
    assert len(found.gaps_s) == found.new_tokens - len(of)


def test_rows_that_wait_for_the_deepest_are_counted():
    """Row-steps alone hide what lockstep wastes."""
    of, rule = jobs(7), "latent-change:0.5"
    usual = drive(engine(exit=rule, coda_delay=0), of)
    lockstep = drive(engine(exit=rule, batching="lockstep"), of)
    assert lockstep.row_steps == usual.row_steps
    assert lockstep.slot_ticks > usual.slot_ticks
    assert figures("lockstep", [lockstep])["slot_ticks"] == lockstep.slot_ticks


def test_jobs_that_come_alone_do_not_wait_for_one_another():
    of = [replace(job, new_tokens=1) for job in jobs(6)]
    found = drive(engine(slots=1), of, alone=True)
    assert found.ttft_s.sum() <= found.seconds
    queued = drive(engine(slots=1), of)
    assert queued.ttft_s.sum() > queued.seconds


def test_agreement_is_of_what_both_would_choose():
    found, of = engine(), jobs(6)
    quality = judge(found, of, "latent-change:0.9", lambda text: None)
    assert quality.agreement(quality.uniform[-1]) == 1.0
    first = force(found, of, "fixed:1", argmax=True).argmax
    full = force(found, of, "fixed:4", argmax=True).argmax
    expected = sum(a == b for a, b in zip(first, full, strict=True)) / len(full)
    assert quality.agreement(quality.uniform[0]) == expected < 1.0


def test_arrivals_are_waited_for():
    found = drive(engine(), jobs(2), [0.0, 0.3])
    assert found.seconds > 0.3
    assert (found.ttft_s < 0.3).all(), "time to first token counts from the arrival"


@pytest.mark.parametrize("kv_policy", ["per-loop", "last"])
def test_forced_tokens_are_scored_by_the_distributions_decoding_would_use(kv_policy):
    """Greedy tokens forced back get the log-probabilities they were chosen with."""
    found = engine(kv_policy=kv_policy, exit="latent-change:0.5")
    of = jobs(3)
    made = found.generate(
        [j.prompt for j in of], [SamplingParams(max_tokens=j.new_tokens) for j in of]
    )
    again = [
        Job(j.prompt, g.completions[0].token_ids, j.new_tokens)
        for j, g in zip(of, made, strict=True)
    ]
    scored = force(found, again, "latent-change:0.5")
    chosen = [x for g in made for x in g.completions[0].logprobs]
    assert (torch.tensor(scored.nll) + torch.tensor(chosen)).abs().max() < 1e-4
    depths = [d for g in made for d in g.completions[0].exit_depths]
    assert scored.depth.tolist() == depths


@pytest.mark.parametrize("command", COMMANDS)
def test_every_benchmark_ends_in_one_json_object(checkpoint, command):
    found = COMMANDS[command](checkpoint, OPTIONS, Console(quiet=True))
    assert json.loads(json.dumps(found))["benchmark"] == command
    assert found["commit"]
    assert found["full_depth"] == 4


SHARED = ("speedup_vs_uniform", "speedup_vs_equal_quality", "cap", "percent_of_cap", "ttft_ratio")


@pytest.mark.parametrize("command", ["decode", "prefill", "serve"])
def test_speed_is_told_with_the_quality_it_cost(checkpoint, command):
    found = COMMANDS[command](checkpoint, OPTIONS, Console(quiet=True))
    for key in SHARED:
        assert found[key] > 0
    assert 1 <= found["mean_depth"] <= 4
    assert 1 <= found["uniform_depth"] <= 4
    low, high = found["nll_delta_ci"]
    assert low <= found["nll_delta_nats"] <= high
    assert 0 <= found["argmax_agreement"] <= 1
    assert found["batch"] == (1 if command == "prefill" else 3)
    assert found["chunk"] == 128
    assert found["dtype"] == "fp32"
    rows = {row["name"]: row for row in found["rows"]}
    assert {"live exits", "uniform 4"} <= set(rows)
    live, full = rows["live exits"], rows["uniform 4"]
    assert live["percent_of_cap"] == found["percent_of_cap"]
    assert math.isclose(
        live["percent_of_cap"], 100 * live["speedup_vs_uniform"] / live["cap"], rel_tol=1e-9
    )
    assert (full["speedup_vs_uniform"], full["cap"], full["nll_delta_nats"]) == (1.0, 1.0, 0.0)
    for row in rows.values():
        assert row["slot_ticks"] > 0
        assert row["kv_bytes_per_token"] > 0
    uniform = [r for n, r in rows.items() if n in ("uniform 1", "uniform 2", "uniform 3")]
    for row in uniform:
        curve = found["nll_by_uniform_depth"]
        depth = int(row["mean_depth"])
        assert math.isclose(row["nll_delta_nats"], curve[depth - 1] - curve[-1], abs_tol=1e-9)
        assert row["kv_bytes_per_token"] < full["kv_bytes_per_token"]
    assert uniform, "a depth below the full one is among them"


def test_every_way_to_decode_is_a_row_with_what_belongs_to_it(checkpoint, tmp_path):
    found = COMMANDS["decode"](checkpoint, OPTIONS, Console(quiet=True))
    rows = {row["name"]: row for row in found["rows"]}
    others = {"lockstep exits", "static 4", "padded loop", "reference"}
    assert others <= set(rows)
    live = rows["live exits"]
    for name in ("lockstep exits", "reference"):
        assert rows[name]["nll_delta_nats"] == live["nll_delta_nats"]
    for name in ("static 4", "padded loop"):
        assert (rows[name]["nll_delta_nats"], rows[name]["cap"]) == (0.0, 1.0)
    repeats = {name: row["repeats"] for name, row in rows.items()}
    assert repeats.pop("reference") == 1
    assert set(repeats.values()) == {2}
    assert sum(map(sum, found["occupancy"])) == live["row_steps"], "a short pass is shown whole"
    keep_result(found, tmp_path)
    assert (tmp_path / "occupancy.png").stat().st_size > 1000
    assert "occupancy" not in last_line(found)


def test_the_padded_loop_says_nothing_of_quality_under_a_policy_it_does_not_have(checkpoint):
    found = COMMANDS["decode"](checkpoint, replace(OPTIONS, kv_policy="last"), Console(quiet=True))
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["padded loop"]["nll_delta_nats"] is None
    assert rows["padded loop"]["kv_bytes_per_token"] > rows["uniform 4"]["kv_bytes_per_token"]


@pytest.mark.parametrize("command", ["decode", "prefill", "serve"])
def test_the_rows_fit_80_columns(checkpoint, command):
    out = io.StringIO()
    found = COMMANDS[command](checkpoint, OPTIONS, Console(file=out, width=80))
    head, _, after = out.getvalue().partition(f"{found['rule']}: ")
    lines = head.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in head, "nothing is cut"
    for row in found["rows"]:
        assert sum(line.strip().startswith(f"{row['name']} ") for line in lines) == 1
    assert "argmax as there" in after


def test_depths_past_training_are_warned_of_once(tmp_path, caplog):
    training = {"seq": 32, "depth": {"true_mean": 3.0, "p99": 3}}
    save_checkpoint(tmp_path / "model", make_model(injection="add"), ByteTokenizer(), training)
    for depth, said in ((4, 1), (3, 0)):
        out = io.StringIO()
        options = replace(OPTIONS, depth=depth)
        found = COMMANDS["prefill"](tmp_path / "model", options, Console(file=out))
        assert out.getvalue().count("4 recurrences are past training") == said
        assert len(found["warnings"]) == said
    assert not caplog.records, "engines do not say it again"


def test_dtype_auto_says_what_it_took(checkpoint, monkeypatch):
    for native, name in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("loopwise.train.machine.has_native_bf16", lambda device, n=native: n)
        out = io.StringIO()
        options = replace(OPTIONS, dtype="auto")
        found = COMMANDS["overhead"](checkpoint, options, Console(file=out))
        assert found["dtype"] == name
        assert "dtype: " in out.getvalue()


def test_exact_kv_costs_nothing_and_the_others_save_what_they_say(checkpoint):
    found = COMMANDS["kv"](checkpoint, replace(OPTIONS, exit=None), Console(quiet=True))
    rows = {row["name"]: row for row in found["rows"]}
    exact = rows["per-loop"]
    assert found["rule"] == "fixed:4"
    assert exact["memory_ratio"] == exact["argmax_agreement"] == exact["same_text"] == 1.0
    assert exact["nll_delta_nats"]["mean"] == exact["nll_delta_on_generated_nats"]["mean"] == 0.0
    ratio = [rows[name]["memory_ratio"] for name in ("per-loop", "ring-2", "last")]
    assert ratio == sorted(ratio, reverse=True) and len(set(ratio)) == 3
    assert any(row["nll_delta_nats"]["mean"] != 0 for row in found["rows"])


def test_the_table_of_kv_policies_fits_80_columns(checkpoint):
    out = io.StringIO()
    COMMANDS["kv"](checkpoint, replace(OPTIONS, exit=None), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(("│", "┃"))]
    assert len(rows) == 6, "a head and five policies, none wrapped onto a second line"
    assert any("first-then-last" in line and "±" in line for line in rows)
    assert "…" not in out.getvalue(), "nothing is cut"


def test_exits_at_full_depth_cost_no_quality(checkpoint):
    options = BenchOptions(data=OPTIONS.data, exit="fixed:4", depth=4, smoke=True)
    found = COMMANDS["decode"](checkpoint, options, Console(quiet=True))
    assert found["nll_delta_nats"] == 0.0
    assert found["cap"] == 1.0


def test_the_command_keeps_its_result(checkpoint, tmp_path):
    arguments = ["bench", "prefill", str(checkpoint), "--data", "builtin:stories:40", "--smoke"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "results")])
    assert result.exit_code == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    kept = list((tmp_path / "results").iterdir())
    assert len(kept) == 1
    assert math.isclose(json.loads(kept[0].read_text())["ttft_ratio"], last["ttft_ratio"])


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("decode", "--rate"),
        ("prefill", "--rate"),
        ("overhead", "--judged"),
        ("overhead", "--requests"),
        ("overhead", "--rate"),
        ("kv", "--kv"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(checkpoint, command, option):
    result = CliRunner().invoke(app, ["bench", command, str(checkpoint), option, "1"])
    assert result.exit_code == 2
    assert f"bench {command} has no use for {option}" in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "--batch 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"rate": 0.0}, "--rate 0"),
        ({"rate": math.nan}, "--rate nan"),
        ({"dtype": "fp8"}, "'fp8'"),
    ],
)
def test_bad_options_are_one_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**changes)
