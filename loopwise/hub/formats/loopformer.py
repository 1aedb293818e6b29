"""LoopFormer as transformers' remote code saves it (``armenjeddi/loopformer`` and its models).

Source: Jeddi et al. 2026, arXiv:2602.11451, and github.com/armenjeddi/loopformer (MIT). The
``ckpt.pt`` of its training script holds Python objects beside the weights and does not load.
"""

from __future__ import annotations

from loopwise.hub.fields import Fields
from loopwise.hub.formats import base
from loopwise.hub.formats.base import Plan
from loopwise.hub.keys import KeyMap
from loopwise.hub.read import Source
from loopwise.models.loopformer import LoopFormerConfig

PREFIX = "gpt."  # of every key, where the class of transformers wraps the model
N_LOOPS = 8  # of training, where the config does not say; the published model always runs these
TIME_WIDTH = 256  # fixed in the published code


class LoopFormer:
    """See :class:`loopwise.hub.formats.base.Format`."""

    name = "loopformer"
    about = "LoopFormer: model_type loopformer, or LoopFormerGPTForCausalLM"

    def recognises(self, source: Source) -> bool:
        return base.is_kind(source, "loopformer", "LoopFormerGPTForCausalLM")

    def plan(self, source: Source) -> Plan:
        fields = Fields(source.config, self.name)
        fields.never("bias", "quantization_config")
        fields.ignore("dropout")
        tied = fields.flag("tie_word_embeddings", default=True)
        said = source.config.get("max_model_loops") is not None
        config = LoopFormerConfig(
            vocab_size=fields.integer("vocab_size"),
            d_model=fields.integer("n_embd", "hidden_size"),
            n_heads=fields.integer("n_head", "num_attention_heads"),
            d_ff=fields.integer("intermediate_dim", "n_inner"),
            n_layers=fields.integer("n_layer", "num_hidden_layers"),
            n_loops=fields.integer("max_model_loops", default=N_LOOPS),
            max_positions=fields.integer("block_size", "n_positions"),
            time_width=TIME_WIDTH,
            tie_embeddings=tied,
        )
        prefix = PREFIX if all(key.startswith(PREFIX) for key in source.shapes) else ""
        notes = [
            f"the loop is cut into {config.n_loops} steps"
            + ("" if said else ", which config.json does not say")
            + "; for another number change model.n_loops in the converted config.json"
        ]
        return Plan(
            architecture="loopformer",
            config=config,
            keys=key_map(config, prefix),
            depth=base.always(config.n_loops),
            unread=fields.unread(),
            notes=notes,
        )


def key_map(c: LoopFormerConfig, prefix: str = PREFIX) -> KeyMap:
    keys, d = KeyMap(), c.d_model

    def take(ours: str, theirs: str, *shape: int) -> None:
        keys.take(ours, (f"{prefix}{theirs}", shape))

    take("embedding.weight", "transformer.wte.weight", c.vocab_size, d)
    take("position_embedding.weight", "transformer.wpe.weight", c.max_positions, d)
    take("norm_final.weight", "transformer.norm_f.weight", d)
    if c.tie_embeddings:
        keys.copies[f"{prefix}lm_head.weight"] = f"{prefix}transformer.wte.weight"
    else:
        take("unembedding.weight", "lm_head.weight", c.vocab_size, d)
    for ours, theirs in (("time", "time_embedder"), ("step", "dt_embedder")):
        for name, number, width in (("project_in", 0, c.time_width), ("project_out", 2, d)):
            take(f"modulation.{ours}.{name}.weight", f"{theirs}.mlp.{number}.weight", d, width)
            take(f"modulation.{ours}.{name}.bias", f"{theirs}.mlp.{number}.bias", d)
    for i in range(c.n_layers):
        ours, theirs = f"core_blocks.{i}", f"transformer.h.blocks.{i}"
        take(f"{ours}.attn.qkv.weight", f"{theirs}.attn.c_attn.weight", 3 * d, d)
        take(f"{ours}.attn.out.weight", f"{theirs}.attn.c_proj.weight", d, d)
        take(f"{ours}.mlp.up.weight", f"{theirs}.mlp.c_fc.weight", c.d_ff, d)
        take(f"{ours}.mlp.down.weight", f"{theirs}.mlp.c_proj.weight", d, c.d_ff)
        take(f"modulation.layers.{i}.weight", f"{theirs}.adaLN_modulation.1.weight", 4 * d, d)
        take(f"modulation.layers.{i}.bias", f"{theirs}.adaLN_modulation.1.bias", 4 * d)
    return keys
