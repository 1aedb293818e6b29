"""Commands that decode: text, and benchmarks of the engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import partial
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
from loopwise.errors import ConfigError

_running = partial(typer.Option, rich_help_panel="Depth and memory")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_ending = partial(typer.Option, rich_help_panel="When an answer ends")
_filing = partial(typer.Option, rich_help_panel="A file of prompts")


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from.")] = None,
    depth: Annotated[
        int | None,
        _running("--depth", help="Uniform recurrences."),
    ] = None,
    exit_: Annotated[
        str | None,
        _running("--exit", help="Exit rule, e.g. kl:1e-3, or tier."),
    ] = None,
    kv: Annotated[
        str,
        _running("--kv", help="per-loop, last, ring-N or first-then-last."),
    ] = "per-loop",
    max_seq: Annotated[
        int | None,
        _running("--max-seq", help="Tokens of prompt and answer; default 1024."),
    ] = None,
    chunk: Annotated[
        int | None,
        _running(
            "--chunk",
            help="Prompt tokens that enter together, which answers depend on, but for --kv "
            "per-loop; default 128.",
        ),
    ] = None,
    temperature: Annotated[float, _sampling("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None,
        _sampling("--top-k", help="Only so many best tokens."),
    ] = None,
    top_p: Annotated[
        float,
        _sampling("--top-p", help="The fewest best that hold this share."),
    ] = 1.0,
    min_p: Annotated[
        float,
        _sampling("--min-p", help="Only tokens this share as likely as the best."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        _sampling("--repetition-penalty", help="Divides logits of tokens seen, prompt included."),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        _sampling("--presence-penalty", help="Off each token made before."),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        _sampling("--frequency-penalty", help="The same, each time it was."),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            metavar="ID=VALUE",
            help="Nats added to a token id's logit; may be repeated.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _sampling("--seed", help="By default a fresh one, shown."),
    ] = None,
    n: Annotated[int, _sampling("--n", help="Answers to each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        _sampling("--logprobs", help="Show log-probabilities, and so many alternatives."),
    ] = None,
    max_tokens: Annotated[int, _ending("--max-tokens", help="Tokens made at most.")] = 80,
    stop: Annotated[
        list[str] | None,
        _ending("--stop", help="A text that ends it; may be repeated."),
    ] = None,
    stop_id: Annotated[
        list[int] | None,
        _ending("--stop-id", help="A token id that ends it; may be repeated."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        _ending("--ignore-eos", help="Go on past the model's own end tokens."),
    ] = False,
    prompts: Annotated[
        Path | None,
        _filing("--prompts", help="One per line, or .jsonl with 'prompt'."),
    ] = None,
    out: Annotated[
        Path | None,
        _filing("--out", help="JSON lines, for --prompts."),
    ] = None,
    resume: Annotated[bool, _filing("--resume", help="Keep what --out holds.")] = False,
    slots: Annotated[int, _filing("--slots", help="Prompts in flight at once.")] = 32,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Go on from a prompt, coloured by the depth each token took, or from a file of prompts."""

    def kept() -> str:
        if out is None or not out.is_file():
            return nothing_kept()
        where = shlex.quote(str(out))
        return f"the answers in {where} are kept; go on with --resume --out {where}"

    with command(as_json, debug, kept) as (display, answer):
        from loopwise.engine.request import SamplingParams
        from loopwise.generate import GenerateOptions, generate_command

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_biases(logit_bias or ()),
            stop=tuple(stop or ()),
            stop_ids=tuple(stop_id or ()),
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
            n=n,
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
            max_seq=max_seq,
            chunk=chunk,
        )

        def told(done: int, total: int) -> None:
            display({"event": "progress", "stage": "prompts", "done": done, "total": total})

        answer(generate_command(checkpoint, prompt, params, options, Console(), told))


def _biases(given: Iterable[str]) -> dict[int, float]:
    """``50=-100`` as a token id and nats.

    Raises:
        ConfigError: something else, or an id twice.
    """
    found: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            token_id, bias = int(token), float(value)
        except ValueError:
            raise ConfigError(
                f"--logit-bias {text!r} must be a token id and nats, as in 50=-100"
            ) from None
        if token_id in found:
            raise ConfigError(f"--logit-bias gives token {token_id} twice; leave one out")
        found[token_id] = bias
    return found


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
        requests: Annotated[
            int | None, typer.Option("--requests", help="Of one pass; default 64.")
        ] = None,
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
                **{"exit": exit_, "kv": kv, "requests": requests, "judged": judged, "rate": rate},
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
