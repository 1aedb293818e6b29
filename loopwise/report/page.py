"""The one-file HTML page: figures inline, no script, nothing fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from matplotlib.figure import Figure

from loopwise.report import facts, passage, sections
from loopwise.report.draw import save_png, to_svg
from loopwise.report.markup import Html, figure, join
from loopwise.report.palette import css_variables
from loopwise.train.metrics import read_metrics
from loopwise.writing import make_folder, write_whole, writing


def write_report(run: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into a run folder, from what lies in it alone.

    Returns:
        The path of the page.
    Raises:
        RunFolderError: the folder holds no valid ``results.json``.
        WriteError: the disk refuses.
    """
    results = facts.read_results(run)
    metrics = run / "metrics.jsonl"
    steps = read_metrics(metrics)
    evals = read_metrics(metrics, "eval") + read_metrics(metrics, "done")
    gallery = Gallery(run / "plots")
    body = sections.everything(results, facts.read_tiers(run), steps, evals, gallery.add)
    return write_page(run, "loopwise report", body, passage.shades(results))


def write_page(folder: Path, title: str, body: list[Html], css: str = "") -> Path:
    """Write ``report.html``, whole or not at all.

    Args:
        css: rules of this page, after the shared ones.
    Raises:
        WriteError: the disk refuses.
    """
    page = folder / "report.html"
    write_whole(page, _document(title, body, css))
    return page


@dataclass
class Gallery:
    """Takes each figure once: a PNG into ``folder``, inline SVG back to the page."""

    folder: Path
    names: list[str] = field(default_factory=list)

    def add(self, name: str, drawing: Figure, caption: str) -> Html:
        """Keep a figure.

        Args:
            name: of the file, unique on the page; made safe for a file name.
            caption: what it shows and how it was computed.
        Raises:
            WriteError: the disk refuses.
        """
        make_folder(self.folder)
        safe = re.sub(r"[^\w-]+", "-", name)
        self.names.append(safe)
        path = self.folder / f"{safe}.png"
        aside = self.folder / f".{safe}.png"
        with writing(path):
            save_png(drawing, aside)
            aside.replace(path)
        return figure(Html(to_svg(drawing, safe, caption)), caption)


def _document(title: str, body: list[Html], css: str) -> str:
    style = css_variables() + resources.files(__package__).joinpath("style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n"
        f"<style>\n{style}{css}</style>\n</head>\n<body>\n<main>\n"
        f"{join(body)}\n</main>\n</body>\n</html>\n"
    )
