"""Huginn, against float64 loops written from its paper and its key list."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loopwise.errors import CheckpointError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.costs import parameters
from loopwise.models.raven import RavenConfig, RavenModel
from tests.hub.folders import (
    IDS,
    VOCAB,
    Shapes,
    Tensors,
    arrays,
    converted,
    decode,
    fill,
    first_latent,
    forward,
    gap,
    write_folder,
)
from tests.hub.mathematics import Array, Sequence, attend, gated, rms, rotate

D, H, FF = 24, 3, 20
SIZE = D // H
# The published fields, at a small size; init_values are off the formulas on purpose.
CONFIG: dict[str, Any] = {
    "architecture_class_name": "RecurrentGPT",
    "architectures": ["RavenForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "activation_checkpoint_impl": "per-iteration",
    "bias": False,
    "block_class_name": "SandwichBlock",
    "block_size": 16,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "effective_expected_depth": 132,
    "head_dim": SIZE,
    "init_orthogonal": False,
    "init_strategy": "takase",
    "init_values": {"std": 0.3, "out_proj": 0.001, "embedding": 0.3, "embed_scale": 2.5},
    "injection_type": "linear",
    "intermediate_size": FF,
    "mean_backprop_depth": 8,
    "mean_recurrence": 32,
    "mlp_class_name": "GatedMLP",
    "model_type": "huginn_raven",
    "n_embd": D,
    "n_heads": H,
    "n_layers": 4,
    "n_layers_in_coda": 1,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-06,
    "num_key_value_heads": H,
    "padded_vocab_size": VOCAB,
    "padding_multiple": 4096,
    "qk_bias": True,
    "rope_base": 50000,
    "sampling_scheme": "poisson-lognormal-filling",
    "state_init": "like-init",
    "test_time_noise": 0,
    "test_time_noise_type": "fixed",
    "tie_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.1",
    "vocab_size": VOCAB,
}


def shapes(d: int = D, h: int = H, ff: int = FF, vocab: int = VOCAB) -> Shapes:
    out: Shapes = {"transformer.wte.weight": (vocab, d)}
    for part, count in (("prelude", 1), ("core_block", 2), ("coda", 1)):
        for i in range(count):
            block = f"transformer.{part}.{i}"
            out |= {f"{block}.norm_{n}.weight": (d,) for n in (1, 2, 3, 4)}
            out[f"{block}.attn.Wqkv.weight"] = (3 * d, d)
            out[f"{block}.attn.qk_bias"] = (2, 1, h, d // h)
            out[f"{block}.attn.proj.weight"] = (d, d)
            out[f"{block}.mlp.fc.weight"] = (2 * ff, d)
            out[f"{block}.mlp.proj.weight"] = (d, ff)
    out["transformer.adapter.weight"] = (d, 2 * d)
    out["transformer.ln_f.weight"] = (d,)
    return out


def tensors() -> Tensors:
    return fill(shapes())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "huginn", CONFIG, tensors())


class NaiveHuginn:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, weights: Tensors, config: dict[str, Any], wrong: str = "") -> None:
        self.w, self.c, self.wrong = arrays(weights), config, wrong
        self.scale = config["init_values"]["embed_scale"]

    def norm(self, key: str, x: Array) -> Array:
        return rms(x, self.w[key + ".weight"], self.c["norm_eps"])

    def attention(self, block: str, xs: Sequence) -> Sequence:
        bias = self.w[block + ".attn.qk_bias"][:, 0]  # (2, heads, size)
        if self.wrong == "key bias on queries":
            bias = bias[::-1]
        queries, keys, values = [], [], []
        for position, x in enumerate(xs):
            q, k, v = (self.w[block + ".attn.Wqkv.weight"] @ x).reshape(3, H, SIZE)
            if self.wrong == "key before query":
                q, k = k, q
            late = self.wrong == "bias after the phase"
            q, k = (q, k) if late else (q + bias[0], k + bias[1])
            base = 10_000.0 if self.wrong == "the usual base" else self.c["rope_base"]
            turn = self.wrong != "rotate half"
            q = np.stack([rotate(head, position, base, turn) for head in q])
            k = np.stack([rotate(head, position, base, turn) for head in k])
            q, k = (q + bias[0], k + bias[1]) if late else (q, k)
            queries.append(q), keys.append(k), values.append(v)
        return [self.w[block + ".attn.proj.weight"] @ x for x in attend(queries, keys, values)]

    def mlp(self, block: str, x: Array) -> Array:
        gate, up = np.split(self.w[block + ".mlp.fc.weight"], 2)
        if self.wrong == "up before gate":
            gate, up = up, gate
        return gated(x, gate, up, self.w[block + ".mlp.proj.weight"])

    def block(self, block: str, xs: Sequence) -> Sequence:
        n1, n2, n3, n4 = (f"{block}.norm_{n}" for n in (1, 2, 3, 4))
        mixed = self.attention(block, [self.norm(n1, x) for x in xs])
        if self.wrong == "norms on the branches":
            xs = [x + self.norm(n2, y) for x, y in zip(xs, mixed, strict=True)]
            return [x + self.norm(n4, self.mlp(block, self.norm(n3, x))) for x in xs]
        xs = [self.norm(n2, x + y) for x, y in zip(xs, mixed, strict=True)]
        return [self.norm(n4, x + self.mlp(block, self.norm(n3, x))) for x in xs]

    def forward(self, ids: list[int], depth: int, latents: Array) -> Array:
        scale = math.sqrt(D) if self.wrong == "scale from the width" else self.scale
        xs = [self.w["transformer.wte.weight"][token] * scale for token in ids]
        injections = self.block("transformer.prelude.0", xs)
        states = list(latents)
        for _ in range(depth):
            pairs = [(s, e) for s, e in zip(states, injections, strict=True)]
            if self.wrong == "injection before latent":
                pairs = [(e, s) for s, e in pairs]
            xs = [self.w["transformer.adapter.weight"] @ np.concatenate(pair) for pair in pairs]
            for i in range(2):
                xs = self.block(f"transformer.core_block.{i}", xs)
            states = xs
            if self.wrong == "norm inside the loop":
                states = [self.norm("transformer.ln_f", x) for x in states]
        if self.wrong not in ("no norm before the coda", "norm inside the loop"):
            xs = [self.norm("transformer.ln_f", x) for x in states]
        xs = self.block("transformer.coda.0", xs)
        head = self.w["transformer.wte.weight"]
        return np.stack([head @ self.norm("transformer.ln_f", x) for x in xs])


def naive(model: LoopedLM, depth: int, wrong: str = "", **changes: Any) -> Array:
    latents = first_latent(model).numpy()
    return NaiveHuginn(tensors(), {**CONFIG, **changes}, wrong).forward(IDS, depth, latents)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_those_of_the_documented_mathematics(source: Path, depth: int) -> None:
    model = converted(source)
    wanted = naive(model, depth)
    assert wanted.std() > 0.1, "the comparison would say nothing about flat logits"
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_decoding_with_a_cache_equals_the_full_forward_pass(source: Path, depth: int) -> None:
    model = converted(source)
    assert gap(decode(model, depth), forward(model, depth)) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "rotate half",
        "the usual base",
        "bias after the phase",
        "key bias on queries",
        "key before query",
        "up before gate",
        "norms on the branches",
        "scale from the width",
        "injection before latent",
        "no norm before the coda",
        "norm inside the loop",
    ],
)
def test_no_other_convention_gives_these_logits(source: Path, wrong: str) -> None:
    """Each line of the mathematics is seen by the comparison: broken, it shows."""
    model = converted(source)
    assert gap(forward(model, 2), naive(model, 2, wrong)) > 1e-3


def test_the_first_latent_is_noise_of_the_size_the_file_says(source: Path) -> None:
    """Spread and scale come from ``init_values``, not from the width; three of them is the cut."""
    model = converted(source)
    std = 0.3 * 2.5
    rows = first_latent(model, [0] * 4000)
    assert rows.abs().max() <= 3 * std
    assert float(rows.std()) == pytest.approx(std * 0.98658, rel=0.01)  # a normal cut at 3 sigma
    assert float(rows.abs().max()) > 2.9 * std
    assert abs(float(rows.mean())) < 0.01


def test_the_first_latent_belongs_to_request_and_position(source: Path) -> None:
    """The published code draws it anew on every call, so greedy decoding is not repeatable."""
    model = converted(source)
    torch.manual_seed(1)
    first = forward(model, 2)
    torch.manual_seed(2)
    assert torch.equal(forward(model, 2), first)
    assert gap(first_latent(model)[0], first_latent(model)[1]) > 0.1


def test_what_the_source_says_of_training_is_kept(source: Path) -> None:
    model = converted(source)
    saved = load_checkpoint(source.parent / "huginn-converted")
    assert saved.trained_mean_depth == pytest.approx(33, abs=0.05)  # max(32, 8) + 1, not 32
    assert saved.training["depth"]["p99"] == pytest.approx(94, abs=2)  # as measured of their code
    assert saved.training["depth"]["backprop_depth"] == 8
    assert saved.training["converted_from"]["format"] == "huginn"
    assert model.geometry.max_depth is None


def test_the_stored_dtype_is_kept(tmp_path: Path) -> None:
    narrow = {key: tensor.bfloat16() for key, tensor in tensors().items()}
    path = write_folder(tmp_path / "huginn", CONFIG, narrow)
    done = convert(path, tmp_path / "out")
    assert done.dtype == "bfloat16"
    model = load_checkpoint(tmp_path / "out").model
    assert torch.equal(model.embedding.weight, narrow["transformer.wte.weight"].float())


def test_a_tied_head_and_a_rotary_table_may_be_in_the_file(tmp_path: Path) -> None:
    more = tensors()
    more["lm_head.weight"] = more["transformer.wte.weight"].clone()
    angles = [[p * 50000 ** (-2 * i / SIZE) for i in range(SIZE // 2)] for p in range(16)]
    table = torch.tensor(angles, dtype=torch.float64)
    more["freqs_cis"] = torch.stack((table.cos(), table.sin()), dim=-1)[None, :, None].float()
    path = write_folder(tmp_path / "whole", CONFIG, more)
    lean = write_folder(tmp_path / "lean", CONFIG, tensors())
    assert torch.equal(forward(converted(path), 2), forward(converted(lean), 2))

    more["freqs_cis"] = more["freqs_cis"].roll(1, dims=1)
    save_file(more, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="freqs_cis .* is not the rotary table"):
        convert(path, tmp_path / "out")
    more["lm_head.weight"] += 1
    save_file(more, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight and transformer.wte.weight"):
        convert(path, tmp_path / "out")


def test_raw_pretraining_keys_lose_their_prefix(tmp_path: Path, source: Path) -> None:
    wrapped = {f"_orig_mod._original_module.{key}": value for key, value in tensors().items()}
    path = write_folder(tmp_path / "raw", CONFIG, wrapped)
    assert torch.equal(forward(converted(path), 2), forward(converted(source), 2))


def test_values_the_file_does_not_have_follow_from_the_width(tmp_path: Path) -> None:
    """The config that stands in the repository itself lacks them, and the total of layers."""
    config = {k: v for k, v in CONFIG.items() if k not in ("init_values", "rope_base", "n_layers")}
    model = converted(write_folder(tmp_path / "huginn", config, tensors()))
    assert model.config.embedding_scale == pytest.approx(math.sqrt(D))
    assert model.config.latent_std == pytest.approx(math.sqrt(2 / (5 * D)) * math.sqrt(D))
    values = {"std": math.sqrt(2 / (5 * D)), "embed_scale": math.sqrt(D)}
    assert gap(forward(model, 2), naive(model, 2, init_values=values)) < 1e-8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"injection_type": "add"}, "injection_type='add'"),
        ({"state_init": "zero"}, "state_init='zero'"),
        ({"nonlin_name": "GELU"}, "nonlin_name='GELU'"),
        ({"mlp_class_name": "BaseMLP"}, "mlp_class_name='BaseMLP'"),
        ({"bias": True}, "bias=True"),
        ({"test_time_noise": 0.1}, "test_time_noise=0.1"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ({"n_layers": 8}, "n_layers=8"),
        ({"init_values": {"std": 0.1}}, "init_values has no embed_scale"),
        ({"n_heads": "three"}, "n_heads='three'"),
        ({"rope_base": True}, "rope_base=True"),
        ({"mean_recurrence": None}, "no mean_recurrence"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write_folder(tmp_path / "huginn", {**CONFIG, **changes}, tensors())
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    assert named in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_the_published_size_has_its_number_of_parameters() -> None:
    """Counted from the published keys: 3,564,976,800, of them 1,581,592,320 in the core."""
    config = RavenConfig(
        vocab_size=65536,
        d_model=5280,
        n_heads=55,
        n_kv_heads=55,
        d_ff=17920,
        embedding_scale=math.sqrt(5280),
    )
    with torch.device("meta"):
        model = RavenModel(config)
    assert parameters(model) == 3_564_976_800
    assert parameters(model.core_blocks) == 1_581_592_320
    assert parameters(model.adapter) == 55_756_800
