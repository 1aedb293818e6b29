"""Does learning when to stop (A2) ever beat reading convergence (A1), in A2's strongest fair forms?

Every form is a score of the latent, trained on a frozen model's own trajectories: what it sees,
what it predicts and whether it has hidden layers differ (``FORMS``). Documents are dealt to three
parts: one to learn from, one that chooses how long to learn, one on which all are judged by replay,
beside the rules that read. Each form is fitted on several numbers of tokens. Quality, depth and
FLOPs are measured, no seconds. The first form is the package's own ``probe``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from benchmarks.common import finish, parser, table
from benchmarks.probe_forms import FORMS, PAPER, as_published, fit
from loopwise.bench.compare import A0, A1, IMPROVES_NATS, Comparison, Row, oracle_curves
from loopwise.bench.samples import Samples, deal, fresh_documents, trace_samples
from loopwise.data import Document, TokenBatch, document_hash
from loopwise.data.packing import NO_TARGET
from loopwise.exits import EXITS
from loopwise.exits.latent_kl import log_of
from loopwise.exits.rule import ExitRule
from loopwise.measure.convergence import argmax_final_depth, loss_optimal
from loopwise.measure.crossing import Curve
from loopwise.measure.evaluate import trajectory
from loopwise.measure.latent_kl_fit import KL_FLOOR, fit_latent_kl
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.models.layers import row_seeds
from loopwise.study.measuring import block_length

CHECKPOINT = Path("checkpoints/tinystories-5m-mean8")
PARTS = {"learn": 4, "choose": 1, "judge": 2}  # of equal length; documents are in one of them only
READING = (A1, "latent-change", "second-difference")
FITTED = "latent-kl"  # reads too, through a map with some 30 numbers fitted on the same text
BUDGETS = (0.01, 0.002)  # nats above full depth
FROM_2 = ("improves, mlp", "left, mlp", "kl-last, mlp")  # also where none may stop at 1, as A1


_TABLE_WIDTH = 110


@dataclass(frozen=True)
class Seen:
    """Text that was run to full depth.

    Attributes:
        samples: its traces, of equally long texts.
        latents: initial and after each recurrence, ``(tokens, depth + 1, d_model)`` float32.
    """

    samples: Samples
    latents: Tensor

    def some(self, tokens: int, seed: int) -> NDArray[np.int64]:
        """About so many tokens in whole blocks, drawn from all texts; fewer lie within more."""
        places = np.stack((self.samples.seed, self.samples["block"]))
        block = np.unique(places, axis=1, return_inverse=True)[1].ravel()
        order = np.random.default_rng(seed).permutation(block.max() + 1)
        kept = order[: max(1, round(len(order) * min(1.0, tokens / len(block))))]
        return np.isin(block, kept).nonzero()[0]

    def inputs(self, sees: Sequence[str]) -> Tensor:
        """What a form sees before full depth, ``(tokens, depth - 1, channels)`` float32."""
        depth = self.latents.shape[1] - 1
        now, before = self.latents[:, 1:depth], self.latents[:, : depth - 1]
        parts: dict[str, list[Tensor]] = {
            "latent": [now],
            "step": [now - before],
            "norms": [self._logs("change"), self._logs("second"), _one_hot(now)],
            "output": [self._column("entropy"), self._column("margin"), self._logs("kl_prev")],
        }
        return torch.cat([part for kind in sees for part in parts[kind]], dim=-1)

    def labels(self, predicts: str) -> Tensor:
        """What there is to predict before full depth, ``(tokens, depth - 1)`` float32."""
        loss, depth = self.samples["loss"], self.latents.shape[1] - 1
        left = loss - loss[:, -1:]
        if predicts == "changes":
            found = argmax_final_depth(self.samples["argmax"])[:, None] > np.arange(1, depth + 1)
        elif predicts == "improves":
            found = left >= IMPROVES_NATS
        elif predicts == "left":
            found = left
        else:
            found = np.log(np.maximum(self.samples["kl_last"], KL_FLOOR))
        return torch.from_numpy(found[:, :-1].astype(np.float32))

    def _column(self, name: str) -> Tensor:
        return torch.from_numpy(self.samples[name])[:, :-1, None]

    def _logs(self, name: str) -> Tensor:
        """Logarithm of a column; 0 at recurrence 1, where it may have no value."""
        values = self._column(name)
        return torch.where(values.isfinite(), log_of(values), 0.0)


def _one_hot(latents: Tensor) -> Tensor:
    """Which recurrence each of ``(tokens, recurrences, d_model)`` is of."""
    return torch.eye(latents.shape[1]).expand(len(latents), -1, -1)


@torch.no_grad()
def latents_of(model: LoopedLM, batch: TokenBatch, depth: int) -> Tensor:
    """Initial latent and those of all recurrences, ``(targets, depth + 1, d_model)`` float32."""
    rows = (batch.targets.flatten() != NO_TARGET).nonzero().squeeze(-1)
    found = []
    for r, latent, view in trajectory(model, batch, depth):
        if r == 1:
            initial = model.initial_latent(
                model.prelude(batch.token_ids, view), row_seeds(batch.positions)
            )
            found.append(initial.flatten(0, -2)[rows].float())
        found.append(latent.flatten(0, -2)[rows].float())
    return torch.stack(found, dim=1)


def dealt(
    checkpoint: Checkpoint, source: str, of_each: int, seeds: int, seed: int
) -> list[dict[str, list[list[Document]]]]:
    """For each seed the texts of its parts; none has a document of another."""
    documents = fresh_documents(checkpoint, (source,))
    enough = of_each + block_length(checkpoint)
    texts = deal(documents, checkpoint.tokenizer, seeds * sum(PARTS.values()), enough, seed)
    hashes = [document_hash(d) for text in texts for d in text]
    assert len(hashes) == len(set(hashes)), "each document was dealt once"
    left = iter(texts)
    return [
        {name: [next(left) for _ in range(n)] for name, n in PARTS.items()} for _ in range(seeds)
    ]


def see(
    checkpoint: Checkpoint, texts: list[list[Document]], tokens: int, depth: int, folder: Path
) -> Seen:
    """Trace so many tokens of each text, and keep the latents."""
    samples = trace_samples(checkpoint, texts, tokens, depth, folder, lambda _: None, READING)
    latents = [latents_of(checkpoint.model, batch, depth) for batch in samples.batches()]
    return Seen(samples, torch.cat(latents))


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Scored:
    """A score of one seed's judged tokens, ``(tokens, depth)``, and what a check takes."""

    policy: str
    score: NDArray[np.float32]
    products: float
    steps: int | None = None


def scores_of(
    parts: dict[str, Seen], sizes: list[int], seed: int, forms: Iterable[str] = FORMS
) -> dict[str, Scored]:
    """All rules and some forms by name, ``form @ tokens`` where fitted."""
    learn, choose, judge = (parts[name] for name in PARTS)
    found = {n: Scored(n, _recorded(judge, n), EXITS[n].products) for n in READING}
    depth, d_model = judge.latents.shape[1] - 1, judge.latents.shape[2]
    drawn = {size: learn.some(size, seed) for size in sizes}
    for size, rows in drawn.items():
        moves = (learn.samples[name][rows] for name in ("change", "second", "kl_prev"))
        state = {FITTED: fit_latent_kl(*moves, np.arange(1, depth + 1)).to_state()}
        found[f"{FITTED} @ {size}"] = Scored(FITTED, _recorded(judge, FITTED, state), 0)
    for name in forms:
        form = FORMS[name]
        inputs, labels = learn.inputs(form.sees), learn.labels(form.predicts)
        held = choose.inputs(form.sees).flatten(0, 1), choose.labels(form.predicts).flatten()
        judged = judge.inputs(form.sees)
        for size, rows in drawn.items():
            examples = inputs[rows].flatten(0, 1), labels[rows].flatten()
            model = as_published(examples) if name == PAPER else fit(form, examples, held, seed)
            # At full depth all stop, whatever is thought of them.
            score = F.pad(model(judged), (0, 1), value=torch.inf).numpy()
            scored = Scored(form.policy, score, model.products(d_model), model.steps)
            found[f"{name} @ {size}"] = scored
            if name in FROM_2:
                late = np.concatenate((np.full_like(score[:, :1], np.inf), score[:, 1:]), axis=1)
                found[f"{name}, from 2 @ {size}"] = replace(scored, score=late)
            _say(f"seed {seed}: fitted {name} @ {size}, best after {model.steps} steps")
    return found


def _recorded(seen: Seen, policy: str, fitted: Row | None = None) -> NDArray[np.float32]:
    return seen.samples.score(policy, fitted or {})


def compared(
    checkpoint: Checkpoint, judged: list[Seen], scores: list[dict[str, Scored]], depth: int
) -> list[Row]:
    """One row for each rule, form and bound, on the judged tokens of all seeds."""
    texts = [seen.samples for seen in judged]
    blocks, traces = [b for t in texts for b in t.blocks], [t for s in texts for t in s.traces]
    samples = Samples(blocks, traces, texts[0].limit)
    yardstick = samples.yardstick(checkpoint, depth)
    curves = {A0: Curve.uniform(yardstick)}
    for name, first in scores[0].items():
        score = np.concatenate([of_seed[name].score for of_seed in scores])
        rule = ExitRule(policy=first.policy, max_depth=depth)
        curves[name] = Curve.swept(score, rule, yardstick)
    curves |= oracle_curves(yardstick, samples["kl_last"])
    optimal = loss_optimal(yardstick.loss, samples["null_loss"], yardstick.block)
    of_seed = np.repeat(np.arange(len(judged)), [len(seen.latents) for seen in judged])
    first = Comparison(checkpoint, samples, yardstick, curves, of_seed, BUDGETS[0], optimal)
    found = {budget: replace(first, budget=budget) for budget in BUDGETS}
    return [_row(name, scores, found) for name in curves]


def _row(name: str, scores: list[dict[str, Scored]], found: dict[float, Comparison]) -> Row:
    """AUROC, and at each budget: loss beside A1 at equal depth, depth, gain and compute there."""
    title, _, size = name.partition(" @ ")
    rows = {budget: of.row(name) for budget, of in found.items()}
    auroc = rows[BUDGETS[0]]["auroc"] or {}
    scored = [of_seed[name] for of_seed in scores if name in of_seed]
    products = scored[0].products if scored else 0.0
    costs = found[BUDGETS[0]].yardstick.costs
    out: Row = {
        "name": title,
        "fitted_tokens": int(size) if size else None,
        "steps": [s.steps for s in scored if s.steps] or None,
        "products": products,
        "products_in_recurrences": products * costs.row / costs.core,
        "auroc": {label: auroc[label]["auroc"] for label in auroc},
        "at": {},
    }
    for budget, row in rows.items():
        point, at_equal = row["equal_nll"], row["equal_depth"]
        full = costs.forward(found[budget].yardstick.max_depth)
        declared = EXITS[scored[0].policy].products if scored else 0
        extra = (products - declared) * point["mean_depth"] * costs.row / full
        out["at"][str(budget)] = {
            "vs_a1_nats": at_equal and at_equal["vs_a1_nats"],
            "a1_depth": found[budget].equal_depth,
            "depth": point["mean_depth"],
            "gain": [point[k] for k in ("allocation_gain", "gain_low", "gain_high")],
            "compute": point["charged_share"] + extra,
        }
    return out


def shown(row: Row, budget: float) -> Row:
    """A row as a line of a table: thousandths of a nat, with half the 95% interval."""
    at = row["at"][str(budget)]
    lost, gain = at["vs_a1_nats"], at["gain"]
    line: Row = {"rule": row["name"], "tokens": row["fitted_tokens"] or "-"}
    for label in ("argmax_changes", "loss_improves"):
        value = row["auroc"].get(label)
        line[f"AUROC {label.split('_')[0]}"] = "-" if value is None else f"{value:.3f}"
    half = 500 * (lost["high"] - lost["low"]) if lost else 0.0
    line[f"vs A1 at {at['a1_depth']:.2f}"] = (
        f"{1000 * lost['mean']:+.1f} ±{half:.1f}" if lost else "-"
    )
    line["depth"] = f"{at['depth']:.2f}"
    line["gain"] = "{:.2f} ({:.2f}-{:.2f})".format(*gain)
    line["compute"] = f"{at['compute']:.0%}"
    return line


def main() -> None:
    args = parser(__doc__ or "", smoke=True)
    args.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    args.add_argument("--data", default="builtin:stories:400", help="text no rule was fitted on")
    args.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="to learn")
    args.add_argument("--seeds", type=int, default=1, help="other documents and first weights each")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--depth", type=int, default=8, help="full depth")
    options = args.parse_args()
    sizes = [512] if options.smoke else sorted(options.tokens)
    depth = 4 if options.smoke else options.depth
    checkpoint = load_checkpoint(options.checkpoint, torch.float32)
    of_each = -(-sizes[-1] // PARTS["learn"])
    texts = dealt(checkpoint, options.data, of_each, options.seeds, options.seed)
    judged, scores, split = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed, of_seed in enumerate(texts, start=options.seed):
            parts = {
                name: see(checkpoint, part, of_each, depth, Path(folder) / f"{seed}-{name}")
                for name, part in of_seed.items()
            }
            held = {n: f"{len(s.latents)} in {sum(map(len, of_seed[n]))}" for n, s in parts.items()}
            split.append({"seed": seed, **held})
            table("Tokens in documents; no document is in two parts", split[-1:])
            scores.append(scores_of(parts, sizes, seed))
            judged.append(parts["judge"])
        rows = compared(checkpoint, judged, scores, depth)
    for budget in BUDGETS:
        lines = [shown(row, budget) for row in rows]
        table(f"{budget} nats above full depth", lines, Console(width=_TABLE_WIDTH))
    facts = {"checkpoint": str(options.checkpoint), "data": options.data, "depth": depth}
    finish("probes", {**facts, "tokens": sizes, "split": split, "rows": rows}, options.save)


if __name__ == "__main__":
    main()
