"""Commands that measure a checkpoint, and what rules and reports come of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loopwise.cli.app import app
from loopwise.cli.options import (
    ConfigOption,
    DebugOption,
    JsonOption,
    SetOption,
    listed,
    measuring_table,
    settings_table,
)
from loopwise.cli.running import Kept, command, nothing_kept


@app.command()
def measure(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Text, as for train; by default what the run held out."),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the traces; default: traces/ of RUN.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Trace every token of --data at every recurrence; fits exit rules on its first part.

    What is fitted is stored with the checkpoint, in its exits.json, wherever the traces go.

    --set measure.reference=CHECKPOINT measures another model on the same text.
    """
    with command(as_json, debug, _measured_kept(checkpoint, out)) as (display, answer):
        from loopwise.measure.reference import read_reference
        from loopwise.report.words import reference_line
        from loopwise.study import measure_command

        settings = measuring_table(config, set_, data)
        fits: list[dict[str, Any]] = []

        def emit(event: dict[str, Any]) -> None:
            if event["event"] == "fitted":
                fits.append({"rules": event["rules"], "file": event["file"]})
            display(event)

        traces = measure_command(checkpoint, data, settings, out, emit)
        display.stop()
        for fit in fits:
            print(f"fitted rules: {', '.join(fit['rules'])}; stored in {fit['file']}")
        for trace in traces:
            print(f"trace: {trace.folder}, {trace.n_tokens:,} tokens")
        references = [read_reference(t) for t in traces]
        for trace, found in zip(traces, references, strict=True):
            if found is not None:
                print(f"{trace.header['corpus']}: {reference_line(found)}")
        out_paths, tokens = [str(t.folder) for t in traces], [t.n_tokens for t in traces]
        told = {"traces": out_paths, "tokens": tokens, "references": references}
        answer({**told, "fitted": fits[0] if fits else None})


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
    with command(as_json, debug) as (display, answer):
        from loopwise.report import print_frontiers
        from loopwise.study import frontier_command

        settings = measuring_table(config, set_)
        frontiers = frontier_command(trace, checkpoint, settings, display)
        display.stop()
        print_frontiers(frontiers)
        answer({"frontiers": frontiers})


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
            help="Comma list of exit rules to compare; fitted on the way where none is. "
            "Default: latent-kl,latent-change,second-difference.",
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
    no_wall: Annotated[
        bool, typer.Option("--no-wall", help="Time nothing; charged compute decides.")
    ] = False,
    allow_training_data: Annotated[
        bool, typer.Option("--allow-training-data", help="Take text that was trained on.")
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the cheapest exit rule, or uniform depth, that keeps a budget; stored as tiers.

    Budgets are kept under the per-loop KV policy, which a parallel pass computes exactly. Under
    other policies outputs differ, even at full depth, so nothing is promised; generate says so.
    """
    with command(as_json, debug) as (display, answer):
        from loopwise.calibrate.commands import calibrate_command
        from loopwise.calibrate.options import CalibrateOptions
        from loopwise.calibrate.results import summary_lines

        options = CalibrateOptions(
            budgets=tuple(listed(budget, float, "--budget")),
            names=tuple(listed(names or "", str, "--names")),
            rules=tuple(listed(rules or "", str, "--rules")),
            depth=depth,
            min_depth=min_depth,
            patience=patience,
            confidence=confidence,
            unit=unit,
            units=units,
            seed=seed,
            force=force,
            wall=not no_wall,
            allow_training_data=allow_training_data,
        )
        asked = settings_table(None, config, set_, None, None, None)
        found = calibrate_command(checkpoint, data, options, asked, display)
        display.stop()
        for line in summary_lines(found):
            print(line)
        answer(found)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder that holds results.json.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write report.html and plots/ from results.json."""
    with command(as_json, debug) as (_, answer):
        from loopwise.report import write_report

        page = write_report(run)
        print(f"report: {page}")
        answer({"report": str(page)})


def _measured_kept(checkpoint: Path, out: Path | None) -> Kept:
    """Of ``measure``, told by the folders alone: a signal may come before anything is loaded."""

    def kept() -> str:
        above = (checkpoint, checkpoint.parent, checkpoint.parent.parent)
        run = next((p for p in above if (p / "checkpoints").is_dir()), None)
        folder = out or (None if run is None else run / "traces")
        traced = folder is not None and any(folder.glob("*/trace.json"))
        places = ("exits.json", "*/exits.json", "checkpoints/*/exits.json")
        fitted = any(found for place in places for found in checkpoint.glob(place))
        if folder is not None and traced:
            what = f"finished traces in {shlex.quote(str(folder))}"
            what += " and fitted rules" if fitted else ""
            return f"{what} are kept; run it again with --data of what is left"
        return "fitted rules are kept; run the command again" if fitted else nothing_kept()

    return kept
