"""Retrofitted Llama and OLMo 2: Huginn's config, but another block, against float64 loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.errors import CheckpointError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from tests.hub import test_huginn
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

D, H, H_KV, SIZE, FF = 24, 3, 1, 8, 20
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What the conversion script changes in Huginn's config, at a small size. Its rope_base, block name
# and tie_word_embeddings are leftovers that nothing reads; init_values.std is the original's.
LLAMA: dict[str, Any] = {
    **test_huginn.CONFIG,
    "head_dim": SIZE,
    "init_values": {"std": 0.0087039, "out_proj": 5e-4, "embedding": 0.0087, "embed_scale": 1.0},
    "max_position_embeddings": 131072,
    "norm_eps": 1e-05,
    "num_key_value_heads": H_KV,
    "qk_bias": False,
    "rope_base": 500000.0,
    "rope_scaling": LLAMA3,
    "rope_theta": 40000.0,
    "tie_embeddings": False,
    "tie_word_embeddings": True,
}
TINY_LLAMA = {**LLAMA, "rope_scaling": None, "rope_theta": 10000.0}
OLMO = {**TINY_LLAMA, "rope_theta": 500000.0, "norm_eps": 1e-06}
KINDS = {"llama": LLAMA, "tinyllama": TINY_LLAMA, "olmo": OLMO}


def shapes(olmo: bool) -> Shapes:
    out: Shapes = {"transformer.wte.weight": (VOCAB, D), "lm_head.weight": (VOCAB, D)}
    for part, count in (("prelude", 1), ("core_block", 2), ("coda", 1)):
        for i in range(count):
            block = f"transformer.{part}.{i}"
            out |= {f"{block}.norm_{n}.weight": (D,) for n in (1, 2)}
            out[f"{block}.attn.Wqkv.weight"] = ((H + 2 * H_KV) * SIZE, D)
            out[f"{block}.attn.proj.weight"] = (D, D)
            out[f"{block}.mlp.fc.weight"] = (2 * FF, D)
            out[f"{block}.mlp.proj.weight"] = (D, FF)
            if olmo:
                out[f"{block}.attn.q_norm.weight"] = (H * SIZE,)
                out[f"{block}.attn.k_norm.weight"] = (H_KV * SIZE,)
    out["transformer.adapter.weight"] = (D, 2 * D)
    out["transformer.ln_f.weight"] = (D,)
    return out


def tensors(kind: str) -> Tensors:
    return fill(shapes(kind == "olmo"))


def folder(tmp_path: Path, kind: str, **changes: Any) -> Path:
    return write_folder(tmp_path / kind, {**KINDS[kind], **changes}, tensors(kind))


class NaiveRetrofit:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, kind: str, wrong: str = "", start: str = "random") -> None:
        self.w, self.c, self.wrong = arrays(tensors(kind)), KINDS[kind], wrong
        self.start = start
        self.olmo = kind == "olmo"

    def norm(self, key: str, x: Array) -> Array:
        return rms(x, self.w[key + ".weight"], self.c["norm_eps"])

    def phase(self, heads: Array, position: int) -> Array:
        base = self.c["rope_base"] if self.wrong == "rope_base" else self.c["rope_theta"]
        scaling = None if self.wrong == "no scaling" else self.c["rope_scaling"]
        turn = self.wrong == "interleaved"
        return np.stack([rotate(head, position, base, turn, scaling) for head in heads])

    def whole(self, key: str, x: Array) -> Array:
        """The q or k norm, over all heads at once."""
        if not self.olmo or self.wrong == "no q/k norm":
            return x
        if self.wrong == "q/k norm a head":
            weight = self.w[key + ".weight"].reshape(-1, SIZE)
            heads = zip(x.reshape(-1, SIZE), weight, strict=True)
            return np.concatenate([rms(head, part, self.c["norm_eps"]) for head, part in heads])
        return self.norm(key, x)

    def attention(self, block: str, xs: Sequence) -> Sequence:
        queries, keys, values = [], [], []
        for position, x in enumerate(xs):
            both = self.w[f"{block}.attn.Wqkv.weight"] @ x
            q, k, v = np.split(both, [H * SIZE, (H + H_KV) * SIZE])
            q = self.whole(f"{block}.attn.q_norm", q).reshape(-1, SIZE)
            k = self.whole(f"{block}.attn.k_norm", k).reshape(-1, SIZE)
            queries.append(self.phase(q, position))
            keys.append(self.phase(k, position))
            values.append(v.reshape(-1, SIZE))
        out = self.w[f"{block}.attn.proj.weight"]
        return [out @ x for x in attend(queries, keys, values)]

    def mlp(self, block: str, x: Array) -> Array:
        gate, up = np.split(self.w[f"{block}.mlp.fc.weight"], 2)
        if self.wrong == "up before gate":
            gate, up = up, gate
        return gated(x, gate, up, self.w[f"{block}.mlp.proj.weight"])

    def block(self, block: str, xs: Sequence) -> Sequence:
        n1, n2 = f"{block}.norm_1", f"{block}.norm_2"
        if self.olmo == (self.wrong != "norms of the other kind"):
            mixed = self.attention(block, xs)
            xs = [x + self.norm(n1, y) for x, y in zip(xs, mixed, strict=True)]
            return [x + self.norm(n2, self.mlp(block, x)) for x in xs]
        mixed = self.attention(block, [self.norm(n1, x) for x in xs])
        xs = [x + y for x, y in zip(xs, mixed, strict=True)]
        return [x + self.mlp(block, self.norm(n2, x)) for x in xs]

    def forward(self, ids: list[int], depth: int, latents: Array) -> Array:
        scale = D**0.5 if self.wrong == "embedding scaled" else 1.0
        xs = [self.w["transformer.wte.weight"][token] * scale for token in ids]
        injections = self.block("transformer.prelude.0", xs)
        states = list(latents) if self.start == "random" else injections
        for r in range(1, depth + 1):
            pairs = [(s, e) for s, e in zip(states, injections, strict=True)]
            if self.wrong == "injection before latent":
                pairs = [(e, s) for s, e in pairs]
            xs = [self.w["transformer.adapter.weight"] @ np.concatenate(pair) for pair in pairs]
            if self.start == "skip-adapter" and r == 1:
                xs = injections
            for i in range(2):
                xs = self.block(f"transformer.core_block.{i}", xs)
            states = xs
        if self.wrong == "norm before the coda":
            xs = [self.norm("transformer.ln_f", x) for x in xs]
        xs = self.block("transformer.coda.0", xs)
        head = self.w["transformer.wte.weight" if self.wrong == "tied" else "lm_head.weight"]
        return np.stack([head @ self.norm("transformer.ln_f", x) for x in xs])


def naive(model: LoopedLM, kind: str, depth: int, wrong: str = "") -> Array:
    return NaiveRetrofit(kind, wrong).forward(IDS, depth, first_latent(model).numpy())


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_documented_mathematics(
    tmp_path: Path, kind: str, depth: int
) -> None:
    path = folder(tmp_path, kind)
    model = converted(path)
    wanted = naive(model, kind, depth)
    assert wanted.std() > 0.1, "the comparison would say nothing about flat logits"
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(path, torch.float32), depth), wanted) < 1e-4
    assert gap(decode(model, depth), wanted) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "olmo"])
@pytest.mark.parametrize(
    "wrong",
    [
        "interleaved",
        "up before gate",
        "norms of the other kind",
        "embedding scaled",
        "injection before latent",
        "norm before the coda",
        "tied",
    ],
)
def test_no_other_convention_gives_these_logits(tmp_path: Path, kind: str, wrong: str) -> None:
    model = converted(folder(tmp_path, kind))
    assert gap(forward(model, 2), naive(model, kind, 2, wrong)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("llama", "no scaling"),
        ("tinyllama", "rope_base"),
        ("olmo", "no q/k norm"),
        ("olmo", "q/k norm a head"),
    ],
)
def test_nor_do_the_conventions_of_one_kind(tmp_path: Path, kind: str, wrong: str) -> None:
    model = converted(folder(tmp_path, kind))
    assert gap(forward(model, 2), naive(model, kind, 2, wrong)) > 1e-5


@pytest.mark.parametrize("start", ["embed-init", "skip-adapter"])
def test_starts_other_than_noise(tmp_path: Path, start: str) -> None:
    model = converted(folder(tmp_path, "olmo", initial_state_mode=start))
    found = {}
    for depth in (1, 2, 4):
        naive_olmo = NaiveRetrofit("olmo", start=start)
        wanted = found[depth] = naive_olmo.forward(IDS, depth, np.empty(0))
        assert gap(forward(model, depth), wanted) < 1e-8
        assert gap(decode(model, depth), wanted) < 1e-5
    other = "skip-adapter" if start == "embed-init" else "embed-init"
    assert (
        np.abs(NaiveRetrofit("olmo", start=other).forward(IDS, 1, np.empty(0)) - found[1]).max()
        > 0.1
    )


def test_rows_skip_the_adapter_by_their_own_recurrence(tmp_path: Path) -> None:
    model = converted(folder(tmp_path, "olmo", initial_state_mode="skip-adapter"))

    class NoAttention:
        def attend(self, layer: int, r: Any, q: Any, k: Any, v: Any) -> Any:
            return q * 0

    latent, injection = torch.randn(2, 3, D, dtype=torch.float64)
    with torch.no_grad():
        mixed = model.core_step(latent, injection, torch.tensor([1, 2, 1]), NoAttention())
        first = model.core_step(latent, injection, 1, NoAttention())
        later = model.core_step(latent, injection, 2, NoAttention())
    assert gap(mixed, torch.stack([first[0], later[1], first[2]])) < 1e-12
    assert gap(first, later) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_tell_the_kinds_apart(tmp_path: Path, kind: str) -> None:
    """The config calls every block SandwichBlock."""
    done = convert(folder(tmp_path, kind), tmp_path / "out")
    assert (done.format, done.architecture) == ("retrofit", "raven")
    config = load_checkpoint(tmp_path / "out").model.config
    assert config.block == ("post-norm" if kind == "olmo" else "pre-norm")
    assert config.qk_norm == (kind == "olmo")
    assert config.latent_std == 0.0087039  # of a width of 5280, whatever this one's is
    assert done.notes == ()


def test_a_layer_that_lacks_its_query_norm_is_noticed(tmp_path: Path) -> None:
    weights = tensors("olmo")
    del weights["transformer.coda.0.attn.q_norm.weight"]
    path = write_folder(tmp_path / "olmo", OLMO, weights)
    with pytest.raises(CheckpointError, match=r"missing transformer.coda.0.attn.q_norm.weight"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_bias": True}, "qk_bias=True"),
        ({"initial_state_mode": "embed-init"}, "initial_state_mode='embed-init'"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "of type 'linear'"),
        ({"head_dim": 4}, "head_dim=4"),
        ({"init_values": None}, "no init_values"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as failure:
        convert(folder(tmp_path, "llama", **changes), tmp_path / "out")
    assert named in str(failure.value)
