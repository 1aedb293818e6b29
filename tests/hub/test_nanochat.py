"""Looped nanochat as its scripts save it, against float64 loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.nanochat import NanochatConfig
from loopwise.tokenizer import ByteTokenizer
from tests.hub.folders import IDS, Shapes, Tensors, arrays, decode, fill, first_latent, forward, gap
from tests.hub.mathematics import Array, Sequence, attend, rms, rotate

D, H, H_KV, SIZE, VOCAB, PADDED = 16, 4, 2, 4, 258, 320
CONFIG: dict[str, Any] = {
    "sequence_len": 2048,
    "vocab_size": VOCAB,
    "size": 20,
    "n_head": H,
    "n_kv_head": H_KV,
    "n_embd": D,
    "window_pattern": "L",
    "n_prelude": 1,
    "n_recur_block": 2,
    "n_coda": 1,
    "train_recur_mean": 4.0,
    "train_recur_max": 16,
    "bptt_k": 4,
    "input_injection": "inject_init_prelude",
    "logit_softcap": 15.0,
}
MODES = ("inject_init_prelude", "inject_init_random", "passthrough")


def shapes(mode: str = MODES[0]) -> Shapes:
    out: Shapes = {"transformer.wte.weight": (PADDED, D), "lm_head.weight": (PADDED, D)}
    for part, count in (("prelude", 1), ("recur", 2), ("coda", 1)):
        for i in range(count):
            block = f"transformer.{part}.{i}"
            out |= {f"{block}.n{n}.weight": (D,) for n in (1, 2, 3, 4)}
            out[f"{block}.attn.c_q.weight"] = out[f"{block}.attn.c_proj.weight"] = (D, D)
            out[f"{block}.attn.c_k.weight"] = out[f"{block}.attn.c_v.weight"] = (H_KV * SIZE, D)
            out[f"{block}.mlp.c_fc.weight"] = (4 * D, D)
            out[f"{block}.mlp.c_proj.weight"] = (D, 4 * D)
    if mode != "passthrough":
        out["inject.weight"] = (D, 2 * D)
    return out | {f"norm_{name}.weight": (D,) for name in ("emb", "recur", "final")}


def tensors(mode: str = MODES[0]) -> Tensors:
    weights = fill(shapes(mode))
    for key, weight in weights.items():
        if weight.ndim == 1 and "norm" not in key:  # n1 .. n4
            weights[key] = 1 + 0.3 * weight
    return weights


def folder(path: Path, mode: str = MODES[0], **changes: Any) -> Path:
    path.mkdir()
    meta = {"step": 7, "model_config": {**CONFIG, "input_injection": mode, **changes}}
    (path / "meta_000007.json").write_text(json.dumps(meta))
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    torch.save(tensors(mode), path / "model_000007.pt")
    return path


def converted(source: Path, dtype: torch.dtype = torch.float64) -> LoopedLM:
    out = source.parent / "out"
    if not out.exists():
        convert(source, out, allow_pickle=True)
    return load_checkpoint(out, dtype).model


class NaiveNanochat:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, mode: str, wrong: str = "", windows: tuple[int | None, ...] = ()) -> None:
        self.w, self.mode, self.wrong = arrays(tensors(mode)), mode, wrong
        names = ("prelude.0", "recur.0", "recur.1", "coda.0")
        self.windows = dict(zip(names, windows or [None] * 4, strict=True))

    def norm(self, key: str, x: Array) -> Array:
        return rms(x, self.w[key + ".weight"], 1e-6)

    def heads(self, key: str, x: Array, position: int) -> Array:
        """Turned by minus the angle, then normed a head."""
        turn = position if self.wrong == "turned forward" else -position
        heads = (self.w[key] @ x).reshape(-1, SIZE)
        heads = np.stack([rotate(head, turn, 10_000.0, False) for head in heads])
        if self.wrong == "no q/k norm":
            return heads
        return np.stack([rms(head, np.ones(SIZE), 1e-6) for head in heads])

    def block(self, block: str, xs: Sequence) -> Sequence:
        seen = [self.norm(f"{block}.n1", x) for x in xs]
        queries = [self.heads(f"{block}.attn.c_q.weight", x, p) for p, x in enumerate(seen)]
        keys = [self.heads(f"{block}.attn.c_k.weight", x, p) for p, x in enumerate(seen)]
        values = [(self.w[f"{block}.attn.c_v.weight"] @ x).reshape(-1, SIZE) for x in seen]
        out = self.w[f"{block}.attn.c_proj.weight"]
        window = self.windows[block.removeprefix("transformer.")]
        mixed = [out @ y for y in attend(queries, keys, values, window)]
        branch = self.wrong == "norms on the branches"
        n2, n4 = f"{block}.n2", f"{block}.n4"
        done = []
        for x, y in zip(xs, mixed, strict=True):
            x = x + self.norm(n2, y) if branch else self.norm(n2, x + y)
            inner = np.maximum(self.w[f"{block}.mlp.c_fc.weight"] @ self.norm(f"{block}.n3", x), 0)
            inner = inner if self.wrong == "relu, not squared" else inner**2
            y = self.w[f"{block}.mlp.c_proj.weight"] @ inner
            done.append(x + self.norm(n4, y) if branch else self.norm(n4, x + y))
        return done

    def forward(self, ids: list[int], depth: int, noise: Array) -> Array:
        xs = [self.w["transformer.wte.weight"][token] for token in ids]
        if self.wrong != "no norm of the embedding":
            xs = [self.norm("norm_emb", x) for x in xs]
        injections = states = self.block("transformer.prelude.0", xs)
        if self.mode == "inject_init_random":
            states = list(noise)
        for r in range(depth):
            xs = states
            if self.mode != "passthrough":
                pairs = list(zip(injections, states, strict=True))
                if self.wrong == "latent before injection":
                    pairs = [(s, e) for e, s in pairs]
                xs = [self.w["inject.weight"] @ np.concatenate(pair) for pair in pairs]
            for i in range(2):
                xs = self.block(f"transformer.recur.{i}", xs)
            states = [self.norm("norm_recur", x) for x in xs]
            if self.wrong == "norm after the last loop only" and r < depth - 1:
                states = xs
        xs = self.block("transformer.coda.0", states)
        head = self.w["lm_head.weight"][:VOCAB]
        logits = np.stack([head @ self.norm("norm_final", x) for x in xs])
        return logits if self.wrong == "no cap" else 15 * np.tanh(logits / 15)


def naive(model: LoopedLM, mode: str, depth: int, wrong: str = "") -> Array:
    noise = first_latent(model).numpy()
    return NaiveNanochat(mode, wrong).forward(IDS, depth, noise)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_the_documented_mathematics(
    tmp_path: Path, mode: str, depth: int
) -> None:
    source = folder(tmp_path / "nanochat", mode)
    model = converted(source)
    wanted = naive(model, mode, depth)
    assert wanted.std() > 0.1
    assert forward(model, depth).shape == (len(IDS), VOCAB), "padding rows are no tokens"
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4
    assert gap(decode(model, depth), wanted) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "turned forward",
        "no q/k norm",
        "norms on the branches",
        "relu, not squared",
        "no norm of the embedding",
        "latent before injection",
        "norm after the last loop only",
        "no cap",
    ],
)
def test_no_other_convention_gives_these_logits(tmp_path: Path, wrong: str) -> None:
    model = converted(folder(tmp_path / "nanochat"))
    assert gap(forward(model, 2), naive(model, MODES[0], 2, wrong)) > 1e-3


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [("SSSL", (4, 4, 4, None)), ("sl", (4, None, 4, None)), ("S", (4, 4, 4, None))],
)
def test_windows_are_half_the_length_and_the_token_itself(
    tmp_path: Path, pattern: str, windows: tuple[int | None, ...]
) -> None:
    """The pattern is tiled over prelude, core and coda; the last layer sees everything."""
    source = folder(tmp_path / "nanochat", window_pattern=pattern, sequence_len=6)
    model = converted(source)
    wanted = NaiveNanochat(MODES[0], windows=windows).forward(IDS, 2, np.zeros(0))
    assert gap(forward(model, 2), wanted) < 1e-8
    assert gap(decode(model, 2), wanted) < 1e-5
    assert np.abs(wanted - naive(model, MODES[0], 2)).max() > 1e-3


def test_random_starts_have_the_published_spread(tmp_path: Path) -> None:
    model = converted(folder(tmp_path / "nanochat", "inject_init_random"))
    assert model.seeded_latent
    rows = first_latent(model, [0] * 4000)
    assert float(rows.std()) == pytest.approx(D**-0.5, rel=0.02)


def test_what_the_source_says_of_training_is_kept(tmp_path: Path) -> None:
    """Mean 4 draws 5 on average; what lies past 16 is set to 16."""
    converted(folder(tmp_path / "nanochat"))
    saved = load_checkpoint(tmp_path / "out")
    draws = np.random.default_rng(0)
    rates = draws.lognormal(np.log(4) - 0.125, 0.5, 200_000)
    depths = np.minimum(draws.poisson(rates) + 1, 16)
    assert saved.trained_mean_depth == pytest.approx(depths.mean(), abs=0.03)
    assert saved.training["depth"]["std"] == pytest.approx(depths.std(), abs=0.03)
    assert saved.training["depth"]["p95"] == np.quantile(depths, 0.95)
    assert saved.trained_depths == (1, 16)
    assert saved.training["depth"]["backprop_depth"] == 4


def test_configs_of_old_checkpoints_are_read(tmp_path: Path) -> None:
    """They lack the window pattern and the injection mode, and have fields dropped since."""
    source = folder(tmp_path / "nanochat")
    meta = json.loads((source / "meta_000007.json").read_text())
    for name in ("window_pattern", "input_injection", "logit_softcap"):
        del meta["model_config"][name]
    meta["model_config"] |= {"inject_mode": "concat_linear", "kv_cache_recur_budget": 1}
    (source / "meta_000007.json").write_text(json.dumps(meta))
    model = converted(source)
    assert gap(forward(model, 2), naive(model, MODES[0], 2)) < 1e-8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_pattern": "SXL"}, "window_pattern='SXL'"),
        ({"input_injection": "add"}, "input_injection='add'"),
        ({"train_recur_mean": None}, "no train_recur_mean"),
        ({"n_recur_block": 3}, "missing transformer.recur.2"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    source = folder(tmp_path / "nanochat", **{"mode": MODES[0], **changes})
    with pytest.raises(CheckpointError) as failure:
        convert(source, tmp_path / "out", allow_pickle=True)
    assert named in str(failure.value)


def test_a_learned_gate_is_named_not_dropped(tmp_path: Path) -> None:
    source = folder(tmp_path / "nanochat")
    weights = {
        **tensors(),
        "gate.linear.weight": torch.ones(1, D),
        "gate.linear.bias": torch.ones(1),
    }
    torch.save(weights, source / "model_000007.pt")
    with pytest.raises(CheckpointError, match="learned exit gate"):
        convert(source, tmp_path / "out", allow_pickle=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 3},
        {"d_model": 18},
        {"logit_cap": 0.0},
        {"n_coda_layers": -1},
        {"injection": "none", "latent_init": "noise"},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NanochatConfig(**changes)
