"""The report says what the results say, in one file that fetches nothing."""

import copy
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from rich.console import Console

from benchmarks import compare_runs
from loopwise.errors import RunFolderError
from loopwise.exits import EXITS
from loopwise.models.checkpoint import load_checkpoint, point_to, save_checkpoint, write_exits
from loopwise.report import (
    facts,
    frontier_sections,
    plots,
    summary_table,
    verdict,
    words,
    write_report,
)
from loopwise.report.palette import SHADES, in_order, policy_style
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

HORIZON, FULL = 32, 8
CORPORA = ("tales", "books")
MINOR = ("entropy", "argmax", "margin", "cosine", "second-difference")  # judged by replay alone
Results = dict[str, Any]


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.25, "high": mean + 0.25}


def curve(first: float, rate: float, horizon: int, undefined: int = 0) -> dict[str, Any]:
    values = [None] * undefined + [first * rate**r for r in range(horizon - undefined)]
    part = {"median": 0.7, "p10": 0.1, "p90": 2.0}
    scaled = {k: [v and v * f for v in values] for k, f in part.items()}
    return {"mean": values, **scaled}


def depths(at: int, horizon: int) -> dict[str, Any]:
    share = [0.0] * (horizon + 1)
    share[at - 1], share[-1] = 0.9, 0.1
    return {"share": share, "mean": at + 0.37, "median": at, "p90": at, "unsettled_share": 0.1}


def convergence(corpus: str, horizon: int = HORIZON) -> dict[str, Any]:
    loss = [3.2171 + 0.5 * 0.4**r for r in range(horizon)]
    at = min(6, horizon)
    looped = horizon > 1
    kinds = ("whitespace", "digit", "content word")
    return {
        "corpus": corpus,
        "tokens": 4321,
        "horizon": horizon,
        "epsilon": 0.002,
        "trained_mean_depth": 8.0 if looped else None,
        "loss_nats": {
            "mean": loss,
            "low": [x - 0.05 for x in loss],
            "high": [x + 0.05 for x in loss],
        },
        "bits_per_byte": [x / 2 for x in loss],
        "curves": {
            "kl_prev": curve(0.4, 0.45, horizon, undefined=1),
            "kl_last": curve(0.5, 0.45, horizon),
            "change": curve(1.0, 0.6, horizon),
            "second": curve(1.2, 0.6, horizon, undefined=1),
        },
        "saturation": {"depth": at, "low": at, "high": at, "within_nats": 0.005},
        "contraction": {
            "rate": 0.613 if looped else None,
            "ratios": [0.6] * (horizon - 1),
            "recurrences_used": list(range(3, horizon + 1)),
            "converges": looped,
            "moving_share": 0.012,
            "moving_change": 0.01,
        },
        "first_crossing": depths(max(1, at - 1), horizon),
        "settled": depths(at, horizon),
        "moving_at_training_mean": 0.123,
        "argmax_final": depths(min(2, horizon), horizon),
        "loss_optimal": {
            "mean_depth": 4.1,
            "headroom_nats": 0.19,
            "null_headroom_nats": 0.17,
            "over_null_nats": {"mean": 0.02, "low": 0.016, "high": 0.024},
        },
        "token_types": [{"type": k, "tokens": 99, **spread(4.0 + i)} for i, k in enumerate(kinds)],
        "hops": [
            {
                "hops": n,
                "tokens": 50,
                "settled_depth": spread(4.0 + n),
                "loss_nats_by_depth": loss,
                "accuracy_by_depth": [1 - 0.8 ** (r + 1) / n for r in range(horizon)],
                "depth_gain_nats": 0.1 * n,
            }
            for n in (1, 2, 3)
        ],
        "passage": [
            {"text": "<script>alert(1)</script>", "depth": 3},
            {"text": "\n", "depth": 2},
            {"text": "&", "depth": horizon + 1},
            {"text": "", "depth": 1},
        ],
    }


def point(mean_depth: float, threshold: float | None = 0.1, reads: bool = False) -> dict[str, Any]:
    delta = 0.5 * 0.4 ** (mean_depth - 1) if mean_depth < FULL else 0.0
    share = (1 + mean_depth) / (1 + FULL) * (1.4 if reads else 1.0)
    return {
        "threshold": threshold,
        "mean_depth": mean_depth,
        "p95_depth": math.ceil(mean_depth),
        "loss_nats": 3.2171 + delta,
        "delta_nats": delta,
        "delta_low": delta - 0.0004,
        "delta_high": delta + 0.0004,
        "argmax_agreement": 0.987,
        "charged_flops": 1e6 * share,
        "charged_share": share,
        "cap": (1 + FULL) / (1 + mean_depth),
        "equal_uniform_depth": mean_depth * 1.17,
        "allocation_gain": 1.17,
        "gain_low": 1.12,
        "gain_high": 1.21,
    }


def frontier(corpus: str, full: int = FULL) -> dict[str, Any]:
    rule = [point(d + 0.43, reads=True) for d in range(1, full)]
    live = [{**p, "tokens": 1234} for p in rule[::2]]
    judged = {
        "auroc": 0.777,
        "positive_share": 0.1,
        "calibration": [{"predicted": x, "observed": x * 0.9, "share": 0.5} for x in (0.1, 0.8)],
        "calibration_error": 0.033,
    }
    predicted = {
        "r2": 0.876,
        "rms_log": math.log(1.75),
        "calibration": [{"predicted": 10.0**-n, "observed": 3 * 10.0**-n} for n in (5, 3, 1)],
    }
    policies: dict[str, Any] = {
        "fixed": {"uniform": [point(float(d), None) for d in range(1, full + 1)]},
        "oracle": {"replayed": [point(1.9, None)]},
        "oracle-kl": {"replayed": rule},
        "kl": {"replayed": rule, "live": live},
        "latent-change": {"replayed": rule, "live": live},
        "probe": {"replayed": rule, "live": live, "judged": judged},
        "latent-kl": {"replayed": rule, "live": live, "judged": predicted},
        **{name: {"replayed": rule} for name in MINOR},
    }
    rows = [("fixed", "uniform"), ("oracle", "replayed"), ("kl", "replayed"), ("kl", "live")]
    rows += [(name, "replayed") for name in MINOR]
    met = {("kl", "replayed"): point(5.4321, reads=True), ("kl", "live"): point(5.8765, reads=True)}
    met["fixed", "uniform"] = point(6.0, None)
    met["margin", "replayed"] = point(7.1357, reads=True)
    return {
        "corpus": corpus,
        "max_depth": full,
        "check_in_recurrences": 0.76,
        "policies": policies,
        "left_out": {"min-p-kl": "its score was not recorded; measure again"},
        "budgets": [
            {"policy": p, "meaning": m, "budget_nats": b, "point": met.get((p, m))}
            for p, m in rows
            for b in (0.001, 0.01)
        ],
    }


def make_results(*corpora: str) -> Results:
    parts = {"prelude": 1e5, "core": 2e5, "coda": 1e5, "head": 3e5}
    return {
        "format": "loopwise-results",
        "version": 1,
        "loopwise": "0.0.0",
        "model": {
            "architecture": "recurrent",
            "parameters": 903_296,
            "d_model": 128,
            "vocab_size": 1024,
            "layers": [1, 2, 1],
            "flops_per_token": parts,
        },
        "training": {
            "step": 30,
            "tokens_seen": 92_160,
            "seq": 128,
            "dtype": "bfloat16",
            "seed": 0,
            "depth": {
                "kind": "lognormal",
                "true_mean": 7.94,
                "median": 7,
                "p95": 16,
                "max": 32,
                "backprop_depth": 6,
            },
            "data": {"sources": ["builtin:stories"], "tokens": 912_199},
        },
        "settings": {"seed": 0},
        "convergence": [convergence(c) for c in corpora],
        "frontiers": [frontier(c) for c in corpora],
    }


def write_run(folder: Path, results: Results, metrics: bool = True) -> Path:
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    if metrics:
        events = [
            {"segment": 1, "event": "step", "step": s, "loss_nats": 7 / s} for s in range(1, 40)
        ]
        held_out = {"1": 4.0, "8": 3.0}
        events.append({"segment": 1, "event": "eval", "step": 20, "loss_nats_by_depth": held_out})
        lines = "".join(json.dumps(e) + "\n" for e in events)
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return write_report(folder)


class Page(HTMLParser):
    """What the page loads, its ids, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, make_results(*CORPORA))
    return folder


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return (run / "report.html").read_text(encoding="utf-8")


def terminal_text(results: Results) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(results))
    return out.getvalue()


def test_the_page_fetches_nothing(html: str) -> None:
    page = Page(html)
    assert not [link for link in page.links if not link.startswith("#")]
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", html)


def test_what_the_certified_rule_promised_and_broke_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = make_results("tales", "books")
    assert frontier_sections.certificates(results["frontiers"]) == ""
    fires = [0.0, 0.1, 0.2, 0.3456, 0.4, 0.5, 0.6, 0.7654]
    judged = {"fires": fires, "certified": 2468, "broken": 13}
    policies = results["frontiers"][0]["policies"]
    policies["certified"] = {**policies["margin"], "judged": judged}
    page = write_run(tmp_path, results).read_text()
    cells = re.search(r'<section id="certificates">.*?</section>', page, re.DOTALL)
    assert cells is not None
    text = re.sub(r"<[^>]*>", " ", cells[0])
    assert all(x in text for x in ("certified by r=4", "34.6%", "76.5%", "2,468", "13", "0.53%"))
    assert "tales" in text and "books" not in text
    compare_runs.main([str(tmp_path)])
    row = f"| {tmp_path.name} | tales | 76.5% | 2,468 | 13 |"
    assert row in capsys.readouterr().out.splitlines()


def test_tiers_of_the_checkpoint_are_shown_while_its_weights_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = make_results("tales")
    assert 'id="tiers"' not in write_run(tmp_path, results).read_text()
    save_checkpoint(tmp_path / "checkpoints" / "step-1", make_model(), ByteTokenizer(), {})
    point_to(tmp_path / "checkpoints", "step-1")
    checkpoint = load_checkpoint(tmp_path)
    tier = {
        "rule": "kl:0.0123",
        "budget_nats": 0.01,
        "full_depth": 8,
        "confidence": 0.9,
        "live": {"mean_depth": 4.321, "charged_share": 0.654},
        "risk": {"mean": 0.0042, "low": 0.0031, "high": 0.0053, "upper_bound": 0.0087},
        "guarantee": {"unit": "document", "units": 765},
    }
    write_exits(checkpoint, {"tiers": {"balanced": tier}})
    page = write_report(tmp_path).read_text()
    cells = re.search(r'<section id="tiers">.*?</section>', page, re.DOTALL)
    assert cells is not None
    text = re.sub(r"<[^>]*>", " ", cells[0])
    wanted = ("balanced", "kl:0.0123", "0.0031 to 0.0053", "0.0087", "4.32", "65%", "765 documents")
    assert all(x in text for x in wanted)
    compare_runs.main([str(tmp_path)])
    measured = "0.0042 (0.0031 to 0.0053)"
    row = f"| {tmp_path.name} | balanced | kl:0.0123 | 0.01 | {measured} | 4.32 | 65% |"
    assert row in capsys.readouterr().out.splitlines()
    weights = checkpoint.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert facts.read_tiers(tmp_path) == {}, "made for other weights"


def test_corpora_whole_nats_apart_share_a_drawing_and_no_name_is_cut() -> None:
    """Names at the ends of lines were cut, and 2.4 nats between corpora flattened both."""
    cs = [convergence("tinystories-valid"), convergence("childrens-books-valid")]
    for part in cs[1]["loss_nats"].values():
        part[:] = [x + 2.4 for x in part]
    cs.append(convergence("a-corpus-with-a-name-that-goes-on-" + "and-on-" * 9 + "test"))
    drawing = plots.loss_by_depth(cs)
    curves = [
        line.get_ydata() for line in drawing.axes[0].lines if len(line.get_xdata()) == HORIZON
    ]
    assert len(curves) == 3
    assert all(min(y) == 0 and y[0] == pytest.approx(0.5) for y in curves)
    width, height = drawing.bbox.size
    drawing.canvas.draw()
    renderer = drawing.canvas.get_renderer()
    said = [text for text in drawing.findobj(Text) if text.get_text().strip()]
    for text in said:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    assert any(
        "childrens-books-valid: best 5.617 at r=32, saturates at r=6" in text.get_text()
        for text in said
    )
    assert any("-test: best" in text.get_text() for text in said), "the end of a name is kept"


def a_reference(corpus: dict[str, Any]) -> dict[str, Any]:
    best = min(corpus["bits_per_byte"])
    return {
        "name": "a-ceiling-<b>135M</b>",
        "depth": 1,
        "parameters": 134_515_008,
        "start_token": "<|start|>",
        "bits_per_byte": {"mean": 0.6543, "low": 0.641, "high": 0.668},
        "best_depth": HORIZON,
        "best_bits_per_byte": {"mean": best, "low": best - 0.1, "high": best + 0.1},
        "above_bits_per_byte": {"mean": best - 0.6543, "low": 0.912, "high": 0.999},
    }


def test_a_reference_stands_beside_the_model_in_the_unit_they_share(tmp_path: Path) -> None:
    results = make_results(*CORPORA)
    assert "reference" not in results["convergence"][0], "results of an earlier version"
    for c in results["convergence"]:
        c["reference"] = a_reference(c)
    page = write_run(tmp_path, results).read_text()
    assert (tmp_path / "plots" / "bits-by-depth.png").is_file()
    section = re.search(r'<section id="loss">.*?</section>', page, re.DOTALL)
    assert section is not None and "<b>135M</b>" not in page
    text = " ".join(re.sub(r"<[^>]*>", " ", section[0]).split())
    wanted = ("a-ceiling", "135M parameters", "0.654 (0.641 to 0.668)", "1.609", "+0.954", "0.912")
    assert [x for x in wanted if x not in text] == []
    terminal = " ".join(terminal_text(results).split())
    line = "1 recurrence: 0.654 bits per byte; this model at its best depth, 32: 1.609, +0.954"
    assert line in terminal
    drawing = plots.bits_by_depth(results["convergence"])
    levels = [x.get_ydata()[0] for x in drawing.axes[0].lines if "135M" in str(x.get_label())]
    assert levels == [0.6543, 0.6543]
    low, high = drawing.axes[0].get_ylim()
    assert low < 0.6543 < high


def test_ids_name_one_thing_each(html: str) -> None:
    anchors = [i for i in Page(html).ids if not re.fullmatch(r"[mpChDl][0-9a-f_]{8,}.*", i)]
    assert len(anchors) == len(set(anchors))
    assert "headline" in anchors


def test_passages_are_escaped_and_keep_their_newlines(html: str) -> None:
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert re.search(r'<span class="d2 newline"[^>]*>\n</span>', html)
    assert 'title="settled at r=3"' in html
    assert f'title="not settled within r={HORIZON}"' in html


def test_every_figure_is_inline_and_a_png(run: Path, html: str) -> None:
    plots = {p.stem for p in (run / "plots").iterdir()}
    kinds = ("kl", "latent", "settled", "frontier-depth", "frontier-compute", "allocation-gain")
    per_corpus = {f"{k}-{c}" for k in (*kinds, "hops-depth", "hops-accuracy") for c in CORPORA}
    assert plots == per_corpus | {"loss-by-depth", "training", "token-types", "calibration"}
    assert html.count("<svg") == html.count("<figcaption") == len(plots)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (run / "plots").iterdir())
    assert not list(run.glob(".*"))


def test_figures_follow_the_theme(html: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert "var(--ink)" in drawings
    assert not re.findall(r"#[0-9a-f]{6}\b", drawings), "a colour that dark mode cannot change"
    assert "prefers-color-scheme: dark" in html


def test_headline_figures_come_from_the_results(tmp_path: Path) -> None:
    results = make_results("tales")
    results["convergence"][0]["saturation"]["depth"] = 13
    results["convergence"][0]["settled"]["median"] = 11
    a1 = facts.at_budget(results["frontiers"][0], "kl", "replayed", 0.01)
    assert a1 is not None
    a1.update(mean_depth=4.94, allocation_gain=1.61, equal_uniform_depth=7.95)
    text = Page(write_run(tmp_path, results).read_text(encoding="utf-8")).text
    for figure in ("13tales", "11tales", "4.94tales", f"1.61{words.TIMES}tales", "true mean 7.94"):
        assert figure in text


@pytest.mark.parametrize("meaning", ["replayed", "live"])
@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.02, 1.3, "yes"), (0.7, 0.98, "no"), (0.99, 1.2, "too close")],
)
def test_the_verdict_weighs_the_interval(
    meaning: str, low: float, high: float, expected: str
) -> None:
    one = frontier("tales")
    for row in one["budgets"]:
        if (row["policy"], row["meaning"]) == ("kl", meaning) and row["point"]:
            row["point"] |= {"gain_low": low, "gain_high": high}
    assert f"{meaning.capitalize()}: {expected}" in verdict.answer(one, "kl")


def test_tokens_that_never_stop_are_pointed_out(tmp_path: Path) -> None:
    results = make_results(*CORPORA)
    results["convergence"][0]["contraction"]["moving_share"] = 0.0
    text = Page(write_run(tmp_path, results).read_text(encoding="utf-8")).text
    assert "On books, 1.2% of tokens still change their latent by more than 1%" in text
    assert "On tales," not in text


def test_checks_that_cost_more_than_they_save_are_called_so() -> None:
    one = frontier("tales")
    text = " ".join(verdict.sentences(one, "kl"))
    assert "checks cost more than the depth they save" in text
    for row in one["budgets"]:
        if row["policy"] == "kl" and row["point"]:
            row["point"]["charged_share"] = 0.1
    assert "the rule costs less" in " ".join(verdict.sentences(one, "kl"))


def test_a_model_of_one_recurrence_has_a_report(tmp_path: Path) -> None:
    results = make_results("tales")
    results["model"]["architecture"] = "fixed"
    results["convergence"] = [convergence("tales", horizon=1) | {"hops": [], "passage": []}]
    one = frontier("tales", full=1)
    one["policies"].pop("probe")
    for row in one["budgets"]:
        row["point"] = None
    results["frontiers"] = [one]
    text = Page(write_run(tmp_path, results, metrics=False).read_text(encoding="utf-8")).text
    assert "there is no depth to allocate" in text
    assert "r=1" in terminal_text(results)


def test_missing_pieces_are_left_out_or_named(tmp_path: Path) -> None:
    results = make_results("tales")
    c, one = results["convergence"][0], results["frontiers"][0]
    c.update(hops=[], passage=[], token_types=[], trained_mean_depth=None)
    c["contraction"]["rate"] = None
    c["curves"]["kl_prev"]["mean"] = [None] * HORIZON
    del one["policies"]["probe"]
    del one["policies"]["latent-kl"]["judged"]
    for name in ("kl", "latent-change", "margin"):
        one["policies"][name] = {"replayed": [], "live": []}
    for row in one["budgets"]:
        row["point"] = None
    results["training"], results["settings"] = {}, None
    text = Page(write_run(tmp_path, results, metrics=False).read_text(encoding="utf-8")).text
    assert "not met" in text
    assert "Depth against difficulty" not in text
    assert "Probe (A2)" not in text
    assert not re.search(r"\b(None|nan|null)\b", text.split("All settings")[0])
    assert "not met" in terminal_text(results)


def test_an_unknown_policy_and_a_probe_of_one_class_are_shown(tmp_path: Path) -> None:
    results = make_results("tales")
    one = results["frontiers"][0]
    one["policies"]["newcomer"] = copy.deepcopy(one["policies"]["kl"])
    one["policies"]["probe"]["judged"]["auroc"] = None
    row = {"policy": "newcomer", "meaning": "live", "budget_nats": 0.01, "point": point(3.21)}
    one["budgets"].append(row)
    text = Page(write_run(tmp_path, results).read_text(encoding="utf-8")).text
    assert "newcomer" in text
    assert "3.21" in text


def test_every_rule_of_the_table_has_a_look_of_its_own() -> None:
    """Apart by colour, by marker and by name, in whatever figure they meet."""
    names = [*EXITS, "oracle-kl"]
    styles = [policy_style(name) for name in names]
    for part in ("colour", "marker", "label"):
        assert len({getattr(s, part) for s in styles}) == len(names), part
    assert {s.colour for s in styles} <= {light for light, _ in SHADES.values()}, "dark mode"
    assert len({light for light, _ in SHADES.values()}) == len(SHADES)
    order = in_order(names[::-1])
    assert sorted(order) == sorted(names)
    assert order[:2] == ["fixed", "kl"]
    assert order[-2:] == ["oracle", "oracle-kl"] or order[-2:] == ["oracle-kl", "oracle"]


def test_rules_that_ran_live_stand_in_front(tmp_path: Path) -> None:
    """The others are drawn, tabled under a fold, and do not take the room of the headline."""
    results = make_results("tales")
    one = results["frontiers"][0]
    assert facts.headline_rules(one) == ["kl", "latent-kl", "latent-change", "probe"]
    assert set(facts.minor_rules(one)) == set(MINOR)
    html = write_run(tmp_path, results).read_text(encoding="utf-8")
    quality = html[html.index('id="frontier"') :]
    folded = re.search(r"<details>.*?</details>", quality, re.DOTALL)
    assert folded is not None
    assert "7.14" in folded[0] and "A1 KL" not in folded[0]
    open_table = quality[: folded.start()]
    assert "5.43" in open_table and "margin" not in open_table
    for name in MINOR:
        assert policy_style(name).label in folded[0]
    for drawing in re.findall(r"<svg.*?</svg>", quality, re.DOTALL)[:3]:
        assert all(f"{policy_style(name).label}<" in drawing for name in (*MINOR, "latent-kl"))
    assert "min-p-kl: its score was not recorded" in Page(html).text


def test_results_of_before_there_were_replayed_rules_still_read(tmp_path: Path) -> None:
    results = make_results("tales")
    one = results["frontiers"][0]
    del one["left_out"], one["policies"]["latent-kl"]
    for name in MINOR:
        del one["policies"][name]
    one["budgets"] = [b for b in one["budgets"] if b["policy"] not in MINOR]
    html = write_run(tmp_path, results).read_text(encoding="utf-8")
    assert "replay alone" not in html and "Left out" not in html and "Predicted KL" not in html


def test_the_predicted_kl_is_shown_beside_the_kl(html: str) -> None:
    text = Page(html).text
    assert "Predicted KL (latent KL)" in text
    for figure in ("0.876", f"1.75{words.TIMES}", "1.0e-5 / 3.0e-5", "1.0e-1 / 3.0e-1"):
        assert figure in text


def test_the_terminal_shows_the_figures() -> None:
    text = terminal_text(make_results(*CORPORA))
    for figure in ("903k", "92.2k", "3.717", "3.217", "12.3%", "5.43", "5.88", "1.17", "not met"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "loopwise-results", "version": 2}',
        '{"format": "loopwise-results", "version": 1, "model": {}}',
    ],
)
def test_results_that_cannot_be_read_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunFolderError, match="loopwise study"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    results = make_results("tales")
    del results["convergence"][0]["settled"]
    with pytest.raises(RunFolderError, match=r"convergence\[0\]\.settled"):
        write_run(tmp_path, results)


def test_a_report_is_a_pure_function_of_the_results(run: Path, html: str) -> None:
    assert write_report(run).read_text(encoding="utf-8") == html
