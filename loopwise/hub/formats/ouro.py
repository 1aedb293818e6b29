"""Ouro (``ByteDance/Ouro-1.4B``, ``-2.6B`` and their Thinking kin).

Source: Zhu et al. 2025, arXiv:2510.25741.
"""

from __future__ import annotations

from loopwise.hub.fields import Fields
from loopwise.hub.formats import base
from loopwise.hub.formats.base import Plan
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.ouro import OuroConfig

NORMS = {
    "norm_attn_in": "input_layernorm",
    "norm_attn_out": "input_layernorm_2",
    "norm_mlp_in": "post_attention_layernorm",
    "norm_mlp_out": "post_attention_layernorm_2",
}


class Ouro:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "ouro"
    about = "Ouro: model_type ouro, or OuroForCausalLM"

    def recognises(self, source: Source) -> bool:
        return base.is_kind(source, "ouro", "OuroForCausalLM")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.only("hidden_act", "silu")
        fields.never("use_sliding_window", "attention_bias", "mlp_bias", "quantization_config")
        fields.ignore("sliding_window", "chunk_size", "early_exit_step", "early_exit_threshold")
        n_layers = fields.integer("num_hidden_layers")
        fields.only("layer_types", ["full_attention"] * n_layers)
        n_heads = fields.integer("num_attention_heads")
        d_model = fields.integer("hidden_size")
        rope_base, rope_scaling = fields.rope()
        config = OuroConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
            head_dim=fields.integer("head_dim", default=d_model // n_heads),
            d_ff=fields.integer("intermediate_size"),
            n_layers=n_layers,
            tie_embeddings=fields.flag("tie_word_embeddings", default=False),
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            norm_eps=fields.number("rms_norm_eps"),
        )
        # Every one of the loops had a loss of its own, so the shallower readings are trained too.
        depth = base.always(fields.integer("total_ut_steps"), smallest=1)
        return Plan(
            architecture="ouro",
            config=config,
            keys=key_map(config, NORMS),
            depth=depth,
            special_ids=special_ids(source),
            unread=fields.unread(),
        )


def special_ids(source: Source) -> dict[str, int]:
    """The published configs say 0 for both, which is padding; the tokenizer's are 1 and 2."""
    said = [source.config.get(f"{name}_token_id") for name in ("bos", "eos")]
    return {"bos": 1, "eos": 2} if said == [0, 0] else {}


def key_map(config: OuroConfig, norms: dict[str, str]) -> KeyMap:
    """Llama's key names, with ``norms`` a layer by our name and theirs."""
    keys, d = KeyMap(), config.d_model
    base.take_llama_ends(keys, config.vocab_size, d, config.tie_embeddings)
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    for i in range(config.n_layers):
        ours, theirs = f"core_blocks.{i}", f"model.layers.{i}"
        base.take_llama_attention(keys, f"{ours}.attn", f"{theirs}.self_attn", d, heads)
        base.take_llama_mlp(keys, f"{ours}.mlp", f"{theirs}.mlp", d, config.d_ff)
        for our_norm, their_norm in norms.items():
            keys.take(f"{ours}.{our_norm}.weight", (f"{theirs}.{their_norm}.weight", (d,)))
    if config.exit_gate:
        keys.take("gate.weight", ("model.early_exit_gate.weight", (1, d)))
        keys.take("gate.bias", ("model.early_exit_gate.bias", (1,)))
    return keys
