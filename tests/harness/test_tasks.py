"""Local tasks ask what the stock tasks of the same names ask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loopwise.errors import ConfigError, DataError
from loopwise.harness.tasks import SEVEN, _load, load_tasks, local_names, write_tasks
from tests.harness.cases import loaded, write_local

pytest.importorskip("lm_eval")

# Of the second question of each set: what is given, what is compared, which is right.
ASKED: dict[str, list[tuple[str, str]]] = {
    "piqa_local": [
        ("Question: open jar 1\nAnswer:", " twist it"),
        ("Question: open jar 1\nAnswer:", " sing to it"),
    ],
    "arc_easy_local": [
        ("Question: Which is number 1?\nAnswer:", f" {w}") for w in ("ant", "bee", "cat", "dog")
    ],
    "arc_challenge_local": [
        ("Question: Which is number 4?\nAnswer:", f" {w}") for w in ("ant", "bee", "cat", "dog")
    ],
    "hellaswag_local": [
        ("Cooking: A man takes 1 eggs. He", f" {w}")
        for w in ("breaks them.", "flies.", "sleeps.", "is blue.")
    ],
    "winogrande_local": [
        ("Sarah met Maria 1 times because Sarah", " liked tea."),
        ("Sarah met Maria 1 times because Maria", " liked tea."),
    ],
    "openbookqa_local": [("Which is number 1?", f" {w}") for w in ("ant", "bee", "cat", "dog")],
    "lambada_openai_local": [("She had 1 cats and loved every", " cat")],
    "sciq_local": [
        ("Dee did.\nQuestion: Who found 1?\nAnswer:", f" {w}") for w in ("Ann", "Bob", "Cy", "Dee")
    ],
    "boolq_local": [
        ("On numbers -- 1 is one.\nQuestion: is 1 a number?\nAnswer:", f" {w}")
        for w in ("no", "yes")
    ],
    "copa_local": [
        ("The man opened tap 1 therefore", "  the sink filled."),
        ("The man opened tap 1 therefore", "  water flowed."),
    ],
    "commonsense_qa_local": [
        (
            "Question: Where is door 1?\nA. bank\nB. sea\nC. sky\nD. mall\nE. tree\nAnswer:",
            f" {letter}",
        )
        for letter in "ABCDE"
    ],
    "social_iqa_local": [
        ("Q: Tracy read 1 books. What will she do?\nA:", f" {w}") for w in ("read on", "eat", "run")
    ],
    # Two spaces are the stock task's: the text from the pronoun on, behind a space.
    "wsc273_local": [
        ("The 1 men refused the boys because the 1 men", "  feared noise."),
        ("The 1 men refused the boys because the boys", "  feared noise."),
    ],
    "basic_arithmetic_local": [
        ("Question: Calculate 1 + 9 =\nAnswer:", f" {w}") for w in ("1", "2", "3", "10")
    ],
    "blimp_wh_island_local": [("", " The 1 dogs bark."), ("", " The 1 dogs barks.")],
}
METRICS = {
    "lambada_openai_local": {"perplexity", "acc"},
    "winogrande_local": {"acc"},
    "boolq_local": {"acc"},
    "copa_local": {"acc"},
    "commonsense_qa_local": {"acc"},
    "social_iqa_local": {"acc"},
    "wsc273_local": {"acc"},
    "blimp_wh_island_local": {"acc"},
}  # the others: acc and acc_norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_local(tmp_path_factory.mktemp("sets") / "data")


def one(name: str, folder: Path):
    task = load_tasks([name], folder)["tasks"][name]
    task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
    task.set_fewshot_seed(seed=1)
    return task


@pytest.mark.parametrize("name", ASKED)
def test_a_local_task_asks_as_the_stock_task_does(name, folder):
    task = one(name, folder)
    task.build_all_requests(rank=0, world_size=1)
    second = [request for request in task.instances if request.doc_id == 1]
    assert [request.args for request in second] == ASKED[name]
    assert set(task.aggregation()) == METRICS.get(name, {"acc", "acc_norm"})


def test_the_right_answers_are_the_right_ones(folder):
    """A model that knows them scores 1, which a shifted label would not."""
    gold = {
        "piqa_local": 1,
        "arc_easy_local": 1,
        "hellaswag_local": 1,
        "winogrande_local": 1,
        "openbookqa_local": 1,
        "sciq_local": 3,
        "boolq_local": 1,
        "copa_local": 1,
        "commonsense_qa_local": 1,
        "social_iqa_local": 1,
        "blimp_wh_island_local": 0,
    }
    for name, right in gold.items():
        task = one(name, folder)
        doc = task.eval_docs[1]
        answers = [(-1.0 - (i != right), False) for i in range(len(ASKED[name]))]
        assert task.process_results(doc, answers)["acc"] == 1.0, name


def test_gsm8k_asks_with_examples_and_knows_its_answers(folder):
    task = one("gsm8k_local", folder)
    task.build_all_requests(rank=0, world_size=1)
    context, settings = task.instances[0].args
    assert context.endswith("Question: Ann has 0 eggs and buys 2. How many?\nAnswer:")
    assert context.count("Question:") == 6 and "#### " in context
    assert "Question:" in settings["until"]
    assert task.doc_to_target(task.eval_docs[0]).endswith("#### 2")


def test_wikitext_is_scored_article_by_article_detokenised(folder):
    task = one("wikitext_local", folder)
    task.build_all_requests(rank=0, world_size=1)
    texts = [request.args[0] for request in task.instances]
    assert len(texts) == 2
    assert "a test, she said" in texts[0] and "lived-well" in texts[0]
    assert set(task.aggregation()) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}


def test_examples_never_hold_the_question_itself(folder):
    for name in ("piqa_local", "arc_easy_local", "lambada_openai_local"):
        task = one(name, folder)
        task.set_config(key="num_fewshot", value=4)
        task.build_all_requests(rank=0, world_size=1)
        for request in task.instances:
            own = task.doc_to_text(request.doc)
            assert request.args[0].count(own) == 1, name
            assert request.args[0].endswith(own)


def test_seven_is_the_usual_seven_with_the_mean_over_tasks(folder):
    loaded = load_tasks([SEVEN], folder)
    assert list(loaded["tasks"]) == [
        "lambada_openai_local",
        "hellaswag_local",
        "piqa_local",
        "winogrande_local",
        "arc_easy_local",
        "arc_challenge_local",
        "openbookqa_local",
    ]
    (metric,) = loaded["groups"][SEVEN].aggregate_metric_list
    assert (metric.metric, metric.weight_by_size) == ("acc", False)


def test_blimp_has_its_67_kinds_each_with_its_own_rows(tmp_path, folder):
    names = write_tasks(tmp_path / "tasks", folder)
    kinds = [n for n in names if n.startswith("blimp_") and n != "blimp_local"]
    assert len(kinds) == 67
    task = one("blimp_adjunct_island_local", folder)
    assert {row["UID"] for row in task.eval_docs} == {"adjunct_island"}


def test_names_that_are_wrong_are_refused_before_the_harness_reads_its_files(folder, monkeypatch):
    import lm_eval.tasks

    def refuse(**_: object) -> None:
        raise AssertionError("read task files")

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", refuse)
    with pytest.raises(ConfigError, match="did you mean 'hellaswag_local'"):
        load_tasks(["piqa_local", "helaswag_local"], folder)
    with pytest.raises(ConfigError, match="name their folder with --data-dir"):
        load_tasks(["piqa_local"], None)
    with pytest.raises(ConfigError, match="no task given"):
        load_tasks([], folder)


def test_what_the_folder_lacks_is_named(tmp_path):
    with pytest.raises(DataError, match="no folder '.*nowhere'"):
        load_tasks(["piqa_local"], tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no arc-easy-test.jsonl"):
        load_tasks(["arc_easy_local"], tmp_path)


def test_a_task_alone_and_in_its_group_is_run_once(folder):
    for names in (["piqa_local", SEVEN], [SEVEN, "piqa_local", "copa_local"]):
        merged = load_tasks(names, folder)
        assert sorted(merged["tasks"]) == sorted(
            {*load_tasks([SEVEN], folder)["tasks"], *names[1:]} - {SEVEN}
        )
        assert list(merged["groups"]) == [SEVEN]


def test_a_task_whose_group_changes_its_settings_is_not_merged(tmp_path, folder):
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path, folder, blimp=False)
    for name, changes in (("mine", "\n    num_fewshot: 3"), ("same", "")):
        (tmp_path / f"{name}.yaml").write_text(
            f"group: {name}\ntask:\n  - task: piqa_local{changes}\n  - copa_local\n"
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for names in (["piqa_local", "mine"], ["mine", "piqa_local"], ["same", "mine"]):
        with pytest.raises(ConfigError, match="task 'piqa_local' has num_fewshot .*one after the"):
            _load(manager, names)
    assert list(_load(manager, ["mine"])["tasks"]) == ["piqa_local", "copa_local"]
    assert list(_load(manager, ["piqa_local", "same", "copa_local"])["groups"]) == ["same"]


def test_loading_says_nothing_and_leaves_the_harness_log_as_it_was(folder, caplog):
    import logging

    log = logging.getLogger("lm_eval.api.task")
    before = list(log.filters)
    with caplog.at_level(logging.WARNING):
        load_tasks(["piqa_local", "copa_local", "boolq_local", "wikitext_local"], folder)
    assert not caplog.records
    assert log.filters == before


def test_written_files_are_tasks_for_any_model_of_the_harness(tmp_path, folder):
    from lm_eval.tasks import TaskManager

    command = [sys.executable, "-m", "loopwise.harness", "write-tasks"]
    done = subprocess.run(
        [*command, str(tmp_path / "tasks"), str(folder)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) >= {*local_names(), "blimp_wh_island_local"}
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    task = manager.load(["piqa_local"])["tasks"]["piqa_local"]
    assert len(task.eval_docs) == 6
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage:")


@pytest.mark.slow  # the harness reads all its own task files first
def test_the_harness_command_knows_the_model_and_its_result_the_settings(tmp_path, folder):
    checkpoint = loaded(tmp_path / "checkpoint")
    write_tasks(tmp_path / "tasks", folder, blimp=False)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "loopwise.harness", "run", "--model", "loopwise"),
            *("--model_args", f"checkpoint={checkpoint.path},exit=latent-change:0.8"),
            *("--tasks", "copa_local", "--include_path", str(tmp_path / "tasks")),
            *("--output_path", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("*.json")
    result = json.loads(file.read_text())
    assert result["results"]["copa_local"]["sample_len"] == 6
    assert result["config"]["exit_rule"] == "latent-change:0.8,max=4"
    assert 1 <= result["config"]["ran"]["mean_depth"] <= 4
