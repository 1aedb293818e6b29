"""``loopwise eval tasks``: check what is asked, load the tasks, then the model, run, write."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from loopwise.config import read_json_object
from loopwise.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExitError,
    RunFolderError,
)
from loopwise.harness.documents import find_file
from loopwise.harness.generating import LENGTHS, room_for_prompt, sampling
from loopwise.harness.installed import harness, harness_version
from loopwise.harness.model import ModelOptions, harness_class
from loopwise.harness.tasks import DATA_DIR_VARIABLE, ENDING, load_tasks
from loopwise.measure.tiers import why_not_promised
from loopwise.models.checkpoint import file_hash, resolve
from loopwise.registry import did_you_mean
from loopwise.train.metrics import finite
from loopwise.writing import make_folder, write_whole

Event = dict[str, Any]
Emit = Callable[[Event], None]
TooLong = Literal["truncate", "skip"]
FORMAT = "loopwise-eval"
VERSION = 1
FEWSHOT_SEED = 1234  # the harness's own
_BOOTSTRAP = 1000  # resamples for the error of metrics that are no means
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HEAVY = ("custom_dataset", "dataset_kwargs", "metadata")  # of a local task's config


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksOptions:
    """What is asked beside checkpoint and tasks.

    Attributes:
        data_dir: folder of the local tasks' files; None: what the environment names.
        limit: questions of each task at most.
        num_fewshot: solved examples before each question; None: what the task says.
        max_gen_toks: new tokens of an answer, in place of what tasks that generate say.
        chat_template: render prompts with the checkpoint's chat template.
        too_long: what becomes of questions that do not fit: cut from the left, or left out.
        out: JSON file to write.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data_dir: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    max_gen_toks: int | None = None
    chat_template: bool = False
    too_long: TooLong = "truncate"
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit} must be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot {self.num_fewshot} must not be negative")
        if self.max_gen_toks is not None and self.max_gen_toks < 1:
            raise ConfigError(f"--max-gen-toks {self.max_gen_toks} must be at least 1")
        if self.too_long not in get_args(TooLong):
            raise ConfigError(
                f"--too-long {self.too_long!r} must be {' or '.join(get_args(TooLong))}"
            )
        if self.out is not None and self.out.exists():
            raise RunFolderError(f"{str(self.out)!r} exists already; choose another name")


def tasks_command(
    path: Path, tasks: Sequence[str], options: TasksOptions, emit: Emit
) -> dict[str, Any]:
    """Evaluate a checkpoint on tasks of the harness.

    Args:
        path: checkpoint or run folder.
        tasks: names of stock tasks, and of local ones, which end in ``_local``.
    Returns:
        What ``--out`` holds: scores, settings, realised depth, truncations, as plain values.
    Raises:
        ConfigError, DataError, ExitError, DepthError: what is asked does not fit; before the model
            is loaded where that can be seen then.
        CheckpointError: no checkpoint, or a broken one.
        MissingExtraError: the harness is not installed.
        WriteError: ``--out`` cannot be written.
    """
    lm_eval = harness()
    folder = resolve(path)
    if options.model.tier is not None:
        check_tier(folder, options.model.tier)
    data_dir = options.data_dir
    if data_dir is None and os.environ.get(DATA_DIR_VARIABLE):
        data_dir = Path(os.environ[DATA_DIR_VARIABLE])
    loaded = load_tasks(tasks, data_dir)
    for name, task in loaded["tasks"].items():
        _set_shots(task, name, options.num_fewshot, emit)
    if options.max_gen_toks is not None:
        _set_lengths(loaded["tasks"], options.max_gen_toks)

    def progress(what: str, done: int, total: int) -> None:
        emit({"event": "progress", "stage": what, "done": done, "total": total})

    fields = {name: getattr(options.model, name) for name in options.model.__slots__}
    model = harness_class()(folder, progress=progress, **fields)
    for name, task in loaded["tasks"].items():  # else likelihoods would be scored first, in vain
        if _generates(task):
            asked = sampling(task.get_config("generation_kwargs") or {})
            room_for_prompt(asked, model.max_length, f"task {name}")
    named = options.model.tier or options.model.exit
    unsure = why_not_promised(model.checkpoint, named, options.model.kv_policy)
    if unsure is not None:
        emit(_warning(unsure))
    if options.chat_template:
        model.chat_template(True)  # refused before anything runs
    skipped: dict[str, list[int]] = {}
    samples = None
    if options.too_long == "skip":
        samples, skipped = _fitting(model, loaded["tasks"], options)
    start = time.perf_counter()
    found = lm_eval.evaluate(
        lm=model,
        task_dict=loaded,
        limit=None if samples is not None else options.limit,
        samples=samples,
        bootstrap_iters=_BOOTSTRAP,
        apply_chat_template=options.chat_template,
        log_samples=False,
    )
    wall_s = time.perf_counter() - start
    result = _result(found, model, loaded["tasks"], list(tasks), data_dir, options)
    result["skipped_questions"] = skipped
    result["wall_s"] = wall_s
    cut = result["truncated_requests"]
    if cut:
        emit(
            _warning(
                f"{cut} of {result['requests']} requests were cut from the left to "
                f"{model.max_length} tokens; see --max-length"
            )
        )
    result = plain(result)
    if options.out is not None:
        make_folder(options.out.parent)
        write_whole(options.out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def tasks_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people: one line per task and metric, then what it cost."""
    lines = []
    width = max(len(name) for name in result["results"])
    for name, metrics in result["results"].items():
        effective = result["n_samples"].get(name, {}).get("effective")
        count = "" if effective is None else f"  ({effective} questions)"
        for key, value in metrics.items():
            metric, _, variant = key.partition(",")
            if not isinstance(value, float) or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{variant}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            label = metric if variant in ("", "none") else f"{metric} ({variant})"
            lines.append(f"{name:<{width}}  {label:<12} {value:.4f}{spread}{count}")
    for label, value in result["average"].items():
        lines.append(f"mean over {len(result['tasks'])} tasks, {label}: {value:.4f}")
    settings, depth = result["settings"], result["mean_depth"]
    shown = "none run" if depth is None else f"{depth:.2f}"
    lines.append(
        f"rule {settings['exit_rule']}, KV {settings['kv_policy']}, mean depth {shown}; "
        f"{result['truncated_requests']} of {result['requests']} requests truncated; "
        f"{result['tokens']:,} tokens in {result['busy_s']:.0f} s"
    )
    return lines


def check_tier(folder: Path, name: str) -> None:
    """Refuse a tier that ``exits.json`` does not name, before weights are read.

    Raises:
        ExitError: no such tier.
    """
    file = folder / "exits.json"
    tiers = read_json_object(file, CheckpointError).get("tiers") if file.is_file() else None
    known = list(tiers) if isinstance(tiers, dict) else []
    if name not in known:
        hint = did_you_mean(name, known) or ";"
        there = ", ".join(known) or "none yet (`loopwise calibrate`)"
        raise ExitError(f"no tier named {name!r}{hint} tiers of {str(folder)!r}: {there}")


def plain(value: Any) -> Any:
    """Anything of the harness as JSON values; numbers that are not finite become null.

    Functions become their names: where they lie in memory would make every result another.
    """
    return json.loads(json.dumps(finite(value), default=_told))


def _told(value: Any) -> str:
    if isinstance(value, partial):
        return f"partial of {_told(value.func)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function {value.__qualname__}"
    return _ADDRESS.sub("", str(value))


def _set_shots(task: Any, name: str, asked: int | None, emit: Emit) -> None:
    """As the harness does: a task that says zero examples keeps to it."""
    own = task.get_config("num_fewshot")
    if asked is not None and own == 0 and asked != 0:
        emit(_warning(f"task {name} takes no examples; --num-fewshot {asked} is not for it"))
    elif asked is not None:
        task.set_config(key="num_fewshot", value=asked)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    shots = task.get_config("num_fewshot")
    if shots and name.endswith(ENDING):
        emit(
            _warning(
                f"the {shots} examples of task {name} are other questions of the same file, where "
                "the stock task has a file of its own; scores with examples do not compare"
            )
        )
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _generates(task: Any) -> bool:
    return bool(task.get_config("output_type") == "generate_until")


def _set_lengths(tasks: Mapping[str, Any], asked: int) -> None:
    """New tokens of every answer, under whichever name a task has them.

    Raises:
        ConfigError: none of the tasks generates.
    """
    generating = [task for task in tasks.values() if _generates(task)]
    if not generating:
        raise ConfigError(
            f"--max-gen-toks {asked} is for tasks that generate, and none of {', '.join(tasks)} "
            "does; leave it out"
        )
    for task in generating:
        own = task.get_config("generation_kwargs") or {}
        kept = {name: value for name, value in own.items() if name not in LENGTHS}
        task.set_config(key="generation_kwargs", value={**kept, LENGTHS[0]: asked})


def _fitting(
    model: Any, tasks: Mapping[str, Any], options: TasksOptions
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Questions of each task all of whose requests fit, and the others, by number."""
    kept: dict[str, list[int]] = {}
    skipped: dict[str, list[int]] = {}
    for name, task in tasks.items():
        task.build_all_requests(
            limit=options.limit,
            rank=0,
            world_size=1,
            apply_chat_template=options.chat_template,
            chat_template=model.apply_chat_template if options.chat_template else None,
        )
        every = sorted({request.doc_id for request in task.instances})
        long = {request.doc_id for request in task.instances if model.is_too_long(request)}
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        kept[name] = [number for number in every if number not in long]
        if long:
            skipped[name] = sorted(long)
        if not kept[name]:
            raise DataError(
                f"no question of task {name!r} fits {model.max_length} tokens; raise --max-length"
            )
    return kept, skipped


def _result(
    found: Mapping[str, Any],
    model: Any,
    tasks: Mapping[str, Any],
    asked: list[str],
    data_dir: Path | None,
    options: TasksOptions,
) -> dict[str, Any]:
    info = model.get_model_info()
    ran = info.pop("ran")
    scores = found["results"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "lm_eval": harness_version(),
        "asked": asked,
        "tasks": list(tasks),
        "results": scores,
        "groups": found.get("groups", {}),
        "average": average({name: scores[name] for name in tasks}),
        "n_samples": found["n-samples"],
        "n_shot": found["n-shot"],
        "versions": found["versions"],
        "configs": {name: _config(found["configs"][name], name) for name in tasks},
        "data": {name: _file(tasks[name], data_dir) for name in tasks if name.endswith(ENDING)},
        "settings": {
            **info,
            "limit": options.limit,
            "num_fewshot": options.num_fewshot,
            "max_gen_toks": options.max_gen_toks,
            "fewshot_seed": FEWSHOT_SEED,
            "too_long": options.too_long,
            "bootstrap_iters": _BOOTSTRAP,
        },
        **ran,
    }


def average(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Means over tasks that all have an accuracy: the plain one, and the normalised where there is
    one. Empty for a single task.
    """
    acc = [metrics["acc,none"] for metrics in scores.values() if "acc,none" in metrics]
    if len(acc) < max(2, len(scores)):
        return {}
    norm = [metrics.get("acc_norm,none", metrics["acc,none"]) for metrics in scores.values()]
    return {"acc": sum(acc) / len(acc), "acc_norm_or_acc": sum(norm) / len(norm)}


def _config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The task as it was asked: prompt, answers, metrics; without where local rows came from."""
    heavy = _HEAVY if name.endswith(ENDING) else ()
    return {key: value for key, value in config.items() if key not in heavy}


def _file(task: Any, data_dir: Path | None) -> dict[str, Any]:
    """Which rows a local task had."""
    assert data_dir is not None, "local tasks were loaded from one"
    kwargs = task.get_config("dataset_kwargs")
    ending = ".jsonl" if "fields" in kwargs else ".txt"
    path = find_file(data_dir, kwargs["file"], ending)
    return {"file": path.name, "sha256": file_hash(path), "rows": len(task.eval_docs)}


def _warning(text: str) -> Event:
    return {"event": "warning", "text": text}
