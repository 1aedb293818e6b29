"""Dory against transformers' own class, and against float64 loops, in every layout of its files."""

from __future__ import annotations

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
from loopwise.models.dory import DoryConfig, DoryModel
from loopwise.tokenizer import ByteTokenizer
from tests.hub.folders import (
    IDS,
    VOCAB,
    Shapes,
    Tensors,
    arrays,
    converted,
    decode,
    fill,
    forward,
    gap,
    write_folder,
)
from tests.hub.mathematics import Array, Sequence, attend, rotate, sigmoid

D, H, H_KV, SIZE, FF = 16, 4, 2, 6, 24
INITIAL, RATE, WINDOW = 0.02, 0.3, 3
FULL, LOCAL = "full_attention", "sliding_attention"
KINDS = [LOCAL, FULL, LOCAL, FULL]  # a prelude layer, two in the loop, a coda layer
BASES = {FULL: 1000.0, LOCAL: 10.0}
CONFIG: dict[str, Any] = {
    "model_type": "dory",
    "architectures": ["DoryForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": 8,
    "num_attention_heads": H,
    "num_key_value_heads": H_KV,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "initializer_range": INITIAL,
    "tie_word_embeddings": False,
    "rope_parameters": {k: {"rope_type": "default", "rope_theta": b} for k, b in BASES.items()},
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": WINDOW,
    "layer_types": [block for kind in KINDS for block in (kind, "mlp")],
    "ngpt_alpha_init": RATE,
    "n_input_layers": 2,
    "n_recurrent_layers": 4,
    "n_output_layers": 2,
    "n_recurrent_loops": 2,
    "recurrent_kv_cache_mode": "per_loop",
    "dtype": "float32",
}
LAYOUTS = ("released", "saved", "in memory")


def shapes() -> Shapes:
    """As the class names them."""
    out: Shapes = {
        "model.embed_tokens.weight": (VOCAB, D),
        "lm_head.weight": (VOCAB, D),
        "lm_head.logit_scale": (VOCAB,),
    }
    for i in range(len(KINDS)):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        out |= {f"{attn}.{name}_proj.weight": (H * SIZE, D) for name in ("q", "gate")}
        out |= {f"{attn}.{name}_proj.weight": (H_KV * SIZE, D) for name in "kv"}
        out[f"{attn}.o_proj.weight"] = (D, H * SIZE)
        out |= {f"{attn}.{name}": (H * SIZE,) for name in ("sqk", "s_gate")}
        out |= {f"{mlp}.{name}_proj.weight": (FF, D) for name in ("gate", "up")}
        out[f"{mlp}.down_proj.weight"] = (D, FF)
        out |= {f"{mlp}.suv_{name}": (FF,) for name in ("gate", "up")}
        out |= {f"{layer}.lambda_{n}": (D,) for n in (1, 2)}
    return out


def tensors() -> Tensors:
    """Scales lie around their first values, some rates below zero."""
    weights = fill(shapes())
    for key, weight in weights.items():
        if weight.ndim == 1:
            first = 1.0 if "suv" in key else INITIAL
            weights[key] = first * (1 + weight)
    return weights


def laid_out(weights: Tensors, layout: str) -> Tensors:
    """Under the keys of a file: as released, as transformers saves it, or as the class names it."""
    if layout == "in memory":
        return weights
    out = {}
    for key, weight in weights.items():
        key = key.replace("model.embed_tokens", "backbone.embeddings")
        key = key.replace("self_attn.gate_proj", "self_attn.g_proj")
        if key.startswith("model.layers.") and layout == "released":
            _, _, i, rest = key.split(".", 3)
            block = 2 * int(i) + (rest.startswith("mlp") or rest == "lambda_2")
            rest = rest.replace("self_attn", "mixer").replace("mlp", "mixer")
            rest = rest.replace("lambda_1", "attn_alpha").replace("lambda_2", "mlp_alpha")
            key = f"model.layers.{block}.{rest}"
        out[key.replace("model.", "backbone.")] = weight
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "dory", CONFIG, laid_out(tensors(), "released"))


class NaiveDory:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, weights: Tensors, wrong: str = "") -> None:
        self.w, self.wrong = arrays(weights), wrong

    def unit(self, x: Array) -> Array:
        if self.wrong == "root mean square":
            return x / math.sqrt(float(x @ x) / len(x) + 1e-6)
        return x / math.sqrt(float(x @ x) + 1e-6)

    def heads(self, attn: str, name: str, x: Array) -> Array:
        return (self.w[f"{attn}.{name}_proj.weight"] @ x).reshape(-1, SIZE)

    def attention(self, i: int, xs: Sequence) -> Sequence:
        attn, kind = f"model.layers.{i}.self_attn", KINDS[i]
        base = BASES[FULL if self.wrong == "one base" else kind]
        scale = (self.w[f"{attn}.sqk"] * math.sqrt(SIZE) / INITIAL).reshape(H, SIZE)
        if self.wrong != "scales not squared":
            scale = scale**2
        queries, keys, values = [], [], []
        for position, x in enumerate(xs):
            asked = [self.unit(head) for head in self.heads(attn, "q", x)]
            if self.wrong == "scales before phase":
                asked = [
                    rotate(q * s, position, base, False) for q, s in zip(asked, scale, strict=True)
                ]
            else:
                asked = [
                    rotate(q, position, base, False) * s for q, s in zip(asked, scale, strict=True)
                ]
            queries.append(np.stack(asked))
            told = [self.unit(head) for head in self.heads(attn, "k", x)]
            keys.append(np.stack([rotate(head, position, base, False) for head in told]))
            values.append(self.heads(attn, "v", x))
        window = WINDOW + (self.wrong == "a window of one more")
        local = kind == LOCAL and self.wrong != "no window"
        opened = (self.w[f"{attn}.s_gate"] * D**0.25 / INITIAL) ** 2
        out = []
        for x, y in zip(xs, attend(queries, keys, values, window if local else None), strict=True):
            gate = sigmoid(self.w[f"{attn}.gate_proj.weight"] @ x * opened)
            y = self.unit(y if self.wrong == "no gate" else y * gate)
            out.append(self.w[f"{attn}.o_proj.weight"] @ y)
        return out

    def mlp(self, i: int, x: Array) -> Array:
        mlp = f"model.layers.{i}.mlp"
        gate, up = (
            self.w[f"{mlp}.{name}_proj.weight"] @ x * self.w[f"{mlp}.suv_{name}"] * math.sqrt(D)
            for name in ("gate", "up")
        )
        if self.wrong == "up before gate":
            gate, up = up, gate
        return self.w[f"{mlp}.down_proj.weight"] @ self.unit(gate * sigmoid(gate) * up)

    def layer(self, i: int, xs: Sequence) -> Sequence:
        xs = [self.unit(x) for x in xs]
        rates = [self.w[f"model.layers.{i}.lambda_{n}"] * RATE / INITIAL for n in (1, 2)]
        if self.wrong != "rates with their sign":
            rates = [np.abs(rate) for rate in rates]
        mixed = [self.unit(y) for y in self.attention(i, xs)]
        xs = [self.unit(x + rates[0] * (y - x)) for x, y in zip(xs, mixed, strict=True)]
        return [x + rates[1] * (self.unit(self.mlp(i, x)) - x) for x in xs]

    def forward(self, ids: list[int], depth: int) -> Array:
        xs = self.layer(0, [self.w["model.embed_tokens.weight"][token] for token in ids])
        injections = [self.unit(x) for x in xs]
        for _ in range(depth):
            if self.wrong == "no injection":
                xs = [self.unit(x) for x in xs]
            else:
                xs = [self.unit(x) + e for x, e in zip(xs, injections, strict=True)]
            for i in (1, 2):
                xs = self.layer(i, xs)
        xs = [self.unit(x) for x in self.layer(3, xs)]
        scale = self.w["lm_head.logit_scale"] / INITIAL
        return np.stack([(self.w["lm_head.weight"] @ x) * scale for x in xs])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    """1e-6 is what float32 leaves of scales that were multiplied into their rows."""
    wanted = NaiveDory(tensors()).forward(IDS, depth)
    assert wanted.std() > 0.1
    assert gap(forward(converted(source), depth), wanted) < 1e-6
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4
    assert gap(decode(converted(source), depth), wanted) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_its_files_is_the_same_model(tmp_path: Path, layout: str) -> None:
    path = write_folder(tmp_path / "dory", CONFIG, laid_out(tensors(), layout))
    found = forward(converted(path), 2)
    assert gap(found, NaiveDory(tensors()).forward(IDS, 2)) < 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        "root mean square",
        "one base",
        "scales not squared",
        "scales before phase",
        "a window of one more",
        "no window",
        "no gate",
        "up before gate",
        "rates with their sign",
        "no injection",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    found = forward(converted(source), 2)
    assert gap(found, NaiveDory(tensors(), wrong).forward(IDS, 2)) > 1e-3


def theirs(tied: bool, seed: int = 1) -> Any:
    """A small random model of transformers, in float32 values."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DoryForCausalLM"):
        pytest.skip("this transformers has no Dory")
    config = transformers.DoryConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW,
        n_input_layers=1, n_recurrent_layers=3, n_output_layers=1, n_recurrent_loops=3,
        layer_types=[FULL, LOCAL, FULL, LOCAL, LOCAL], tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.DoryForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            gain = 6 if "lambda" in name else 1  # so that layers and depth matter
            parameter.data = parameter.data * (gain + 0.3 * noise)
        else:
            parameter.data = noise / parameter.shape[1] ** 0.5
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    model = theirs(tied)
    model.save_pretrained(tmp_path / "dory")
    (tmp_path / "dory" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    ours: LoopedLM = converted(tmp_path / "dory")
    model = model.double()
    for depth in (1, 2, 3, 5):
        model.config.n_recurrent_loops = depth
        with torch.no_grad():
            wanted = model(torch.tensor([IDS]), use_cache=False).logits[0]
        assert wanted.std() > 0.1
        assert gap(forward(ours, depth), wanted) < 1e-5
        assert gap(decode(ours, depth), wanted) < 1e-5


def test_what_the_source_says_of_training_is_kept(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out")
    saved = load_checkpoint(tmp_path / "out")
    assert (done.format, done.architecture) == ("dory", "dory")
    assert saved.trained_mean_depth == 2
    local = saved.model.geometry.rope.local
    assert local is not None
    assert (local.layers, local.window, local.rope.base) == ((True, False) * 2, WINDOW, 10.0)
    assert any("multiplied into their matrices" in note for note in done.notes)


def test_kinds_and_bases_have_published_defaults(tmp_path: Path) -> None:
    """Every fourth layer sees everything; the counts are layers where no mlp is listed."""
    config = {**CONFIG, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1}
    for name in ("layer_types", "rope_parameters", "n_recurrent_layers"):
        del config[name]
    path = write_folder(tmp_path / "dory", config, laid_out(tensors(), "saved"))
    rope = converted(path).geometry.rope
    assert rope.local is not None
    assert rope.local.layers == (True, True, True, False)
    assert (rope.base, rope.local.rope.base) == (1e7, 1e4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["mamba"] * 8}, "layer_types="),
        ({"layer_types": [FULL, "mlp", "mlp", FULL] * 2}, "must take turns"),
        ({"n_recurrent_layers": 2}, "these must agree"),
        (
            {"rope_parameters": {FULL: {"rope_theta": 1e7}}},
            "no config.json rope_parameters.sliding",
        ),
        (
            {
                "rope_parameters": {
                    k: {"rope_type": "yarn", "rope_theta": 1e4} for k in (FULL, LOCAL)
                }
            },
            "rope_type='yarn'",
        ),
        ({"head_dim": 8}, "(24, 16), expected (32, 16)"),
        ({"n_output_layers": 4, "num_hidden_layers": 10}, "these must agree"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    weights = laid_out(tensors(), "released")
    path = write_folder(tmp_path / "dory", {**CONFIG, **changes}, weights)
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("backbone.layers.2.mixer.s_gate", "missing backbone.layers.2.mixer.s_gate"),
        ("lm_head.logit_scale", "missing lm_head.logit_scale"),
        ("backbone.layers.3.mlp_alpha", "missing backbone.layers.3.mlp_alpha"),
    ],
)
def test_scales_are_keys_like_others(tmp_path: Path, broken: str, named: str) -> None:
    weights = laid_out(tensors(), "released")
    del weights[broken]
    weights["backbone.norm.weight"] = torch.ones(D)
    path = write_folder(tmp_path / "dory", CONFIG, weights)
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)
    assert "unknown backbone.norm.weight" in str(failure.value)


def test_the_published_size() -> None:
    config = DoryConfig(
        vocab_size=131072, d_model=2560, n_heads=16, n_kv_heads=4, head_dim=256, d_ff=7168,
        n_prelude_layers=8, n_core_layers=20, n_coda_layers=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = DoryModel(config)
    width, kv = 16 * 256, 4 * 256
    layer = 2560 * (3 * width + 2 * kv) + width + 3 * 2560 * 7168 + 2 * 2560
    assert parameters(model) == 2 * 131072 * 2560 + 36 * layer


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 3},
        {"head_dim": 7},
        {"window": 0},
        {"n_coda_layers": -1},
        {"local_layers": (8,)},
        {"local_rope_base": 0.0},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DoryConfig(**changes)
