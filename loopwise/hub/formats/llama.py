"""Plain Llama-shaped checkpoints (Llama, SmolLM2 and kin) into `fixed`, a model of one recurrence.

Source: Touvron et al. 2023, arXiv:2302.13971; key names as transformers' LlamaForCausalLM has them.
"""

from __future__ import annotations

import torch

from loopwise.hub.fields import Fields
from loopwise.hub.formats import base
from loopwise.hub.formats.base import Plan
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.fixed import FixedConfig

NORMS = {"norm_attn_in": "input_layernorm", "norm_mlp_in": "post_attention_layernorm"}


class Llama:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "llama"
    about = "plain Llama-shaped models such as SmolLM2: model_type llama, or LlamaForCausalLM"

    def recognises(self, source: Source) -> bool:
        return base.is_kind(source, "llama", "LlamaForCausalLM")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.only("hidden_act", "silu")
        fields.never("attention_bias", "mlp_bias", "quantization_config", "sliding_window")
        fields.never("rope_interleaved")
        n_heads = fields.integer("num_attention_heads")
        d_model = fields.integer("hidden_size")
        fields.only("head_dim", d_model // n_heads)
        rope_base, rope_scaling = fields.rope(default_base=10_000.0)
        config = FixedConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
            d_ff=fields.integer("intermediate_size"),
            n_layers=fields.integer("num_hidden_layers"),
            tie_embeddings=fields.flag("tie_word_embeddings", default=False),
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            norm_eps=fields.number("rms_norm_eps"),
        )
        return Plan(
            architecture="fixed",
            config=config,
            keys=key_map(config),
            depth=base.always(1),
            unread=fields.unread(),
        )


def key_map(config: FixedConfig) -> KeyMap:
    keys, d = KeyMap(), config.d_model
    rope = config.geometry.rope
    base.take_llama_ends(keys, config.vocab_size, d, config.tie_embeddings)
    heads = (config.n_heads, config.n_kv_heads, rope.head_dim)
    half = torch.arange(rope.head_dim // 2, dtype=torch.float64)
    for i in range(config.n_layers):
        ours, theirs = f"core_blocks.{i}", f"model.layers.{i}"
        base.take_llama_attention(keys, f"{ours}.attn", f"{theirs}.self_attn", d, heads)
        base.take_llama_mlp(keys, f"{ours}.mlp", f"{theirs}.mlp", d, config.d_ff)
        for our_norm, their_norm in NORMS.items():
            keys.take(f"{ours}.{our_norm}.weight", (f"{theirs}.{their_norm}.weight", (d,)))
        if config.rope_scaling is None:  # a table that conversions of 2023 still carry
            frequencies = rope.base ** (-2 * half / rope.head_dim)
            keys.tables[f"{theirs}.self_attn.rotary_emb.inv_freq"] = frequencies
    return keys
