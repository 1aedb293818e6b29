"""Nanbeige4.2 (``Nanbeige/Nanbeige4.2-3B``): Llama layers, run twice with the final norm between.

Source: the published config and key names; the loop is Ouro's without exit gate and branch norms.
"""

from __future__ import annotations

from loopwise.hub.fields import Fields
from loopwise.hub.formats import base
from loopwise.hub.formats.base import Plan
from loopwise.hub.formats.llama import NORMS
from loopwise.hub.formats.ouro import key_map
from loopwise.hub.read import Source
from loopwise.models.ouro import OuroConfig


class Nanbeige:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "nanbeige"
    about = "Nanbeige4.2: model_type nanbeige, or NanbeigeForCausalLM"

    def recognises(self, source: Source) -> bool:
        return base.is_kind(source, "nanbeige", "NanbeigeForCausalLM")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.only("hidden_act", "silu")
        # The published code can do much that the published weights do not use.
        fields.never("attention_bias", "mlp_bias", "quantization_config", "qk_layernorm")
        fields.never("skip_loop_final_norm", "enable_double_loop_split", "loop_middle_layers")
        fields.never("loop_share_kv", "enable_hyper_connection", "enable_mhc")
        fields.never("enable_depth_attention", "emb_neighbor_num", "insert_ngram_layer_idx")
        fields.never("ngram_insert_all_layers", "use_sliding_window")
        fields.ignore("loop_loss_weights")
        n_heads = fields.integer("num_attention_heads")
        d_model = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", "kv_channels", default=d_model // n_heads)
        fields.only("kv_channels", head_dim)
        rope_base, rope_scaling = fields.rope()
        config = OuroConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
            head_dim=head_dim,
            d_ff=fields.integer("intermediate_size"),
            n_layers=fields.integer("num_hidden_layers"),
            block="pre-norm",
            exit_gate=False,
            tie_embeddings=fields.flag("tie_word_embeddings", default=False),
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            norm_eps=fields.number("rms_norm_eps"),
        )
        return Plan(
            architecture="ouro",
            config=config,
            keys=key_map(config, NORMS),
            depth=base.always(fields.integer("num_loops")),
            unread=fields.unread(),
        )
