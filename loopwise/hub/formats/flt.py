"""The looped family of paper 2 as its authors' code saves it: LT, LT_ia, FLT and FLT_res.

Source: Fu et al. 2026, arXiv:2605.18797; the published config fields and key names. Their own
decoding keeps the last loop's keys and values only and so departs from the trained model; here it
does not.
"""

from __future__ import annotations

from typing import get_args

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.formats import nanochat_keys
from loopwise.hub.formats.base import Plan, always
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.looped import Inject, LoopedConfig

INJECT: dict[str, Inject] = {
    "LT": "none",
    "LT_ia": "attn-first",
    "FLT_res": "residual-all",
    "FLT": "attn-all",
}
assert set(INJECT.values()) < set(get_args(Inject)), "a variant of its own for each"


class FLT:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "flt"
    about = "LT, LT_ia, FLT, FLT_res: a config with K loops, keys transformer.h.0.attn.c_q"

    def recognises(self, source: Source) -> bool:
        return "K" in source.config and any(
            key.startswith("transformer.h.0.attn.c_") for key in source.shapes
        )

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        kind = source.config.get("model_type")
        if kind not in INJECT:
            # LT_i adds the embedding as it is, before its norm; our `input` adds it normed.
            raise CheckpointError(
                f"config has model_type={kind!r}; loopwise reads {', '.join(INJECT)} (LT_i adds "
                "its embedding un-normed, which `looped` does not do)"
            )
        fields.only("attn_type", "full")
        fields.ignore("dropout", "sequence_len", "activation_offload", "kv_lora_rank")
        fields.ignore("activation_offload_keep_last", "loss_type")
        n_layers, d_model = fields.integer("n_layer"), fields.integer("n_embd")
        local = nanochat_keys.local_layers(fields, source, n_layers)
        if local:
            raise CheckpointError(
                f"window_pattern={source.config['window_pattern']!r} gives layers "
                f"{', '.join(map(str, local))} a sliding window, whose length is not documented; "
                "only models of full context (L) load"
            )
        config = LoopedConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=d_model,
            n_heads=fields.integer("n_head"),
            n_kv_heads=fields.integer("n_kv_head"),
            d_ff=4 * d_model,
            n_layers=n_layers,
            inject=INJECT[kind],
            norm_eps=nanochat_keys.NORM_EPS,
        )
        scored_all = source.config.get("loss_type") == "STEP"
        return Plan(
            architecture="looped",
            config=config,
            keys=key_map(config),
            depth=always(fields.integer("K"), smallest=1 if scored_all else None),
            unread=fields.unread(),
            notes=[
                "the source rounds its rotary tables to bfloat16 and takes the epsilon of its "
                "norms from the dtype it runs in; here both are those of float32"
            ],
        )


def key_map(config: LoopedConfig) -> KeyMap:
    keys, d = KeyMap(), config.d_model
    nanochat_keys.take_ends(keys, config.vocab_size, d)
    size = d // config.n_heads
    kv_shape = (config.n_kv_heads * size, d)
    for i in range(config.n_layers):
        ours, theirs = f"core_blocks.{i}", f"transformer.h.{i}"
        keys.take(f"{ours}.query.weight", (f"{theirs}.attn.c_q.weight", (d, d)))
        keys.take(
            f"{ours}.key_value.weight",
            (f"{theirs}.attn.c_k.weight", kv_shape),
            (f"{theirs}.attn.c_v.weight", kv_shape),
        )
        for letter in "qk":
            keys.changes[f"{theirs}.attn.c_{letter}.weight"] = nanochat_keys.turned_back(size)
        keys.take(f"{ours}.out.weight", (f"{theirs}.attn.c_proj.weight", (d, d)))
        keys.take(f"{ours}.mlp.up.weight", (f"{theirs}.mlp.c_fc.weight", (config.d_ff, d)))
        keys.take(f"{ours}.mlp.down.weight", (f"{theirs}.mlp.c_proj.weight", (d, config.d_ff)))
    return keys
