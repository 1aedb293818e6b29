"""A GGUF file of a Llama-shaped model, read as if it were a published folder.

Quantised tensors come out as the float32 values they stand for. llama.cpp turns neighbouring
channels where transformers turns channels half a head apart, so its files hold the rows of query
and key projections in another order; here they are put back.

Source: the GGUF specification and conversion script of llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwise.errors import CheckpointError, require_extra
from loopwise.hub.chat import check_names
from loopwise.hub.read import DEFAULT_TEMPLATE, Shape, Source, refuse_pointer

ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FIELDS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
_MAGIC = b"GGUF"
CONTROL = 3  # token type of special tokens
# Pre-tokenizers by llama.cpp's name for them: what comes before the byte-level split.
SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}


def open_gguf(path: Path) -> Source:
    """Look into a GGUF file; tensors are dequantised one at a time as they are read.

    Raises:
        CheckpointError: not GGUF, truncated, of a shape other than Llama's, or a Git LFS pointer.
        MissingExtraError: `gguf` is not installed.
    """
    gguf = require_extra("gguf", "smollm2", f"reading {path.name!r}")
    refuse_pointer(path)
    try:
        reader = gguf.GGUFReader(path)
        said = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as err:  # as damage shows
        raise CheckpointError(f"{str(path)!r} {_damage(path, gguf.GGUF_VERSION)}") from err
    tensors = {_key(tensor.name): tensor for tensor in reader.tensors}
    shapes: dict[str, Shape] = {
        key: tuple(int(n) for n in reversed(tensor.shape)) for key, tensor in tensors.items()
    }
    config = _config(path, said, tied="lm_head.weight" not in tensors)

    def read(key: str) -> Tensor:
        tensor = tensors[key]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.astype(np.float32).reshape(shapes[key])
        if key.endswith("q_proj.weight"):
            values = halves_apart(values, config["num_attention_heads"])
        elif key.endswith("k_proj.weight"):
            values = halves_apart(values, config["num_key_value_heads"])
        return torch.from_numpy(values.copy())

    return Source(
        path=path,
        config=config,
        shapes=shapes,
        read=read,
        tokenizer=lambda: tokenizer_json(path, said),
        special_ids=_special_ids(said),
        chat_templates=_chat_templates(path, said),
        license=_license(said.get("general.license")),
    )


def _damage(path: Path, newest: int) -> str:
    """What is wrong with a file that the library could not read, which says it in its own words.

    Args:
        newest: version of the format that the library knows.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if magic != _MAGIC:
        return f"is no GGUF file: its {size:,} bytes do not begin with GGUF; copy it again"
    if version > newest:
        return (
            f"says it is of GGUF version {version}, and {newest} is the newest known; copy it again"
        )
    return (
        f"is truncated or damaged: its {size:,} bytes do not hold what its header announces; "
        "copy it again"
    )


def halves_apart(weight: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs (0, 1), (2, 3) ... to pairs half a head apart."""
    rows, width = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def tokenizer_json(path: Path, said: Mapping[str, Any]) -> str:
    """A ``tokenizer.json`` of the vocabulary inside the file.

    Raises:
        CheckpointError: it is not byte-level BPE split in a way we know.
    """
    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise CheckpointError(
            f"{str(path)!r} has a tokenizer of kind {kind!r} split as {split!r}; loopwise reads "
            f"'gpt2' split as {' or '.join(map(repr, SPLITS))} there; give its tokenizer.json with "
            "--tokenizer"
        )
    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": token, "special": True, **plain}
                for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
                if type_ == CONTROL
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*SPLITS[split], byte_level],
            },
            "post_processor": _beginning(path, said),
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in said["tokenizer.ggml.merges"]],
            },
        },
        ensure_ascii=False,
    )


def _beginning(path: Path, said: Mapping[str, Any]) -> dict[str, Any] | None:
    """A post-processor that puts the start token before a text, where the file asks for it.

    Raises:
        CheckpointError: the start token is none of the vocabulary.
    """
    bos = said.get("tokenizer.ggml.bos_token_id")
    if bos is None or not said.get("tokenizer.ggml.add_bos_token"):
        return None
    tokens = said["tokenizer.ggml.tokens"]
    if not isinstance(bos, int) or not 0 <= bos < len(tokens):
        raise CheckpointError(
            f"{str(path)!r} has tokenizer.ggml.bos_token_id {bos}, beyond its {len(tokens)} "
            "tokens; copy it again, or give its tokenizer.json with --tokenizer"
        )
    name = tokens[bos]
    first, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"id": "A", "type_id": 0}
    both = [first, {"Sequence": text}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": text}],
        "pair": both,
        "special_tokens": {name: {"id": name, "ids": [int(bos)], "tokens": [name]}},
    }


def _key(name: str) -> str:
    """Transformers' name of a tensor; a name we do not know stays, to be refused by the key map."""
    stem, _, kind = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{kind}"
    head, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if head == "blk" and number.isdecimal() and part in LAYER:
        return f"model.layers.{number}.{LAYER[part]}.{kind}"
    return name


def _config(path: Path, said: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """What transformers' ``config.json`` would say; fields we do not know keep their names.

    Raises:
        CheckpointError: another architecture, or what our Llama does not do.
    """
    kind = said.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"{str(path)!r} holds a model of architecture {kind!r}; loopwise reads GGUF files of "
            "'llama' only; convert the published folder instead"
        )
    own = {key.removeprefix("llama."): v for key, v in said.items() if key.startswith("llama.")}
    for name in ("rope.scaling.type", "expert_count"):
        if own.pop(name, None) not in (None, 0, "none"):
            raise CheckpointError(
                f"{str(path)!r} has llama.{name}={said[f'llama.{name}']!r}, which loopwise does "
                "not read from GGUF; convert the published folder instead"
            )
    config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": tied}
    config["vocab_size"] = len(said.get("tokenizer.ggml.tokens", ()))
    for name, value in own.items():
        # Floats are stored in 32 bits; 1e-5 is meant, not its nearest float32.
        plain = float(str(np.float32(value))) if isinstance(value, float) else value
        config[FIELDS.get(name, f"llama.{name}")] = plain
    turned = config.pop("llama.rope.dimension_count", None)
    size = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if turned not in (None, size):
        raise CheckpointError(
            f"{str(path)!r} turns {turned} of the {size} channels of a head; loopwise turns all"
        )
    return config


def _chat_templates(path: Path, said: Mapping[str, Any]) -> dict[str, str]:
    """By name; the one without a name is the default.

    Raises:
        CheckpointError: a name that is no plain file name.
    """
    found = {DEFAULT_TEMPLATE: said.get("tokenizer.chat_template")}
    names = said.get("tokenizer.chat_templates", ())
    check_names(names, path)
    for name in names:
        found[name] = said.get(f"tokenizer.chat_template.{name}")
    return {name: text for name, text in found.items() if text}


def _license(said: Any) -> str | None:
    """A name of one word, as model cards have it."""
    return said if isinstance(said, str) and re.fullmatch(r"[\w.+-]+", said) else None


def _special_ids(said: Mapping[str, Any]) -> dict[str, int]:
    ids = {name: said.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {name: int(value) for name, value in ids.items() if value is not None}
