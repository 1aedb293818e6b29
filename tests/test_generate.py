"""``loopwise generate --prompts FILE --out OUT``: answers to a file of prompts, and resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from loopwise.cli import app
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.request import SamplingParams
from loopwise.generate import coloured
from loopwise.measure.tiers import write_tiers
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

PROMPTS = ["Tom has", "", "The red ball", "Where is it?", "日本"]
LINES = [prompt for prompt in PROMPTS if prompt]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    for seed in (0, 1):
        model = make_model(seed, injection="add", n_core_layers=1)
        save_checkpoint(folder / f"seed-{seed}", model, ByteTokenizer(), {})
    return folder / "seed-0"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def generate(checkpoint: Path, prompts: Path, *more: str) -> Result:
    out = prompts.parent / "out.jsonl"
    usual = ["--depth", "2", "--max-tokens", "6"]
    arguments = ["generate", checkpoint, "--prompts", prompts, "--out", out, *usual, *more]
    return CliRunner().invoke(app, [str(a) for a in arguments])


def answers(prompts: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    text = (prompts.parent / "out.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    head, *rest = [json.loads(line) for line in text.split("\n")[:-1]]
    assert len({r["index"] for r in rest}) == len(rest), "an answer is there twice"
    return head, {r["index"]: r for r in rest}


def test_a_terminal_does_not_obey_what_a_model_says():
    ids = ByteTokenizer().encode("a\x1b[2Jb\x08c\n\td\x7f é")
    text = coloured(ByteTokenizer(), ids, [1 + i % 3 for i in range(len(ids))], 3)
    assert text.plain == "a␛[2Jb␈c\n\td␡ é"


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    for part in parts:
        assert part in result.stderr.replace("\n", " ")


def test_every_prompt_gets_the_answer_it_would_get_alone(checkpoint, prompts):
    result = generate(checkpoint, prompts, "--slots", "2")
    assert result.exit_code == 0, (result.stderr, result.exception)
    _, found = answers(prompts)
    engine = Engine(
        make_model(injection="add", n_core_layers=1),
        ByteTokenizer(),
        EngineConfig(exit="fixed:2", max_depth=2),
    )
    assert sorted(found) == [0, 1, 2, 3]
    for index, prompt in enumerate(LINES):
        alone = engine.generate([prompt], SamplingParams(max_tokens=6))[0].completions[0]
        answer = found[index]
        assert answer["prompt"] == prompt
        assert tuple(answer["token_ids"]) == alone.token_ids
        assert (answer["text"], answer["finish_reason"]) == (alone.text, alone.finish_reason)
        assert answer["exit_depths"] == [2] * len(alone.token_ids)


def test_a_run_killed_anywhere_goes_on_where_it_was(checkpoint, prompts):
    """In the middle of a line too, and in the first."""
    generate(checkpoint, prompts)
    out = prompts.parent / "out.jsonl"
    whole, wanted = out.read_bytes(), answers(prompts)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cuts = [0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1, ends[2], ends[3] - 3, len(whole)]
    for cut in cuts:
        out.write_bytes(whole[:cut])
        result = generate(checkpoint, prompts, "--resume", "--json")
        assert result.exit_code == 0, (cut, result.stderr, result.exception)
        assert answers(prompts) == wanted, f"killed at byte {cut}"
        kept = json.loads(result.stdout.splitlines()[-1])["kept"]
        assert kept == max(sum(end <= cut for end in ends) - 1, 0)


def test_separators_of_other_alphabets_end_no_line(checkpoint, tmp_path):
    """U+2028, U+0085 and form feed in a prompt were taken for line ends; resuming lost the file."""
    prompts = tmp_path / "prompts.jsonl"
    odd = ["one\u2028two", "three\x85four", "five\x0csix"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in odd]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    assert generate(checkpoint, prompts).exit_code == 0
    assert [answers(prompts)[1][i]["prompt"] for i in range(3)] == odd
    result = generate(checkpoint, prompts, "--resume", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["kept"] == 3
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(odd), encoding="utf-8")
    (tmp_path / "out.jsonl").unlink()
    assert generate(checkpoint, plain).exit_code == 0
    assert len(answers(plain)[1]) == 3


@pytest.mark.parametrize(
    "changes",
    [
        *("--seed 1", "--temperature 0.5", "--max-tokens 7", "--depth 3", "--kv last", "--stop x"),
        *("--chunk 16", "--max-seq 512", "--n 2", "--stop-id 5", "--ignore-eos", "--logprobs 0"),
    ],
)
def test_resuming_with_other_settings_is_refused(checkpoint, prompts, changes):
    generate(checkpoint, prompts)
    before = (prompts.parent / "out.jsonl").read_bytes()
    refused(generate(checkpoint, prompts, "--resume", *changes.split()), "made with other settings")
    assert (prompts.parent / "out.jsonl").read_bytes() == before


def test_a_file_drawn_without_a_seed_says_it_and_goes_on_with_it(checkpoint, prompts):
    """Every run without a seed was the same one."""
    out, warm = prompts.parent / "out.jsonl", ["--temperature", "1", "--ignore-eos"]
    seeds = []
    for _ in range(2):
        out.unlink(missing_ok=True)
        assert generate(checkpoint, prompts, *warm).exit_code == 0
        seeds.append(answers(prompts)[0]["settings"]["params"]["seed"])
    wanted = answers(prompts)
    assert seeds[0] != seeds[1]
    assert {record["seed"] for record in wanted[1].values()} == {seeds[1]}
    whole = out.read_bytes()
    for cut in (whole.index(b"\n") + 1, len(whole) - 9):
        out.write_bytes(whole[:cut])
        assert generate(checkpoint, prompts, *warm, "--resume").exit_code == 0
        assert answers(prompts) == wanted, f"killed at byte {cut}"
    out.write_bytes(whole[:cut])
    assert generate(checkpoint, prompts, *warm, "--resume", f"--seed={seeds[1]}").exit_code == 0
    assert answers(prompts) == wanted
    refused(generate(checkpoint, prompts, *warm, "--resume", "--seed=1"), "other settings (params)")
    out.write_bytes(whole[:300])  # in the middle of the settings: nothing is lost, so start anew
    assert generate(checkpoint, prompts, *warm, "--resume").exit_code == 0
    assert sorted(answers(prompts)[1]) == [0, 1, 2, 3]


def test_every_option_reaches_the_engine(checkpoint, prompts):
    options = "--n 2 --logprobs 3 --temperature 0.7 --top-k 50 --top-p 0.9 --min-p 0.01 --seed 4"
    options += " --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty 0.25"
    options += " --logit-bias 65=-3 --logit-bias 66=0.5 --stop ab --stop-id 7 --stop-id 9"
    options += " --ignore-eos --chunk 16 --max-seq 64"
    result = generate(checkpoint, prompts, *options.split())
    assert result.exit_code == 0, result.stderr
    head, found = answers(prompts)
    params = SamplingParams(
        n=2,
        logprobs=3,
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=4,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={65: -3.0, 66: 0.5},
        stop=("ab",),
        stop_ids=(7, 9),
        ignore_eos=True,
        max_tokens=6,
    )
    settings = head["settings"]
    assert (settings["chunk"], settings["max_seq"], settings["end_ids"]) == (16, 64, [257])
    engine = Engine(
        make_model(injection="add", n_core_layers=1),
        ByteTokenizer(),
        EngineConfig(exit="fixed:2", max_depth=2, chunk=16, max_seq=64),
    )
    for index, prompt in enumerate(LINES):
        wanted = engine.generate([prompt], params)[0].completions
        choices = found[index]["choices"]
        assert [c["text"] for c in choices] == [c.text for c in wanted]
        assert [tuple(c["token_ids"]) for c in choices] == [c.token_ids for c in wanted]
        assert choices[0]["logprobs"] == pytest.approx(wanted[0].logprobs, abs=1e-4)
        assert [len(top) for top in choices[1]["top_logprobs"]] == [3] * len(wanted[1].token_ids)
        assert {k: found[index][k] for k in choices[0]} == choices[0]


def test_a_longer_prompt_fits_once_it_is_given_room(checkpoint, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n" + "b" * 1500)
    refused(generate(checkpoint, prompts), "line 2 of", "1501 tokens, a slot holds 1024", "max_seq")
    assert generate(checkpoint, prompts, "--max-seq", "1600", "--slots", "1").exit_code == 0
    assert sorted(answers(prompts)[1]) == [0, 1]


@pytest.mark.parametrize("bias", ["65", "a=1", "65=x", "=", "65=nan", "300=1", "65=1000", "-1=2"])
def test_a_bias_that_is_none_is_one_line(checkpoint, prompts, bias):
    refused(generate(checkpoint, prompts, f"--logit-bias={bias}"), "logit")
    refused(generate(checkpoint, prompts, *["--logit-bias", "5=1"] * 2), "token 5 twice")


def one(checkpoint: Path, *more: str) -> Result:
    arguments = ["generate", str(checkpoint), "Tom", "--max-tokens", "4", "--ignore-eos", *more]
    return CliRunner().invoke(app, arguments)


def test_choices_and_likelihoods_are_shown(checkpoint):
    result = one(checkpoint, "--temperature=1", "--n=2", "--logprobs=2", "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout.splitlines()[-1])
    assert (made["chunk"], made["end_ids"]) == (128, [257])
    assert f"seed {made['seed']}" in result.stdout
    for index, choice in enumerate(made["choices"]):
        assert f"choice {index}, length:" in result.stdout
        for logprob, top in zip(choice["logprobs"], choice["top_logprobs"], strict=True):
            assert f"{logprob:.3f}" in result.stdout
            assert f"{top[0][1]:.3f}" in result.stdout
    again = one(checkpoint, "--temperature=1", f"--seed={made['seed']}", "--json")
    assert json.loads(again.stdout.splitlines()[-1])["text"] == made["choices"][0]["text"]


def test_what_is_not_known_to_hold_is_said_once(tmp_path):
    """22 was shown as the most that training drew, where one step in a hundred drew up to 32."""
    depth = {"true_mean": 8.0, "min": 1, "max": 32, "p99": 22}
    model = make_model(injection="add", n_core_layers=1)
    save_checkpoint(tmp_path / "c", model, ByteTokenizer(), {"depth": depth})
    deep = one(tmp_path / "c", "--depth", "40")
    said = "warning: 40 recurrences are past training, which ran at most 22 in 99% of its steps"
    assert deep.stderr.count(said) == 1
    assert "at most 32 in any" in deep.stderr
    tiers = {"fast": {"rule": "fixed:2", "kv_policy": "per-loop"}}
    write_tiers(load_checkpoint(tmp_path / "c"), tiers)
    assert one(tmp_path / "c", "--exit", "fast").stderr == ""
    other = one(tmp_path / "c", "--exit", "fast", "--kv", "last")
    assert other.stderr.count("warning: tier 'fast' was calibrated under per-loop") == 1


def test_resuming_with_another_model_is_refused(checkpoint, prompts):
    """Answers of two models came to stand in one file."""
    generate(checkpoint, prompts)
    other = checkpoint.parent / "seed-1"
    refused(generate(other, prompts, "--resume"), "made with other settings")


def test_resuming_with_other_prompts_is_refused(checkpoint, prompts):
    generate(checkpoint, prompts)
    prompts.write_text("Something else\n")
    refused(generate(checkpoint, prompts, "--resume"), "answers other prompts")


def test_an_existing_file_is_not_written_over(checkpoint, prompts):
    out = prompts.parent / "out.jsonl"
    for content in ("my notes\n", "my notes", "[]\n", '{"settings": 3}\n', "{}\n"):
        out.write_text(content)
        refused(generate(checkpoint, prompts), "exists already; add --resume")
        refused(generate(checkpoint, prompts, "--resume"), "choose another name")
        assert out.read_text() == content


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("p.txt", "", "holds no prompt"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.txt", "a" * 3000, "3001 tokens"),
        ("p.txt", "a\n\nb\n" + "c" * 3000, "line 4 of"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud800"}\n', "line 2 of"),
        ("p.jsonl", '{"prompt": "a"}\nb\n', "line 2"),
        ("p.jsonl", '{"text": "a"}\n', "line 1"),
        ("p.jsonl", '{"prompt": 3}\n', "'prompt' is not text"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "surrogate"),
        ("p.jsonl", "[1]\n", "line 1"),
    ],
)
def test_bad_prompts_are_one_error_and_leave_no_file(checkpoint, tmp_path, name, content, part):
    prompts = tmp_path / name
    prompts.write_text(content, encoding="utf-8")
    refused(generate(checkpoint, prompts), part)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_missing_file_and_half_a_pair_of_options_are_refused(checkpoint, prompts):
    refused(generate(checkpoint, prompts.parent / "nothing.txt"), "cannot read prompts")
    for arguments in (
        ["--prompts", prompts],
        ["Hello", "--out", "x.jsonl"],
        ["a", "--prompts", "b"],
    ):
        result = CliRunner().invoke(app, ["generate", str(checkpoint), *map(str, arguments)])
        refused(result, "--prompts")


def test_a_prompt_that_fails_is_named_and_the_others_are_kept(checkpoint, prompts):
    """One row of the embedding is NaN, as an overflow would leave it."""
    model = make_model(0, injection="add", n_core_layers=1, tie_embeddings=False)
    with torch.no_grad():
        model.get_submodule("embedding").weight[ByteTokenizer().encode("W")[0]] = math.nan
    broken = prompts.parent / "broken"
    save_checkpoint(broken, model, ByteTokenizer(), {})
    refused(generate(broken, prompts), "1 of 4 prompts failed", "prompt 2", "--resume")
    assert sorted(answers(prompts)[1]) == [0, 1, 3]
    refused(generate(broken, prompts, "--resume"), "1 of 4 prompts failed")
    assert sorted(answers(prompts)[1]) == [0, 1, 3]
