"""Parcae (``SandyResearch/parcae-140m`` to ``-1.3b``): ``config.json`` and ``pytorch_model.bin``.

Source: arXiv:2604.12946, and github.com/SandyResearch/parcae (MIT).
"""

from __future__ import annotations

import math
from typing import Any

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.formats.base import Plan
from loopwise.hub.formats.huginn import rotary_table
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.parcae import ParcaeConfig

GATE_CHANNELS = 32  # fixed in the published code
PARTS = {"prelude": "prelude", "core": "core_block", "coda": "coda"}


class Parcae:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "parcae"
    about = "Parcae: keys transformer.adapter.A_log and transformer.C"

    def recognises(self, source: Source) -> bool:
        return "transformer.adapter.A_log" in source.shapes

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        check(fields)
        d_model = fields.integer("n_embd")
        n_heads = fields.integer("num_attention_heads")
        fields.only("num_key_value_heads", n_heads)
        fields.only("recurrent_num_attention_heads", n_heads)
        fields.only("recurrent_embedding_dimension", d_model)
        d_ff = fields.integer("intermediate_size")
        fields.only("recurrent_intermediation_embedding_dimension", d_ff)
        parts = ("prelude", "recurrent_block", "coda")
        counts = [fields.integer(f"n_layers_in_{part}") for part in parts]
        mean = fields.integer("mean_recurrence")
        config = ParcaeConfig(
            vocab_size=fields.integer("padded_vocab_size", "vocab_size"),
            d_model=d_model,
            n_heads=n_heads,
            d_ff=d_ff,
            n_prelude_layers=counts[0],
            n_core_layers=counts[1],
            n_coda_layers=counts[2],
            value_layers=value_layers(source, counts),
            gate_channels=GATE_CHANNELS,
            latent_std=math.sqrt(2 / (5 * d_model)),
            tie_embeddings=fields.flag("tie_embeddings", "tie_word_embeddings"),
            rope_base=rope_base(fields),
            norm_eps=fields.number("norm_eps"),
            init_depth=mean,
        )
        keys = key_map(config)
        table = source.shapes.get("freqs_cis")
        if table is not None and len(table) > 1:
            keys.tables["freqs_cis"] = rotary_table(config.geometry.rope, table[1])
        return Plan(
            architecture="parcae",
            config=config,
            keys=keys,
            depth=drawn(fields, mean),
            unread=fields.unread(),
        )


def check(fields: Fields) -> None:
    """Refuse what no published checkpoint uses and our architecture does not do."""
    fields.only("injection_type", "diagonal")
    fields.only("state_init", "like-init")
    fields.only("block_class_name", "TransformerPreNormBlock")
    fields.only("norm_class_name", "RMSNorm")
    fields.only("mlp_class_name", "BaseMLP")
    fields.only("nonlin_name", "ReLU2")
    fields.only("init_strategy", "scaled-zero")  # the embedding is not scaled
    fields.only("mup_model_scaling_factor", 1)
    fields.only("prelude_norm", True)
    fields.only("qk_norm", True)
    fields.never("bias", "qk_bias", "clip_qkv", "logit_softcap")
    fields.ignore("name", "hf_config", "block_size", "padding_multiple", "attn_impl", "_class_name")
    fields.ignore("init_orthogonal", "architecture_class_name", "model_class_name")
    fields.ignore("activation_checkpoint_impl", "lockstep_n", "lockstep_k", "curriculum_target")


def rope_base(fields: Fields) -> float:
    """From ``rope_settings``; every layer turns, by whole positions.

    Raises:
        CheckpointError: it says otherwise.
    """
    table = fields.section("rope_settings")
    if table is None:
        return fields.number("rope_base", default=50_000.0)
    fields.ignore("rope_base")
    inner = Fields(table, "Parcae", "config.json rope_settings")
    inner.only("use_rope", True)
    inner.only("rope_condense_ratio", 1)
    base = inner.number("rope_base", default=50_000.0)
    inner.close()
    return base


def value_layers(source: Source, counts: list[int]) -> tuple[int, ...]:
    """The layers that add values by token.

    Which layers have gates depends on the depth of training, so gates and tables can fall apart.

    Raises:
        CheckpointError: they do.
    """
    tables = {key.split(".")[1] for key in source.shapes if key.startswith("value_embeds.")}
    names = layer_names(counts)
    gates = {
        str(i) for i, name in enumerate(names) if f"{name}.attn.ve_gate.weight" in source.shapes
    }
    if tables != gates:
        raise CheckpointError(
            f"{str(source.path)!r} has tables of values for layers {', '.join(sorted(tables))} but "
            f"gates in layers {', '.join(sorted(gates))}; loopwise reads checkpoints where these "
            "are the same layers"
        )
    return tuple(sorted(int(layer) for layer in tables))


def drawn(fields: Fields, mean: int) -> dict[str, Any]:
    """How depths were drawn; the published samplers hit ``mean`` one sequence at a time only."""
    backprop = fields.integer("mean_backprop_depth")
    fields.ignore("sampling_scheme", "recurrent_iteration_method")
    return {
        "kind": "parcae",
        "asked_mean": float(mean),
        "true_mean": float(mean),
        "backprop_depth": backprop,
    }


def layer_names(counts: list[int]) -> list[str]:
    """The source's layers, in our order."""
    parts = zip(PARTS.values(), counts, strict=True)
    return [f"transformer.{part}.{i}" for part, count in parts for i in range(count)]


def key_map(c: ParcaeConfig) -> KeyMap:
    """Every key, save the rotary table."""
    keys, d = KeyMap(), c.d_model
    counts = [c.n_prelude_layers, c.n_core_layers, c.n_coda_layers]
    keys.take("embedding.weight", ("transformer.wte.weight", (c.vocab_size, d)))
    keys.take("norm_injection.weight", ("transformer.ln_prelude.weight", (d,)))
    keys.take("adapter.log_rate", ("transformer.adapter.A_log", (d,)))
    keys.take("adapter.step", ("transformer.adapter.dt_bias", (d,)))
    keys.take("adapter.inject.weight", ("transformer.adapter.B", (d, d)))
    keys.take("readout.weight", ("transformer.C.weight", (d, d)))
    keys.take("norm_final.weight", ("transformer.ln_f.weight", (d,)))
    if c.tie_embeddings:
        keys.copies["lm_head.weight"] = "transformer.wte.weight"
    else:
        keys.take("unembedding.weight", ("lm_head.weight", (c.vocab_size, d)))
    blocks = [f"{part}_blocks.{i}" for part, n in zip(PARTS, counts, strict=True) for i in range(n)]
    for layer, (ours, theirs) in enumerate(zip(blocks, layer_names(counts), strict=True)):
        qkv = [(f"{theirs}.attn.c_{letter}.weight", (d, d)) for letter in "qkv"]
        keys.take(f"{ours}.attn.qkv.weight", *qkv)
        keys.take(f"{ours}.attn.out.weight", (f"{theirs}.attn.c_proj.weight", (d, d)))
        keys.take(f"{ours}.mlp.up.weight", (f"{theirs}.mlp.fc.weight", (c.d_ff, d)))
        keys.take(f"{ours}.mlp.down.weight", (f"{theirs}.mlp.proj.weight", (d, c.d_ff)))
        for norm, number in (("norm_attn_in", 1), ("norm_mlp_in", 2)):
            keys.take(f"{ours}.{norm}.weight", (f"{theirs}.norm_{number}.weight", (d,)))
        if layer in c.value_layers:
            shape = (c.n_heads, c.gate_channels)
            keys.take(f"{ours}.values.gate.weight", (f"{theirs}.attn.ve_gate.weight", shape))
            table = (f"value_embeds.{layer}.weight", (c.vocab_size, d))
            keys.take(f"{ours}.values.embedding.weight", table)
    return keys
