"""A stack of Llama layers in float64 loops, read by the published key names; run once or looped."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.hub.folders import VOCAB, Shapes, Tensors, arrays
from tests.hub.mathematics import Array, Sequence, attend, gated, rms, rotate


def shapes(config: dict[str, Any]) -> Shapes:
    """The published keys and shapes of a config with transformers' Llama fields."""
    d, ff = config["hidden_size"], config["intermediate_size"]
    h, h_kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or d // h
    out: Shapes = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, heads in (("q", h), ("k", h_kv), ("v", h_kv)):
            out[f"{layer}.self_attn.{name}_proj.weight"] = (heads * size, d)
        out[f"{layer}.self_attn.o_proj.weight"] = (d, h * size)
        out[f"{layer}.mlp.gate_proj.weight"] = out[f"{layer}.mlp.up_proj.weight"] = (ff, d)
        out[f"{layer}.mlp.down_proj.weight"] = (d, ff)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, d)
    return out


class NaiveLlama:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, weights: Tensors, config: dict[str, Any], wrong: str = "") -> None:
        self.w, self.c, self.wrong = arrays(weights), config, wrong
        self.h, self.h_kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.h

    def norm(self, key: str, x: Array) -> Array:
        eps = 0.1 if self.wrong == "another epsilon" else self.c["rms_norm_eps"]
        return rms(x, self.w[key + ".weight"], eps)

    def phase(self, heads: Array, position: int) -> Array:
        scaling = None if self.wrong == "no scaling" else self.c.get("rope_scaling")
        base = 5e5 if self.wrong == "another base" else self.c["rope_theta"]
        turn = self.wrong == "interleaved"
        return np.stack([rotate(head, position, base, turn, scaling) for head in heads])

    def attention(self, layer: str, xs: Sequence) -> Sequence:
        queries, keys, values = [], [], []
        for position, x in enumerate(xs):
            q, k, v = (
                (self.w[f"{layer}.self_attn.{name}_proj.weight"] @ x).reshape(-1, self.size)
                for name in "qkv"
            )
            if self.wrong == "values before keys":
                k, v = v, k
            queries.append(self.phase(q, position))
            keys.append(self.phase(k, position))
            values.append(v)
        out = self.w[f"{layer}.self_attn.o_proj.weight"]
        if self.wrong == "key heads in turn":  # head j reads j mod h_kv, not j // groups
            keys, values = (
                [np.tile(heads, (self.h // self.h_kv, 1)) for heads in both]
                for both in (keys, values)
            )
        return [out @ x for x in attend(queries, keys, values)]

    def mlp(self, layer: str, x: Array) -> Array:
        gate, up = (self.w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        if self.wrong == "up before gate":
            gate, up = up, gate
        return gated(x, gate, up, self.w[f"{layer}.mlp.down_proj.weight"])

    def stack(self, xs: Sequence) -> Sequence:
        for i in range(self.c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            n1, n2 = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
            if self.wrong == "norms swapped":
                n1, n2 = n2, n1
            mixed = self.attention(layer, [self.norm(n1, x) for x in xs])
            xs = [x + y for x, y in zip(xs, mixed, strict=True)]
            xs = [x + self.mlp(layer, self.norm(n2, x)) for x in xs]
        return xs

    def forward(self, ids: list[int], loops: int = 1) -> Array:
        scale = self.c["hidden_size"] ** 0.5 if self.wrong == "embedding scaled" else 1.0
        xs = [self.w["model.embed_tokens.weight"][token] * scale for token in ids]
        for loop in range(loops):
            xs = self.stack(xs)
            if loop == loops - 1 or self.wrong != "norm after the last loop only":
                xs = [self.norm("model.norm", x) for x in xs]
        tied = self.c["tie_word_embeddings"]
        head = self.w["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return np.stack([head @ x for x in xs])
