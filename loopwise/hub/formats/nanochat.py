"""Looped nanochat: ``meta_STEP.json`` and ``model_STEP.pt`` as its scripts save them.

Source: github.com/kschwethelm/looped_nanochat (MIT).
"""

from __future__ import annotations

from typing import Literal

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.formats import nanochat_keys
from loopwise.hub.formats.base import Plan, clamped
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.nanochat import NanochatConfig

NORMS = ("norm_attn_in", "norm_attn_out", "norm_mlp_in", "norm_mlp_out")
Injection = tuple[Literal["concat", "none"], Literal["injection", "noise"]]
MODES: dict[str, Injection] = {
    "inject_init_prelude": ("concat", "injection"),
    "inject_init_random": ("concat", "noise"),
    "passthrough": ("none", "injection"),
}


class Nanochat:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "nanochat"
    about = "looped nanochat: keys transformer.recur and norm_recur"

    def recognises(self, source: Source) -> bool:
        recurs = any(key.startswith("transformer.recur.") for key in source.shapes)
        return recurs and "norm_recur.weight" in source.shapes

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.ignore("size", "input_injection")
        fields.only("inject_mode", "concat_linear")
        # Dropped from later configs; none of them changes what the weights compute.
        fields.ignore("kv_cache_recur_budget", "recur_warm_start", "train_recur_min")
        fields.ignore("use_exit_gate", "exit_beta", "exit_min_recur")
        mode = source.config.get("input_injection") or "inject_init_prelude"
        if mode not in MODES:
            raise CheckpointError(
                f"config has input_injection={mode!r}; loopwise reads {', '.join(MODES)}"
            )
        if any(key.startswith("gate.") for key in source.shapes):
            raise CheckpointError(
                f"{str(source.path)!r} holds a learned exit gate (gate.linear), which loopwise has "
                "no place for in this architecture; convert the checkpoint from before it was added"
            )
        counts = [fields.integer(f"n_{part}") for part in ("prelude", "recur_block", "coda")]
        d_model = fields.integer("n_embd")
        injection, latent_init = MODES[mode]
        config = NanochatConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=d_model,
            n_heads=fields.integer("n_head"),
            n_kv_heads=fields.integer("n_kv_head"),
            d_ff=4 * d_model,
            n_prelude_layers=counts[0],
            n_core_layers=counts[1],
            n_coda_layers=counts[2],
            injection=injection,
            latent_init=latent_init,
            local_layers=nanochat_keys.local_layers(fields, source, sum(counts)),
            # The window counts tokens before the one that looks: half of the training's length.
            window=fields.integer("sequence_len", default=2048) // 2 + 1,
            logit_cap=fields.number("logit_softcap", default=15.0),
        )
        depth = clamped(
            fields.number("train_recur_mean"),
            fields.integer("train_recur_max"),
            fields.integer("bptt_k"),
        )
        return Plan(
            architecture="nanochat",
            config=config,
            keys=key_map(config),
            depth=depth,
            unread=fields.unread(),
            notes=["the source rounds its rotary tables to bfloat16; here they are exact"],
        )


def key_map(c: NanochatConfig) -> KeyMap:
    keys, d = KeyMap(), c.d_model
    nanochat_keys.take_ends(keys, c.vocab_size, d)
    size = d // c.n_heads
    for ours, theirs in (("embedding", "emb"), ("latent", "recur"), ("final", "final")):
        keys.take(f"norm_{ours}.weight", (f"norm_{theirs}.weight", (d,)))
    if c.injection == "concat":
        keys.take("adapter.weight", ("inject.weight", (d, 2 * d)))
    parts = {
        "prelude": ("prelude", c.n_prelude_layers),
        "core": ("recur", c.n_core_layers),
        "coda": ("coda", c.n_coda_layers),
    }
    for part, (name, count) in parts.items():
        for i in range(count):
            ours, theirs = f"{part}_blocks.{i}", f"transformer.{name}.{i}"
            keys.take(
                f"{ours}.attn.qkv.weight",
                (f"{theirs}.attn.c_q.weight", (d, d)),
                (f"{theirs}.attn.c_k.weight", (c.n_kv_heads * size, d)),
                (f"{theirs}.attn.c_v.weight", (c.n_kv_heads * size, d)),
            )
            for letter in "qk":
                keys.changes[f"{theirs}.attn.c_{letter}.weight"] = nanochat_keys.turned_back(size)
            keys.take(f"{ours}.attn.out.weight", (f"{theirs}.attn.c_proj.weight", (d, d)))
            keys.take(f"{ours}.mlp.up.weight", (f"{theirs}.mlp.c_fc.weight", (c.d_ff, d)))
            keys.take(f"{ours}.mlp.down.weight", (f"{theirs}.mlp.c_proj.weight", (d, c.d_ff)))
            for n, norm in enumerate(NORMS, start=1):
                keys.take(f"{ours}.{norm}.weight", (f"{theirs}.n{n}.weight", (d,)))
    return keys
