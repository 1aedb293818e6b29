"""What Huginn and the retrofits of it share: config fields and key names of the Raven code."""

from __future__ import annotations

import math

from loopwise.errors import CheckpointError
from loopwise.hub.fields import Fields
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.raven import RavenConfig

# The norms of a block by their place in ours.
NORMS = {
    "sandwich": ("norm_attn_in", "norm_attn_out", "norm_mlp_in", "norm_mlp_out"),
    "pre-norm": ("norm_attn_in", "norm_mlp_in"),
    "post-norm": ("norm_attn_out", "norm_mlp_out"),
}


def is_raven(source: Source) -> bool:
    """The model type and class are the same in all of them; the keys tell them apart."""
    names = source.config.get("architectures") or []
    return source.config.get("model_type") == "huginn_raven" or "RavenForCausalLM" in names


def has(source: Source, ending: str) -> bool:
    return any(key.startswith("transformer.") and key.endswith(ending) for key in source.shapes)


def check_common(fields: Fields) -> None:
    """Refuse what no published checkpoint uses and our architecture does not do."""
    fields.only("injection_type", "linear")
    fields.only("state_init", "like-init")
    fields.only("mlp_class_name", "GatedMLP")
    fields.only("nonlin_name", "SiLU")
    fields.only("block_class_name", "SandwichBlock")  # the name is kept by every retrofit
    fields.only("norm_class_name", "RMSNorm_llama", "RMSNorm")
    fields.never("bias")
    fields.ignore("architecture_class_name", "init_strategy", "init_orthogonal", "block_size")
    fields.ignore("padding_multiple", "sampling_scheme", "activation_checkpoint_impl")
    fields.ignore("effective_expected_depth", "test_time_noise_type", "tie_word_embeddings")
    fields.never("test_time_noise")


def initial_values(fields: Fields, width: int | None = None) -> tuple[float, float]:
    """Embedding scale and the standard deviation of the first latent.

    Where ``init_values`` is part of the file, it wins over what the width would give: retrofits
    keep the 5280-wide original's ``std`` and an ``embed_scale`` of 1, whatever their own width is.

    Args:
        width: of the model, for sources whose code computes the values where the file has none.
    """
    values = fields.section("init_values")
    if values is None and width is not None:
        return math.sqrt(width), math.sqrt(2 / 5)  # sqrt(2 / (5 width)) x sqrt(width)
    if values is None:
        raise CheckpointError(
            "config.json has no init_values; the embedding scale and the spread of the first "
            "latent stand there and cannot be guessed"
        )
    inner = Fields(values, "Raven", "config.json init_values")
    scale = inner.number("embed_scale")
    std = inner.number("std") * scale
    if not (0 < scale < math.inf and 0 < std < math.inf):
        raise CheckpointError(f"config.json has init_values={dict(values)!r}; they must be above 0")
    return scale, std


def layer_counts(fields: Fields) -> tuple[int, int, int]:
    """Layers of prelude, core and coda; the total must agree.

    Raises:
        CheckpointError: ``n_layers`` is another number.
    """
    prelude = fields.integer("n_layers_in_prelude")
    core = fields.integer("n_layers_in_recurrent_block")
    coda = fields.integer("n_layers_in_coda")
    both = prelude + core + coda
    total = fields.integer("n_layers", "num_hidden_layers", default=both)
    if total != both:
        raise CheckpointError(
            f"config.json has n_layers={total}, but its prelude, core and coda sum to {both}"
        )
    return prelude, core, coda


def key_map(c: RavenConfig) -> KeyMap:
    """Every key of a Raven checkpoint of this shape, save rotary tables."""
    keys, d = KeyMap(), c.d_model
    size = d // c.n_heads
    keys.take("embedding.weight", ("transformer.wte.weight", (c.vocab_size, d)))
    keys.take("adapter.weight", ("transformer.adapter.weight", (d, 2 * d)))
    keys.take("norm_final.weight", ("transformer.ln_f.weight", (d,)))
    if c.tie_embeddings:
        keys.copies["lm_head.weight"] = "transformer.wte.weight"
    else:
        keys.take("unembedding.weight", ("lm_head.weight", (c.vocab_size, d)))
    parts = {
        "prelude": ("prelude", c.n_prelude_layers),
        "core": ("core_block", c.n_core_layers),
        "coda": ("coda", c.n_coda_layers),
    }
    width = (c.n_heads + 2 * c.n_kv_heads) * size
    for part, (theirs, count) in parts.items():
        for i in range(count):
            block, source = f"{part}_blocks.{i}", f"transformer.{theirs}.{i}"
            keys.take(f"{block}.attn.qkv.weight", (f"{source}.attn.Wqkv.weight", (width, d)))
            keys.take(f"{block}.attn.out.weight", (f"{source}.attn.proj.weight", (d, d)))
            keys.take(f"{block}.mlp.up.weight", (f"{source}.mlp.fc.weight", (2 * c.d_ff, d)))
            keys.take(f"{block}.mlp.down.weight", (f"{source}.mlp.proj.weight", (d, c.d_ff)))
            for n, norm in enumerate(NORMS[c.block], start=1):
                keys.take(f"{block}.{norm}.weight", (f"{source}.norm_{n}.weight", (d,)))
            if c.qk_bias:
                shape = (2, 1, c.n_heads, size)
                keys.take(f"{block}.attn.before_phase.bias", (f"{source}.attn.qk_bias", shape))
            if c.qk_norm:
                for ours, letter, heads in (("query", "q", c.n_heads), ("key", "k", c.n_kv_heads)):
                    key = (f"{source}.attn.{letter}_norm.weight", (heads * size,))
                    keys.take(f"{block}.attn.before_phase.{ours}.weight", key)
    return keys
