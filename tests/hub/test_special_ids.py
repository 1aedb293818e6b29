"""A converted model begins and ends texts as it says, wherever texts are made of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from loopwise.bench.commands import BenchOptions
from loopwise.bench.setup import Bench
from loopwise.bench.workload import Lengths
from loopwise.data import Document, load_or_tokenize
from loopwise.hub.convert import convert
from loopwise.measure.perplexity import perplexity
from loopwise.models.checkpoint import Checkpoint, load_checkpoint
from loopwise.study.training import settings_from
from loopwise.tokenizer import ByteTokenizer, load_tokenizer
from tests.harness.cases import naive_pair
from tests.hub.folders import write_folder
from tests.hub.test_ouro import CONFIG, tensors
from tests.test_cli import answer, run, sets

BOS, EOS = 1, 2  # the tokenizer alone says 256 and 257
TEXTS = ["Tom has 3 apples.", "Mia sings."]


@pytest.fixture
def converted(tmp_path: Path) -> Checkpoint:
    """Its published config says 0 and 0, which is known to be wrong."""
    config = {**CONFIG, "bos_token_id": 0, "eos_token_id": 0}
    convert(write_folder(tmp_path / "ouro", config, tensors()), tmp_path / "model")
    return load_checkpoint(tmp_path / "model")


def test_the_tokenizer_knows_and_whoever_loads_it(converted: Checkpoint) -> None:
    for tokenizer in (converted.tokenizer, load_tokenizer(converted.path)):
        assert (tokenizer.bos_id, tokenizer.eos_id, set(tokenizer.end_ids)) == (BOS, EOS, {2, 257})
    assert converted.training["special_ids"] == {"bos": BOS, "eos": EOS}


def test_documents_are_packed_with_one_start_token(converted: Checkpoint, tmp_path: Path) -> None:
    """Token files of the tokenizer alone, in the same cache, are other ones."""
    documents = [Document(text) for text in TEXTS]
    alone = load_or_tokenize(lambda: documents, ByteTokenizer(), tmp_path / "cache")
    store = load_or_tokenize(lambda: documents, converted.tokenizer, tmp_path / "cache")
    wanted = [i for text in TEXTS for i in (BOS, *text.encode(), EOS)]
    assert store.token_ids.tolist() == wanted
    assert alone.token_ids[0] == ByteTokenizer.bos_id


def test_perplexity_of_documents_starts_them_once(converted: Checkpoint) -> None:
    found = perplexity(
        converted.model, converted.tokenizer, [Document(t) for t in TEXTS], "document", [2]
    )
    pairs = [naive_pair(converted.model, converted.tokenizer, ("", text), 2) for text in TEXTS]
    nll = -sum(logprob for logprob, _ in pairs) / sum(map(len, TEXTS))
    assert found["by_depth"][2]["nll_nats"] == pytest.approx(nll, abs=1e-5)
    alone = perplexity(
        converted.model, ByteTokenizer(), [Document(t) for t in TEXTS], "document", [2]
    )
    assert abs(alone["by_depth"][2]["nll_nats"] - nll) > 1e-4, "the start token matters here"


def test_benchmarks_start_prompts_once_and_all_engines_agree(converted: Checkpoint) -> None:
    options = BenchOptions(data=("builtin:stories:40",), depth=2, batch=2, requests=8, judged=8)
    bench = Bench(converted.path, options, Lengths((3, 9), (2, 6)), Console(quiet=True))
    assert len(bench.jobs) == 8
    for job in bench.jobs:
        assert job.prompt[0] == BOS
        assert (job.prompt + job.continuation).count(BOS) == 1
    for engine in (bench.first, bench.engine(exit="fixed:1")):
        assert (engine.bos_id, engine.end_ids) == (BOS, {EOS, 257})


def test_training_goes_on_with_them_and_so_does_its_resumption(
    converted: Checkpoint, tmp_path: Path
) -> None:
    assert settings_from({}, converted.path)["tokenizer"] == {"kind": str(converted.path)}
    out = tmp_path / "run"
    small = ("seq=48", "micro_batch=2", "steps=2", "compile=off", "dtype=fp32", "eval_depths=[1]")
    arguments = ["train", "--from", converted.path, "--data", "builtin:stories:16", "--out", out]
    settings = sets(*(f"train.{item}" for item in small), "depth.mean=2", "depth.backprop_depth=2")
    made = answer(run(*arguments, *settings, "--json"))
    assert answer(run(*arguments, *settings, "--json", "--resume"))["step"] == made["step"]
    trained = load_checkpoint(Path(made["checkpoint"]))
    assert trained.training["special_ids"] == {"bos": BOS, "eos": EOS}
    for tokenizer in (trained.tokenizer, load_tokenizer(out)):
        assert tokenizer.fingerprint == converted.tokenizer.fingerprint
