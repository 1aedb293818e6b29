"""Live exits beside other ways to decode the same jobs: speed with the quality it cost.

What `decode`, `prefill` and `serve` have in common: which uniform depths run, in turns, and what
their results say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from loopwise.bench.common import ratios, spread
from loopwise.bench.drive import Forced, Pass, figures
from loopwise.bench.setup import Bench
from loopwise.bench.workload import Job
from loopwise.engine import Engine
from loopwise.models.costs import flops_per_token
from loopwise.report import words
from loopwise.report.terminal import plain_table

LIVE = "live exits"
_LEGEND = """\
speed: over uniform {depth}. cap: share of the most that depth allows. TTFT: to the
first token, p99: between tokens, ms. depth: of all tokens, prompts included;
p95: of new ones. rows: row-steps; slots: slot-ticks, waiting included.
NLL: nats above uniform {depth}."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode.

    Attributes:
        run: one pass.
        judged: its teacher-forced quality, None where that was not measured.
        kv_bytes_per_token: that it keeps.
    """

    run: Callable[[], Pass]
    judged: Forced | None
    kv_bytes_per_token: float


class Contest:
    """Live exits, uniform full depth and the two uniform depths about the quality of the exits.

    Args:
        run: one pass of an engine.
        seconds: what of a pass is its cost.
        changes: of every engine's settings.
    """

    def __init__(
        self,
        bench: Bench,
        run: Callable[[Engine], Pass],
        seconds: Callable[[Pass], float] = lambda p: p.seconds,
        **changes: Any,
    ) -> None:
        self.bench, self._run, self._seconds, self._changes = bench, run, seconds, changes
        self.quality = bench.quality()
        self.ways: dict[str, Way] = {}
        self.found: dict[str, list[Pass]] = {}
        self.full = f"uniform {bench.depth}"
        self.live = bench.engine(**changes)
        self.add(LIVE, Way(partial(run, self.live), self.quality.exits, _kv_bytes(self.live)))
        depth = self.quality.uniform_depth
        below = min(int(depth), max(1, bench.depth - 1))
        self._between = below, min(below + 1, bench.depth)
        for d in (bench.depth, *self._between):
            judged = self.quality.uniform[d - 1]
            self.add_engine(f"uniform {d}", judged, exit=f"fixed:{d}", max_depth=d)

    def add_engine(self, name: str, judged: Forced, **changes: Any) -> None:
        """Another engine takes part."""
        engine = self.bench.engine(**{**self._changes, **changes})
        self.add(name, Way(partial(self._run, engine), judged, _kv_bytes(engine)))

    def add(self, name: str, way: Way) -> None:
        self.ways[name] = way

    def time(self) -> None:
        """All ways so far, in turns."""
        self.found |= self.bench.timed({name: way.run for name, way in self.ways.items()})

    def time_once(self, name: str, way: Way) -> None:
        """One that is too slow to repeat: once, without warm-up, after the others."""
        self.add(name, way)
        self.found[name] = [way.run()]

    def ratio(self, above: str, below: str) -> dict[str, float]:
        """Cost of a new token: ``above`` over ``below``, pair by pair."""
        return self._paired(self._costs(above), self._costs(below))

    def result(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """What the results of all three say, of what was timed.

        ``speedup_vs_uniform`` is uniform full depth's cost of a new token over that of live exits,
        ``speedup_vs_equal_quality`` the same of the uniform depth of equal NLL (between two depths,
        linear between their costs); ``cap`` and ``percent_of_cap`` hold the first against the
        largest speed-up that the mean depth allows, the head counted where it runs. ``mean_depth``
        is of all tokens, prompts included, ``p95_depth`` of new ones.
        """
        bench, quality = self.bench, self.quality
        rows = [self._row(name, jobs) for name in self.found]
        live = rows[list(self.found).index(LIVE)]
        speed = self.ratio(self.full, LIVE)
        ttft = ratios(self._ttft(LIVE), self._ttft(self.full))
        return {
            **bench.settings(),
            "requests": len(jobs),
            "speedup_vs_uniform": speed["median"],
            "speedup_vs_uniform_range": [speed["low"], speed["high"]],
            "cap": live["cap"],
            "percent_of_cap": live["percent_of_cap"],
            "speedup_vs_equal_quality": self._vs_equal_quality(),
            "nll_delta_nats": live["nll_delta_nats"],
            "nll_delta_ci": live["nll_delta_ci"],
            "argmax_agreement": live["argmax_agreement"],
            "nll_by_uniform_depth": quality.curve.tolist(),
            "mean_depth": live["mean_depth_with_prompts"],
            "p95_depth": live["p95_depth"],
            "uniform_depth": quality.uniform_depth,
            "allocation_gain": quality.uniform_depth / float(np.mean(quality.exits.depth)),
            "ttft_ratio": ttft["median"],
            "ttft_ratio_range": [ttft["low"], ttft["high"]],
            "rows": rows,
        }

    def show(self, title: str, result: dict[str, Any], speed: str = "over") -> None:
        """The rows as a table of 80 columns, and one line on live exits."""
        bench = self.bench
        table = plain_table(title)
        table.padding = 0  # the lines between columns, drawn as blanks, are room enough
        shown = [_shown(row) for row in result["rows"]]
        for i, name in enumerate(shown[0]):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in shown:
            table.add_row(*row.values())
        bench.console.print(table)
        bench.say(_LEGEND.format(depth=bench.depth))
        low, high = result["nll_delta_ci"]
        slow, fast = result["speedup_vs_uniform_range"]
        bench.say(
            f"{result['rule']}: {result['speedup_vs_uniform']:.2f}x ({slow:.2f}-{fast:.2f}) "
            f"{speed} uniform {bench.depth}, {result['percent_of_cap']:.0f}% of the cap "
            f"{result['cap']:.2f}; {result['speedup_vs_equal_quality']:.2f}x over the uniform "
            f"depth of equal quality ({result['uniform_depth']:.2f}); mean depth "
            f"{result['mean_depth']:.2f}; time to the first token {result['ttft_ratio']:.2f} of "
            f"uniform {bench.depth}; NLL {result['nll_delta_nats']:+.4f} ({low:+.4f} to "
            f"{high:+.4f}) nats against full depth, argmax as there "
            f"{words.percent(result['argmax_agreement'], 1)}"
        )

    def _row(self, name: str, jobs: Sequence[Job]) -> dict[str, Any]:
        row, way = figures(name, self.found[name]), self.ways[name]
        speed = self.ratio(self.full, name)["median"]
        cap = self._cap(row["mean_depth_with_prompts"], jobs)
        delta = None if way.judged is None else self.quality.delta(way.judged)
        return {
            **row,
            "speedup_vs_uniform": speed,
            "cap": cap,
            "percent_of_cap": 100 * speed / cap,
            "kv_bytes_per_token": way.kv_bytes_per_token,
            "nll_delta_nats": None if delta is None else delta["mean"],
            "nll_delta_ci": None if delta is None else [delta["low"], delta["high"]],
            "argmax_agreement": None if way.judged is None else self.quality.agreement(way.judged),
        }

    def _cap(self, mean_depth: float, jobs: Sequence[Job]) -> float:
        """Of a mean depth over all tokens of the jobs; only new ones are read from the head."""
        fed = np.array([len(job.prompt) + job.new_tokens - 1 for job in jobs])
        context = int((fed**2).sum() / (2 * fed.sum()))  # that a token has before it
        costs = flops_per_token(self.bench.checkpoint.model, context)
        read = sum(job.new_tokens for job in jobs) / int(fed.sum())
        return replace(costs, head=costs.head * read).cap(self.bench.depth, mean_depth)

    def _vs_equal_quality(self) -> float:
        part = self.quality.uniform_depth - self._between[0]
        below, above = (self._costs(f"uniform {d}") for d in self._between)
        equal = [(1 - part) * a + part * b for a, b in zip(below, above, strict=True)]
        return ratios(equal, self._costs(LIVE))["median"]

    def _costs(self, name: str) -> list[float]:
        return [self._seconds(p) / p.new_tokens for p in self.found[name]]

    def _ttft(self, name: str) -> list[float]:
        return [float(np.median(p.ttft_s)) for p in self.found[name]]

    @staticmethod
    def _paired(above: list[float], below: list[float]) -> dict[str, float]:
        """A pass that was not repeated stands against the median of those that were."""
        if len(above) == len(below):
            return ratios(above, below)
        return spread([float(np.median(above) / np.median(below))])


def _kv_bytes(engine: Engine) -> float:
    return engine.cache.bytes_per_token


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """Narrow enough for 80 columns; the record has every figure in full."""
    return {
        "": row["name"],
        "tokens/s": words.significant(row["tokens_per_s"]),
        "speed": words.times(row["speedup_vs_uniform"]),
        "cap": words.percent(row["percent_of_cap"] / 100),
        "TTFT": _ms(row["ttft_s"]),
        "p99": _ms(row["gap_p99_s"]),
        "depth": words.number(row["mean_depth_with_prompts"]),
        "p95": words.number(row["p95_depth"], 0),
        "rows": words.count(row["row_steps"]),
        "slots": words.count(row["slot_ticks"]),
        "NLL": words.signed(row["nll_delta_nats"], 3),
    }


def _ms(seconds: float | None) -> str:
    return words.significant(None if seconds is None else 1e3 * seconds)
