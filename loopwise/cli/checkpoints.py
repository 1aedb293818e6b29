"""Commands that make checkpoints of other checkpoints, or say what one is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from loopwise.cli.app import app
from loopwise.cli.options import (
    DebugOption,
    JsonOption,
)
from loopwise.cli.running import command
from loopwise.errors import CheckpointError


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="Folder, file or hub id of a published checkpoint; or smollm2."),
    ],
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
    with command(as_json, debug) as (display, answer):
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
    prelude: Annotated[
        str, typer.Option("--prelude", help="Layers before the loop: 0-3, or how many first ones.")
    ],
    core: Annotated[str, typer.Option("--core", help="Layers of the loop: 10-17, or 10,12-14.")],
    coda: Annotated[
        str, typer.Option("--coda", help="Layers after the loop: 26-29, or how many last ones.")
    ],
    latent_share: Annotated[
        float,
        typer.Option(
            "--latent-share",
            help="What recurrences read before training: so much of their own output, the rest the "
            "prelude's. 0: all depths agree; 1: the core's layers run again and again.",
        ),
    ] = 0.5,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a depth-recurrent checkpoint out of the layers of an ordinary one; train it next."""
    with command(as_json, debug) as (display, answer):
        from loopwise.hub.retrofit import retrofit, retrofit_lines

        layers = {"prelude": prelude, "core": core, "coda": coda}
        done = retrofit(checkpoint, out, layers, latent_share=latent_share)
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
    """Shape, parameters, FLOPs, KV bytes, the cap of exits; whether exits and bfloat16 are safe."""
    with command(as_json, debug) as (display, answer):
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
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    out: Annotated[Path, typer.Argument(help="Checkpoint folder to make.")],
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option("--dtype", help="Of the weights; bf16 is half.")
    ] = "fp32",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a checkpoint to hand out: without the trainer's state, in a dtype."""
    with command(as_json, debug) as (display, answer):
        from loopwise.hub.export import export_checkpoint
        from loopwise.models.checkpoint import load_checkpoint

        done = export_checkpoint(load_checkpoint(checkpoint), out, dtype)
        display.stop()
        print(f"{done['out']}: {done['bytes'] / 2**20:.1f} MiB of weights")
        if not done["exits"]:
            print("without exit rules; fit them with `loopwise measure`")
        answer(done)
