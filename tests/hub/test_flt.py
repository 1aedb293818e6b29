"""LT, LT_ia, FLT and FLT_res as their authors' scripts save them, against float64 loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwise.errors import CheckpointError
from loopwise.hub.convert import convert
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.hub.folders import IDS, Shapes, Tensors, arrays, decode, fill, forward, gap
from tests.hub.mathematics import Array, Sequence, attend, rms, rotate

D, H, H_KV, SIZE, LAYERS, VOCAB, PADDED = 16, 4, 2, 4, 2, 258, 320
CONFIG: dict[str, Any] = {
    "model_type": "FLT",
    "dropout": 0.01,
    "K": 3,
    "sequence_len": 1024,
    "vocab_size": VOCAB,
    "n_layer": LAYERS,
    "n_head": H,
    "n_kv_head": H_KV,
    "n_embd": D,
    "activation_offload": False,
    "activation_offload_keep_last": 1,
    "loss_type": "END",
    "attn_type": "full",
    "kv_lora_rank": 128,
    "window_pattern": "L",
}
KINDS = ("LT", "LT_ia", "FLT_res", "FLT")


def shapes() -> Shapes:
    out: Shapes = {"transformer.wte.weight": (PADDED, D), "lm_head.weight": (PADDED, D)}
    for i in range(LAYERS):
        layer = f"transformer.h.{i}"
        out[f"{layer}.attn.c_q.weight"] = out[f"{layer}.attn.c_proj.weight"] = (D, D)
        out[f"{layer}.attn.c_k.weight"] = out[f"{layer}.attn.c_v.weight"] = (H_KV * SIZE, D)
        out[f"{layer}.mlp.c_fc.weight"] = (4 * D, D)
        out[f"{layer}.mlp.c_proj.weight"] = (D, 4 * D)
    return out


def tensors() -> Tensors:
    return fill(shapes())


def folder(path: Path, weights: Tensors, **changes: Any) -> Path:
    """``meta_STEP.json`` beside ``model_STEP.pt``, with an optimiser's file in the way."""
    path.mkdir()
    meta = {"step": 1000, "val_bpb": 1.0, "model_config": {**CONFIG, **changes}}
    (path / "meta_001000.json").write_text(json.dumps(meta))
    (path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    torch.save({f"_orig_mod.{k}": v for k, v in weights.items()}, path / "model_001000.pt")
    torch.save({"state": 1}, path / "optim_001000_rank0.pt")
    return path


def converted(source: Path, dtype: torch.dtype = torch.float64) -> LoopedLM:
    out = source.parent / "out"
    if not out.exists():
        convert(source, out, allow_pickle=True)
    return load_checkpoint(out, dtype).model


class NaiveFLT:
    """The forward pass; ``wrong`` names conventions to break, to show that each one matters."""

    def __init__(self, kind: str, wrong: str = "") -> None:
        self.w, self.kind, self.wrong = arrays(tensors()), kind, wrong

    def norm(self, x: Array) -> Array:
        return rms(x, np.ones(len(x)), 2.0**-23)

    def heads(self, key: str, x: Array, position: int) -> Array:
        """Turned by minus the angle, then normed a head."""
        turn = position if self.wrong == "turned forward" else -position
        heads = (self.w[key] @ x).reshape(-1, SIZE)
        heads = np.stack([rotate(head, turn, 10_000.0, False) for head in heads])
        return heads if self.wrong == "no q/k norm" else np.stack([self.norm(h) for h in heads])

    def layer(self, i: int, xs: Sequence, hs: Sequence | None) -> Sequence:
        layer = f"transformer.h.{i}"
        if hs is not None and self.kind == "FLT_res":
            xs, hs = [self.norm(x + h) for x, h in zip(xs, hs, strict=True)], None
        asks = xs if hs is None or (self.kind == "LT_ia" and i > 0) else hs
        if self.wrong == "keys from the state too" and hs is not None:
            xs = hs
        queries, keys, values = [], [], []
        for position, (ask, x) in enumerate(zip(asks, xs, strict=True)):
            seen = self.norm(x)
            queries.append(self.heads(f"{layer}.attn.c_q.weight", self.norm(ask), position))
            keys.append(self.heads(f"{layer}.attn.c_k.weight", seen, position))
            values.append((self.w[f"{layer}.attn.c_v.weight"] @ seen).reshape(-1, SIZE))
        out = self.w[f"{layer}.attn.c_proj.weight"]
        xs = [x + out @ y for x, y in zip(xs, attend(queries, keys, values), strict=True)]
        up, down = self.w[f"{layer}.mlp.c_fc.weight"], self.w[f"{layer}.mlp.c_proj.weight"]
        return [x + down @ np.maximum(up @ self.norm(x), 0) ** 2 for x in xs]

    def forward(self, ids: list[int], depth: int) -> Array:
        embedded = [self.norm(self.w["transformer.wte.weight"][token]) for token in ids]
        xs, hs = embedded, None
        for r in range(depth):
            if r:
                hs = [self.norm(x) for x in xs]
                xs = hs if self.kind == "LT" or self.wrong == "no restart" else embedded
            for i in range(LAYERS):
                xs = self.layer(i, xs, None if self.kind == "LT" else hs)
        logits = [self.w["lm_head.weight"][:VOCAB] @ self.norm(x) for x in xs]
        if self.wrong == "no cap":
            return np.stack(logits)
        return np.stack([15 * np.tanh(row / 15) for row in logits])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_documented_mathematics(
    tmp_path: Path, kind: str, depth: int
) -> None:
    source = folder(tmp_path / "flt", tensors(), model_type=kind)
    wanted = NaiveFLT(kind).forward(IDS, depth)
    assert wanted.std() > 0.1
    model = converted(source)
    assert forward(model, depth).shape == (len(IDS), VOCAB), "padding rows are no tokens"
    assert gap(forward(model, depth), wanted) < 1e-8
    assert gap(forward(converted(source, torch.float32), depth), wanted) < 1e-4


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_equals_the_full_forward_pass(
    tmp_path: Path, kind: str, depth: int
) -> None:
    """In the authors' code it does not: only the last loop's keys and values are kept."""
    model = converted(folder(tmp_path / "flt", tensors(), model_type=kind))
    assert gap(decode(model, depth), forward(model, depth)) < 1e-5


@pytest.mark.parametrize(
    "wrong", ["turned forward", "no q/k norm", "keys from the state too", "no restart", "no cap"]
)
def test_no_other_convention_gives_these_logits(tmp_path: Path, wrong: str) -> None:
    model = converted(folder(tmp_path / "flt", tensors()))
    assert gap(forward(model, 2), NaiveFLT("FLT", wrong).forward(IDS, 2)) > 1e-3


@pytest.mark.parametrize(("loss", "depths"), [("END", (3, 3)), ("FEW", (3, 3)), ("STEP", (1, 3))])
def test_what_the_source_says_of_training_is_kept(
    tmp_path: Path, loss: str, depths: tuple[int, int]
) -> None:
    converted(folder(tmp_path / "flt", tensors(), loss_type=loss))
    saved = load_checkpoint(tmp_path / "out")
    assert (saved.trained_mean_depth, saved.trained_depths) == (3, depths)


def test_pickles_must_be_allowed(tmp_path: Path) -> None:
    source = folder(tmp_path / "flt", tensors())
    with pytest.raises(CheckpointError, match=r"model_001000.pt.* --allow-pickle"):
        convert(source, tmp_path / "out")


def test_several_steps_in_one_folder_are_not_guessed_between(tmp_path: Path) -> None:
    source = folder(tmp_path / "flt", tensors())
    (source / "meta_002000.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"2 checkpoints \(meta_001000 .. meta_002000\)"):
        convert(source, tmp_path / "out", allow_pickle=True)
    (source / "meta_001000.json").unlink()
    with pytest.raises(CheckpointError, match="no model_config"):
        convert(source, tmp_path / "out", allow_pickle=True)
    (source / "meta_002000.json").write_text('{"model_config": {}}')
    with pytest.raises(CheckpointError, match=r"no model_002000.pt"):
        convert(source, tmp_path / "out", allow_pickle=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "LT_i"}, "model_type='LT_i'"),
        ({"model_type": "FLT_rl"}, "model_type='FLT_rl'"),
        ({"attn_type": "mla"}, "attn_type='mla'"),
        ({"window_pattern": "SL"}, "gives layers 0 a sliding window"),
        ({"window_pattern": "LX"}, "window_pattern='LX'"),
        ({"n_head": None}, "no n_head"),
        ({"vocab_size": 400}, "expected (448, 16)"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as failure:
        convert(folder(tmp_path / "flt", tensors(), **changes), tmp_path / "out", allow_pickle=True)
    assert named in str(failure.value)


def test_a_window_of_the_last_layer_is_none(tmp_path: Path) -> None:
    converted(folder(tmp_path / "flt", tensors(), window_pattern="LS"))
