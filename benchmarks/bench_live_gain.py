"""Does a rule's allocation gain in replay survive being run live?

On the first blocks of a trace. Replayed: on full-depth trajectories, between the two thresholds
that enclose the budget. Live: the same tokens again, frozen at their exits; the thresholds that
enclose the budget are searched for among those of a replay of the whole trace. Budgets count from
full depth on the same tokens, thresholds are those of the judged tokens.

``learned`` is taught the distance to the last output (``learned_distance.py``), on those documents
of ``--text`` that the checkpoint's rules were fitted on, which are in no trace; ``live-learned`` on
the same text while most tokens leave early. Quality and depth are measured, no seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.common import finish, parser, table
from benchmarks.learned_distance import learn
from loopwise.bench.samples import pack
from loopwise.data import ReadOptions, ReadReport, TokenBatch, document_hash, read_documents
from loopwise.exits.base import ExitPolicy
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.measure.crossing import Curve, Point, Stops, at_loss
from loopwise.measure.evaluate import batches
from loopwise.measure.frontier import Yardstick, replayed_points
from loopwise.measure.live import run_live
from loopwise.measure.price import live_checks
from loopwise.measure.scores import recorded_asks, recorded_score
from loopwise.measure.trace import Trace, trace_batch
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.models.costs import flops_per_token

LEARNED = {"learned": (1.0, 1), "live-learned": (0.3, 3)}  # share that stays, passes over the text
RULES = (
    "kl",
    "latent-kl",
    "probe",
    "learned",
    "learned,min=2",
    "live-learned",
    "live-learned,min=2",
)
_BATCH = 8  # blocks at once
_FIELDS = ("token_ids", "targets", "document_ids", "positions", "hops")


@dataclass
class Live:
    """Live runs of one rule at thresholds of its replay, each run once.

    Attributes:
        curve: the replay, of the whole trace.
        yardstick: of the tokens that run live.
        batches: their blocks.
    """

    checkpoint: Checkpoint
    policy: ExitPolicy
    curve: Curve
    yardstick: Yardstick
    batches: Sequence[TokenBatch]
    ran: dict[int, Stops] = field(default_factory=dict)

    def at(self, index: int) -> Stops:
        """What the tokens came to at a point of the replay."""
        if index not in self.ran:
            rule = self.curve.rules[index]
            found = run_live(self.checkpoint.model, self.batches, rule, self.policy)
            of_tokens = (found.exit_depth.numpy(), found.loss.numpy(), found.argmax.numpy())
            self.ran[index] = Stops(*of_tokens, live_checks(self.policy, found))
        return self.ran[index]

    def lost(self, index: int) -> float:
        """Nats above full depth."""
        return float(self.at(index).loss.mean() - self.yardstick.loss[:, -1].mean())

    def point(self, budget: float) -> Point:
        """Where the loss crosses the budget, between neighbouring thresholds."""
        points = self.curve.points
        order = sorted(range(len(points)), key=lambda i: points[i]["mean_depth"])
        over, within = -1, len(order) - 1  # places in the order, from loose to strict
        while within - over > 1:
            middle = (over + within) // 2
            if self.lost(order[middle]) <= budget:
                within = middle
            else:
                over = middle
        stops = self.at(order[within])
        if over >= 0:
            high, low = self.lost(order[over]), self.lost(order[within])
            stops = self.at(order[over]).mixed(stops, (high - budget) / (high - low))
        return Curve.uniform(self.yardstick).point(stops)


def open_rule(name: str, fields: str, depth: int) -> ExitRule:
    """A rule without its threshold, to run up to ``depth``; fields as in ``min=2``."""
    policy = "probe" if name in LEARNED else name  # what replay needs to know of a name
    return parse_rule(f"{policy}:0{fields and ','}{fields}", depth)


def fit_batches(checkpoint: Checkpoint, sources: Sequence[str]) -> list[TokenBatch]:
    """The documents among ``sources`` that the checkpoint's rules were fitted on."""
    fitted_on = set(checkpoint.exits["fitted_on"])
    read = read_documents(list(sources), ReadOptions(), ReadReport())
    kept = list({h: d for d in read if (h := document_hash(d)) in fitted_on}.values())
    return list(batches(pack(kept, checkpoint, "fitting"), _BATCH))


def parts_of(blocks: TokenBatch, n: int) -> list[TokenBatch]:
    """The first ``n`` blocks, some at a time."""
    places = [slice(a, min(a + _BATCH, n)) for a in range(0, n, _BATCH)]
    return [TokenBatch(*(getattr(blocks, name)[at] for name in _FIELDS)) for at in places]


def scored(
    trace: Trace, checkpoint: Checkpoint, policy: ExitPolicy, name: str, depth: int
) -> NDArray:
    """What a rule says on the trajectories of a trace, ``(tokens, depth)``."""
    if name not in LEARNED:
        return recorded_score(trace, name, checkpoint.fitted_policies())[:, :depth]
    parts = parts_of(trace.blocks(), trace.header["n_blocks"])
    found = [trace_batch(checkpoint.model, b, depth, [policy]) for b in parts]
    return torch.cat([columns[f"score.{policy.name}"] for columns in found]).numpy()


def shown(name: str, found: dict[float, dict[str, Point | None]]) -> dict[str, str]:
    """A line of the table."""
    line = {"rule": name}
    for budget, kinds in found.items():
        for kind, point in kinds.items():
            line[f"{kind}, {budget}"] = "-" if point is None else _gain(point)
    return line


def _gain(point: Point) -> str:
    gain = "{allocation_gain:.2f} ({gain_low:.2f}-{gain_high:.2f})".format(**point)
    return f"{point['mean_depth']:.2f}; {gain}"


def main() -> None:
    args = parser(__doc__ or "", smoke=True)
    args.add_argument("trace", type=Path)
    args.add_argument("checkpoint", type=Path)
    args.add_argument("--text", nargs="+", help="what the checkpoint was measured on")
    args.add_argument("--rules", nargs="+", default=RULES, help="for example kl or kl,min=2")
    args.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.002], help="nats")
    args.add_argument("--depth", type=int, help="full depth; default: the training mean")
    args.add_argument("--live-tokens", type=int, default=10_000)
    options = args.parse_args()
    trace, checkpoint = Trace(options.trace), load_checkpoint(options.checkpoint, torch.float32)
    costs = flops_per_token(checkpoint.model, context=trace.header["seq"] // 2)
    depth = options.depth or round(trace.header["trained_mean_depth"])
    whole = Yardstick.of(trace, depth, costs)
    n = 2 if options.smoke else max(1, options.live_tokens // trace.header["seq"])
    of = trace["block"] < n
    few = replace(whole, loss=whole.loss[of], argmax=whole.argmax[of], block=whole.block[of])
    parts = parts_of(trace.blocks(), min(n, trace.header["n_blocks"]))
    wanted = [name.partition(",") for name in options.rules]
    text = fit_batches(checkpoint, options.text) if options.text else []
    policies: dict[str, ExitPolicy] = {
        name: learn(checkpoint.model, text, depth, *LEARNED[name])
        if name in LEARNED
        else build_policy(ExitRule(policy=name), checkpoint.fitted_policies(), checkpoint.model)
        for name in dict.fromkeys(name for name, _, _ in wanted)
    }
    points: dict[str, dict[float, dict[str, Point | None]]] = {}
    uniform = Curve.uniform(few)
    points["uniform"] = {
        b: {"replayed": _crossing(uniform, b), "live": None} for b in options.budgets
    }
    scores = {n: scored(trace, checkpoint, p, n, depth) for n, p in policies.items()}
    for name, comma, fields in wanted:
        rule, asked = open_rule(name, fields, depth), None
        if name not in LEARNED:
            asked = recorded_asks(trace, name)
        curve = Curve.swept(scores[name], rule, whole, asked)
        live = Live(checkpoint, policies[name], curve, few, parts)
        replayed = on_some(curve, of, few)
        points[name + comma + fields] = {
            b: {"replayed": _crossing(replayed, b), "live": live.point(b)} for b in options.budgets
        }
        print(f"{name}{comma}{fields}: {len(live.ran)} live runs", flush=True)
    rows = [shown(name, found) for name, found in points.items()]
    table("Mean depth; allocation gain (95% interval)", rows, Console(width=140))
    facts = {"trace": str(options.trace), "checkpoint": str(options.checkpoint), "depth": depth}
    counts = {"tokens": trace.n_tokens, "live_tokens": len(few.loss)}
    finish("live-gain", {**facts, **counts, "rows": points}, options.save)


def on_some(curve: Curve, of: NDArray, yardstick: Yardstick) -> Curve:
    """The same thresholds on some of the tokens, ``of (tokens,)`` bool."""
    score, asked = curve.score[of], None if curve.asked is None else curve.asked[of]
    points = [
        replayed_points(score, rule, yardstick, [rule.threshold], asked)[0] for rule in curve.rules
    ]
    return Curve(score, curve.rules, points, yardstick, asked)


def _crossing(curve: Curve, budget: float) -> Point | None:
    place = at_loss(curve.points, budget)
    return None if place is None else curve.point(curve.between(place))


if __name__ == "__main__":
    main()
