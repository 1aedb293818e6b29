"""Runs of `loopwise study` side by side, as Markdown tables for docs/results.

python -m benchmarks.compare_runs runs/a runs/b ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loopwise.report import facts
from loopwise.report.palette import in_order

DEPTHS = (1, 2, 4, 8, 16, 32)
BUDGETS = (0.01, 0.001)


def main(folders: list[str]) -> None:
    runs = [(Path(f).name, json.loads((Path(f) / "results.json").read_text())) for f in folders]
    convergence = [_convergence(name, run, c) for name, run in runs for c in run["convergence"]]
    print(markdown(convergence))
    print()
    frontiers = [(name, f) for name, run in runs for f in run["frontiers"]]
    print(markdown([row for name, f in frontiers for row in _rules(name, f)]))
    print()
    print(markdown([_types(name, c) for name, run in runs for c in run["convergence"]]))
    hops = [row for name, run in runs for c in run["convergence"] for row in _hops(name, c)]
    fitted = [row for name, run in runs for row in _certificates(name, run["frontiers"])]
    tiers = [row for folder in folders for row in _tiers(Path(folder))]
    for rows in (hops, fitted, tiers):
        if rows:
            print()
            print(markdown(rows))


def _convergence(name: str, run: dict[str, Any], c: dict[str, Any]) -> dict[str, str]:
    loss, model = c["loss_nats"]["mean"], run["model"]
    kl = c["curves"]["kl_prev"]["mean"]
    sat = c["saturation"]
    row = {
        "run": name,
        "corpus": c["corpus"],
        "parameters": f"{model['parameters'] / 1e6:.2f}M",
        "layers": "/".join(map(str, model["layers"])),
        "tokens seen": f"{run['training']['tokens_seen'] / 1e6:.2f}M",
    }
    row |= {f"r={r}": f"{loss[r - 1]:.3f}" for r in DEPTHS if r <= len(loss)}
    if len(loss) >= 16:
        row["KL 2 / 16"] = f"{kl[1] / kl[15]:,.0f}"
    return row | {
        "worth of depth, nats": f"{loss[0] - min(loss):.3f}",
        "saturation": f"{sat['depth']} ({sat['low']}-{sat['high']})",
        "contraction": f"{c['contraction']['rate']:.2f}" if c["contraction"]["rate"] else "-",
        "median settled": f"{c['settled']['median']:.0f}",
        "moving at mean": f"{c['moving_at_training_mean']:.1%}",
    }


def _types(name: str, c: dict[str, Any]) -> dict[str, str]:
    """Mean settled depth by token type, in one order for all rows."""
    found = {t["type"]: t for t in c["token_types"]}
    row = {"run": name, "corpus": c["corpus"]}
    for kind in sorted(found):
        t = found[kind]
        row[kind] = f"{t['mean']:.2f} ({t['low']:.2f}-{t['high']:.2f})"
    over = c["loss_optimal"]["over_null_nats"]
    headroom = f"{over['mean']:.3f} ({over['low']:.3f}-{over['high']:.3f})"
    return row | {"headroom over the null, nats": headroom}


def _hops(name: str, c: dict[str, Any]) -> list[dict[str, str]]:
    """Answer tokens by the look-ups they need."""
    rows = []
    for h in c["hops"]:
        settled, right = h["settled_depth"], h["accuracy_by_depth"]
        row = {
            "run": name,
            "corpus": c["corpus"],
            "look-ups": str(h["hops"]),
            "answer tokens": f"{h['tokens']:,}",
            "settled depth": f"{settled['mean']:.2f} ({settled['low']:.2f}-{settled['high']:.2f})",
            "worth of depth, nats": f"{h['depth_gain_nats']:.3f}",
        }
        rows.append(
            row | {f"right at r={r}": f"{right[r - 1]:.0%}" for r in DEPTHS[:4] if r <= len(right)}
        )
    return rows


def _rules(name: str, frontier: dict[str, Any]) -> list[dict[str, str]]:
    points = {
        (b["policy"], b["meaning"], b["budget_nats"]): b["point"] for b in frontier["budgets"]
    }
    rows = []
    for policy in in_order(list(frontier["policies"])):
        for meaning in ("uniform", "replayed", "live"):
            if (policy, meaning, BUDGETS[0]) not in points:
                continue
            row = {"run": name, "corpus": frontier["corpus"], "rule": policy, "exits": meaning}
            for budget in BUDGETS:
                point = points[policy, meaning, budget]
                row |= {
                    f"depth at {budget}": f"{point['mean_depth']:.2f}" if point else "not met",
                    f"gain at {budget}": _gain(point),
                    f"compute at {budget}": f"{point['charged_share']:.0%}" if point else "",
                }
            rows.append(row)
    return rows


def _certificates(name: str, frontiers: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Answers the certified rule promises by full depth, and promises that were broken."""
    return [
        {
            "run": name,
            "corpus": corpus,
            "certified": f"{j['fires'][-1]:.1%}",
            "tokens": f"{j['certified']:,}",
            "broken": f"{j['broken']:,}",
        }
        for corpus, j in facts.judged(frontiers, "certified")
    ]


def _tiers(folder: Path) -> list[dict[str, str]]:
    """Calibrated tiers stored with the newest checkpoint."""
    rows = []
    for name, tier in facts.read_tiers(folder).items():
        risk, live = tier["risk"], tier["live"]
        rows.append(
            {
                "run": folder.name,
                "tier": name,
                "rule": tier["rule"],
                "budget, nats": f"{tier['budget_nats']:g}",
                "measured": f"{risk['mean']:.4f} ({risk['low']:.4f} to {risk['high']:.4f})",
                "mean depth": f"{live['mean_depth']:.2f}",
                "compute": f"{live['charged_share']:.0%}",
            }
        )
    return rows


def _gain(point: dict[str, Any] | None) -> str:
    if point is None:
        return ""
    return f"{point['allocation_gain']:.2f} ({point['gain_low']:.2f}-{point['gain_high']:.2f})"


def markdown(rows: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([row.get(n, "") for n in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
