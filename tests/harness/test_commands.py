"""``loopwise eval tasks`` from end to end: scores, what is recorded, what is refused and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwise.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExitError,
    MissingExtraError,
    RunFolderError,
    WriteError,
)
from loopwise.harness import commands
from loopwise.harness.commands import (
    TasksOptions,
    average,
    check_tier,
    tasks_command,
    tasks_lines,
)
from loopwise.harness.model import ModelOptions
from loopwise.harness.tasks import DATA_DIR_VARIABLE, SEVEN
from loopwise.hub.chat import write_templates
from loopwise.models.checkpoint import write_exits
from tests.conftest import full_disk
from tests.harness.cases import ROWS, loaded, naive_pair, write_local
from tests.test_cli import answer, refused, run

RULE = "latent-change:0.8,max=6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_local(tmp_path_factory.mktemp("sets") / "data")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("model") / "checkpoint")


def options(folder: Path | None, model: dict | None = None, **changes) -> TasksOptions:
    model = {"depth": 2} if model is None else model
    return TasksOptions(model=ModelOptions(**model), data_dir=folder, **changes)


class Heard:
    def __init__(self) -> None:
        self.events: list[dict] = []

    def __call__(self, event: dict) -> None:
        self.events.append(event)

    @property
    def warnings(self) -> list[str]:
        return [e["text"] for e in self.events if e["event"] == "warning"]


class TestRun:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("lm_eval")

    def test_the_seven_with_settings_depth_and_average_in_one_file(
        self, checkpoint, folder, tmp_path
    ):
        out = tmp_path / "new" / "result.json"
        heard = Heard()
        asked = options(folder, {"exit": RULE}, out=out)
        result = tasks_command(checkpoint.path, [SEVEN], asked, heard)
        assert json.loads(out.read_text()) == result
        assert sorted(p.name for p in out.parent.iterdir()) == ["result.json"]
        settings = result["settings"]
        assert settings["exit_rule"] == RULE and settings["kv_policy"] == "per-loop"
        assert settings["weights_hash"] == checkpoint.weights_hash
        assert settings["options"]["max_length"] == 128
        assert result["lm_eval"].startswith("0.4.")
        assert 1 < result["mean_depth"] < 6
        assert (result["truncated_requests"], result["skipped_questions"]) == (0, {})
        assert result["requests"] == 6 * (1 + 4 + 2 + 2 + 4 + 4 + 4)
        assert {e["event"] for e in heard.events} == {"progress"}
        scores = [result["results"][name]["acc,none"] for name in result["tasks"]]
        assert len(scores) == 7
        assert result["groups"][SEVEN]["acc,none"] == pytest.approx(sum(scores) / 7)
        assert result["average"]["acc"] == pytest.approx(sum(scores) / 7)
        assert result["data"]["piqa_local"]["rows"] == 6
        assert "Question: {{goal}}" in result["configs"]["piqa_local"]["doc_to_text"]
        assert str(folder) not in out.read_text()
        lines = tasks_lines(result)
        assert any(line.startswith("piqa_local") and "acc_norm" in line for line in lines)
        assert lines[-1].startswith(f"rule {RULE}, KV per-loop, mean depth ")

    def test_accuracy_is_that_of_scores_by_definition(self, checkpoint, folder):
        found = tasks_command(checkpoint.path, ["piqa_local"], options(folder), Heard())
        right = 0
        for row in ROWS["piqa-valid"]:
            scores = [
                naive_pair(
                    checkpoint.model,
                    checkpoint.tokenizer,
                    (f"Question: {row['goal']}\nAnswer:", f" {row[name]}"),
                    2,
                )[0]
                for name in ("sol1", "sol2")
            ]
            right += (scores[1] > scores[0]) == row["label"]
        assert found["results"]["piqa_local"]["acc,none"] == pytest.approx(right / 6)
        assert found["average"] == {}

    def test_u27_the_same_twice_and_in_batches_of_any_size(self, checkpoint, folder):
        tasks = ["hellaswag_local", "lambada_openai_local"]
        first = tasks_command(checkpoint.path, tasks, options(folder), Heard())
        for batch in (None, 1, 5):
            asked = options(folder, {"depth": 2, "batch": batch})
            again = tasks_command(checkpoint.path, tasks, asked, Heard())
            for task in tasks:
                for name, value in first["results"][task].items():
                    if isinstance(value, float):
                        assert again["results"][task][name] == pytest.approx(value, rel=1e-4), name

    def test_u27_41_questions_score_the_same_in_batches_that_do_not_divide_them(
        self, checkpoint, tmp_path
    ):
        rows = [
            {"goal": f"open {'the ' * (i % 7)}jar {i}", "sol1": "twist", "sol2": "sing", "label": 0}
            for i in range(41)
        ]
        (tmp_path / "piqa-valid.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        found = {}
        for batch, largest in ((1, 1), (4, 4), (16, 16), (None, None)):
            asked = options(tmp_path, {"depth": 2, "batch": batch})
            result = tasks_command(checkpoint.path, ["piqa_local"], asked, Heard())
            assert result["n_samples"]["piqa_local"] == {"original": 41, "effective": 41}
            assert result["requests"] == 82
            told = result["largest_batch"]["pass"]
            assert told == largest if largest is not None else 16 < told <= 82
            found[batch] = result["results"]["piqa_local"]
        for batch in (4, 16, None):
            assert found[batch] == found[1], batch

    def test_u34_a_chat_template_is_used_on_request_and_told(self, folder, tmp_path):
        pytest.importorskip("transformers")
        checkpoint = loaded(tmp_path / "checkpoint")
        asked = options(folder, chat_template=True, too_long="skip")
        with pytest.raises(ConfigError, match="has no chat template"):
            tasks_command(checkpoint.path, ["copa_local"], asked, Heard())
        template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        write_templates(checkpoint.path, {"default": template})
        told = tasks_command(checkpoint.path, ["copa_local"], asked, Heard())
        assert told["settings"]["chat_template"]["text"] == template
        plain = tasks_command(checkpoint.path, ["copa_local"], options(folder), Heard())
        assert plain["settings"]["chat_template"] is None
        assert told["tokens"] > plain["tokens"], "each names its role"

    def test_two_runs_write_the_same_configs(self, checkpoint, folder):
        """A task's functions were written as where they lay in memory."""
        names = ["copa_local", "gsm8k_local", "lambada_openai_local", "wikitext_local"]
        asked = options(folder, {"depth": 1, "max_length": 1024}, limit=1)
        found = tasks_command(checkpoint.path, names, asked, Heard())
        text = json.dumps(found["configs"])
        assert " at 0x" not in text
        assert "return doc" in found["configs"]["copa_local"]["doc_to_text"]

    def test_a_group_and_a_task_of_it(self, checkpoint, folder):
        asked = options(folder, limit=1)
        found = tasks_command(checkpoint.path, [SEVEN, "piqa_local"], asked, Heard())
        scores = [found["results"][name]["acc,none"] for name in found["tasks"]]
        assert found["groups"][SEVEN]["acc,none"] == pytest.approx(sum(scores) / 7)

    def test_limit_and_examples_are_what_the_harness_makes_of_them(self, checkpoint, folder):
        heard = Heard()
        asked = options(folder, {"depth": 1, "max_length": 999}, limit=3, num_fewshot=2)
        found = tasks_command(checkpoint.path, ["piqa_local", "boolq_local"], asked, heard)
        assert found["n_samples"]["piqa_local"] == {"original": 6, "effective": 3}
        assert found["n_shot"] == {"piqa_local": 2, "boolq_local": 2}
        assert sum("do not compare" in text for text in heard.warnings) == 2

    def test_generation_rolling_and_scores_in_one_run(self, checkpoint, folder):
        asked = options(folder, {"depth": 2, "max_length": 1024}, limit=2)
        tasks = ["gsm8k_local", "wikitext_local", "copa_local"]
        found = tasks_command(checkpoint.path, tasks, asked, Heard())
        assert set(found["requests_by_kind"]) == {
            "generate_until",
            "loglikelihood_rolling",
            "loglikelihood",
        }
        assert found["results"]["wikitext_local"]["word_perplexity,none"] > 1
        assert found["results"]["gsm8k_local"]["exact_match,strict-match"] == 0.0
        assert found["average"] == {}, "not all have an accuracy"
        assert any("exact_match (strict-match)" in line for line in tasks_lines(found))

    def test_an_answer_without_room_for_a_prompt_is_refused_before_anything_is_scored(
        self, checkpoint, folder
    ):
        """The other tasks were run to their end, and lost."""
        asked, heard = options(folder, {"depth": 2, "max_length": 64}), Heard()
        with pytest.raises(ConfigError, match="task gsm8k_local asks for .* leaves no room"):
            tasks_command(checkpoint.path, ["copa_local", "gsm8k_local"], asked, heard)
        assert not [e for e in heard.events if e["event"] == "progress"]

    def test_answers_may_be_made_shorter(self, checkpoint, folder):
        """The refusal said to lower max_gen_toks, which no option did."""
        model = {"depth": 1, "max_length": 64}
        with pytest.raises(ConfigError, match="ask for fewer with --max-gen-toks"):
            tasks_command(checkpoint.path, ["gsm8k_local"], options(folder, model), Heard())
        asked = options(folder, model, limit=1, max_gen_toks=5)
        found = tasks_command(checkpoint.path, ["gsm8k_local", "copa_local"], asked, Heard())
        settings = found["configs"]["gsm8k_local"]["generation_kwargs"]
        assert settings["max_gen_toks"] == 5 and "until" in settings
        assert found["settings"]["max_gen_toks"] == 5
        with pytest.raises(ConfigError, match="none of copa_local does; leave it out"):
            tasks_command(checkpoint.path, ["copa_local"], asked, Heard())

    def test_u32_questions_that_do_not_fit_are_cut_and_counted_or_left_out(
        self, checkpoint, tmp_path
    ):
        folder = tmp_path / "data"
        folder.mkdir()
        rows = [
            {"goal": goal, "sol1": "yes", "sol2": "no", "label": 0}
            for goal in ("a", "b" * 80, "c", "d" * 90)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "piqa-valid.jsonl").write_text(text)
        model = {"depth": 1, "max_length": 64}
        heard = Heard()
        cut = tasks_command(checkpoint.path, ["piqa_local"], options(folder, model), heard)
        assert (cut["truncated_requests"], cut["requests"]) == (4, 8)
        assert any("4 of 8 requests were cut" in text for text in heard.warnings)
        asked = options(folder, model, too_long="skip")
        left_out = tasks_command(checkpoint.path, ["piqa_local"], asked, Heard())
        assert left_out["skipped_questions"] == {"piqa_local": [1, 3]}
        assert (left_out["truncated_requests"], left_out["requests"]) == (0, 4)
        assert left_out["n_samples"]["piqa_local"]["effective"] == 2
        short = [rows[0], rows[2]]
        (folder / "piqa-valid.jsonl").write_text("".join(json.dumps(r) + "\n" for r in short))
        alone = tasks_command(checkpoint.path, ["piqa_local"], options(folder, model), Heard())
        same = ("acc,none", "acc_norm,none")
        assert [left_out["results"]["piqa_local"][m] for m in same] == [
            alone["results"]["piqa_local"][m] for m in same
        ]
        asked = options(folder, {"depth": 1, "max_length": 8}, too_long="skip")
        with pytest.raises(DataError, match="no question of task 'piqa_local' fits 8"):
            tasks_command(checkpoint.path, ["piqa_local"], asked, Heard())

    def test_the_environment_may_name_the_folder(self, checkpoint, folder, monkeypatch):
        monkeypatch.setenv(DATA_DIR_VARIABLE, str(folder))
        found = tasks_command(checkpoint.path, ["copa_local"], options(None, limit=1), Heard())
        assert found["n_samples"]["copa_local"]["effective"] == 1

    def test_a_tier_is_run_as_calibrated(self, folder, tmp_path):
        checkpoint = loaded(tmp_path / "checkpoint")
        write_exits(checkpoint, {"tiers": {"balanced": {"rule": RULE, "kv_policy": "per-loop"}}})
        heard = Heard()
        asked = options(folder, {"tier": "balanced", "kv_policy": "last"}, limit=2)
        found = tasks_command(checkpoint.path, ["copa_local"], asked, heard)
        assert found["settings"]["exit_rule"] == RULE
        assert found["settings"]["options"]["tier"] == "balanced"
        assert found["settings"]["kv_policy"] == "last"
        assert any("nothing is promised" in text for text in heard.warnings)


class TestCommandLine:
    """As users type it: ``loopwise eval CHECKPOINT --tasks ...``, without naming a subcommand."""

    def test_tasks_are_what_eval_does_where_no_other_command_is_named(self, checkpoint, folder):
        pytest.importorskip("lm_eval")
        asked = ("--tasks", "copa_local", "--data-dir", folder, "--limit", "2", "--json")
        named = answer(run("eval", "tasks", checkpoint.path, *asked))
        for words in ((checkpoint.path, *asked), (*asked, checkpoint.path)):
            found = answer(run("eval", *words))
            assert found["results"] == named["results"]

    def test_what_is_meant_is_told_where_it_is_not(self, checkpoint, tmp_path):
        lacks = run("eval", checkpoint.path)
        assert lacks.exit_code == 2 and "Missing option '--tasks'" in lacks.stderr
        misspelt = run("eval", "perplexty", checkpoint.path)
        assert misspelt.exit_code == 2 and "No such command 'perplexty'" in misspelt.stderr
        refused(run("eval", tmp_path / "no", "--tasks", "copa_local"), "no checkpoint at")
        assert "perplexity" in run("eval", "--help").stdout


class TestRefusals:
    """One line each, and before weights are read."""

    @pytest.fixture(autouse=True)
    def _no_model(self, monkeypatch) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("the model was loaded")

        monkeypatch.setattr("loopwise.harness.model.load_checkpoint", refuse)

    @pytest.fixture
    def _needs_harness(self) -> None:
        pytest.importorskip("lm_eval")

    @pytest.mark.usefixtures("_needs_harness")
    def test_tasks_folders_and_tiers(self, checkpoint, folder, tmp_path):
        run = checkpoint.path
        with pytest.raises(ConfigError, match="did you mean 'piqa_local'"):
            tasks_command(run, ["pica_local"], options(folder), Heard())
        with pytest.raises(DataError, match="has no piqa-valid.jsonl"):
            tasks_command(run, ["piqa_local"], options(tmp_path), Heard())
        with pytest.raises(ExitError, match="no tier named 'fast'"):
            tasks_command(run, ["piqa_local"], options(folder, {"tier": "fast"}), Heard())
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            tasks_command(tmp_path / "none", ["piqa_local"], options(folder), Heard())

    def test_options(self, tmp_path):
        (tmp_path / "result.json").touch()
        with pytest.raises(RunFolderError, match="exists already"):
            options(None, out=tmp_path / "result.json")
        with pytest.raises(ConfigError, match="--limit 0"):
            options(None, limit=0)
        with pytest.raises(ConfigError, match="--num-fewshot -1"):
            options(None, num_fewshot=-1)
        with pytest.raises(ConfigError, match="--max-gen-toks 0"):
            options(None, max_gen_toks=0)
        with pytest.raises(ConfigError, match="truncate or skip"):
            options(None, too_long="drop")

    def test_without_the_extra(self, checkpoint, folder, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'loopwise\[eval\]'"):
            tasks_command(checkpoint.path, ["piqa_local"], options(folder), Heard())


def test_tiers_are_looked_up_before_weights_are_read(tmp_path):
    (tmp_path / "exits.json").write_text(json.dumps({"tiers": {"high": {}, "fast": {}}}))
    check_tier(tmp_path, "fast")
    with pytest.raises(ExitError, match="did you mean 'high'.*high, fast"):
        check_tier(tmp_path, "hgih")


def test_averages_are_over_tasks_that_all_have_an_accuracy():
    scores = {"a": {"acc,none": 0.5, "acc_norm,none": 0.7}, "b": {"acc,none": 0.1}}
    assert average(scores) == {"acc": pytest.approx(0.3), "acc_norm_or_acc": pytest.approx(0.4)}
    assert average({**scores, "c": {"word_perplexity,none": 9.0}}) == {}
    assert average({"a": scores["a"]}) == {}


def test_a_result_that_cannot_be_written_is_one_line(checkpoint, folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    asked = options(folder, limit=1, out=tmp_path / "file" / "result.json")
    with pytest.raises(WriteError, match=r"file': .*; choose another place"):
        tasks_command(checkpoint.path, ["copa_local"], asked, Heard())
    asked = options(folder, limit=1, out=tmp_path / "new" / "result.json")
    own = commands.write_whole

    def write(*given: object) -> None:
        with full_disk():
            own(*given)

    monkeypatch.setattr(commands, "write_whole", write)
    with pytest.raises(WriteError, match=r"result.json': File too large; free some"):
        tasks_command(checkpoint.path, ["copa_local"], asked, Heard())
    assert not list((tmp_path / "new").iterdir())
