"""The command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from loopwise.errors import CheckpointError, ConfigError, LoopwiseError

if TYPE_CHECKING:
    from loopwise.display import Display

app = typer.Typer(
    help="Train, measure and serve depth-recurrent language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

eval_app = typer.Typer(help="Evaluate a checkpoint.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")

bench_app = typer.Typer(
    help="Measure the engine beside its alternatives, in one run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", help="Text: files, folders, globs, hub:OWNER/NAME, builtin:stories."),
]
HeldOutOption = Annotated[
    list[str] | None,
    typer.Option("--held-out", help="Text to measure on; by default a part of --data."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, e.g. --set optim.lr=3e-4.")
]
PresetOption = Annotated[str | None, typer.Option("--preset", help="tiny, small or paper-135m.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder.")]
BaselineOption = Annotated[
    Literal["parameters", "flops"] | None,
    typer.Option("--baseline", help="Train the non-looped twin of the settings instead."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Last line on stdout is one JSON object.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def study(
    data: DataOption = None,
    held_out: HeldOutOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    seed: SeedOption = None,
    baseline: BaselineOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train, measure how every token converges, allocate depth, report: the whole line."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.report import print_summary
        from loopwise.study import run_study

        settings = _settings(preset, config, set_, data, held_out, seed, baseline)
        made = run_study(settings, out or Path("runs") / "study", display, resume)
        display.stop()
        print_summary(made.pop("results"))
        print(f"report: {made['report']}")
        answer(made)


@app.command()
def train(
    data: DataOption = None,
    held_out: HeldOutOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    seed: SeedOption = None,
    baseline: BaselineOption = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Checkpoint to start from: its weights, shape, tokenizer."),
    ] = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Log gradient and latent norms of every step.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a model with random depth; checkpoints and metrics go to --out."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.config import merge
        from loopwise.study import train_command

        if start is not None and baseline is not None:
            raise ConfigError("--from and --baseline exclude one another; leave one out")
        settings = _settings(preset, config, set_, data, held_out, seed, baseline)
        if diagnostics:
            settings = merge(settings, {"train": {"diagnostics": True}})
        answer(train_command(settings, out or Path("runs") / "train", display, resume, start))


@app.command()
def measure(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    data: DataOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Trace every token of --data at every recurrence; fits exit rules on its first part."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.study import measure_command

        settings = _settings(None, config, set_, data, None, None)
        traces = measure_command(checkpoint, data, settings, out, display)
        answer({"traces": [str(t.folder) for t in traces], "tokens": [t.n_tokens for t in traces]})


@app.command()
def frontier(
    trace: Annotated[list[Path], typer.Argument(help="Trace folders.")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Where the weights are now, if moved.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Quality against depth for every exit rule and the oracles, replayed and live."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.study import frontier_command

        settings = _settings(None, config, set_, None, None, None)
        answer({"frontiers": frontier_command(trace, checkpoint, settings, display)})


@app.command()
def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Held-out text; by default what the run held out."),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="Nats above full depth; a comma list makes tiers.")
    ] = "0.01",
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            help="Of the tiers. Default: balanced; high,fast; high,balanced,fast; "
            "tier-1,tier-2,... from the smallest budget.",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            help="Comma list of exit rules to compare. "
            "Default: latent-change,latent-kl,second-difference,kl, where fitted.",
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", help="Full depth; default: the training mean.")
    ] = None,
    min_depth: Annotated[int, typer.Option("--min-depth", help="Of every rule.")] = 1,
    patience: Annotated[int, typer.Option("--patience", help="Of every rule.")] = 1,
    confidence: Annotated[
        float, typer.Option("--confidence", help="That a tier keeps its budget.")
    ] = 0.95,
    unit: Annotated[
        Literal["document", "block"],
        typer.Option(
            "--unit", help="What is drawn independently; block: parts of documents as well."
        ),
    ] = "document",
    units: Annotated[
        int | None,
        typer.Option("--units", help="Judged, at most; default: 3 times what is needed."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of how the text is divided.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Offer exit rules on a model that does not converge.")
    ] = False,
    allow_training_data: Annotated[
        bool, typer.Option("--allow-training-data", help="Take text that was trained on.")
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the cheapest exit rule, or uniform depth, that keeps a budget; stored as tiers."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.calibrate.commands import calibrate_command
        from loopwise.calibrate.options import CalibrateOptions
        from loopwise.calibrate.results import summary_lines

        options = CalibrateOptions(
            budgets=tuple(_listed(budget, float, "--budget")),
            names=tuple(_listed(names or "", str, "--names")),
            rules=tuple(_listed(rules or "", str, "--rules")),
            depth=depth,
            min_depth=min_depth,
            patience=patience,
            confidence=confidence,
            unit=unit,
            units=units,
            seed=seed,
            force=force,
            allow_training_data=allow_training_data,
        )
        asked = _settings(None, config, set_, None, None, None)
        found = calibrate_command(checkpoint, data, options, asked, display)
        display.stop()
        for line in summary_lines(found):
            print(line)
        answer(found)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or hub id of a published checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to make.")],
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights too, weights-only.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="For a source without one: byte, or a tokenizer.json."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a loopwise checkpoint of a published one; nothing but the format changes."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.hub.convert import conversion_lines, convert
        from loopwise.hub.download import source_folder

        if out.exists():  # before anything is downloaded
            raise CheckpointError(f"{str(out)!r} exists already; choose another name")
        folder = source_folder(source, allow_pickle=allow_pickle)
        done = convert(folder, out, allow_pickle=allow_pickle, tokenizer=tokenizer)
        display.stop()
        for line in conversion_lines(done):
            print(line)
        answer(done.to_json())


@app.command()
def retrofit(
    checkpoint: Annotated[Path, typer.Argument(help="A Llama-shaped checkpoint (fixed).")],
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to make.")],
    prelude: Annotated[str, typer.Option("--prelude", help="Layers before the loop, e.g. 0-3.")],
    core: Annotated[str, typer.Option("--core", help="Layers of the loop, e.g. 10-17.")],
    coda: Annotated[str, typer.Option("--coda", help="Layers after the loop, e.g. 26-29.")],
    start: Annotated[
        Literal["injection", "latent"],
        typer.Option(
            "--start",
            help="What recurrences start from before training: the prelude's output, so that all "
            "depths agree, or their own, so that the core's layers run again and again.",
        ),
    ] = "injection",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a depth-recurrent checkpoint out of the layers of an ordinary one; train it next."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.hub.retrofit import retrofit, retrofit_lines

        layers = {"prelude": prelude, "core": core, "coda": coda}
        done = retrofit(checkpoint, out, layers, start=start)
        display.stop()
        for line in retrofit_lines(done):
            print(line)
        answer(done.to_json())


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    depth: Annotated[
        float | None,
        typer.Option("--depth", help="Mean depth under exits; default: half of full depth."),
    ] = None,
    full_depth: Annotated[
        int | None,
        typer.Option("--full-depth", help="Depth without exits; default: the training mean."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Text to watch it on; default: some of the built-in corpus."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Of the text, at most.")] = 2048,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Shape, parameters, FLOPs, KV bytes, the cap of exits, and whether exits can be trusted."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.hub.inspect import inspect_checkpoint, inspect_lines
        from loopwise.models.checkpoint import load_checkpoint

        def watching(done: int, total: int) -> None:
            event = {"event": "progress", "stage": "watching", "done": done, "total": total}
            display(event)

        facts = inspect_checkpoint(
            load_checkpoint(checkpoint),
            data,
            mean_depth=depth,
            full_depth=full_depth,
            tokens=tokens,
            progress=watching,
        )
        display.stop()
        for line in inspect_lines(facts):
            print(line)
        answer(facts)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder that holds results.json.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write report.html and plots/ from results.json."""
    with _command(as_json, debug) as (_, answer):
        from loopwise.report import write_report

        answer({"report": str(write_report(run))})


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from.")] = None,
    depth: Annotated[int | None, typer.Option("--depth", help="Uniform recurrences.")] = None,
    exit_: Annotated[
        str | None, typer.Option("--exit", help="Exit rule, e.g. kl:1e-3, or tier.")
    ] = None,
    kv: Annotated[
        str, typer.Option("--kv", help="per-loop, last, ring-N or first-then-last.")
    ] = "per-loop",
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = 80,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k")] = None,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Ends the text.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="One per line, or .jsonl with 'prompt'.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON lines, for --prompts.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --out holds.")] = False,
    slots: Annotated[int, typer.Option("--slots", help="Prompts in flight at once.")] = 32,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Go on from a prompt, coloured by the depth each token took, or from a file of prompts."""
    with _command(as_json, debug) as (_, answer):
        from loopwise.engine.request import SamplingParams
        from loopwise.generate import GenerateOptions, generate_command

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=tuple(stop or ()),
            seed=seed,
            max_tokens=max_tokens,
        )
        options = GenerateOptions(
            depth=depth,
            exit=exit_,
            kv_policy=kv,
            prompts=prompts,
            out=out,
            resume=resume,
            slots=slots,
        )
        answer(generate_command(checkpoint, prompt, params, options, Console()))


@app.command()
def stability(
    variants: Annotated[
        str, typer.Option("--variants", help="Comma list: lt,lt-input,lt-attn-first,fla,flt.")
    ] = "lt,lt-input,lt-attn-first,fla,flt",
    loops: Annotated[str, typer.Option("--loops", help="Comma list of loop counts.")] = "6,9,12",
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds of every cell.")] = 3,
    lrs: Annotated[
        str | None, typer.Option("--lrs", help="Comma list of matrix learning rates.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimiser steps of a cell.")] = None,
    random_depth: Annotated[
        bool, typer.Option("--random-depth", help="Draw depths with the loops as their mean.")
    ] = False,
    data: DataOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    preset: PresetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a grid of looped variants, see which collapse and why; finished cells are kept."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.report import print_stability, write_stability_report
        from loopwise.study.stability import GridConfig, run_grid

        asked = _settings(preset, config, set_, data, None, None)
        if steps is not None:
            asked.setdefault("train", {})["steps"] = steps
        grid = GridConfig(
            variants=tuple(_listed(variants, str, "--variants")),
            loops=tuple(_listed(loops, int, "--loops")),
            seeds=seeds,
            lrs=tuple(_listed(lrs, float, "--lrs")) if lrs else (),
            random_depth=random_depth,
        )
        folder = out or Path("runs") / "stability"
        results = run_grid(asked, grid, folder, display)
        page = write_stability_report(folder)
        display.stop()
        print_stability(results, folder)
        print(f"report: {page}")
        answer({"report": str(page), "cells": results["cells"]})


@eval_app.command()
def perplexity(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    data: Annotated[list[str], typer.Option("--data", help="Text, as for --data elsewhere.")],
    protocol: Annotated[
        Literal["block", "sliding", "document"], typer.Option(help="How text is cut and averaged.")
    ] = "block",
    depth: Annotated[list[int] | None, typer.Option("--depth", help="Default: 1 to 32.")] = None,
    block: Annotated[int, typer.Option(help="Tokens of a block or window.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens a sliding window moves; half a block by default.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Perplexity at each depth under a named protocol."""
    with _command(as_json, debug) as (display, answer):
        from loopwise.report.perplexity import print_perplexity
        from loopwise.study import perplexity_command

        settings = _settings(None, config, set_, None, None, None)
        results = perplexity_command(
            checkpoint, data, protocol, depth, block, stride, settings, display
        )
        display.stop()
        for name, result in results.items():
            print_perplexity(name, result)
        answer(results)


def _bench(command: str, what: str) -> None:
    """One row of the ``bench`` table; all of them take the same options."""

    @bench_app.command(command, help=what)
    def run(
        checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
        data: DataOption = None,
        exit_: Annotated[str | None, typer.Option("--exit", help="Exit rule under test.")] = None,
        depth: Annotated[
            int | None, typer.Option("--depth", help="Full depth; default: the training mean.")
        ] = None,
        kv: Annotated[str, typer.Option("--kv", help="KV policy.")] = "per-loop",
        batch: Annotated[int, typer.Option("--batch", help="Requests in flight.")] = 32,
        requests: Annotated[int, typer.Option("--requests", help="Of one pass.")] = 64,
        judged: Annotated[
            int | None, typer.Option("--judged", help="Requests scored; default 64.")
        ] = None,
        repeats: Annotated[int, typer.Option("--repeats")] = 5,
        rate: Annotated[
            float | None,
            typer.Option("--rate", help="serve: share of full-depth capacity; default 0.7."),
        ] = None,
        dtype: Annotated[str, typer.Option("--dtype", help="fp32 or bf16.")] = "fp32",
        compile_: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
        seed: Annotated[int, typer.Option("--seed")] = 0,
        smoke: Annotated[bool, typer.Option("--smoke", help="Seconds: does it run.")] = False,
        out: Annotated[Path | None, typer.Option("--out", help="Folder to keep it in.")] = None,
        debug: DebugOption = False,
    ) -> None:
        with _command(True, debug) as (_, answer):
            from loopwise.bench.commands import COMMANDS, BenchOptions, check_used
            from loopwise.bench.common import keep

            asked = {"exit": exit_, "judged": judged, "rate": rate}
            given: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
            check_used(command, given)
            options = BenchOptions(
                **given,
                data=tuple(data or BenchOptions().data),
                depth=depth,
                kv_policy=kv,
                batch=batch,
                requests=requests,
                repeats=repeats,
                dtype=dtype,
                compile=compile_,
                seed=seed,
                smoke=smoke,
            )
            found = COMMANDS[command](checkpoint, options, Console(stderr=True))
            if out is not None:
                keep(found, out)
            answer(found)


_bench("decode", "Tokens per second with live exits against uniform depth and other batching.")
_bench("prefill", "Time to the first token of long prompts, with live exits.")
_bench("serve", "Latency of requests that arrive at random.")
_bench("overhead", "The engine against the same kernels in a bare loop.")


@contextmanager
def _command(
    as_json: bool, debug: bool
) -> Iterator[tuple[Display, Callable[[dict[str, Any]], None]]]:
    """Run a command: display on stderr, the answer on stdout, one line and code 2 for bad input."""
    from loopwise.display import Display
    from loopwise.train.loop import Interrupted
    from loopwise.train.metrics import finite

    console = Console(stderr=True)
    try:
        with Display(console) as display:

            def answer(value: dict[str, Any]) -> None:
                if as_json:
                    print(json.dumps(finite(value), allow_nan=False), flush=True)

            yield display, answer
    except LoopwiseError as err:
        if debug:
            raise
        console.print(f"error: {err}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except Interrupted as err:
        console.print(str(err), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def _settings(
    preset: str | None,
    config: Path | None,
    set_: list[str] | None,
    data: list[str] | None,
    held_out: list[str] | None,
    seed: int | None,
    baseline: Literal["parameters", "flops"] | None = None,
) -> dict[str, Any]:
    """What the command line asks for, as one table."""
    from loopwise.settings import explicit_table, fixed_baseline

    table: dict[str, Any] = {}
    if data:
        table["data"] = {"sources": data}
    if held_out:
        table.setdefault("data", {})["held_out"] = held_out
    if seed is not None:
        table["seed"] = seed
    asked = explicit_table(preset=preset, file=config, overrides=set_ or (), settings=table)
    return asked if baseline is None else fixed_baseline(asked, baseline)


def _listed(text: str, kind: type, option: str) -> list[Any]:
    """``"6,9,12"`` as a list of ``kind``."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be a comma list of {kind.__name__}") from None


def main() -> None:
    """Entry point of ``loopwise``."""
    sys.exit(app())
