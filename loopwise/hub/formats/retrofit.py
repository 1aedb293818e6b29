"""Retrofitted recurrence: Llama, TinyLlama or OLMo 2 layers around and inside a Raven loop.

The config is Huginn's own, down to the block's name and a ``rope_base`` that nothing reads; only
the keys say which kind it is. Source: McLeish et al. 2025, arXiv:2511.07384, and
github.com/LoopedLMs/retrofitting-recurrence.
"""

from __future__ import annotations

from typing import Literal

from loopwise.hub.fields import Fields
from loopwise.hub.formats import raven_keys
from loopwise.hub.formats.base import Plan, drawn
from loopwise.hub.read import Source
from loopwise.models.raven import RavenConfig

# How the first latent is made, and whether recurrence 1 goes past the adapter.
STARTS: dict[str, tuple[Literal["noise", "injection"], bool]] = {
    "random": ("noise", False),
    "embed-init": ("injection", False),
    "skip-adapter": ("injection", True),
}


class Retrofit:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "retrofit"
    about = "retrofitted Llama, TinyLlama or OLMo 2: model_type huginn_raven with two norms a block"

    def recognises(self, source: Source) -> bool:
        return raven_keys.is_raven(source) and not raven_keys.has(source, ".norm_4.weight")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        raven_keys.check_common(fields)
        olmo = raven_keys.has(source, ".attn.q_norm.weight")
        n_heads = fields.integer("n_heads", "num_attention_heads")
        d_model = fields.integer("n_embd", "hidden_size")
        fields.only("head_dim", d_model // n_heads)
        fields.only("qk_bias", False)
        fields.ignore("rope_base")  # inherited from Huginn; the blocks read rope_theta
        n_prelude, n_core, n_coda = raven_keys.layer_counts(fields)
        # Llama's own modelling file knows random starts only, whatever the config says.
        modes = list(STARTS) if olmo else ["random"]
        fields.only("initial_state_mode", *modes)
        latent_init, skip_first = STARTS[source.config.get("initial_state_mode") or "random"]
        scale, std = raven_keys.initial_values(fields)
        rope_base, rope_scaling = fields.rope()
        config = RavenConfig(
            vocab_size=fields.integer("padded_vocab_size", "vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
            d_ff=fields.integer("intermediate_size"),
            n_prelude_layers=n_prelude,
            n_core_layers=n_core,
            n_coda_layers=n_coda,
            block="post-norm" if olmo else "pre-norm",
            qk_bias=False,
            qk_norm=olmo,
            norm_before_coda=False,
            embedding_scale=scale,
            latent_init=latent_init,
            skip_first_adapter=skip_first,
            latent_std=std,
            tie_embeddings=fields.flag("tie_embeddings", "tie_word_embeddings"),
            rope_base=rope_base,
            rope_interleaved=False,
            rope_scaling=rope_scaling,
            norm_eps=fields.number("norm_eps"),
            init_depth=fields.integer("mean_recurrence"),
        )
        return Plan(
            architecture="raven",
            config=config,
            keys=raven_keys.key_map(config),
            depth=drawn(fields.integer("mean_recurrence"), fields.integer("mean_backprop_depth")),
            unread=fields.unread(),
        )
