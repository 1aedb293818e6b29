"""Commands under ``loopwise eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from loopwise.cli.app import eval_app
from loopwise.cli.options import (
    ConfigOption,
    DebugOption,
    JsonOption,
    SetOption,
    settings_table,
)
from loopwise.cli.running import command


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

        settings = settings_table(None, config, set_, None, None, None)
        results = perplexity_command(
            checkpoint, data, protocol, depth, block, stride, settings, display
        )
        display.stop()
        for name, result in results.items():
            print_perplexity(name, result)
        answer(results)
