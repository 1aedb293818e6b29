"""``loopwise generate``: text on the terminal, coloured by depth, or many prompts to a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopwise.engine import Completion, Engine, EngineConfig, Generation, Request
from loopwise.engine.request import SamplingParams
from loopwise.errors import ConfigError, DataError, EngineError, RunFolderError, telling_which
from loopwise.exits.rule import ExitRule, parse_rule
from loopwise.measure.tiers import named_rule
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
        slots: prompts in flight at once.
        max_seq: tokens of a prompt and its answer; None: the engine's default, within what the
            model has learned.
        chunk: prompt tokens that enter the core together; None: the engine's default.
    """

    depth: int | None = None
    exit: str | None = None
    kv_policy: str = "per-loop"
    prompts: Path | None = None
    out: Path | None = None
    resume: bool = False
    slots: int = 32
    max_seq: int | None = None
    chunk: int | None = None


def generate_command(
    path: Path,
    prompt: str | None,
    params: SamplingParams,
    options: GenerateOptions,
    console: Console,
    told: Callable[[int, int], None],
) -> dict[str, Any]:
    """Decode one prompt and print it, or a file of prompts into another file.

    Args:
        told: how many prompts of a file are finished, and how many there are.
    """
    if (prompt is None) == (options.prompts is None):
        raise ConfigError("give a prompt, or --prompts FILE, one of the two")
    if (options.out is None) != (options.prompts is None):
        raise ConfigError("--prompts and --out go together: answers of a file go to a file")
    checkpoint = load_checkpoint(path)
    rule = choose_rule(checkpoint, options.depth, options.exit)
    usual, learned = EngineConfig(), checkpoint.model.geometry.max_positions
    longest = usual.max_seq if learned is None else min(usual.max_seq, learned)
    engine = Engine.from_checkpoint(
        checkpoint,
        EngineConfig(
            exit=options.exit or str(rule),
            max_depth=rule.max_depth,
            kv_policy=options.kv_policy,
            slots=1 if prompt is not None else options.slots,
            max_seq=longest if options.max_seq is None else options.max_seq,
            chunk=usual.chunk if options.chunk is None else options.chunk,
        ),
    )
    stats = engine.stats()
    settings = {
        "weights": checkpoint.weights_hash,
        "rule": str(engine.default_rule),
        "kv_policy": engine.kv_policy.name,
        "chunk": stats["chunk"],
        "max_seq": engine.config.max_seq,
        "end_ids": stats["end_ids"],
    }
    if prompt is not None:
        return {**settings, **_one(engine, prompt, params, console)}
    return _many(engine, options, settings, params, told)


def _one(engine: Engine, prompt: str, params: SamplingParams, console: Console) -> dict[str, Any]:
    request = engine.submit(prompt, params)
    (ended,) = engine.as_completed([request])
    answer = ended.generation()
    if answer.error is not None:
        raise answer.error
    rule, given = engine.default_rule, [d or 0 for d in answer.prompt_exit_depths]
    depths = list(given)
    for made in answer.completions:
        if params.n > 1:
            console.print(f"choice {made.index}, {made.finish_reason}:", highlight=False)
        ids = [*answer.prompt_ids, *made.token_ids]
        # A token has the colour of the row that predicted it; the first was given.
        shown = [given[0], *given, *made.exit_depths[1:]]
        console.print(coloured(engine.tokenizer, ids, shown, rule.max_depth))
        if params.logprobs is not None:
            console.print(likelihoods(engine.tokenizer, made))
        depths += made.exit_depths[1:]
    console.print(legend(rule.max_depth))
    mean = sum(depths) / len(depths)
    seed = f"; seed {answer.seed}" if params.temperature > 0 else ""
    console.print(
        f"rule {rule}; mean depth {mean:.2f} over {len(depths)} tokens{seed}", highlight=False
    )
    return {**_record(0, prompt, answer, params), "mean_depth": mean}


def _many(
    engine: Engine,
    options: GenerateOptions,
    settings: dict[str, Any],
    params: SamplingParams,
    told: Callable[[int, int], None],
) -> dict[str, Any]:
    source, out = options.prompts, options.out
    assert source is not None and out is not None, "checked by the caller"
    lines = list(read_prompts(source))
    prompts = [prompt for _, prompt in lines]
    earlier = _earlier(out, options.resume)
    if params.seed is None and earlier is not None:
        params = replace(params, seed=earlier.settings["params"]["seed"])
    params = params.seeded()  # one for the file, so that it can be made again
    asked = {**asdict(params), "logit_bias": dict(params.logit_bias)}
    head = json.dumps({"settings": {**settings, "params": asked}})
    done = set() if earlier is None else _checked(earlier, out, prompts, json.loads(head))
    running: dict[Request, int] = {}
    for index, (number, prompt) in enumerate(lines):
        if index not in done:
            with telling_which(f"line {number} of {str(source)!r}"):
                running[engine.submit(prompt, params)] = index
    if earlier is None:  # after all prompts have been taken
        append_line(out, head)
    tokens, failed = 0, []
    for finished, request in enumerate(engine.as_completed(running), len(done) + 1):
        index, answer = running[request], request.generation()
        told(finished, len(prompts))
        if answer.error is not None:  # no line: --resume tries it again
            failed.append(f"prompt {index}: {answer.error}")
            continue
        tokens += sum(len(c.token_ids) for c in answer.completions)
        record = _record(index, prompts[index], answer, params)
        append_line(out, json.dumps(record, ensure_ascii=False))
    if failed:
        raise EngineError(
            f"{len(failed)} of {len(prompts)} prompts failed, the others are in {str(out)!r}; "
            f"--resume tries them again ({failed[0]})"
        )
    counts = {"prompts": len(prompts), "kept": len(done), "tokens": tokens}
    return {"out": str(out), **counts, "seed": params.seed}


def _record(index: int, prompt: str, answer: Generation, params: SamplingParams) -> dict[str, Any]:
    """One answer as plain values: its first choice, and where there are more, each of them."""

    def choice(made: Completion) -> dict[str, Any]:
        plain = asdict(made)
        names = ["text", "token_ids", "exit_depths", "finish_reason"]
        return {k: plain[k] for k in names + ["logprobs", "top_logprobs"] * asks}

    asks = params.logprobs is not None
    record = {"index": index, "prompt": prompt, "seed": answer.seed}
    record |= choice(answer.completions[0])
    if params.n > 1:
        record["choices"] = [choice(c) for c in answer.completions]
    return record


def read_prompts(path: Path) -> Iterator[tuple[int, str]]:
    """Prompts of a text file, one per line, or of JSON lines with a ``prompt`` field.

    Returns:
        The line each stands on, from 1, and its text.
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
            yield number, line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"line {number} of {str(path)!r} is no JSON object with a 'prompt'"
            ) from None
        if not isinstance(prompt, str):
            raise DataError(f"line {number} of {str(path)!r}: 'prompt' is not text")
        yield number, prompt


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What an earlier run left: its settings, the prompts it answered, its whole lines in bytes."""

    settings: dict[str, Any]
    answered: dict[int, str]
    size: int


_HEAD = b'{"settings": {'


def _earlier(out: Path, resume: bool) -> _Earlier | None:
    """What there is to go on with; a file without its first line whole holds nothing.

    Raises:
        RunFolderError: it holds something else, or is not to be gone on with.
    """
    if not out.exists():
        return None
    if not resume:
        raise RunFolderError(f"{str(out)!r} exists already; add --resume or choose another name")
    whole = out.read_bytes()
    if b"\n" not in whole and whole[: len(_HEAD)] == _HEAD[: len(whole)]:  # killed at its start
        out.unlink()
        return None
    kept = whole[: whole.rfind(b"\n") + 1]
    try:
        first, *rest = [json.loads(line) for line in kept.decode("utf-8").split("\n")[:-1]]
        answered = {int(r["index"]): r["prompt"] for r in rest}
        settings = first["settings"]
        settings["params"]["seed"]
    except (ValueError, KeyError, TypeError):
        raise RunFolderError(
            f"{str(out)!r} holds no answers of loopwise generate; choose another name"
        ) from None
    return _Earlier(settings, answered, len(kept))


def _checked(earlier: _Earlier, out: Path, prompts: list[str], head: dict[str, Any]) -> set[int]:
    """Indices of the prompts that ``out`` answers already; a line cut short is taken off.

    Args:
        head: the first line that this run would write.
    Raises:
        RunFolderError: it was made with other settings or of other prompts.
    """
    if earlier.settings != head["settings"]:
        changed = [k for k, v in head["settings"].items() if earlier.settings.get(k) != v]
        raise RunFolderError(
            f"{str(out)!r} was made with other settings ({', '.join(changed)}); choose another name"
        )
    if any(i >= len(prompts) or prompts[i] != p for i, p in earlier.answered.items()):
        raise RunFolderError(f"{str(out)!r} answers other prompts; choose another name")
    if out.stat().st_size > earlier.size:
        with out.open("r+b") as file:
            file.truncate(earlier.size)
    return set(earlier.answered)


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


def likelihoods(tokenizer: Tokenizer, made: Completion) -> Table:
    """Each token of a choice that asked for log-probabilities, and the best in its place."""

    def spelt(token_id: int) -> str:
        return repr(tokenizer.decode([token_id], special=True))

    table = Table("token", "depth", "logprob (nats)", "likeliest", box=None, highlight=False)
    rows = zip(made.token_ids, made.exit_depths, made.logprobs, made.top_logprobs, strict=True)
    for token_id, depth, logprob, top in rows:
        best = "  ".join(f"{spelt(i)} {value:.3f}" for i, value in top)
        cells = (spelt(token_id), str(depth), f"{logprob:.3f}", best)
        table.add_row(*map(Text, cells))
    return table


def legend(deepest: int) -> Text:
    out = Text("depth: ")
    for depth in range(1, deepest + 1):
        out.append(f" {depth} ", style=f"reverse {shade(depth, deepest)}")
    return out


def shade(depth: int, deepest: int) -> str:
    place = (depth - 1) / max(1, deepest - 1)
    return _SHADES[round(place * (len(_SHADES) - 1))]
