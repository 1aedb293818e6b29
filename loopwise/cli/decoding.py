"""Commands that decode: text, and benchmarks of the engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from loopwise.cli.app import app, bench_app
from loopwise.cli.options import (
    DataOption,
    DebugOption,
    JsonOption,
)
from loopwise.cli.running import command, nothing_kept


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

    def kept() -> str:
        if out is None or not out.is_file():
            return nothing_kept()
        where = shlex.quote(str(out))
        return f"the answers in {where} are kept; go on with --resume --out {where}"

    with command(as_json, debug, kept) as (_, answer):
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


def _bench(name: str, what: str) -> None:
    """One row of the ``bench`` table; all of them take the same options."""

    @bench_app.command(name, help=what)
    def run(
        checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
        data: DataOption = None,
        exit_: Annotated[
            str | None, typer.Option("--exit", help="Exit rule or tier under test.")
        ] = None,
        depth: Annotated[
            int | None, typer.Option("--depth", help="Full depth; default: the training mean.")
        ] = None,
        kv: Annotated[str | None, typer.Option("--kv", help="KV policy; default per-loop.")] = None,
        batch: Annotated[int, typer.Option("--batch", help="Requests in flight.")] = 32,
        requests: Annotated[int, typer.Option("--requests", help="Of one pass.")] = 64,
        judged: Annotated[
            int | None, typer.Option("--judged", help="Requests scored; default 64.")
        ] = None,
        repeats: Annotated[
            int, typer.Option("--repeats", help="In turns; the reference decoder runs once.")
        ] = 5,
        rate: Annotated[
            float | None,
            typer.Option("--rate", help="serve: share of full-depth capacity; default 0.7."),
        ] = None,
        seeds: Annotated[
            int | None, typer.Option("--seeds", help="exits: draws of documents; default 3.")
        ] = None,
        tokens: Annotated[
            int | None, typer.Option("--tokens", help="exits: of each draw; default 8000.")
        ] = None,
        budget: Annotated[
            float | None, typer.Option("--budget", help="exits: nats above full depth; 0.01.")
        ] = None,
        no_wall: Annotated[bool, typer.Option("--no-wall", help="exits: time nothing.")] = False,
        dtype: Annotated[
            Literal["fp32", "bf16", "auto"],
            typer.Option("--dtype", help="auto: bf16 where the machine multiplies it natively."),
        ] = "fp32",
        compile_: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
        seed: Annotated[int, typer.Option("--seed")] = 0,
        smoke: Annotated[bool, typer.Option("--smoke", help="Seconds: does it run.")] = False,
        out: Annotated[Path | None, typer.Option("--out", help="Folder to keep it in.")] = None,
        debug: DebugOption = False,
    ) -> None:
        with command(True, debug) as (_, answer):
            from loopwise.bench.commands import (
                COMMANDS,
                BenchOptions,
                check_used,
                keep_result,
                last_line,
            )

            asked = {
                **{"exit": exit_, "kv": kv, "judged": judged, "rate": rate},
                **{"seeds": seeds, "tokens": tokens, "budget": budget},
                "no-wall": no_wall or None,
            }
            given: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
            check_used(name, given)
            given.pop("kv", None)
            given["wall"] = not given.pop("no-wall", False)
            options = BenchOptions(
                **given,
                data=tuple(data or BenchOptions().data),
                depth=depth,
                kv_policy=kv or "per-loop",
                batch=batch,
                requests=requests,
                repeats=repeats,
                dtype=dtype,
                compile=compile_,
                seed=seed,
                smoke=smoke,
            )
            found = COMMANDS[name](checkpoint, options, Console(stderr=True))
            if out is not None:
                keep_result(found, out)
            answer(last_line(found))


_bench("decode", "Tokens per second with live exits against uniform depth and other batching.")
_bench("prefill", "Time to the first token of long prompts, with live exits.")
_bench("serve", "Latency of requests that arrive at random.")
_bench("overhead", "The engine against the same kernels in a bare loop.")
_bench("kv", "Memory, speed and quality of every KV policy.")
_bench("exits", "Every exit rule on the same tokens: quality, price of its checks, speed.")
