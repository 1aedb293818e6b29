"""The measuring stage: no fit ever sees what is measured, now or in any later measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopwise.data import Document, TokenBatch, document_hash, generate
from loopwise.data.packing import NO_TARGET
from loopwise.errors import DataError, RunFolderError
from loopwise.measure.trace import Trace
from loopwise.models.checkpoint import (
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    write_exits,
)
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.settings import MeasureConfig
from loopwise.study import measuring
from loopwise.study.measuring import fit_stage, measure_stage
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model

TRAINING = {"seq": 48, "depth": {"true_mean": 3.0, "p99": 4}}
CONFIG = MeasureConfig(horizon=4, tokens=100_000, fit_tokens=1500, batch=4)


def a_checkpoint(path: Path, model: Any = None) -> Checkpoint:
    model = model or make_model(injection="add", n_core_layers=1)
    save_checkpoint(path, model, ByteTokenizer(), TRAINING)
    return load_checkpoint(path)


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    return a_checkpoint(tmp_path / "ckpt")


def texts(corpus: str = "stories", first: int = 0, count: int = 8) -> list[Document]:
    return list(generate(corpus, 0, first, count))


def traced_texts(trace: Trace) -> list[str]:
    """The documents a trace holds, read back from its tokens."""
    batch, pieces = trace.blocks(), []
    for ids, targets in zip(batch.token_ids, batch.targets, strict=True):
        for i, t in zip(ids.tolist(), targets.tolist(), strict=True):
            if i == 256:
                pieces.append([])
            elif i < 256 and (t != NO_TARGET or i):
                pieces[-1].append(i)
    return [bytes(p).decode() for p in pieces]


def measure(checkpoint: Checkpoint, corpora: dict, folder: Path, **changes: Any) -> list[Trace]:
    events: list = changes.pop("events", [])
    config = MeasureConfig(**{**{"horizon": 4, "fit_tokens": 1500, "batch": 4}, **changes})
    return measure_stage(checkpoint, corpora, config, folder, events.append)


def test_fitted_and_measured_documents_are_disjoint_and_whole(checkpoint, tmp_path):
    corpora = {"stories": texts(), "ledgers": texts("ledgers")}
    traces = measure(checkpoint, corpora, tmp_path / "t")
    fitted = set(load_checkpoint(checkpoint.path).exits["fitted_on"])
    assert fitted
    for trace, (name, documents) in zip(traces, corpora.items(), strict=True):
        assert trace.header["corpus"] == name
        of_fit = [d.text for d in documents if document_hash(d) in fitted]
        measured = [d.text for d in documents if document_hash(d) not in fitted]
        assert of_fit, f"{name}: nothing was fitted on"
        assert traced_texts(trace) == measured


FITS = ["latent-kl", "certified", "probe"]


def spy_on_fit(monkeypatch, name: str) -> list[int]:
    """The tokens that reach the fit of a rule, in order, as they come."""
    seen: list[int] = []
    sources = {"probe": "probe_examples", "latent-kl": "trace_batch", "certified": "reach_examples"}
    source = sources[name]
    real = getattr(measuring, source)

    def spying(model, given, *args):
        given = given if isinstance(given, TokenBatch) else list(given)
        for batch in [given] if isinstance(given, TokenBatch) else given:
            seen.extend(batch.targets[batch.targets != NO_TARGET].tolist())
        return real(model, given, *args)

    monkeypatch.setattr(measuring, source, spying)
    return seen


@pytest.mark.parametrize("name", FITS)
def test_rules_are_fitted_on_what_fitted_on_says(checkpoint, tmp_path, monkeypatch, name):
    """Not only the list: the tokens that reach the fit are those documents."""
    seen = spy_on_fit(monkeypatch, name)
    documents = texts()
    measure(checkpoint, {"stories": documents}, tmp_path / "t")
    fitted = set(load_checkpoint(checkpoint.path).exits["fitted_on"])
    wanted = b"".join(d.text.encode() for d in documents if document_hash(d) in fitted)
    assert bytes(t for t in seen if t < 256) == wanted[: sum(t < 256 for t in seen)]
    assert 1000 <= len(seen) <= 1500


def test_a_document_that_comes_twice_is_not_measured_after_it_was_fitted(checkpoint, tmp_path):
    documents = texts(count=4)
    corpora = {"a": [*documents, documents[0]], "b": [*documents[::-1], documents[0]]}
    traces = measure(checkpoint, corpora, tmp_path / "t", fit_tokens=10)
    fitted = set(load_checkpoint(checkpoint.path).exits["fitted_on"])
    for trace in traces:
        for text in traced_texts(trace):
            assert document_hash(Document(text)) not in fitted


def test_a_later_measurement_leaves_out_what_the_stored_probe_saw(checkpoint, tmp_path):
    documents = texts()
    measure(checkpoint, {"stories": documents}, tmp_path / "first")
    stored = load_checkpoint(checkpoint.path)
    assert set(stored.fitted_policies()) == set(FITS)
    before = (checkpoint.path / "exits.json").read_bytes()
    mixed = [*texts(first=20, count=2), *documents]
    (again,) = measure(stored, {"mixed": mixed}, tmp_path / "second")
    fitted = set(stored.exits["fitted_on"])
    assert traced_texts(again) == [d.text for d in mixed if document_hash(d) not in fitted]
    assert len(traced_texts(again)) < len(mixed)
    assert (checkpoint.path / "exits.json").read_bytes() == before, "a rule was fitted again"
    assert again["score.probe"].shape == (again.n_tokens, 4)


def without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """As an earlier version left it, before there was such a rule."""
    stored = load_checkpoint(checkpoint.path)
    kept = {k: v for k, v in stored.exits["policies"].items() if k != name}
    return write_exits(stored, {**stored.exits, "policies": kept})


@pytest.mark.parametrize("name", FITS)
def test_a_rule_that_came_later_is_fitted_on_the_documents_of_the_first(
    checkpoint, tmp_path, monkeypatch, name
):
    """And on no others, so that traces of before hold nothing it has seen."""
    documents = texts()
    (first,) = measure(checkpoint, {"stories": documents}, tmp_path / "first")
    at_once = load_checkpoint(checkpoint.path).exits
    older = without(checkpoint, name)
    seen = spy_on_fit(monkeypatch, name)
    more = [*texts(first=20, count=2), *documents]
    (again,) = measure(older, {"mixed": more}, tmp_path / "second")
    now = load_checkpoint(checkpoint.path).exits
    assert now == at_once, "the same documents give the same rules"
    fitted = set(now["fitted_on"])
    wanted = b"".join(d.text.encode() for d in documents if document_hash(d) in fitted)
    assert bytes(t for t in seen if t < 256) == wanted[: sum(t < 256 for t in seen)]
    for trace in (first, again):
        assert not fitted & {document_hash(Document(text)) for text in traced_texts(trace)}


def test_a_rule_that_came_later_is_not_fitted_on_other_text(checkpoint, tmp_path):
    """An earlier trace may hold that text: it is said, and nothing is fitted or stored."""
    measure(checkpoint, {"stories": texts()}, tmp_path / "first")
    older = without(checkpoint, "latent-kl")
    before = (checkpoint.path / "exits.json").read_bytes()
    events: list = []
    corpora = {"other": texts(first=30, count=4)}
    (trace,) = measure(older, corpora, tmp_path / "second", events=events)
    assert any("no fit of latent-kl" in e.get("text", "") for e in events)
    assert (checkpoint.path / "exits.json").read_bytes() == before
    assert len(traced_texts(trace)) == 4, "all of it is measured"


def test_fitting_alone_gives_what_measuring_gives(checkpoint, tmp_path):
    corpora = {"stories": texts()}
    config = MeasureConfig(horizon=4, fit_tokens=1500, batch=4)
    fitted = fit_stage(checkpoint, corpora, config, lambda event: None)
    alone = (checkpoint.path / "exits.json").read_bytes()
    assert set(fitted.fitted_policies()) == set(FITS)
    (checkpoint.path / "exits.json").unlink()
    measure(load_checkpoint(checkpoint.path), corpora, tmp_path / "t")
    assert (checkpoint.path / "exits.json").read_bytes() == alone


def test_text_that_was_all_fitted_on_is_refused(checkpoint, tmp_path):
    documents = texts()
    measure(checkpoint, {"stories": documents}, tmp_path / "first")
    stored = load_checkpoint(checkpoint.path)
    fitted = set(stored.exits["fitted_on"])
    only = [d for d in documents if document_hash(d) in fitted]
    with pytest.raises(DataError, match="'stories' was used to fit exit rules"):
        measure(stored, {"stories": only}, tmp_path / "second")


def test_fitting_takes_at_most_half_of_the_documents(checkpoint, tmp_path):
    documents = texts(count=5)
    measure(checkpoint, {"stories": documents}, tmp_path / "t", fit_tokens=10**6)
    fitted = load_checkpoint(checkpoint.path).exits["fitted_on"]
    assert fitted == [document_hash(d) for d in documents[:2]]


def test_one_document_is_too_little_and_nothing_is_stored(checkpoint, tmp_path):
    only = [replace(d, source="a.txt: line 1") for d in texts(count=1)]
    remedy = f"--set data.read.max_document_chars={(len(only[0].text) + 1) // 2}"
    with pytest.raises(DataError, match=f"'stories' is one document.*{remedy}"):
        measure(checkpoint, {"stories": only}, tmp_path / "t")
    assert not (checkpoint.path / "exits.json").exists()
    assert not (tmp_path / "t").exists()


def test_text_shorter_than_a_block_is_refused_and_nothing_is_stored(checkpoint, tmp_path):
    tiny = [Document("a"), Document("b"), Document("c")]
    with pytest.raises(DataError, match="one block needs 49"):
        measure(checkpoint, {"tiny": tiny}, tmp_path / "t")
    assert not (checkpoint.path / "exits.json").exists()
    assert not (tmp_path / "t").exists()


def test_corpora_are_checked_before_any_is_traced(checkpoint, tmp_path):
    """The second corpus has text for the fit only; an hour on the first would be lost."""
    measure(checkpoint, {"stories": texts()}, tmp_path / "first")
    stored = load_checkpoint(checkpoint.path)
    corpora = {"good": texts(first=30, count=3), "bad": [Document("too short")]}
    with pytest.raises(DataError):
        measure(stored, corpora, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_the_header_ties_the_trace_to_the_weights(checkpoint, tmp_path):
    (trace,) = measure(checkpoint, {"stories": texts()}, tmp_path / "t")
    assert trace.header["weights_hash"] == checkpoint.weights_hash
    assert trace.header["checkpoint"] == str(checkpoint.path)
    assert trace.header["trained_mean_depth"] == 3.0
    cheap = ["cosine", "sketched-kl", "certified", "probe"]
    assert trace.policies == cheap, "what no standard column tells; no gate, for there is none"
    text = "".join(traced_texts(trace))
    assert trace.header["n_bytes"] == len(text.encode())


def test_a_score_that_costs_passes_over_the_vocabulary_is_recorded_when_asked(checkpoint, tmp_path):
    rules = ("kl", "min-p-kl", "short-list-kl")
    (trace,) = measure(checkpoint, {"stories": texts()}, tmp_path / "t", live_rules=rules)
    added = ["short-list-kl", "sketched-kl", "certified", "probe"]
    assert trace.policies == ["min-p-kl", "cosine", *added]
    assert trace["score.min-p-kl"].shape == (trace.n_tokens, 4)


def test_a_limit_of_tokens_is_kept(checkpoint, tmp_path):
    (trace,) = measure(checkpoint, {"stories": texts()}, tmp_path / "t", tokens=100)
    assert trace.header["n_blocks"] == 2


def test_measuring_past_training_is_said(checkpoint, tmp_path):
    events: list = []
    measure(checkpoint, {"stories": texts()}, tmp_path / "t", horizon=7, events=events)
    assert any("extrapolation" in e.get("text", "") for e in events)
    events = []
    stored = load_checkpoint(checkpoint.path)
    measure(stored, {"stories": texts()}, tmp_path / "u", horizon=4, events=events)
    assert not any(e["event"] == "warning" for e in events)


def test_a_finished_trace_is_not_measured_over(checkpoint, tmp_path):
    measure(checkpoint, {"stories": texts()}, tmp_path / "t")
    with pytest.raises(RunFolderError, match="finished trace"):
        measure(load_checkpoint(checkpoint.path), {"stories": texts()}, tmp_path / "t")


def test_a_model_of_one_recurrence_has_nothing_to_fit_or_record(tmp_path):
    config = FixedConfig(vocab_size=258, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24, n_layers=1)
    checkpoint = a_checkpoint(tmp_path / "ckpt", FixedModel(config))
    (trace,) = measure(checkpoint, {"stories": texts(count=2)}, tmp_path / "t", horizon=8)
    assert trace.horizon == 1
    assert trace.policies == []
    assert not (checkpoint.path / "exits.json").exists()
