"""Every number of the stability page as tables, one row for each cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from loopwise.report import words
from loopwise.report.markup import Html, details, table
from loopwise.report.stability_facts import TAIL_SHARE, Array, Lab, Run, median


def everything(lab: Lab) -> list[Html]:
    tail = f"mean over the last {TAIL_SHARE:.0%} of a run's steps"
    lists: list[tuple[str, str, Callable[[Run], Array]]] = [
        ("Held-out loss by loops, nats", "r", lambda run: run.loss_by_depth),
        (f"Latent norm after each recurrence, {tail}", "r", lambda run: run.tail(run.latent)),
        (
            f"Gradient norm at each recurrence, {tail}",
            "r",
            lambda run: run.tail(run.latent_grad),
        ),
        (f"Gradient norm of attention, {tail}", "layer", lambda run: run.tail(run.attn)),
        (f"Gradient norm of the MLP, {tail}", "layer", lambda run: run.tail(run.mlp)),
    ]
    folded = [_by_index(lab, title, index, of) for title, index, of in lists]
    return [_cells(lab), *(part for part in folded if part)]


def _cells(lab: Lab) -> Html:
    head = [
        *("variant", "K", "lr", "seed", "status", "stopped at step", "held-out loss (nats)"),
        *("gradient norm", "oscillation", "latent norm r = 1", "latent norm r = K", "growth"),
        *("spectral radius", "spectral norm", "reason"),
    ]
    rows = []
    for run in _in_order(lab):
        first, last = run.latent_ends
        numbers = (
            *(median(run.grad_norm), lab.typical_oscillation(run), first, last, run.growth),
            *(run.spectrum("radius"), run.spectrum("norm")),
        )
        rows.append(
            [
                *_key(run),
                run.record["status"],
                f"{run.last_step:,}",
                words.number(_known(run.final_loss), 4),
                *(words.significant(_known(n)) for n in numbers),
                run.record["reason"] or "",
            ]
        )
    note = (
        "Gradient norm: median over the run's steps. Oscillation: median of its running standard "
        f"deviation over {lab.window} steps. Latent norms: mean over the last {TAIL_SHARE:.0%} of "
        "the run's steps."
    )
    return table(head, rows, note=note)


def _by_index(lab: Lab, title: str, index: str, of: Callable[[Run], Array]) -> Html:
    values = {run.record["cell"]: of(run) for run in lab.runs}
    longest = max(len(row) for row in values.values())
    if not longest:
        return Html("")
    head = ["variant", "K", "lr", "seed", *(f"{index} {i}" for i in range(1, longest + 1))]
    rows = []
    for run in _in_order(lab):
        row = values[run.record["cell"]]
        if len(row):
            shown = [words.significant(_known(float(v)), 4) for v in row]
            rows.append([*_key(run), *shown, *[""] * (longest - len(row))])
    return details(title, table(head, rows))


def _in_order(lab: Lab) -> Iterable[Run]:
    for _, _, _, runs in lab.places():
        yield from sorted(runs, key=lambda run: run.record["seed"])


def _key(run: Run) -> list[str]:
    record = run.record
    return [record["variant"], str(run.loops), f"{record['lr']:g}", str(record["seed"])]


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
