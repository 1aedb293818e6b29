"""Huginn (``tomg-group-umd/huginn-0125``) and what its code pretrained: the original Raven.

Source: Geiping et al. 2025, arXiv:2502.05171, and github.com/seal-rg/recurrent-pretraining.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loopwise.hub.fields import Fields
from loopwise.hub.formats import raven_keys
from loopwise.hub.formats.base import Plan, drawn
from loopwise.hub.read import Source
from loopwise.models.base import Rope
from loopwise.models.raven import RavenConfig


class Huginn:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "huginn"
    about = "Huginn: model_type huginn_raven with four norms a block (norm_4)"

    def recognises(self, source: Source) -> bool:
        return raven_keys.is_raven(source) and raven_keys.has(source, ".norm_4.weight")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        raven_keys.check_common(fields)
        n_heads = fields.integer("n_heads", "num_attention_heads")
        d_model = fields.integer("n_embd", "hidden_size")
        fields.only("num_key_value_heads", n_heads)  # queries and keys share one bias tensor
        fields.only("head_dim", d_model // n_heads)
        n_prelude, n_core, n_coda = raven_keys.layer_counts(fields)
        scale, std = raven_keys.initial_values(fields, width=d_model)
        config = RavenConfig(
            vocab_size=fields.integer("padded_vocab_size", "vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_ff=fields.integer("intermediate_size"),
            n_prelude_layers=n_prelude,
            n_core_layers=n_core,
            n_coda_layers=n_coda,
            qk_bias=fields.flag("qk_bias"),
            embedding_scale=scale,
            latent_std=std,
            tie_embeddings=fields.flag("tie_embeddings", "tie_word_embeddings"),
            rope_base=fields.number("rope_base", default=50_000.0),
            norm_eps=fields.number("norm_eps"),
            init_depth=fields.integer("mean_recurrence"),
        )
        keys = raven_keys.key_map(config)
        table = source.shapes.get("freqs_cis")
        if table is not None and len(table) > 1:
            keys.tables["freqs_cis"] = rotary_table(config.geometry.rope, table[1])
        depth = drawn(fields.integer("mean_recurrence"), fields.integer("mean_backprop_depth"))
        return Plan(
            architecture="raven", config=config, keys=keys, depth=depth, unread=fields.unread()
        )


def rotary_table(rope: Rope, length: int) -> Tensor:
    """Cosine and sine of every pair at every position: ``(1, length, 1, head_dim/2, 2)``."""
    cos, sin = rope.tables(torch.arange(length), torch.float64)  # (length, 1, head_dim)
    return torch.stack((cos[..., ::2], sin[..., ::2]), dim=-1).unsqueeze(0)
