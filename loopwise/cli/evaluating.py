"""Commands under ``loopwise eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from loopwise.cli.app import eval_app
from loopwise.cli.options import (
    ConfigOption,
    DebugOption,
    JsonOption,
    SetOption,
    listed,
    measuring_table,
)
from loopwise.cli.running import command


class TasksByDefault(TyperGroup):
    """``loopwise eval CHECKPOINT --tasks ...`` means ``loopwise eval tasks CHECKPOINT ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            names_tasks = any(arg.split("=")[0] == "--tasks" for arg in args)
            if names_tasks or Path(args[0]).exists():
                args = ["tasks", *args]
        return super().parse_args(ctx, args)


eval_app.info.cls = TasksByDefault


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
    with command(as_json, debug) as (display, answer):
        from loopwise.report.perplexity import print_perplexity
        from loopwise.study import perplexity_command

        settings = measuring_table(config, set_)
        results = perplexity_command(
            checkpoint, data, protocol, depth, block, stride, settings, display
        )
        display.stop()
        for name, result in results.items():
            print_perplexity(name, result)
        answer(results)


@eval_app.command()
def tasks(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    names: Annotated[
        str, typer.Option("--tasks", help="Comma list, e.g. piqa,arc_easy_local,seven_local.")
    ],
    depth: Annotated[int | None, typer.Option("--depth", help="Uniform recurrences.")] = None,
    exit_: Annotated[str | None, typer.Option("--exit", help="Exit rule, live.")] = None,
    tier: Annotated[str | None, typer.Option("--tier", help="Calibrated tier.")] = None,
    kv: Annotated[str, typer.Option("--kv", help="KV policy.")] = "per-loop",
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Folder of the files of ..._local tasks."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Questions of each task.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", help="Examples before a question; default: the task's."),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Prompts in the checkpoint's chat template.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Tokens of a request; default: as trained.")
    ] = None,
    max_gen_toks: Annotated[
        int | None,
        typer.Option("--max-gen-toks", help="New tokens of an answer; default: the task's."),
    ] = None,
    too_long: Annotated[
        Literal["truncate", "skip"], typer.Option("--too-long", help="Questions that do not fit.")
    ] = "truncate",
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option("--dtype", help="What is computed in.")
    ] = "fp32",
    bos: Annotated[
        Literal["auto", "yes", "no"], typer.Option("--bos", help="Start token; auto: as trained.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option("--batch", help="Requests together.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file of the result.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Scores on tasks of lm-evaluation-harness; ..._local ones need no network."""
    with command(as_json, debug) as (display, answer):
        from loopwise.harness.commands import TasksOptions, tasks_command, tasks_lines
        from loopwise.harness.model import ModelOptions

        options = TasksOptions(
            model=ModelOptions(
                depth=depth,
                exit=exit_,
                tier=tier,
                kv_policy=kv,
                max_length=max_length,
                dtype=dtype,
                bos=bos,
                batch=batch,
            ),
            data_dir=data_dir,
            limit=limit,
            num_fewshot=num_fewshot,
            max_gen_toks=max_gen_toks,
            chat_template=chat_template,
            too_long=too_long,
            out=out,
        )
        found = tasks_command(checkpoint, listed(names, str, "--tasks"), options, display)
        display.stop()
        for line in tasks_lines(found):
            print(line)
        answer(found)
