"""LoopFormer as its class of transformers saves it, against float64 loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.engine import Engine, EngineConfig
from loopwise.errors import CheckpointError, ConfigError, DepthError, EngineError, ShapeError
from loopwise.hub.convert import convert
from loopwise.measure.evaluate import check_length, latents_at
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.costs import flops_per_token, parameters
from loopwise.models.loopformer import LoopFormerConfig, LoopFormerModel
from loopwise.tokenizer import ByteTokenizer
from tests.engine.test_reference import as_batch
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
from tests.hub.mathematics import Array, Sequence, attend, sigmoid

D, H, LAYERS, FF, CONTEXT, LOOPS = 16, 4, 2, 40, 32, 8
EPS = 2.0**-23
CONFIG: dict[str, Any] = {
    "model_type": "loopformer",
    "architectures": ["LoopFormerGPTForCausalLM"],
    "block_size": CONTEXT,
    "vocab_size": VOCAB,
    "n_layer": LAYERS,
    "n_head": H,
    "n_embd": D,
    "dropout": 0.0,
    "bias": False,
    "intermediate_dim": FF,
    "bos_token_id": 50256,
    "torch_dtype": "float32",
}


def shapes(prefix: str = "gpt.") -> Shapes:
    out: Shapes = {
        "transformer.wte.weight": (VOCAB, D),
        "transformer.wpe.weight": (CONTEXT, D),
        "transformer.norm_f.weight": (D,),
    }
    for name in ("time_embedder", "dt_embedder"):
        out |= {f"{name}.mlp.0.weight": (D, 256), f"{name}.mlp.2.weight": (D, D)}
        out |= {f"{name}.mlp.{i}.bias": (D,) for i in (0, 2)}
    for i in range(LAYERS):
        block = f"transformer.h.blocks.{i}"
        out |= {
            f"{block}.attn.c_attn.weight": (3 * D, D),
            f"{block}.attn.c_proj.weight": (D, D),
            f"{block}.mlp.c_fc.weight": (FF, D),
            f"{block}.mlp.c_proj.weight": (D, FF),
            f"{block}.adaLN_modulation.1.weight": (4 * D, D),
            f"{block}.adaLN_modulation.1.bias": (4 * D,),
        }
    return {prefix + key: shape for key, shape in out.items()}


def tensors(prefix: str = "gpt.") -> Tensors:
    weights = fill(shapes(prefix))
    for name in ("time_embedder", "dt_embedder"):  # fill takes these for embeddings
        weights[f"{prefix}{name}.mlp.0.weight"] *= 0.4
    return weights


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "loopformer", CONFIG, tensors())


class NaiveLoopFormer:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, weights: Tensors, wrong: str = "") -> None:
        plain = {key.removeprefix("gpt."): weight for key, weight in weights.items()}
        self.w, self.wrong = arrays(plain), wrong

    def embed_time(self, name: str, t: float) -> Array:
        waves = [[], []]
        for i in range(128):
            angle = t * math.exp(-math.log(10_000) * i / 128)
            waves[0].append(math.cos(angle))
            waves[1].append(math.sin(angle))
        if self.wrong == "sine before cosine":
            waves.reverse()
        x = self.w[f"{name}.mlp.0.weight"] @ np.array(waves[0] + waves[1])
        x = x + self.w[f"{name}.mlp.0.bias"]
        x = self.w[f"{name}.mlp.2.weight"] @ (x * sigmoid(x))
        return x + self.w[f"{name}.mlp.2.bias"]

    def norm(self, x: Array) -> Array:
        return x / math.sqrt(float(x @ x) / D + EPS)

    def attention(self, block: str, xs: Sequence) -> Sequence:
        heads = [(self.w[f"{block}.attn.c_attn.weight"] @ x).reshape(3, H, D // H) for x in xs]
        mixed = attend(*([head[i] for head in heads] for i in range(3)))
        return [self.w[f"{block}.attn.c_proj.weight"] @ x for x in mixed]

    def mlp(self, block: str, x: Array) -> Array:
        inner = self.w[f"{block}.mlp.c_fc.weight"] @ x
        if self.wrong == "relu":
            inner = np.maximum(inner, 0)
        else:
            inner = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in inner])
        return self.w[f"{block}.mlp.c_proj.weight"] @ inner

    def block(self, block: str, xs: Sequence, c: Array) -> Sequence:
        told = self.w[f"{block}.adaLN_modulation.1.weight"] @ (c * sigmoid(c))
        told = (told + self.w[f"{block}.adaLN_modulation.1.bias"]).reshape(4, D)
        if self.wrong == "scales before gates":
            told = told[[2, 3, 0, 1]]
        gate1, gate2, scale1, scale2 = told
        one = 0 if self.wrong == "scale, not one plus scale" else 1
        mixed = self.attention(block, [self.norm(x) * (one + scale1) for x in xs])
        xs = [x + gate1 * y for x, y in zip(xs, mixed, strict=True)]
        return [x + gate2 * self.mlp(block, self.norm(x) * (one + scale2)) for x in xs]

    def forward(self, ids: list[int], steps: list[float]) -> Array:
        wte, wpe = self.w["transformer.wte.weight"], self.w["transformer.wpe.weight"]
        shift = 1 if self.wrong == "positions from one" else 0
        xs = [wte[token] + wpe[position + shift] for position, token in enumerate(ids)]
        t = 0.0
        for dt in steps:
            at = t + dt if self.wrong == "time at the end of the step" else t
            c = self.embed_time("time_embedder", at) + self.embed_time("dt_embedder", dt)
            if self.wrong == "time alone":
                c = self.embed_time("time_embedder", at)
            for i in range(LAYERS):
                xs = self.block(f"transformer.h.blocks.{i}", xs, c)
            t += dt
        weight = self.w["transformer.norm_f.weight"]
        return np.stack([wte @ (self.norm(x) * weight) for x in xs])


@pytest.mark.parametrize("depth", [1, 2, 5, LOOPS])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    """Recurrence r of eight stands at time (r - 1) / 8, whether or not the token goes on."""
    wanted = NaiveLoopFormer(tensors()).forward(IDS, [1 / LOOPS] * depth)
    model = converted(source)
    assert wanted.std() > 0.1
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4
    assert gap(decode(model, depth), wanted) < 1e-5


@pytest.mark.parametrize("n_loops", [1, 3, 4])
def test_the_steps_of_the_way_are_a_setting(source: Path, n_loops: int) -> None:
    """A shorter way with larger steps is the same weights with another number in config.json."""
    converted(source)
    file = source.parent / "loopformer-converted" / "config.json"
    config = json.loads(file.read_text())
    config["model"]["n_loops"] = n_loops
    file.write_text(json.dumps(config))
    model = converted(source)
    wanted = NaiveLoopFormer(tensors()).forward(IDS, [1 / n_loops] * n_loops)
    assert gap(forward(model, n_loops), wanted) < 1e-8
    assert model.geometry.max_depth == n_loops
    with pytest.raises(DepthError, match=f"limit of {n_loops}"):
        latents_at(model, as_batch(IDS), [n_loops + 1])


@pytest.mark.parametrize(
    "wrong",
    [
        "sine before cosine",
        "relu",
        "scales before gates",
        "scale, not one plus scale",
        "positions from one",
        "time at the end of the step",
        "time alone",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    wanted = NaiveLoopFormer(tensors(), wrong).forward(IDS, [1 / LOOPS] * 3)
    assert gap(forward(converted(source), 3), wanted) > 1e-3


@torch.no_grad()
def test_rows_stand_at_their_own_times(source: Path) -> None:
    model = converted(source)
    alone = [model.modulation(r) for r in (1, 4, 8)]
    together = model.modulation(torch.tensor([1, 4, 8]))
    for layer in range(LAYERS):
        for part in range(4):
            rows = torch.stack([told[layer][part] for told in alone])
            assert gap(together[layer][part], rows) < 1e-12
    assert gap(alone[0][0][0], alone[1][0][0]) > 0.01


def test_keys_may_come_without_the_prefix_and_with_the_tied_head(tmp_path: Path) -> None:
    weights = tensors("")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    model = converted(write_folder(tmp_path / "plain", CONFIG, weights))
    wanted = NaiveLoopFormer(tensors()).forward(IDS, [1 / LOOPS] * 2)
    assert gap(forward(model, 2), wanted) < 1e-8


def test_what_the_source_says_of_training_is_kept(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out")
    saved = load_checkpoint(tmp_path / "out")
    assert (done.format, done.architecture) == ("loopformer", "loopformer")
    assert done.parameters == sum(weight.numel() for weight in tensors().values())
    assert saved.trained_mean_depth == LOOPS
    assert any("cut into 8 steps, which config.json does not say" in note for note in done.notes)


def test_texts_past_the_learned_positions_are_refused(source: Path) -> None:
    model = converted(source)
    check_length(model, CONTEXT)
    with pytest.raises(ShapeError, match=f"33 tokens are past this model's limit of {CONTEXT}"):
        latents_at(model, as_batch([1] * 33), [1])
    with pytest.raises(EngineError, match="max_seq=33 is past the 32 positions"):
        Engine(model, ByteTokenizer(), EngineConfig(max_seq=33))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bias": True}, "bias=True"),
        ({"intermediate_dim": None}, "no intermediate_dim"),
        ({"block_size": None}, "no block_size"),
        ({"n_layer": 3}, "missing gpt.transformer.h.blocks.2"),
        ({"n_layer": 1}, "unknown gpt.transformer.h.blocks.1"),
        ({"block_size": 64}, "gpt.transformer.wpe.weight is (32, 16), expected (64, 16)"),
        ({"tie_word_embeddings": False}, "missing gpt.lm_head.weight"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write_folder(tmp_path / "loopformer", {**CONFIG, **changes}, tensors())
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)


def test_the_published_size_and_its_costs() -> None:
    config = LoopFormerConfig(
        vocab_size=50304, d_model=2048, n_heads=32, d_ff=5120, n_layers=3, max_positions=1024
    )
    with torch.device("meta"):
        model = LoopFormerModel(config)
    layer = 4 * 2048**2 + 2 * 2048 * 5120
    told = 3 * (4 * 2048 * 2048 + 4 * 2048) + 2 * (256 * 2048 + 2048**2 + 2 * 2048)
    assert parameters(model) == (50304 + 1024) * 2048 + 3 * layer + told + 2048
    assert flops_per_token(model).core == 2 * 3 * layer


@pytest.mark.parametrize(
    "changes",
    [{"n_heads": 3}, {"n_loops": 0}, {"time_width": 7}, {"max_positions": 0}, {"norm_eps": 0.0}],
    ids=str,
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoopFormerConfig(**changes)
