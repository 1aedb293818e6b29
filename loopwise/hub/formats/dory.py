"""Dory (``nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16``), transformers' own looped model.

Source: transformers' documentation of model type ``dory``, its config fields and key names.
Released configs list an attention block and an MLP block for each layer; both spellings load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.formats import base
from loopwise.hub.formats.base import Plan
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.dory import DoryConfig

FULL, LOCAL = "full_attention", "sliding_attention"
BASES = {FULL: 10_000_000.0, LOCAL: 10_000.0}  # where the config has no rope_parameters


class Dory:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "dory"
    about = "Dory: model_type dory, or DoryForCausalLM"

    def recognises(self, source: Source) -> bool:
        return base.is_kind(source, "dory", "DoryForCausalLM")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.only("hidden_act", "silu")
        fields.never("attention_bias", "mlp_bias", "quantization_config")
        # How its own cache is laid out; here that is a KV policy.
        fields.ignore("recurrent_kv_cache_mode")
        counts, kinds = layers(fields, source.config)
        n_heads = fields.integer("num_attention_heads")
        bases = rope_bases(fields, kinds)
        config = DoryConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=fields.integer("hidden_size"),
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
            head_dim=fields.integer("head_dim"),
            d_ff=fields.integer("intermediate_size"),
            n_prelude_layers=counts[0],
            n_core_layers=counts[1],
            n_coda_layers=counts[2],
            local_layers=tuple(i for i, kind in enumerate(kinds) if kind == LOCAL),
            window=fields.integer("sliding_window", default=1024),
            rope_base=bases[FULL],
            local_rope_base=bases[LOCAL],
            init_rate=fields.number("ngpt_alpha_init", default=0.05),
        )
        keys = key_map(
            config,
            Names.of(source),
            stored_as=fields.number("initializer_range", default=0.0177),
            tied=fields.flag("tie_word_embeddings", default=False),
        )
        return Plan(
            architecture="dory",
            config=config,
            keys=keys,
            depth=base.always(fields.integer("n_recurrent_loops", default=2)),
            unread=fields.unread(),
            notes=["learned scales of rows were multiplied into their matrices"],
        )


def layers(fields: Fields, config: Mapping[str, Any]) -> tuple[tuple[int, int, int], list[str]]:
    """Layers of prelude, core and coda, and the kind of attention of each.

    Raises:
        CheckpointError: kinds nobody knows, or counts that do not agree.
    """
    total = fields.integer("num_hidden_layers")
    prelude = fields.integer("n_input_layers", default=8)
    coda = fields.integer("n_output_layers", default=8)
    core = fields.integer("n_recurrent_layers", default=total - prelude - coda)
    fields.ignore("layer_types")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [LOCAL if (i + 1) % 4 else FULL for i in range(total)]
    if not isinstance(kinds, list) or not all(kind in (FULL, LOCAL, "mlp") for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types={kinds!r}; loopwise reads lists of {FULL!r}, {LOCAL!r} "
            "and 'mlp'"
        )
    if "mlp" in kinds:
        uneven = any(n % 2 for n in (total, prelude, core, coda, len(kinds)))
        if uneven or set(kinds[1::2]) != {"mlp"} or "mlp" in kinds[::2]:
            raise CheckpointError(
                f"config.json has layer_types={kinds!r}, where attention and mlp must take turns"
            )
        kinds = kinds[::2]
        total, prelude, core, coda = (n // 2 for n in (total, prelude, core, coda))
    if prelude + core + coda != total or len(kinds) != total:
        raise CheckpointError(
            f"config.json has {total} layers in all, {prelude} + {core} + {coda} before, in and "
            f"after the loop, and kinds of attention for {len(kinds)}; these must agree"
        )
    return (prelude, core, coda), kinds


def rope_bases(fields: Fields, kinds: list[str]) -> dict[str, float]:
    """Rotary base by kind of layer.

    Raises:
        CheckpointError: a kind has no table, or one with scaling.
    """
    table = fields.section("rope_parameters")
    if table is None:
        return dict(BASES)
    bases = dict(BASES)
    for kind in sorted(set(kinds)):
        where = f"config.json rope_parameters.{kind}"
        own = Fields(table, "Dory", "config.json rope_parameters").section(kind)
        if own is None:
            raise CheckpointError(f"config.json has layers of {kind!r} but no {where}")
        inner = Fields(own, "Dory", where)
        inner.only("rope_type", "default")
        inner.only("partial_rotary_factor", 1.0)
        bases[kind] = inner.number("rope_theta")
        inner.close()
    return bases


@dataclass(frozen=True)
class Names:
    """Where tensors lie: files call the stack ``backbone``, models in memory ``model``.

    Attributes:
        root: of all keys but the head's.
        paired: attention and MLP are blocks of their own, numbered through, as in released files.
    """

    root: str
    paired: bool

    @classmethod
    def of(cls, source: Source) -> Names:
        root = "model" if "model.embed_tokens.weight" in source.shapes else "backbone"
        return cls(root, any(".mixer." in key for key in source.shapes))

    @property
    def embedding(self) -> str:
        return f"{self.root}.{'embeddings' if self.root == 'backbone' else 'embed_tokens'}.weight"

    def attention(self, i: int) -> tuple[str, str, str]:
        """Attention of layer ``i``, its gate, and the key of its rate."""
        gate = "g_proj" if self.root == "backbone" else "gate_proj"
        block = f"{self.root}.layers.{2 * i if self.paired else i}"
        attn = f"{block}.{'mixer' if self.paired else 'self_attn'}"
        return (
            attn,
            f"{attn}.{gate}.weight",
            f"{block}.{'attn_alpha' if self.paired else 'lambda_1'}",
        )

    def mlp(self, i: int) -> tuple[str, str]:
        """MLP of layer ``i``, and the key of its rate."""
        block = f"{self.root}.layers.{2 * i + 1 if self.paired else i}"
        if self.paired:
            return f"{block}.mixer", f"{block}.mlp_alpha"
        return f"{block}.mlp", f"{block}.lambda_2"


def key_map(c: DoryConfig, names: Names, *, stored_as: float, tied: bool) -> KeyMap:
    """Every key; scales are stored in units of ``stored_as``, which is their first value."""
    keys, d, size = KeyMap(), c.d_model, c.head_dim
    width = c.n_heads * size
    head = names.embedding if tied else "lm_head.weight"
    keys.take("embedding.weight", (names.embedding, (c.vocab_size, d)))
    keys.take("unembedding.weight", (head, (c.vocab_size, d)))
    keys.scale_rows("unembedding.weight", head, "lm_head.logit_scale", times(1 / stored_as))
    if tied:
        keys.copies["lm_head.weight"] = head
    counts = {"prelude": c.n_prelude_layers, "core": c.n_core_layers, "coda": c.n_coda_layers}
    blocks = [f"{part}_blocks.{i}" for part, count in counts.items() for i in range(count)]
    rate = times(c.init_rate / stored_as, positive=True)
    for i, ours in enumerate(blocks):
        attn, gate, attn_rate = names.attention(i)
        base.take_llama_attention(keys, f"{ours}.attn", attn, d, (c.n_heads, c.n_kv_heads, size))
        keys.take(f"{ours}.attn.gate.weight", (gate, (width, d)))
        opened = times(d**0.25 / stored_as, squared=True)
        keys.scale_rows(f"{ours}.attn.gate.weight", gate, f"{attn}.s_gate", opened)
        keys.take(f"{ours}.attn.query_scale", (f"{attn}.sqk", (width,)))
        keys.changes[f"{attn}.sqk"] = times(math.sqrt(size) / stored_as, squared=True)
        mlp, mlp_rate = names.mlp(i)
        base.take_llama_mlp(keys, f"{ours}.mlp", mlp, d, c.d_ff)
        for name in ("gate", "up"):
            theirs, by = f"{mlp}.{name}_proj.weight", f"{mlp}.suv_{name}"
            keys.scale_rows(f"{ours}.mlp.up.weight", theirs, by, times(math.sqrt(d)))
        for branch, key in (("attn", attn_rate), ("mlp", mlp_rate)):
            keys.take(f"{ours}.rate_{branch}", (key, (d,)))
            keys.changes[key] = rate
    return keys


def times(
    by: float, *, squared: bool = False, positive: bool = False
) -> Callable[[Tensor], Tensor]:
    """A stored scale as it is used: times a number, then squared or without its sign."""

    def change(stored: Tensor) -> Tensor:
        used = stored * by
        if squared:
            return used.square()
        return used.abs() if positive else used

    return change
