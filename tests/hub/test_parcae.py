"""Parcae as its authors publish it, against float64 loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.costs import parameters
from loopwise.models.parcae import ParcaeConfig, ParcaeModel
from loopwise.tokenizer import ByteTokenizer
from tests.hub.folders import (
    IDS,
    VOCAB,
    Shapes,
    Tensors,
    arrays,
    decode,
    fill,
    first_latent,
    forward,
    gap,
)
from tests.hub.mathematics import Array, Sequence, attend, frequency, rms, rotate, sigmoid

D, H, SIZE, FF, CONTEXT, GATE = 40, 4, 10, 48, 20, 32
BASE, EPS = 50_000.0, 1e-5
CONFIG: dict[str, Any] = {
    "name": "parcae-tiny",
    "hf_config": {"org": "SandyResearch", "name": "parcae-tiny"},
    "block_size": CONTEXT,
    "n_embd": D,
    "intermediate_size": FF,
    "num_attention_heads": H,
    "num_key_value_heads": H,
    "bias": False,
    "vocab_size": VOCAB,
    "padding_multiple": 64,
    "padded_vocab_size": VOCAB,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "attn_impl": "sdpa",
    "norm_eps": EPS,
    "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2",
    "init_strategy": "scaled-zero",
    "init_orthogonal": True,
    "qk_norm": True,
    "logit_softcap": None,
    "prelude_norm": True,
    "injection_type": "diagonal",
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "state_init": "like-init",
    "recurrent_embedding_dimension": D,
    "recurrent_intermediation_embedding_dimension": FF,
    "sampling_scheme": "poisson-truncated-full",
    "mean_recurrence": 8,
    "mean_backprop_depth": 4,
    "recurrent_iteration_method": "per-sequence",
    "tie_embeddings": True,
    "_class_name": "ParcaeConfig",
}
LAYERS = [f"transformer.{part}.{i}" for part in ("prelude", "core_block", "coda") for i in (0, 1)]
BY_TOKEN = (1, 3, 5)


def shapes() -> Shapes:
    out: Shapes = {"transformer.wte.weight": (VOCAB, D), "lm_head.weight": (VOCAB, D)}
    out |= {f"value_embeds.{i}.weight": (VOCAB, D) for i in BY_TOKEN}
    for i, layer in enumerate(LAYERS):
        out |= {f"{layer}.norm_{n}.weight": (D,) for n in (1, 2)}
        out |= {f"{layer}.attn.c_{name}.weight": (D, D) for name in ("q", "k", "v", "proj")}
        out |= {f"{layer}.mlp.fc.weight": (FF, D), f"{layer}.mlp.proj.weight": (D, FF)}
        if i in BY_TOKEN:
            out[f"{layer}.attn.ve_gate.weight"] = (H, GATE)
    adapter = "transformer.adapter"
    out |= {f"{adapter}.A_log": (D,), f"{adapter}.dt_bias": (D,), f"{adapter}.B": (D, D)}
    out["transformer.C.weight"] = (D, D)
    return out | {f"transformer.{name}.weight": (D,) for name in ("ln_prelude", "ln_f")}


def tensors() -> Tensors:
    weights = fill(shapes())
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    angles = torch.tensor(
        [[p * frequency(i, SIZE, BASE) for i in range(SIZE // 2)] for p in range(CONTEXT)]
    )
    table = torch.stack((angles.cos(), angles.sin()), dim=-1).float()
    return {**weights, "freqs_cis": table[None, :, None]}


def folder(path: Path, changes: dict[str, Any] | None = None, **weights: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **(changes or {})}))
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    held = {key: value for key, value in {**tensors(), **weights}.items() if value is not None}
    torch.save(held, path / "pytorch_model.bin")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "parcae")


def converted(source: Path, dtype: torch.dtype = torch.float64) -> LoopedLM:
    out = source.parent / "out"
    if not out.exists():
        convert(source, out, allow_pickle=True)
    return load_checkpoint(out, dtype).model


class NaiveParcae:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, wrong: str = "") -> None:
        self.w, self.wrong = arrays(tensors()), wrong

    def norm(self, key: str, x: Array) -> Array:
        return rms(x, self.w[f"transformer.{key}.weight"], EPS)

    def heads(self, key: str, x: Array, position: int) -> Array:
        """Turned, then normed a head."""
        heads = (self.w[key] @ x).reshape(H, SIZE)
        heads = np.stack([rotate(h, position, BASE, self.wrong != "halves") for h in heads])
        if self.wrong == "no q/k norm":
            return heads
        return np.stack([rms(head, np.ones(SIZE), 2.0**-23) for head in heads])

    def values(self, i: int, x: Array, token: int) -> Array:
        own = (self.w[f"{LAYERS[i]}.attn.c_v.weight"] @ x).reshape(H, SIZE)
        if i not in BY_TOKEN or self.wrong == "no values by token":
            return own
        gate = sigmoid(self.w[f"{LAYERS[i]}.attn.ve_gate.weight"] @ x[:GATE])
        gate = gate if self.wrong == "gates up to one" else 2 * gate
        table = 5 if self.wrong == "one table" else i
        return own + gate[:, None] * self.w[f"value_embeds.{table}.weight"][token].reshape(H, SIZE)

    def block(self, i: int, xs: Sequence, ids: list[int]) -> Sequence:
        layer = LAYERS[i]
        n1, n2 = (f"{layer.removeprefix('transformer.')}.norm_{n}" for n in (1, 2))
        seen = [self.norm(n1, x) for x in xs]
        queries = [self.heads(f"{layer}.attn.c_q.weight", x, p) for p, x in enumerate(seen)]
        keys = [self.heads(f"{layer}.attn.c_k.weight", x, p) for p, x in enumerate(seen)]
        values = [self.values(i, x, token) for x, token in zip(seen, ids, strict=True)]
        out = self.w[f"{layer}.attn.c_proj.weight"]
        xs = [x + out @ y for x, y in zip(xs, attend(queries, keys, values), strict=True)]
        done = []
        for x in xs:
            inner = np.maximum(self.w[f"{layer}.mlp.fc.weight"] @ self.norm(n2, x), 0) ** 2
            half = 1.0 if self.wrong == "whole squares" else 0.5
            done.append(x + self.w[f"{layer}.mlp.proj.weight"] @ (half * inner))
        return done

    def step(self, s: Array, e: Array) -> Array:
        a = self.w["transformer.adapter.A_log"]
        dt = np.log1p(np.exp(self.w["transformer.adapter.dt_bias"]))
        kept = np.exp(-dt * (a if self.wrong == "rates as they are" else np.exp(a)))
        more = self.w["transformer.adapter.B"] @ e
        return kept * s + (more if self.wrong == "injection without step" else dt * more)

    def forward(self, ids: list[int], depth: int, noise: Array) -> Array:
        xs = [self.w["transformer.wte.weight"][token] for token in ids]
        for i in (0, 1):
            xs = self.block(i, xs, ids)
        if self.wrong != "no norm of the injection":
            xs = [self.norm("ln_prelude", x) for x in xs]
        injections, xs = xs, list(noise)
        for _ in range(depth):
            xs = [self.step(s, e) for s, e in zip(xs, injections, strict=True)]
            for i in (2, 3):
                xs = self.block(i, xs, ids)
        if self.wrong != "no readout":
            xs = [self.w["transformer.C.weight"] @ x for x in xs]
        for i in (4, 5):
            xs = self.block(i, xs, ids)
        return np.stack([self.w["lm_head.weight"] @ self.norm("ln_f", x) for x in xs])


def naive(model: LoopedLM, depth: int, wrong: str = "") -> Array:
    return NaiveParcae(wrong).forward(IDS, depth, first_latent(model).numpy())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    model = converted(source)
    wanted = naive(model, depth)
    assert wanted.std() > 0.1
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-3
    assert gap(decode(model, depth), wanted) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "halves",
        "no q/k norm",
        "no values by token",
        "gates up to one",
        "one table",
        "whole squares",
        "rates as they are",
        "injection without step",
        "no norm of the injection",
        "no readout",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    model = converted(source)
    assert gap(forward(model, 2), naive(model, 2, wrong)) > 1e-3


def test_random_starts_have_the_published_spread(source: Path) -> None:
    model = converted(source)
    assert model.seeded_latent
    rows = first_latent(model, [0] * 4000)
    assert rows.abs().max() < 3.001 * math.sqrt(2 / (5 * D))
    assert float(rows.std()) == pytest.approx(math.sqrt(2 / (5 * D)), rel=0.03)


@torch.no_grad()
def test_what_is_kept_of_the_latent_is_below_one_at_first() -> None:
    """The published start: a share of 1 / sqrt(5), and an injection that passes as it is."""
    adapter = ParcaeModel(ParcaeConfig(vocab_size=9, d_model=32, d_ff=8, n_heads=4)).adapter
    e, s = torch.zeros(32), torch.ones(32)
    assert gap(adapter(s, e), torch.full((32,), 5**-0.5)) < 1e-6
    assert gap(adapter(e, s), torch.full((32,), math.log(5) / 2)) < 1e-6


def test_what_the_source_says_of_training_is_kept(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", allow_pickle=True)
    saved = load_checkpoint(tmp_path / "out")
    assert (done.format, done.architecture) == ("parcae", "parcae")
    unique = [
        value for key, value in tensors().items() if key not in ("lm_head.weight", "freqs_cis")
    ]
    assert done.parameters == sum(value.numel() for value in unique)
    assert saved.trained_mean_depth == 8
    assert saved.training["depth"]["backprop_depth"] == 4
    assert not [note for note in done.notes if "nothing was made of" in note]


@pytest.mark.parametrize(
    ("changes", "weights", "named"),
    [
        ({"injection_type": "linear"}, {}, "injection_type='linear'"),
        ({"state_init": "zero"}, {}, "state_init='zero'"),
        ({"nonlin_name": "GELU"}, {}, "nonlin_name='GELU'"),
        ({"prelude_norm": False}, {}, "prelude_norm=False"),
        ({"logit_softcap": 15.0}, {}, "logit_softcap=15.0"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads=2"),
        ({"recurrent_embedding_dimension": 64}, {}, "recurrent_embedding_dimension=64"),
        (
            {"rope_settings": {"use_rope": True, "rope_condense_ratio": 2}},
            {},
            "rope_condense_ratio=2",
        ),
        ({}, {"value_embeds.3.weight": None}, "tables of values for layers 1, 5 but gates in"),
        ({}, {"transformer.C.weight": None}, "missing transformer.C.weight"),
        ({}, {"transformer.adapter.D": torch.ones(D)}, "unknown transformer.adapter.D"),
        ({}, {"lm_head.weight": torch.ones(VOCAB, D)}, "are one tensor, but they differ"),
        ({}, {"freqs_cis": torch.ones(1, CONTEXT, 1, SIZE // 2, 2)}, "is not the rotary table"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], weights: dict[str, Any], named: str
) -> None:
    path = folder(tmp_path / "parcae", changes, **weights)
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out", allow_pickle=True)
    assert named in str(failure.value)


def test_the_published_size() -> None:
    """140M: with its tables of values 144.3M, of which half are looked up by token."""
    config = ParcaeConfig(
        vocab_size=32768, d_model=768, n_heads=6, d_ff=3072, n_prelude_layers=2, n_core_layers=2,
        n_coda_layers=2, value_layers=(1, 3, 5),
    )  # fmt: skip
    with torch.device("meta"):
        model = ParcaeModel(config)
    assert parameters(model) == pytest.approx(144.3e6, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{"n_heads": 3}, {"value_layers": (6,)}, {"gate_channels": 0}, {"latent_std": 0.0}],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ParcaeConfig(**changes)
