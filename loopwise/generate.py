"""``loopwise generate``: text on the terminal, coloured by depth, or many prompts to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from loopwise.engine import Engine, EngineConfig, Generation, Request
from loopwise.engine.request import SamplingParams
from loopwise.errors import ConfigError, DataError, EngineError, RunFolderError
from loopwise.exits.rule import ExitRule, parse_rule
from loopwise.measure.tiers import named_rule, why_not_promised
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.tokenizer import Tokenizer
from loopwise.writing import append_line

# From settled at once to still moving; readable on dark and light terminals.
_SHADES = ("#2a9d8f", "#6a994e", "#c9a227", "#e76f51", "#c1121f")
# Control characters as their pictures: a terminal must not obey what a model says.
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What the command line asks for beside sampling.

    Attributes:
        depth, exit: uniform recurrences, or an exit rule or tier; neither is the training mean.
        prompts: a file of prompts, one per line, or JSON lines with ``prompt``.
        out: JSON lines, one per prompt, written as they finish.
        resume: keep what ``out`` holds already.
    """

    depth: int | None = None
    exit: str | None = None
    kv_policy: str = "per-loop"
    prompts: Path | None = None
    out: Path | None = None
    resume: bool = False
    slots: int = 32


def generate_command(
    path: Path,
    prompt: str | None,
    params: SamplingParams,
    options: GenerateOptions,
    console: Console,
) -> dict[str, Any]:
    """Decode one prompt and print it, or a file of prompts into another file."""
    if (prompt is None) == (options.prompts is None):
        raise ConfigError("give a prompt, or --prompts FILE, one of the two")
    if (options.out is None) != (options.prompts is None):
        raise ConfigError("--prompts and --out go together: answers of a file go to a file")
    checkpoint = load_checkpoint(path)
    rule = choose_rule(checkpoint, options.depth, options.exit)
    longest = EngineConfig().max_seq
    learned = checkpoint.model.geometry.max_positions
    engine = Engine.from_checkpoint(
        checkpoint,
        EngineConfig(
            exit=str(rule),
            max_depth=rule.max_depth,
            kv_policy=options.kv_policy,
            slots=1 if prompt is not None else options.slots,
            max_seq=longest if learned is None else min(longest, learned),
        ),
    )
    trained = checkpoint.trained_max_depth
    if trained is not None and rule.max_depth > trained:
        console.print(
            f"warning: {rule.max_depth} recurrences is past what training drew (up to {trained})"
        )
    unsure = why_not_promised(checkpoint, options.exit, options.kv_policy)
    if unsure is not None:
        console.print(f"warning: {unsure}")
    if prompt is not None:
        return _one(engine, prompt, params, console)
    settings = {
        "weights": checkpoint.weights_hash,
        "rule": str(engine.default_rule),
        "kv_policy": engine.kv_policy.name,
        "params": {**asdict(params), "logit_bias": dict(params.logit_bias)},
    }
    return _many(engine, options, settings, params, console)


def _one(engine: Engine, prompt: str, params: SamplingParams, console: Console) -> dict[str, Any]:
    answer = engine.generate([prompt], params)[0]
    if answer.error is not None:
        raise answer.error
    made = answer.completions[0]
    ids = [*answer.prompt_ids, *made.token_ids]
    rule = engine.default_rule
    fed = [*(d or 0 for d in answer.prompt_exit_depths), *made.exit_depths[1:]]
    # A token has the colour of the row that predicted it; the first was given.
    console.print(coloured(engine.tokenizer, ids, [fed[0], *fed], rule.max_depth))
    console.print(legend(rule.max_depth))
    mean = sum(fed) / len(fed)
    console.print(f"rule {rule}; mean depth {mean:.2f} over {len(fed)} tokens", highlight=False)
    return {**_record(0, prompt, answer), "rule": str(rule), "mean_depth": mean}


def _many(
    engine: Engine,
    options: GenerateOptions,
    settings: dict[str, Any],
    params: SamplingParams,
    console: Console,
) -> dict[str, Any]:
    source, out = options.prompts, options.out
    assert source is not None and out is not None, "checked by the caller"
    prompts = list(read_prompts(source))
    head = json.dumps({"settings": settings})
    done = _done(out, options.resume, prompts, head)
    running: dict[Request, int] = {
        engine.submit(prompt, params): i for i, prompt in enumerate(prompts) if i not in done
    }
    if not out.exists():  # after all prompts have been taken
        append_line(out, head)
    tokens, failed = 0, []
    while running:
        engine.step()
        for request in [r for r in running if r.finished]:
            index = running.pop(request)
            answer = request.generation()
            if answer.error is not None:  # no line: --resume tries it again
                failed.append(f"prompt {index}: {answer.error}")
                continue
            tokens += sum(len(c.token_ids) for c in answer.completions)
            record = _record(index, prompts[index], answer)
            append_line(out, json.dumps(record, ensure_ascii=False))
            console.print(f"{len(prompts) - len(running)}/{len(prompts)} prompts", highlight=False)
    if failed:
        raise EngineError(
            f"{len(failed)} of {len(prompts)} prompts failed, the others are in {str(out)!r}; "
            f"--resume tries them again ({failed[0]})"
        )
    return {"out": str(out), "prompts": len(prompts), "kept": len(done), "tokens": tokens}


def _record(index: int, prompt: str, answer: Generation) -> dict[str, Any]:
    first = answer.completions[0]
    return {
        "index": index,
        "prompt": prompt,
        "text": first.text,
        "token_ids": list(first.token_ids),
        "exit_depths": list(first.exit_depths),
        "finish_reason": first.finish_reason,
        "choices": [c.text for c in answer.completions],
    }


def read_prompts(path: Path) -> Iterator[str]:
    """Prompts of a text file, one per line, or of JSON lines with a ``prompt`` field.

    Raises:
        DataError: a file that is missing or empty, or a line without a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # no other character ends a line
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"cannot read prompts from {str(path)!r}: {err}") from None
    found = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{str(path)!r} holds no prompt; write one per line")
    for number, line in found:
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"line {number} of {str(path)!r} is no JSON object with a 'prompt'"
            ) from None
        if not isinstance(prompt, str):
            raise DataError(f"line {number} of {str(path)!r}: 'prompt' is not text")
        yield prompt


def _done(out: Path, resume: bool, prompts: list[str], head: str) -> set[int]:
    """Indices of the prompts that ``out`` answers already; a line cut short is taken off.

    Args:
        head: the first line, with the settings.
    Raises:
        RunFolderError: it holds something else, or was made with other settings.
    """
    if not out.exists():
        return set()
    if not resume:
        raise RunFolderError(f"{str(out)!r} exists already; add --resume or choose another name")
    whole = out.read_bytes()
    if f"{head}\n".encode().startswith(whole):  # killed before the first answer
        out.unlink()
        return set()
    kept = whole[: whole.rfind(b"\n") + 1]
    try:
        first, *rest = [json.loads(line) for line in kept.decode("utf-8").split("\n")[:-1]]
        answered = {int(r["index"]): r["prompt"] for r in rest}
        before = first["settings"]
    except (ValueError, KeyError, TypeError):
        raise RunFolderError(
            f"{str(out)!r} holds no answers of loopwise generate; choose another name"
        ) from None
    if before != json.loads(head)["settings"]:
        raise RunFolderError(f"{str(out)!r} was made with other settings; choose another name")
    if any(i >= len(prompts) or prompts[i] != p for i, p in answered.items()):
        raise RunFolderError(f"{str(out)!r} answers other prompts; choose another name")
    if len(kept) < len(whole):
        with out.open("r+b") as file:
            file.truncate(len(kept))
    return set(answered)


def choose_rule(checkpoint: Checkpoint, depth: int | None, exit_rule: str | None) -> ExitRule:
    """The rule or tier asked for; by default uniform depth at the training mean.

    Raises:
        ConfigError: both a depth and a rule, or a depth that is none.
        ExitError: a rule that cannot be read, or a tier that was not calibrated.
    """
    if depth is not None and exit_rule is not None:
        raise ConfigError("give --depth or --exit, not both")
    if depth is not None and depth < 1:
        raise ConfigError(f"--depth {depth} must be at least 1, the recurrences of every token")
    limit = checkpoint.model.geometry.max_depth
    usual = min(round(checkpoint.trained_mean_depth or 1), limit or 256)
    if exit_rule is not None:
        return named_rule(checkpoint, exit_rule, max_depth=usual)
    return parse_rule(f"fixed:{usual if depth is None else depth}")


def coloured(tokenizer: Tokenizer, ids: list[int], depths: list[int], deepest: int) -> Text:
    """Text in the colours of its tokens' depths; a character keeps that of its last token."""
    out = Text()
    waiting: list[int] = []
    for token_id, depth in zip(ids, depths, strict=True):
        waiting.append(token_id)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd"):  # a character may be spread over tokens
            out.append(text.translate(_SHOWN), style=shade(depth, deepest))
            waiting = []
    out.append(tokenizer.decode(waiting).translate(_SHOWN))
    return out


def legend(deepest: int) -> Text:
    out = Text("depth: ")
    for depth in range(1, deepest + 1):
        out.append(f" {depth} ", style=f"reverse {shade(depth, deepest)}")
    return out


def shade(depth: int, deepest: int) -> str:
    place = (depth - 1) / max(1, deepest - 1)
    return _SHADES[round(place * (len(_SHADES) - 1))]
