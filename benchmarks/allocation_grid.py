"""What raises allocation gain: training, the shape of the core, or how the exit is decided?

Allocation gain is the uniform depth of equal loss over a rule's mean depth. Small models that
differ from a base in one thing each are trained, then traced to one full depth on held-out text;
part of it fits what is to be fitted, the rest judges, by replay. Training goes on where it was
stopped, and finished cells are kept. Quality and depth are measured, no seconds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.allocation_cells import BASE, FULL_DEPTH, SMOKE_CELLS, VARIANTS, Cell, train
from benchmarks.allocation_rules import FIRST, Frontier, entropy_first, rule_frontiers
from benchmarks.common import finish, parser, table
from loopwise.bench.compare import oracle_curves
from loopwise.bench.samples import deal, pack
from loopwise.data import Document
from loopwise.data.stories import generate
from loopwise.exits.rule import ExitRule
from loopwise.measure.convergence import saturation_depth
from loopwise.measure.crossing import Curve, at_loss
from loopwise.measure.frontier import Yardstick
from loopwise.measure.latent_kl_fit import fit_latent_kl
from loopwise.measure.scores import recorded_score
from loopwise.measure.trace import Trace, TraceInfo, write_trace
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.models.costs import flops_per_token, parameters
from loopwise.settings import build_config
from loopwise.study.texts import read_corpora
from loopwise.writing import write_whole

BUDGETS = (0.01, 0.002)  # nats above full depth
RULES = ("kl", "latent-change", "latent-kl")
BOUND, BOUND_FROM_2 = "oracle-kl", "oracle-kl, from 2"
RULES_ON = (BASE, "fixed depth", "look-ups")  # seed 0: every way to decide
PARTS = ("fit", "judge", "judge", "judge")  # of equal length; no document is in two
PART_TOKENS = 16_384
CERTAIN_NATS = 0.05  # entropy of the output at recurrence 1
SHOWN_DEPTHS = (1, 2, 4, 8)
FRESH_FROM = 1_000_000  # built-in documents from this number on are in no training text
_TABLE_WIDTH = 330

Row = dict[str, Any]


def held_out_documents(checkpoint: Checkpoint, settings: Row, tokens: int) -> list[Document]:
    """What no cell learned from: the file held out, or other documents of the built-in corpus."""
    config = build_config(settings)
    if config.data.held_out:
        corpora = read_corpora(config.data.held_out, config.data).values()
        return [d for documents in corpora for d in documents]
    documents, held = [], 0
    for document in generate("stories", 0, FRESH_FROM, tokens // 50):
        documents.append(document)
        held += len(checkpoint.tokenizer.encode(document.text))
        if held > 1.5 * tokens:
            break
    return documents


def traces(
    checkpoint: Checkpoint, documents: list[Document], folder: Path, tokens: int
) -> dict[str, Trace]:
    """The text to fit on and the text to judge on, traced once and kept."""
    seq = checkpoint.training["seq"]
    dealt = deal(documents, checkpoint.tokenizer, len(PARTS), tokens + seq, 0)
    found = {}
    for part in dict.fromkeys(PARTS):
        at = folder / f"trace-{part}"
        texts = [text for text, name in zip(dealt, PARTS, strict=True) if name == part]
        blocks = pack([d for text in texts for d in text], checkpoint, part)
        info = TraceInfo(
            checkpoint=checkpoint.path.name,
            weights_hash=checkpoint.weights_hash,
            corpus=part,
            text_hash=blocks.store.text_hash,
            trained_mean_depth=checkpoint.trained_mean_depth,
            trained_depths=checkpoint.trained_depths,
        )
        limit = max(1, len(texts) * tokens // seq)
        if (at / "trace.json").is_file():
            found[part] = Trace(at)
        else:
            model = checkpoint.model
            found[part] = write_trace(model, blocks, at, info, horizon=FULL_DEPTH, limit=limit)
    return found


def scores(fit: Trace, judge: Trace) -> dict[str, NDArray[Any]]:
    """What each rule scored on the judged tokens; ``latent-kl`` is fitted on the others."""
    r = np.arange(1, FULL_DEPTH + 1)
    fitted = {
        "latent-kl": fit_latent_kl(fit["change"], fit["second"], fit["kl_prev"], r).to_state()
    }
    return {name: recorded_score(judge, name, fitted) for name in RULES}


def gains(yardstick: Yardstick, score: dict[str, NDArray[Any]], kl_last: NDArray[Any]) -> Row:
    """Allocation gain with its interval for every rule and the bound, at each budget."""
    curves = {
        name: Curve.swept(s, ExitRule(policy=name, max_depth=yardstick.max_depth), yardstick)
        for name, s in score.items()
    }
    curves[BOUND] = oracle_curves(yardstick, kl_last)[BOUND]
    curves[BOUND_FROM_2] = oracle_curves(yardstick, late(kl_last))[BOUND]
    return {name: _gains_of(curve) for name, curve in curves.items()}


def late(score: NDArray[Any]) -> NDArray[Any]:
    """A score that stops none at recurrence 1, as A1's cannot."""
    return np.concatenate((np.full_like(score[:, :1], np.inf), score[:, 1:]), axis=1)


def _gains_of(curve: Curve) -> Row:
    out: Row = {}
    for budget in BUDGETS:
        place = at_loss(curve.points, budget)
        assert place is not None, "full depth, which ends every curve, loses nothing"
        out[str(budget)] = _kept(curve.point(curve.between(place)))
    return out


def _kept(point: Row) -> Row:
    names = ("mean_depth", "equal_uniform_depth", "allocation_gain", "gain_low", "gain_high")
    return {name: point[name] for name in names}


def by_hops(yardstick: Yardstick, trace: Trace, score: dict[str, NDArray[Any]]) -> list[Row]:
    """The answers of each number of look-ups on their own, each with thresholds of its own."""
    hops, loss = trace["hops"], yardstick.loss
    out = []
    for n in range(int(hops.max()) + 1):
        of = hops == n
        if not of.any():
            continue
        some = Yardstick(loss[of], yardstick.argmax[of], yardstick.block[of], yardstick.costs)
        found = gains(some, {k: s[of] for k, s in score.items()}, trace["kl_last"][of])
        out.append({"hops": n, "tokens": int(of.sum()), **depths(some), "gains": found})
    return out


def depths(yardstick: Yardstick) -> Row:
    """What depth is worth: loss at 1, at the best and at full depth, and where it saturates."""
    means = yardstick.loss.astype(np.float64).mean(axis=0)
    return {
        "loss_nats": means.tolist(),
        "best_depth": int(means.argmin()) + 1,
        "worth_nats": float(means[0] - means.min()),
        "saturation": saturation_depth(yardstick.loss, yardstick.block),
    }


def judged(cell: Cell, folder: Path, settings: Row, tokens: int) -> Row:
    """Everything that is said of one trained cell."""
    checkpoint = load_checkpoint(folder, torch.float32)
    on_hops = cell.variant.startswith("look-ups")
    tokens = 2 * tokens if on_hops else tokens  # few of its tokens are answers
    documents = held_out_documents(checkpoint, settings, len(PARTS) * tokens)
    parts = traces(checkpoint, documents, folder, tokens)
    judge = parts["judge"]
    costs = flops_per_token(checkpoint.model, context=checkpoint.training["seq"] // 2)
    yardstick = Yardstick.of(judge, FULL_DEPTH, costs)
    score = scores(parts["fit"], judge)
    row = {
        "variant": cell.variant,
        "seed": cell.seed,
        "parameters": parameters(checkpoint.model),
        "tokens_seen": checkpoint.training["tokens_seen"],
        "judged_tokens": judge.n_tokens,
        **depths(yardstick),
        "certain_share": float((judge["entropy"][:, 0] < CERTAIN_NATS).mean()),
        "gains": gains(yardstick, score, judge["kl_last"]),
    }
    first = entropy_first(parts["fit"], judge, yardstick)
    row["gains"][FIRST] = {str(b): _kept(first.point(first.at_loss(b))) for b in BUDGETS}
    if on_hops:
        row["by_hops"] = by_hops(yardstick, judge, score)
    if cell.variant in RULES_ON and cell.seed == 0:
        found = rule_frontiers(parts["fit"], judge, yardstick, checkpoint.tokenizer)
        row["rules"] = {name: _compared(frontier, found) for name, frontier in found.items()}
    return row


def _compared(frontier: Frontier, found: dict[str, Frontier]) -> Row:
    """Gain at each budget, and loss beside plain ``kl`` at the depth at which that meets it."""
    out: Row = {}
    for budget in BUDGETS:
        goal = float(found["kl"].at_loss(budget).depth.mean())
        point = frontier.point(frontier.at_loss(budget))
        out[str(budget)] = {
            **_kept(point),
            "at_depth": goal,
            "vs_kl_nats": frontier.against(found["kl"], goal),
        }
    return out


def interval(point: Row) -> str:
    keys = ("allocation_gain", "gain_low", "gain_high")
    return "{:.2f} ({:.2f}-{:.2f})".format(*(point[k] for k in keys))


def shown(row: Row) -> Row:
    """A cell as a line of a table; ``kl depth`` is its mean depth at the smaller budget."""
    loss, at = row["loss_nats"], row["gains"]["kl"][str(min(BUDGETS))]
    line = {"cell": row["variant"], "seed": row["seed"]}
    line |= {f"depth {r}": f"{loss[r - 1]:.3f}" for r in SHOWN_DEPTHS} | _depth_columns(row)
    line["saturates"] = row["saturation"]["depth"]
    line["certain at 1"] = f"{row['certain_share']:.1%}"
    return line | _gain_columns(row["gains"]) | {"kl depth": f"{at['mean_depth']:.2f}"}


def _depth_columns(row: Row) -> Row:
    loss, best = row["loss_nats"], row["best_depth"]
    return {
        "best": f"{loss[best - 1]:.3f} at {best}",
        "worth": f"{row['worth_nats']:.3f}",
    }


def _gain_columns(found: Row) -> Row:
    return {
        f"{name} {budget:g}": interval(found[name][str(budget)])
        for budget in BUDGETS
        for name in (*RULES, FIRST, BOUND_FROM_2, BOUND)
    }


def shown_hops(row: Row) -> list[Row]:
    return [
        {
            "cell": row["variant"],
            "look-ups": of["hops"] or "none",
            "tokens": of["tokens"],
            "depth 1": f"{of['loss_nats'][0]:.3f}",
            **_depth_columns(of),
            **{
                f"{name} {BUDGETS[0]:g}": interval(of["gains"][name][str(BUDGETS[0])])
                for name in ("kl", "latent-kl", BOUND)
            },
        }
        for of in row["by_hops"]
    ]


def shown_rules(rules: Row) -> list[Row]:
    out = []
    for name, at in rules.items():
        line: Row = {"rule": name}
        for budget in BUDGETS:
            point = at[str(budget)]
            lost = point["vs_kl_nats"]
            half = 500 * (lost["high"] - lost["low"]) if lost else 0.0
            line[f"{budget:g}: vs kl at {point['at_depth']:.2f}"] = (
                f"{1000 * lost['mean']:+.1f} ±{half:.1f}" if lost else "-"
            )
            line[f"{budget:g}: depth"] = f"{point['mean_depth']:.2f}"
            line[f"{budget:g}: gain"] = interval(point)
        out.append(line)
    return out


def main() -> None:
    args = parser(__doc__ or "", smoke=True)
    args.add_argument("--data", default="builtin:stories:200", help="text to learn from")
    args.add_argument("--held-out", default="builtin:ledgers:200", help="text to judge on")
    args.add_argument("--out", type=Path, default=Path("runs") / "allocation")
    args.add_argument("--cells", nargs="+", choices=list(VARIANTS), help="default: all")
    args.add_argument("--seeds", type=int, default=1)
    options = args.parse_args()
    tokens = 512 if options.smoke else PART_TOKENS
    names = options.cells or (SMOKE_CELLS if options.smoke else list(VARIANTS))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.smoke else options.out
        for cell in (Cell(name, seed) for seed in range(options.seeds) for name in names):
            settings = cell.settings(options.data, options.held_out, options.smoke)
            train(cell, out / cell.name, settings, lambda text: print(text, flush=True))
            file = out / cell.name / "judged.json"
            if not file.is_file():
                write_whole(file, json.dumps(judged(cell, file.parent, settings, tokens)))
            rows.append(json.loads(file.read_text()))
    console = Console(width=_TABLE_WIDTH)
    table("Cells: losses in nats, allocation gain by budget", [shown(r) for r in rows], console)
    for row in rows:
        if "by_hops" in row:
            table("By look-ups of the target", shown_hops(row), console)
        if "rules" in row:
            table(
                f"Rules on {row['variant']!r}; thousandths of a nat",
                shown_rules(row["rules"]),
                console,
            )
    finish("allocation", {"data": options.data, "rows": rows}, options.save)


if __name__ == "__main__":
    main()
