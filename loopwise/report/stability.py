"""The page and the terminal table of a stability grid, from its results and logs alone."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from loopwise.report import stability_sections, words
from loopwise.report.facts import Results
from loopwise.report.page import Gallery, write_page
from loopwise.report.stability_facts import Lab, Run, gather, middle, read_lab
from loopwise.report.terminal import plain_table


def write_stability_report(folder: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into the folder of a finished grid.

    Returns:
        The path of the page.
    Raises:
        RunFolderError: the folder holds no valid ``results.json``.
    """
    lab = read_lab(folder)
    body = stability_sections.everything(lab, Gallery(folder / "plots").add)
    return write_page(folder, "loopwise stability", body)


def print_stability(results: Results, folder: Path | None = None) -> None:
    """Print the grid to standard output.

    Args:
        folder: of the grid; without it, what only the logs know is a dash.
    """
    Console().print(stability_table(gather(results, folder)))


def stability_table(lab: Lab) -> Table:
    """One row for each variant, number of loops and learning rate."""
    several = len(lab.rates) > 1
    table = plain_table(
        f"stability grid: {len(lab.runs)} runs of {lab.steps:,} steps",
        "medians over seeds\nloss: held out at K loops, nats, survivors\noscillation: std of the "
        f"gradient norm over {lab.window} steps\nlatent norm: after loop K, end of the run",
    )
    table.add_column("variant", no_wrap=True)
    heads = ["K", *(["lr"] if several else []), "survived", "collapsed", "loss"]
    for name in (*heads, "oscillation", "latent norm"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for variant, loops, rate, runs in lab.places():
        if last not in (None, variant):
            table.add_section()
        table.add_row(
            "" if variant == last else variant,
            str(loops),
            *([f"{rate:g}"] if several else []),
            *_counts(runs),
            words.number(middle(runs, lambda run: run.final_loss), 3),
            words.significant(middle(runs, lab.typical_oscillation)),
            words.significant(middle(runs, lambda run: run.latent_ends[1])),
        )
        last = variant
    return table


def _counts(runs: list[Run]) -> tuple[str, str]:
    kept = sum(run.survived for run in runs)
    return f"{kept}/{len(runs)}", f"{len(runs) - kept}/{len(runs)}"
