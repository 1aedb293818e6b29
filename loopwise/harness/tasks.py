"""The harness's tasks by name: its own, which ask the network, and ours over local files.

A local task is a file of ``tasks/``: it includes the stock task of the same name from the installed
harness, so prompts, answers and metrics are that task's, and says which file its rows come from.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from loopwise.errors import ConfigError, DataError, LoopwiseError
from loopwise.harness.installed import harness
from loopwise.registry import did_you_mean

ENDING = "_local"
SEVEN = f"seven{ENDING}"
DATA_DIR_VARIABLE = "LOOPWISE_EVAL_DATA"
_HERE = Path(__file__).parent / "tasks"
_STOCK_FILE = re.compile(r'"\$\{stock\}/([^"]+)"')
_SHOWN = 60  # characters of a setting that an error shows
_NO_USE = ("Custom kwargs", "but aggregation is not", "but higher_is_better is not")
_BLIMP_GROUP = """\
group: blimp_local
task: [{tasks}]
aggregate_metric_list:
  - metric: acc
    weight_by_size: false
"""


def local_names() -> list[str]:
    """Local tasks and groups that can be asked for, BLiMP's 67 parts left out."""
    return [f"{path.stem}{ENDING}" for path in _templates()]


def load_tasks(names: Sequence[str], data_dir: Path | None) -> dict[str, Any]:
    """Tasks with their data, as the harness's ``evaluate`` takes them.

    A task that is asked for alone and in groups is run once, and counts in each. Stock names make
    the harness read all its task files first, which takes some seconds.

    Args:
        data_dir: folder of the local tasks' files.
    Raises:
        ConfigError: an unknown name, no folder for a local task, or a task that a group asks with
            other settings than another name does.
        DataError: a file that lacks or is broken, or data that the network does not give.
        MissingExtraError: the harness is not installed.
    """
    if not names:
        raise ConfigError(f"no task given; give some with --tasks, for example {SEVEN}")
    lm_eval = harness("lm_eval.tasks")
    blimp = any(name.startswith("blimp_") and name.endswith(ENDING) for name in names)
    local = [*local_names(), *(_blimp_names() if blimp else [])]
    ours = [name for name in names if name.endswith(ENDING)]
    for name in ours:  # before the harness reads its own files
        _require_known(name, local)
    if ours and data_dir is None:
        raise ConfigError(
            f"task {ours[0]!r} reads local files; name their folder with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    with tempfile.TemporaryDirectory(prefix="loopwise-tasks-") as folder:
        if data_dir is not None:
            write_tasks(Path(folder), data_dir, blimp=blimp)
        manager = lm_eval.TaskManager(include_path=folder, include_defaults=len(ours) < len(names))
        for name in names:
            _require_known(name, manager.all_tasks)
        return _load(manager, list(dict.fromkeys(names)))


def write_tasks(folder: Path, data_dir: Path, *, blimp: bool = True) -> list[str]:
    """Write ready task files for ``lm_eval --include_path``, for any of its models.

    They name the installed harness and ``data_dir`` by absolute paths.

    Returns:
        The tasks and groups they define.
    """
    stock = _stock_folder()
    places = {"stock": stock, "here": _HERE, "folder": data_dir.expanduser().resolve()}
    values = {name: json.dumps(str(path))[1:-1] for name, path in places.items()}
    written: dict[str, str] = {}
    for path in _templates():
        text = path.read_text(encoding="utf-8")
        for file in _STOCK_FILE.findall(text):
            if not (stock / file).is_file():
                raise ConfigError(
                    f"the installed lm-eval has no task file {file!r}; install the version that "
                    "loopwise[eval] asks for"
                )
        if path.stem != "blimp":
            written[f"{path.stem}{ENDING}"] = Template(text).substitute(values)
            continue
        if not blimp:
            continue
        for name in _blimp_names():
            kind = name.removeprefix("blimp_").removesuffix(ENDING)
            written[name] = Template(text).substitute(values, kind=kind)
        written["blimp_local"] = _BLIMP_GROUP.format(tasks=", ".join(_blimp_names()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return sorted(written)


def _load(manager: Any, names: list[str]) -> dict[str, Any]:
    log = logging.getLogger("lm_eval.api.task")
    log.addFilter(_is_of_use)
    try:
        # One at a time: together, the harness refuses those that share a task.
        merged: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        asked: dict[str, str] = {}  # by task: the name that loaded it
        for name in names:
            loaded = manager.load([name])
            for task, found in loaded["tasks"].items():
                if task in asked:
                    _require_same(task, (asked[task], merged["tasks"][task]), (name, found))
                asked[task] = name
            for part, found in loaded.items():
                merged[part] |= found
        return merged
    except LoopwiseError:
        raise
    except OSError as err:
        first = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise DataError(
            f"cannot get the data of the tasks {', '.join(names)} ({first}); check the network, or "
            f"take local tasks: {', '.join(local_names())}"
        ) from err
    finally:
        log.removeFilter(_is_of_use)


def _require_same(task: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    """Refuse a task that two names load with different settings: it is run once."""
    before, after = (found.dump_config() for _, found in (first, second))
    for key in sorted({*before, *after}):
        texts = [json.dumps(c.get(key), default=_name, sort_keys=True) for c in (before, after)]
        if texts[0] != texts[1]:
            said = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in texts]
            raise ConfigError(
                f"task {task!r} has {key} {said[0]} as {first[0]!r} loads it and {said[1]} as "
                f"{second[0]!r} does; evaluate them one after the other"
            )


def _name(value: Any) -> str:
    """What a function is called: loaded twice, it is another object."""
    return str(getattr(value, "__qualname__", type(value).__name__))


def _is_of_use(record: logging.LogRecord) -> bool:
    """Not advice on options of the harness's own command, which a local task has no need of, nor
    on what its own task files leave out."""
    return not any(part in record.getMessage() for part in _NO_USE)


def _require_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        ours = ", ".join(local_names())
        raise ConfigError(f"no task named {name!r}{hint or ';'} local tasks: {ours}")


def _templates() -> list[Path]:
    return sorted(path for path in _HERE.glob("*.yaml") if not path.stem.startswith("_"))


def _blimp_names() -> list[str]:
    kinds = sorted(path.stem for path in (_stock_folder() / "blimp").glob("[!_]*.yaml"))
    return [f"blimp_{kind}{ENDING}" for kind in kinds]


def _stock_folder() -> Path:
    return Path(harness("lm_eval.tasks").__file__).parent
