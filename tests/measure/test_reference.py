"""A reference reads the very text of a trace: the same bytes, cut at the same places."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from loopwise.data import Document, PackedBlocks, generate, tokenize
from loopwise.errors import ShapeError, TraceError
from loopwise.measure.convergence import byte_sums, summarise
from loopwise.measure.reference import (
    measure_reference,
    name_of,
    pieces,
    read_reference,
    write_reference,
)
from loopwise.measure.trace import Trace, TraceInfo, write_trace
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.models.layers import row_seeds
from loopwise.models.loopformer import LoopFormerConfig, LoopFormerModel
from loopwise.models.recurrent import RecurrentConfig, RecurrentModel
from loopwise.models.views import PackedView
from loopwise.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from tests.conftest import TINY, make_model

INFO = TraceInfo(
    checkpoint="somewhere",
    weights_hash="abc",
    corpus="stories",
    text_hash="def",
    trained_mean_depth=4.0,
    trained_depths=(1, 12),
)
TEXTS = ["Zürich 🙂🙂 liegt am See.", "x", "日本語のテキスト and more of it.", "", "The end 🙂"]
STORIES = [d.text for d in generate("stories", 0, 0, 3)]


def traced(folder: Path, texts: list[str], seq: int = 16, limit: int | None = None) -> Trace:
    store = tokenize([Document(text) for text in texts], ByteTokenizer())
    blocks = PackedBlocks(store, seq, seed=0, shuffle=False)
    model = make_model(latent_init="noise")
    lengths = ByteTokenizer().byte_lengths()
    return write_trace(model, blocks, folder, INFO, horizon=4, limit=limit, byte_lengths=lengths)


def saved(folder: Path, model: LoopedLM, tokenizer: Tokenizer, **training: Any) -> Checkpoint:
    save_checkpoint(folder, model, tokenizer, {"depth": {"true_mean": 3.0}, **training})
    return load_checkpoint(folder)


@pytest.fixture
def same(tmp_path) -> Checkpoint:
    """The traced model itself, as a reference of depth 3."""
    return saved(tmp_path / "same", make_model(latent_init="noise"), ByteTokenizer())


@pytest.mark.parametrize("seq", [3, 5, 16, 64])
def test_pieces_are_the_text_with_no_byte_lost_or_twice(tmp_path, seq):
    """Also where the cut goes through a character."""
    trace = traced(tmp_path / "t", TEXTS, seq)
    found = list(pieces(trace, ByteTokenizer()))
    assert "".join(p.scored for p in found) == "".join(TEXTS)
    whole, at = "".join(TEXTS), 0
    for piece in found:
        assert whole[:at].endswith(piece.given)
        at += len(piece.scored)
    assert sum(not p.given for p in found) == sum(map(bool, TEXTS)), "a document begins once"


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_end_of_a_trace_cuts_off_no_more_than_a_character(tmp_path, limit):
    trace = traced(tmp_path / "t", TEXTS[:1], seq=4, limit=limit)
    text = "".join(p.scored for p in pieces(trace, ByteTokenizer()))
    assert TEXTS[0].startswith(text)
    assert 0 <= trace.header["n_bytes"] - len(text.encode()) < 4


@pytest.mark.parametrize("limit", [None, 20])
def test_a_model_is_its_own_reference_bit_for_bit(tmp_path, same, limit):
    """The same cuts, start tokens, positions and targets: nothing but rounding may differ."""
    trace = traced(tmp_path / "t", STORIES, limit=limit)
    found = measure_reference(trace, ByteTokenizer(), same)
    bits = summarise(trace, ByteTokenizer(), epsilon=1e-3)["bits_per_byte"]
    assert found["depth"] == 3
    assert found["bits_per_byte"]["mean"] == pytest.approx(bits[2], rel=1e-5)
    assert found["bytes"] == trace.header["n_bytes"]
    assert found["best_depth"] == int(np.argmin(bits)) + 1
    assert found["best_bits_per_byte"]["mean"] == pytest.approx(min(bits), rel=1e-6)
    gap = found["above_bits_per_byte"]
    assert gap["low"] <= gap["mean"] <= gap["high"]
    assert gap["mean"] == pytest.approx(min(bits) - bits[2], abs=1e-5)


def test_the_difference_is_paired_by_block(tmp_path):
    """A model beside itself at its best depth: whatever is drawn, there is none."""
    trace = traced(tmp_path / "t", STORIES)
    best = float(byte_sums(trace, ByteTokenizer()).mean.argmin() + 1)
    model = make_model(latent_init="noise")
    own = saved(tmp_path / "own", model, ByteTokenizer(), depth={"true_mean": best})
    found = measure_reference(trace, ByteTokenizer(), own)
    assert found["best_depth"] == found["depth"] == best
    assert list(found["above_bits_per_byte"].values()) == pytest.approx([0, 0, 0], abs=1e-5)
    assert found["bits_per_byte"]["high"] - found["bits_per_byte"]["low"] > 0.01


def test_a_reference_of_another_tokenizer_is_scored_piece_by_piece(tmp_path):
    """Against a loop over pieces that knows nothing of batches."""
    bpe = BPETokenizer.train(STORIES, 300)
    torch.manual_seed(1)
    model = RecurrentModel(RecurrentConfig(vocab_size=bpe.vocab_size, **TINY)).eval()
    other = saved(tmp_path / "other", model, bpe)
    trace = traced(tmp_path / "t", STORIES, seq=40)
    total = 0.0
    for piece in pieces(trace, ByteTokenizer()):
        given = bpe.encode(piece.given) or [bpe.bos_id]
        ids = torch.tensor([[*given, *bpe.encode(piece.scored)]])
        logits = _logits(model, ids, 3)
        start = len(given)
        total += F.cross_entropy(logits[0, start - 1 : -1], ids[0, start:], reduction="sum").item()
    seen: list[tuple[int, int]] = []
    found = measure_reference(trace, ByteTokenizer(), other, lambda *done: seen.append(done))
    n_bytes = sum(len(text.encode()) for text in STORIES)
    assert found["bytes"] == n_bytes
    assert found["bits_per_byte"]["mean"] == pytest.approx(total / n_bytes / math.log(2), rel=1e-5)
    assert found["tokens"] < trace.n_tokens
    assert found["start_token"] == "<|endoftext|>"
    assert seen[-1][0] == seen[-1][1]


@torch.no_grad()
def _logits(model: LoopedLM, ids: torch.Tensor, depth: int) -> torch.Tensor:
    positions = torch.arange(ids.shape[1])[None]
    view = PackedView(model.geometry.rope, positions, None, model.dtype, ids)
    injection = model.prelude(ids, view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)


def test_ends_of_documents_are_no_bits_of_their_bytes(tmp_path):
    trace = traced(tmp_path / "t", STORIES)
    sums = byte_sums(trace, ByteTokenizer())
    text = trace["target"] < 256
    wanted = trace["loss"][text].astype(float).sum(axis=0) / text.sum()
    assert sums.mean == pytest.approx(wanted)
    assert 0 < (~text).sum() == len(STORIES)


def test_what_is_stored_is_of_this_trace_or_nothing(tmp_path, same):
    trace = traced(tmp_path / "t", STORIES[:1])
    assert read_reference(trace) is None
    found = measure_reference(trace, ByteTokenizer(), same)
    write_reference(trace, found)
    assert read_reference(trace) == found
    write_reference(trace, {**found, "traced_weights_hash": "of another"})
    assert read_reference(trace) is None
    (trace.folder / "reference.json").write_text("[]")
    with pytest.raises(TraceError, match=r"reference\.json"):
        read_reference(trace)


def test_a_stored_reference_that_lacks_a_part_is_one_line(tmp_path, same):
    """It was a KeyError, of whoever read that part first."""
    trace = traced(tmp_path / "t", STORIES[:1])
    found = measure_reference(trace, ByteTokenizer(), same)
    for key in found:
        if key not in ("format", "version"):
            write_reference(trace, {k: v for k, v in found.items() if k != key})
            with pytest.raises(TraceError, match=rf"reference\.json.* is damaged: {key} missing"):
                read_reference(trace)
    write_reference(trace, {**found, "bits_per_byte": {"mean": 1.0}, "depth": "8"})
    with pytest.raises(TraceError, match="depth, bits_per_byte missing or of the wrong kind"):
        read_reference(trace)
    write_reference(trace, {"version": 2})
    assert read_reference(trace) is None, "of another version, which may have other parts"


def test_a_trace_without_text_is_refused(tmp_path, same):
    trace = traced(tmp_path / "t", [""] * 9)
    with pytest.raises(TraceError, match="no text"):
        measure_reference(trace, ByteTokenizer(), same)


def test_a_reference_is_called_by_its_source_or_its_run(tmp_path):
    def name(folder: str, source: str | None = None) -> str:
        training = {} if source is None else {"converted_from": {"folder": source}}
        return name_of(saved(tmp_path / folder, make_model(), ByteTokenizer(), **training))

    assert name("smol", "SmolLM2-135M-Instruct.Q4_1.gguf") == "SmolLM2-135M-Instruct.Q4_1"
    assert name("llama", "0123456789abcdef" * 2 + "01234567") == "llama", "a snapshot's hash"
    assert name("mine/checkpoints/step-9") == "mine"
    facts = {"converted_from": {"folder": "SmolLM2-135M"}, "retrofitted_from": {"checkpoint": "x"}}
    looped = saved(tmp_path / "looped", make_model(), ByteTokenizer(), **facts)
    assert name_of(looped) == "looped", "what was cut and looped is no longer its source"


def test_a_piece_past_its_positions_is_refused_before_shorter_ones_run(tmp_path, monkeypatch):
    monkeypatch.setattr("loopwise.measure.reference._BATCH_LOGITS", 1)  # one piece at a time
    trace = traced(tmp_path / "t", ["short", "a longer text than that"], seq=16)
    config = LoopFormerConfig(
        vocab_size=258, d_model=16, n_heads=2, d_ff=24, n_layers=1, max_positions=12
    )
    other = saved(tmp_path / "other", LoopFormerModel(config), ByteTokenizer())
    seen: list[tuple[int, int]] = []
    with pytest.raises(ShapeError, match="limit of 12"):
        measure_reference(trace, ByteTokenizer(), other, lambda *done: seen.append(done))
    assert not seen
