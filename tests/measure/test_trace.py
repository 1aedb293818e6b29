"""Traces: every column is what it claims, streaming changes nothing, broken folders are refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwise.data import PackedBlocks, TokenBatch
from loopwise.data.packing import NO_TARGET
from loopwise.errors import (
    DepthError,
    DivergenceError,
    LoopwiseError,
    RunFolderError,
    TraceError,
    WriteError,
)
from loopwise.exits.base import Observation, Output
from loopwise.exits.fixed import FixedDepth
from loopwise.exits.kl import StepKL
from loopwise.exits.latent_change import LatentChange
from loopwise.exits.probe import Probe
from loopwise.measure import trace as trace_module
from loopwise.measure.evaluate import batches, loss_by_depth, trajectory
from loopwise.measure.trace import PER_RECURRENCE, PER_TOKEN, Trace, TraceInfo, write_trace
from loopwise.models.base import LoopedLM
from loopwise.models.fixed import FixedConfig, FixedModel
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import full_disk, make_blocks, make_model

HORIZON = 6
INFO = TraceInfo(
    checkpoint="somewhere",
    weights_hash="abc",
    corpus="stories",
    text_hash="def",
    trained_mean_depth=4.0,
    trained_depths=(1, 12),
)
PROBE = Probe(weight=torch.linspace(-1, 1, 32), bias=0.1, mean=torch.zeros(32), std=torch.ones(32))
POLICIES = [StepKL(), LatentChange(), PROBE, FixedDepth()]


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    return make_model(injection="add", latent_init="noise")


@pytest.fixture(scope="module")
def few() -> PackedBlocks:
    return make_blocks(documents=2, shuffle=False)


@pytest.fixture(scope="module")
def made(model, few, tmp_path_factory) -> Trace:
    """Read by every test that spoils nothing."""
    folder = tmp_path_factory.mktemp("trace") / "made"
    lengths = ByteTokenizer().byte_lengths()
    return write_trace(
        model, few, folder, INFO, horizon=HORIZON, policies=POLICIES, byte_lengths=lengths
    )


@pytest.fixture
def own(model, few, tmp_path) -> Path:
    """A small trace to spoil."""
    return write_trace(model, few, tmp_path / "own", INFO, horizon=2, limit=2).folder


@pytest.fixture(scope="module")
@torch.no_grad()
def found(model: LoopedLM, few: PackedBlocks) -> dict[str, torch.Tensor]:
    """Logits and latents ``(tokens, horizon, ...)`` and the targets, block by block."""
    logits, latents, targets = [], [], []
    for batch in batches(few, 1):
        kept = batch.targets != NO_TARGET
        steps = list(trajectory(model, batch, HORIZON))
        latents.append(torch.stack([latent[kept] for _, latent, _ in steps], dim=1))
        logits.append(torch.stack([model.coda(h, r, v)[kept] for r, h, v in steps], dim=1))
        targets.append(batch.targets[kept])
    return {
        "logits": torch.cat(logits).double(),
        "latents": torch.cat(latents),
        "targets": torch.cat(targets),
    }


def test_the_loss_at_each_recurrence_is_the_loss_of_that_depth(model, few, made):
    wanted = loss_by_depth(model, batches(few, 2), range(1, HORIZON + 1))
    assert made["loss"].mean(axis=0) == pytest.approx(list(wanted.values()), abs=1e-5)
    assert np.ptp(made["loss"].mean(axis=0)) > 0.01, "depth must matter for this to test anything"


def test_divergences_equal_float64_ones(found, made):
    log_p = found["logits"].log_softmax(-1)
    p = log_p.exp()
    previous = (p[:, 1:] * (log_p[:, 1:] - log_p[:, :-1])).sum(-1).numpy()
    last = (p * (log_p - log_p[:, -1:])).sum(-1).numpy()
    assert np.isposinf(made["kl_prev"][:, 0]).all()
    assert made["kl_prev"][:, 1:] == pytest.approx(previous, rel=1e-3, abs=2e-6)
    assert made["kl_last"] == pytest.approx(last, rel=1e-3, abs=2e-6)
    assert (made["kl_last"][:, -1] == 0).all()
    assert (made["kl_prev"] >= 0).all()


def test_output_columns_equal_float64_ones(found, made):
    log_p = found["logits"].log_softmax(-1)
    loss = -log_p.gather(2, found["targets"][:, None, None].expand(-1, HORIZON, 1)).squeeze(2)
    top = log_p.exp().topk(2, dim=-1).values
    assert made["loss"] == pytest.approx(loss.numpy(), abs=1e-4)
    assert made["entropy"] == pytest.approx(-(log_p.exp() * log_p).sum(-1).numpy(), abs=1e-4)
    assert made["margin"] == pytest.approx((top[..., 0] - top[..., 1]).numpy(), abs=1e-5)
    clear = (top[..., 0] - top[..., 1]).numpy() > 1e-5
    assert (made["argmax"] == log_p.argmax(-1).numpy())[clear].all()
    assert made["target"].tolist() == found["targets"].tolist()


def test_the_null_label_is_one_token_drawn_from_the_last_distribution(found, made):
    """The same label at every recurrence; on average it costs the entropy."""
    log_p = found["logits"].log_softmax(-1)
    gap = (-log_p - torch.from_numpy(made["null_loss"])[..., None]).abs().amax(dim=1)
    assert gap.min(dim=1).values.max() < 1e-4, "no single label has these losses"
    last = log_p[:, -1]
    entropy = -(last.exp() * last).sum(-1)
    spread = ((last.exp() * last.square()).sum(-1) - entropy.square()).mean().sqrt()
    error = abs(float(made["null_loss"][:, -1].mean() - entropy.mean()))
    assert error < 4 * float(spread) / made.n_tokens**0.5


def test_null_labels_of_different_tokens_are_drawn_apart(few, tmp_path):
    """All tokens get one flat distribution: if draws repeat, luck never averages out.

    Losses at r = 1 are those of a ramp, which tells the labels apart.
    """
    model = make_model()
    ramp = torch.linspace(0, 5, 258)

    def hidden(latent, r, view):
        return torch.full_like(latent, float(r == 1))

    def head(hidden):
        return hidden[..., :1] * ramp

    model.hidden, model.head = hidden, head
    trace = write_trace(model, few, tmp_path / "t", INFO, horizon=2, limit=40)
    label = trace["null_loss"][:, 0]
    n = 128
    assert len(label) >= 4 * n
    same = np.mean(label[:n] == label[n : 2 * n])
    assert same < 0.1, f"every {n} tokens the same labels are drawn again"


def test_latent_columns_equal_their_formulas(found, made):
    h = found["latents"].double().numpy()
    assert made["rms"] == pytest.approx(np.sqrt((h**2).mean(axis=-1)), rel=1e-5)
    step = np.diff(h, axis=1)
    size = np.linalg.norm(h, axis=-1)
    change = np.linalg.norm(step, axis=-1) / size[:, 1:]
    assert made["change"][:, 1:] == pytest.approx(change, rel=1e-4, abs=1e-6)
    second = np.linalg.norm(np.diff(step, axis=1), axis=-1) / size[:, 2:]
    assert made["second"][:, 2:] == pytest.approx(second, rel=1e-4, abs=1e-6)
    lengths = np.linalg.norm(step, axis=-1)
    cosine = (step[:, 1:] * step[:, :-1]).sum(-1) / (lengths[:, 1:] * lengths[:, :-1])
    assert made["cosine"][:, 2:] == pytest.approx(cosine, abs=1e-3)
    assert np.isnan(made["cosine"][:, 0]).all()
    assert np.isposinf(made["second"][:, 0]).all()


def test_the_first_step_starts_at_the_initial_latent(few, tmp_path):
    """From zeros the first change is the whole latent; noise starts elsewhere."""
    zeros = write_trace(make_model(), few, tmp_path / "zeros", INFO, horizon=2, limit=1)
    assert zeros["change"][:, 0] == pytest.approx(np.ones(zeros.n_tokens), abs=1e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_recorded_scores_are_what_the_policy_says(found, made, policy):
    """Score a row alone, from latents and logits computed block by block."""
    score = made[f"score.{policy.name}"]
    assert score.dtype == np.float32
    memory = torch.zeros(len(score), policy.memory_width(258, 32))
    for r in range(1, HORIZON + 1):
        seen = Observation(
            r=r,
            latent=found["latents"][:, r - 1],
            previous=found["latents"][:, max(r - 2, 0)],
            output=Output.known(found["logits"][:, r - 1].float()),
        )
        wanted, memory = policy.score(seen, memory)
        if r > 1 or policy.name != "latent-change":  # the initial latent is not at hand here
            assert score[:, r - 1] == pytest.approx(wanted.numpy(), rel=1e-3, abs=2e-6)


def test_kl_as_a_policy_is_the_kl_column(made):
    assert np.array_equal(made["score.kl"], made["kl_prev"])
    assert np.array_equal(made["score.latent-change"], made["change"])


def test_token_columns_say_where_each_token_stood(few, made):
    batch = few.batch(0, few.n_blocks)
    kept = batch.targets != NO_TARGET
    assert made.n_tokens == int(kept.sum())
    block, column = kept.nonzero(as_tuple=True)
    assert made["block"].tolist() == block.tolist()
    assert made["column"].tolist() == column.tolist()
    for name, source in (("token", "token_ids"), ("position", "positions"), ("hops", "hops")):
        assert made[name].tolist() == getattr(batch, source)[kept].tolist(), name
    assert made["hops"].max() >= 1


def test_every_column_is_there_with_its_shape(made):
    for name in PER_TOKEN:
        assert made[name].shape == (made.n_tokens,), name
    for name in PER_RECURRENCE:
        assert made[name].shape == (made.n_tokens, HORIZON), name


def test_blocks_come_back_as_they_were_run(few, made):
    again, wanted = made.blocks(), few.batch(0, few.n_blocks)
    assert isinstance(again, TokenBatch)
    for field in fields(TokenBatch):
        assert torch.equal(getattr(again, field.name), getattr(wanted, field.name)), field.name


def test_the_header_says_what_was_run(few, made):
    assert made.header == {
        "format": "loopwise-trace",
        "version": 1,
        "checkpoint": "somewhere",
        "weights_hash": "abc",
        "corpus": "stories",
        "text_hash": "def",
        "trained_mean_depth": 4.0,
        "trained_depths": [1, 12],
        "n_bytes": int((made["target"] < 256).sum()),
        "horizon": HORIZON,
        "dtype": "float32",
        "seq": 32,
        "n_blocks": few.n_blocks,
        "policies": ["kl", "latent-change", "probe", "fixed"],
        "shards": ["shard-00000.safetensors"],
        "n_tokens": made.n_tokens,
    }


def test_streaming_in_small_pieces_reads_as_one(model, few, made, tmp_path, monkeypatch):
    """One block at a time and a shard per few dozen rows, against all at once."""
    monkeypatch.setattr(trace_module, "_SHARD_ROWS", 50)
    monkeypatch.setattr(trace_module, "_BATCH_ROWS", 1)
    monkeypatch.setattr(trace_module, "_HEAD_LOGITS", 23 * 258)
    monkeypatch.setattr(trace_module, "_CACHED_LOGITS", 7 * 258)
    seen = []
    small = write_trace(
        model,
        few,
        tmp_path / "small",
        INFO,
        horizon=HORIZON,
        policies=POLICIES,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(small.header["shards"]) >= 3
    assert seen == [(i, few.n_blocks) for i in range(1, few.n_blocks + 1)]
    for name in PER_TOKEN:
        assert np.array_equal(small[name], made[name]), name
    for name in ("loss", "kl_prev", "rms", "change", "score.probe", "null_loss"):
        assert small[name] == pytest.approx(made[name], abs=1e-5), name
    for field in fields(TokenBatch):
        assert torch.equal(getattr(small.blocks(), field.name), getattr(made.blocks(), field.name))


def test_a_limit_takes_the_first_blocks(model, few, made, tmp_path):
    limited = write_trace(model, few, tmp_path / "limited", INFO, horizon=2, limit=2)
    assert limited.header["n_blocks"] == 2
    assert set(limited["block"].tolist()) == {0, 1}
    assert limited["target"].tolist() == made["target"][: limited.n_tokens].tolist()
    beyond = write_trace(model, few, tmp_path / "beyond", INFO, horizon=1, limit=10_000)
    assert beyond.header["n_blocks"] == few.n_blocks


def test_bytes_are_those_of_the_limited_text(model, few, tmp_path):
    """An end of document is a target of no bytes."""
    lengths = ByteTokenizer().byte_lengths()
    found = write_trace(
        model, few, tmp_path / "t", INFO, horizon=1, limit=few.n_blocks - 1, byte_lengths=lengths
    )
    targets = few.batch(0, few.n_blocks - 1).targets
    assert found.header["n_bytes"] == int(((targets >= 0) & (targets < 256)).sum())
    assert found.header["n_bytes"] < found.n_tokens


def test_a_fixed_model_is_traced_at_horizon_one(few, tmp_path):
    torch.manual_seed(0)
    model = FixedModel(
        FixedConfig(vocab_size=258, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24, n_layers=2)
    ).eval()
    found = write_trace(model, few, tmp_path / "fixed", INFO, horizon=1, policies=[LatentChange()])
    assert found["loss"].shape == (found.n_tokens, 1)
    wanted = loss_by_depth(model, batches(few, 2), [1])[1]
    assert float(found["loss"].mean()) == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(DepthError, match="limit of 1"):
        write_trace(model, few, tmp_path / "two", INFO, horizon=2)
    assert not (tmp_path / "two").exists()


def test_a_latent_that_grows_without_bound_is_named(few, tmp_path, monkeypatch):
    model = make_model()
    step = model.core_step

    def explodes(latent, injection, r, view):
        return step(latent, injection, r, view) * (float("inf") if r == 3 else 1.0)

    monkeypatch.setattr(model, "core_step", explodes)
    assert write_trace(model, few, tmp_path / "two", INFO, horizon=2, limit=1).horizon == 2
    with pytest.raises(DivergenceError, match="recurrence 3.*at most 2"):
        write_trace(model, few, tmp_path / "three", INFO, horizon=5, limit=1)
    with pytest.raises(TraceError):
        Trace(tmp_path / "three")


@pytest.mark.parametrize("horizon", [0, -3])
def test_a_horizon_below_one_is_refused_before_anything_is_written(model, few, tmp_path, horizon):
    with pytest.raises(DepthError, match=f"depth {horizon}"):
        write_trace(model, few, tmp_path / "none", INFO, horizon=horizon)
    assert not (tmp_path / "none").exists()


# Folders.


def test_a_finished_folder_is_refused_and_left_alone(model, few, own):
    before = {p.name: p.read_bytes() for p in own.iterdir()}
    with pytest.raises(RunFolderError, match="finished trace"):
        write_trace(model, few, own, INFO, horizon=1)
    assert {p.name: p.read_bytes() for p in own.iterdir()} == before


def test_an_unfinished_folder_is_started_over(model, few, own):
    (own / "trace.json").unlink()
    (own / "shard-00007.safetensors").write_bytes(b"left by a killed run")
    with pytest.raises(TraceError, match="no finished trace"):
        Trace(own)
    write_trace(model, few, own, INFO, horizon=1, limit=1)
    assert not (own / "shard-00007.safetensors").exists()
    assert Trace(own).horizon == 1


def test_somebody_elses_folder_is_refused_and_left_alone(model, few, tmp_path):
    """`measure --data books --out .` names the trace folder ``books``: the text must survive."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "novel.txt").write_text("years of work")
    with pytest.raises(RunFolderError, match="books"):
        write_trace(model, few, folder, INFO, horizon=1, limit=1)
    assert (folder / "novel.txt").read_text() == "years of work"


def test_a_run_that_dies_leaves_no_finished_trace(model, few, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "_BATCH_ROWS", 1)

    def dies(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(model, few, tmp_path / "dead", INFO, horizon=1, progress=dies)
    with pytest.raises(TraceError, match="no finished trace"):
        Trace(tmp_path / "dead")


def test_a_full_disk_names_the_shard_and_leaves_no_finished_trace(model, few, tmp_path):
    folder = tmp_path / "t"
    with full_disk(), pytest.raises(WriteError, match=r"cannot write .*shard-00000"):
        write_trace(model, few, folder, INFO, horizon=HORIZON)
    assert not (folder / "trace.json").exists()
    assert write_trace(model, few, folder, INFO, horizon=HORIZON).n_tokens > 0, "done again"


def test_a_truncated_shard_is_named(own):
    shard = own / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"shard-00000\.safetensors.*truncated"):
        Trace(own)["loss"]


def test_a_missing_shard_is_named(own):
    (own / "shard-00000.safetensors").unlink()
    with pytest.raises(TraceError, match=r"shard-00000\.safetensors"):
        Trace(own)["loss"]


def test_an_unknown_column_names_what_there_is(own):
    with pytest.raises(TraceError, match=r"no 'score\.probe'; it has: .*loss"):
        Trace(own)["score.probe"]


def change_header(folder: Path, **changes: object) -> None:
    file = folder / "trace.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_newer_version_is_refused(own):
    change_header(own, version=2)
    with pytest.raises(TraceError, match="format 2.*update loopwise"):
        Trace(own)


def test_another_format_is_refused(own):
    change_header(own, format="something-else")
    with pytest.raises(TraceError, match="not a loopwise trace"):
        Trace(own)


@pytest.mark.parametrize(
    "header",
    [b"{", b"", b"\xff\xfe\x00", b"[]", b'"text"', b'{"format": "loopwise-trace"}'],
    ids=["cut", "empty", "binary", "list", "string", "no version"],
)
def test_a_spoilt_header_is_a_trace_error(own, header):
    (own / "trace.json").write_bytes(header)
    with pytest.raises(TraceError):
        Trace(own)


def test_a_folder_that_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(TraceError, match="loopwise measure"):
        Trace(tmp_path / "nowhere")


def test_tracing_leaves_the_model_as_it_was(model, few, tmp_path):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = write_trace(model, few, tmp_path / "a", INFO, horizon=3, limit=2)
    assert torch.equal(torch.get_rng_state(), state), "measuring drew from the global generator"
    second = write_trace(model, few, tmp_path / "b", INFO, horizon=3, limit=2)
    assert np.array_equal(first["loss"], second["loss"])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_bfloat16_models_give_float32_columns(few, tmp_path):
    model = make_model().bfloat16()
    found = write_trace(model, few, tmp_path / "bf16", INFO, horizon=2, limit=1)
    assert found.header["dtype"] == "bfloat16"
    assert found["loss"].dtype == np.float32
    assert math.isfinite(float(found["loss"].sum()))


def test_errors_are_of_the_users_kind():
    assert issubclass(TraceError, LoopwiseError)
