"""Ouro, against float64 loops written from its paper and its key list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.costs import flops_per_token, parameters
from loopwise.models.ouro import OuroConfig, OuroModel
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
from tests.hub.mathematics import Array, Sequence, attend, gated, rms, rotate, sigmoid

D, H, SIZE, FF, LAYERS = 16, 2, 8, 20, 2
CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
    "bos_token_id": 0,
    "early_exit_threshold": 1.0,
    "eos_token_id": 0,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": FF,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 65536,
    "max_window_layers": LAYERS,
    "model_type": "ouro",
    "num_attention_heads": H,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": H,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
BRANCHES = ("input_layernorm", "post_attention_layernorm")


def shapes(h_kv: int = H) -> Shapes:
    out: Shapes = {"model.embed_tokens.weight": (VOCAB, D), "lm_head.weight": (VOCAB, D)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows in (("q", H), ("k", h_kv), ("v", h_kv)):
            out[f"{layer}.self_attn.{name}_proj.weight"] = (rows * SIZE, D)
        out[f"{layer}.self_attn.o_proj.weight"] = (D, H * SIZE)
        out[f"{layer}.mlp.gate_proj.weight"] = out[f"{layer}.mlp.up_proj.weight"] = (FF, D)
        out[f"{layer}.mlp.down_proj.weight"] = (D, FF)
        for norm in BRANCHES:
            out[f"{layer}.{norm}.weight"] = out[f"{layer}.{norm}_2.weight"] = (D,)
    out["model.norm.weight"] = (D,)
    out["model.early_exit_gate.weight"], out["model.early_exit_gate.bias"] = (1, D), (1,)
    return out


def tensors() -> Tensors:
    return fill(shapes())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ouro", CONFIG, tensors())


class NaiveOuro:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, weights: Tensors, wrong: str = "") -> None:
        self.w, self.wrong = arrays(weights), wrong

    def norm(self, key: str, x: Array) -> Array:
        return rms(x, self.w[key + ".weight"], 1e-6)

    def attention(self, layer: str, xs: Sequence) -> Sequence:
        queries, keys, values = [], [], []
        base = 10_000.0 if self.wrong == "the usual base" else 1e6
        turn = self.wrong == "interleaved"
        for position, x in enumerate(xs):
            q, k, v = (
                (self.w[f"{layer}.self_attn.{name}_proj.weight"] @ x).reshape(H, SIZE)
                for name in "qkv"
            )
            queries.append(np.stack([rotate(head, position, base, turn) for head in q]))
            keys.append(np.stack([rotate(head, position, base, turn) for head in k]))
            values.append(v)
        out = self.w[f"{layer}.self_attn.o_proj.weight"]
        return [out @ x for x in attend(queries, keys, values)]

    def mlp(self, layer: str, x: Array) -> Array:
        gate, up = (self.w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        if self.wrong == "up before gate":
            gate, up = up, gate
        return gated(x, gate, up, self.w[f"{layer}.mlp.down_proj.weight"])

    def layer(self, layer: str, xs: Sequence) -> Sequence:
        n1, n2 = f"{layer}.input_layernorm", f"{layer}.input_layernorm_2"
        n3, n4 = f"{layer}.post_attention_layernorm", f"{layer}.post_attention_layernorm_2"
        if self.wrong == "second and third norm swapped":
            n2, n3 = n3, n2
        mixed = self.attention(layer, [self.norm(n1, x) for x in xs])
        if self.wrong == "norms on the sum":
            xs = [self.norm(n2, x + y) for x, y in zip(xs, mixed, strict=True)]
            return [self.norm(n4, x + self.mlp(layer, self.norm(n3, x))) for x in xs]
        xs = [x + self.norm(n2, y) for x, y in zip(xs, mixed, strict=True)]
        return [x + self.norm(n4, self.mlp(layer, self.norm(n3, x))) for x in xs]

    def states(self, ids: list[int], depth: int) -> Sequence:
        xs = [self.w["model.embed_tokens.weight"][token] for token in ids]
        embedded = xs
        for r in range(depth):
            if self.wrong == "embedding added again" and r:
                xs = [x + e for x, e in zip(xs, embedded, strict=True)]
            for i in range(LAYERS):
                xs = self.layer(f"model.layers.{i}", xs)
            if self.wrong != "norm after the last loop only" or r == depth - 1:
                xs = [self.norm("model.norm", x) for x in xs]
        return xs

    def forward(self, ids: list[int], depth: int) -> Array:
        xs = self.states(ids, depth)
        if self.wrong == "norm before the head again":
            xs = [self.norm("model.norm", x) for x in xs]
        return np.stack([self.w["lm_head.weight"] @ x for x in xs])

    def gate(self, x: Array) -> float:
        logit = self.w["model.early_exit_gate.weight"] @ x + self.w["model.early_exit_gate.bias"]
        return float(sigmoid(logit)[0])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    wanted = NaiveOuro(tensors()).forward(IDS, depth)
    assert wanted.std() > 0.1, "the comparison would say nothing about flat logits"
    assert gap(forward(converted(source), depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_decoding_with_a_cache_equals_the_full_forward_pass(source: Path, depth: int) -> None:
    model = converted(source)
    assert gap(decode(model, depth), forward(model, depth)) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "interleaved",
        "the usual base",
        "up before gate",
        "norms on the sum",
        "second and third norm swapped",
        "norm after the last loop only",
        "norm before the head again",
        "embedding added again",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    """Each line of the mathematics is seen by the comparison: broken, it shows."""
    found = forward(converted(source), 2)
    assert gap(found, NaiveOuro(tensors(), wrong).forward(IDS, 2)) > 1e-3


@torch.no_grad()
def test_the_exit_gate_reads_the_normed_latent(source: Path) -> None:
    naive = NaiveOuro(tensors())
    model = converted(source)
    assert isinstance(model, OuroModel)
    for depth in (1, 2, 4):
        states = naive.states(IDS, depth)
        found = model.stop_probability(torch.tensor(np.stack(states)))
        assert found.shape == (len(IDS),)
        assert gap(found, np.array([naive.gate(x) for x in states])) < 1e-12


def test_rows_may_stand_at_different_recurrences(source: Path) -> None:
    model = converted(source)
    seen = []

    class Spy:
        def attend(self, layer: int, r: Any, q: Any, k: Any, v: Any) -> Any:
            seen.append((layer, r))
            return q

    r = torch.tensor([1, 3])
    with torch.no_grad():
        injection = model.prelude(torch.tensor([1, 2]), Spy())
        latent = model.core_step(model.initial_latent(injection), injection, r, Spy())
        assert model.coda(latent, r, Spy()).shape == (2, VOCAB)
    assert [layer for layer, _ in seen] == [0, 1]
    assert all(at is r for _, at in seen)


def test_known_wrong_special_ids_are_put_right_and_told(source: Path, tmp_path: Path) -> None:
    """The published config gives 0, which is padding, as both ends of a text."""
    done = convert(source, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").training["special_ids"] == {"bos": 1, "eos": 2}
    assert "the tokenizer's eos is id 257; the source says 2" in done.notes


def test_what_the_source_says_of_training_is_kept(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    saved = load_checkpoint(tmp_path / "out")
    assert saved.trained_mean_depth == 4
    assert saved.trained_depths == (1, 4)


def test_grouped_queries_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    config = {**CONFIG, "num_key_value_heads": 1}
    path = write_folder(tmp_path / "ouro", config, fill(shapes(h_kv=1)))
    model = converted(path)
    assert (model.geometry.n_kv_heads, model.geometry.head_dim) == (1, SIZE)
    assert gap(decode(model, 2), forward(model, 2)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"total_ut_steps": "4"}, "total_ut_steps='4'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write_folder(tmp_path / "ouro", {**CONFIG, **changes}, tensors())
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)


def test_the_published_size_and_its_costs() -> None:
    """1.4B: 24 layers of width 2048, untied; the gate is no part of a recurrence."""
    config = OuroConfig(
        vocab_size=49152, d_model=2048, n_heads=16, n_kv_heads=16, head_dim=128, d_ff=5632,
        n_layers=24,
    )  # fmt: skip
    with torch.device("meta"):
        model = OuroModel(config)
    layer = 4 * 2048**2 + 3 * 2048 * 5632
    assert parameters(model) == 2 * 49152 * 2048 + 24 * (layer + 4 * 2048) + 2048 + 2049
    assert flops_per_token(model).core == 2 * 24 * layer
    assert flops_per_token(model).prelude == flops_per_token(model).coda == 0


@pytest.mark.parametrize(
    "changes",
    [{"n_kv_heads": 3}, {"head_dim": 7}, {"head_dim": 0}, {"block": "sandwich"}, {"norm_eps": 0.0}],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OuroConfig(**changes)


def test_a_model_without_a_gate_says_so() -> None:
    model: LoopedLM = OuroModel(OuroConfig(vocab_size=9, n_layers=1, exit_gate=False))
    assert isinstance(model, OuroModel)
    with pytest.raises(ConfigError, match="no exit gate"):
        model.stop_probability(torch.zeros(1, 256))
