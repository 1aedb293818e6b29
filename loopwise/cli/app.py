"""The command line application the commands join, and its entry point."""

from __future__ import annotations

import typer

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
