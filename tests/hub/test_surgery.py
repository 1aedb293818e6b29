"""Retrofitting: layers land where they were sent, depth 1 is the source without the others."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.data import Document
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.request import SamplingParams
from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub import retrofit as module
from loopwise.hub.auto.card import model_card
from loopwise.hub.chat import templates_in
from loopwise.hub.convert import convert
from loopwise.hub.retrofit import GATE, HEALING_TEXT, parse_layers, retrofit
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.models.costs import parameters
from loopwise.models.views import PackedView
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.hub.folders import IDS, decode, fill, forward, gap, write_folder
from tests.hub.naive_llama import NaiveLlama, shapes
from tests.hub.test_llama import CONFIG as LLAMA
from tests.test_cli import answer, refused, run, sets

CONFIG: dict[str, Any] = {**LLAMA, "num_hidden_layers": 8, "eos_token_id": 2}
PARTS = {"prelude": "0-1", "core": "5,3", "coda": "7-7"}
OPTIONS = [part for name, layers in PARTS.items() for part in (f"--{name}", layers)]


def source_of(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    config = {**CONFIG, **changes}
    tensors = {key: t.to(dtype) for key, t in fill(shapes(config)).items()}
    convert(write_folder(folder / "llama", config, tensors), folder / "source")
    return folder / "source"


def naive(order: list[int], **changes: Any) -> Any:
    """Float64 loops over some of the source's layers, in an order."""
    config = {**CONFIG, **changes}
    whole = fill(shapes(config))
    part = {key: t for key, t in whole.items() if ".layers." not in key}
    for new, old in enumerate(order):
        head = f"model.layers.{old}."
        of = {k.removeprefix(head): t for k, t in whole.items() if k.startswith(head)}
        part |= {f"model.layers.{new}.{k}": t for k, t in of.items()}
    return NaiveLlama(part, {**config, "num_hidden_layers": len(order)}).forward(IDS)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("tied", [True, False])
def test_depth_one_is_the_source_without_the_dropped_layers(
    tmp_path: Path, share: float, tied: bool
) -> None:
    source = source_of(tmp_path, tie_word_embeddings=tied)
    done = retrofit(source, tmp_path / "out", PARTS, latent_share=share)
    assert done.gate_error <= GATE
    assert (done.layers["core"], done.dropped) == ([5, 3], [2, 4, 6])
    model = load_checkpoint(tmp_path / "out", torch.float64).model
    assert gap(forward(model, 1), naive([0, 1, 5, 3, 7], tie_word_embeddings=tied)) < 1e-9
    d, layer = 24, parameters(load_checkpoint(source).model.core_blocks[0])  # type: ignore[index]
    assert done.source_parameters - done.parameters == 3 * layer - 2 * d * d


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.9, 0.95])
def test_shares_add_up_in_few_bits_too(tmp_path: Path, share: float, dtype: torch.dtype) -> None:
    done = retrofit(source_of(tmp_path, dtype), tmp_path / "out", PARTS, latent_share=share)
    assert done.gate_error <= GATE


@torch.no_grad()
def test_deeper_passes_start_as_documented(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    retrofit(source, tmp_path / "same", PARTS, latent_share=0)
    same = load_checkpoint(tmp_path / "same", torch.float64).model
    retrofit(source, tmp_path / "again", PARTS, latent_share=1)
    again = load_checkpoint(tmp_path / "again", torch.float64).model
    assert gap(forward(same, 4), naive([0, 1, 5, 3, 7])) < 1e-9
    assert gap(forward(again, 3), naive([0, 1, 5, 3, 5, 3, 5, 3, 7])) < 1e-9
    assert gap(decode(again, 3), forward(again, 3)) < 1e-5
    retrofit(source, tmp_path / "mixed", PARTS)
    mixed = load_checkpoint(tmp_path / "mixed", torch.float64).model
    positions = torch.arange(len(IDS))[None]
    view = PackedView(again.geometry.rope, positions, None, again.dtype, torch.tensor([IDS]))
    latent, injection = torch.randn(2, 1, len(IDS), 24, dtype=torch.float64)
    wanted = again.core_step((latent + injection) / 2, injection, 2, view)
    assert gap(mixed.core_step(latent, injection, 2, view), wanted) < 1e-12


def test_facts_and_dtype_are_carried_along(tmp_path: Path) -> None:
    source = source_of(tmp_path, torch.bfloat16)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    retrofit(source, tmp_path / "out", PARTS)
    saved = load_checkpoint(tmp_path / "out")
    facts = saved.training
    assert templates_in(tmp_path / "out") == {"default": "{{ messages }}"}
    assert not saved.tokenizer.start.added, "as the source's tokenizer"
    assert facts["retrofitted_from"]["layers"] == {"prelude": [0, 1], "core": [5, 3], "coda": [7]}
    assert facts["retrofitted_from"]["weights_hash"] == load_checkpoint(source).weights_hash
    assert facts["special_ids"] == {"eos": [2]}
    assert saved.trained_mean_depth == 1
    card = model_card(saved.model, facts, {}, name="cut", num_loops=1)
    for said in (
        f"Retrofitted from {source.name}, a model of layers that run once",
        "its layers 0-1 are the prelude, 5, 3 the core, which is looped, and 7 the coda",
        f"{source.name} was converted from ",
    ):
        assert said in card, said
    inspected = answer(run("inspect", tmp_path / "out", "--tokens", "128", "--json"))
    assert inspected["dtype"] == ["BF16"]


def test_a_failed_gate_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path)

    def wrong(*arguments: Any) -> Any:
        state = surgery(*arguments)
        state["adapter.weight"] = state["adapter.weight"] * 1.01
        return state

    surgery = module.surgery
    monkeypatch.setattr(module, "surgery", wrong)
    with pytest.raises(CheckpointError, match="nothing was written"):
        retrofit(source, tmp_path / "out", PARTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0-3", [0, 1, 2, 3]), ("4,", [4]), ("7, 5-6", [7, 5, 6]), ("0-0", [0]), ("1,,2", [1, 2])],
)
def test_lists_of_layers(text: str, layers: list[int]) -> None:
    assert parse_layers(text, "core", 8) == layers


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names no layer"),
        (" , ", "names no layer"),
        ("8,", "there is no layer 8; the source has 0-7"),
        ("4", "--core 4 may mean layer 4 or 4 layers; write a range such as 10-17, or 4-4"),
        ("5-9", "there is no layer 9"),
        ("5-3", "runs backwards; write 3-5"),
        ("1,0-2", "names layer 1 twice"),
        ("a", "'a' is no layer"),
        ("-1", "'-1' is no layer"),
        ("1-", "'1-' is no layer"),
        ("1-2-3", "'1-2-3' is no layer"),
        ("²", "'²' is no layer"),
        ("0-99999999999", "there is no layer 99999999999"),
    ],
)
def test_bad_lists_say_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as failure:
        parse_layers(text, "core", 8)
    assert str(failure.value).startswith("--core ")


def test_a_lone_number_is_so_many_layers() -> None:
    """``--prelude 4`` was taken as layer 4 alone, without a word."""
    assert parse_layers("4", "prelude", 8) == [0, 1, 2, 3]
    assert parse_layers(" 2 ", "coda", 8) == [6, 7]
    for part in ("prelude", "coda"):
        assert parse_layers("4-4", part, 8) == [4]
        for count in ("0", "9"):
            wanted = f"asks for {count} layers; the source has 8, 0-7"
            wanted += r" \(write 0-0 for layer 0 alone\)$" if count == "0" else "$"
            with pytest.raises(ConfigError, match=wanted):
                parse_layers(count, part, 8)


def test_the_summary_warns_of_lost_ends_and_ends_with_a_whole_command(tmp_path: Path) -> None:
    """It runs as it stands, once its text and its size are put in."""
    source, out = source_of(tmp_path), tmp_path / "out"
    lines = run("retrofit", source, out, "--prelude", "2", "--core", "3-4", "--coda", "1")
    assert "warning" not in lines.stdout and "layers: prelude 0-1; core 3-4; coda 7" in lines.stdout
    words = shlex.split(lines.stdout.splitlines()[-1])
    assert words[:4] == ["loopwise", "train", "--from", str(out)]
    words[words.index(HEALING_TEXT)] = "builtin:stories:16"
    small = ("seq=48", "micro_batch=2", "steps=3", "compile=off", "dtype=fp32", "eval_depths=[1,3]")
    trained = answer(run(*words[1:], *sets(*(f"train.{item}" for item in small)), "--json"))
    assert Path(trained["checkpoint"]).is_relative_to(tmp_path / "out-healed")
    config = json.loads((tmp_path / "out-healed" / "config.json").read_text())
    config = config["settings"]
    assert config["objective"]["distil_from"] == str(source)
    assert config["depth"]["curriculum"] == "1-sqrt"
    parts = ("--prelude", "1,2", "--core", "3-4", "--coda", "5-6")
    told = run("retrofit", source, tmp_path / "ends", *parts).stdout.splitlines()
    (warning,) = [line for line in told if line.startswith("warning")]
    assert "first layer 0 and last layer 7" in warning


def test_bad_requests_are_one_line(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    out = tmp_path / "out"
    shared = ["--prelude", "0-2", "--core", "2-5", "--coda", "1"]
    refused(run("retrofit", source, out, *shared), "--prelude and --core both name layer 2")
    refused(run("retrofit", source, out, *OPTIONS, "--latent-share", "1.5"), "1.5 must lie in 0..1")
    refused(run("retrofit", source, source, *OPTIONS), "exists already")
    refused(run("retrofit", tmp_path / "no", out, *OPTIONS), "no checkpoint at")
    save_checkpoint(tmp_path / "looped", make_model(), ByteTokenizer(), {})
    refused(run("retrofit", tmp_path / "looped", out, *OPTIONS), "architecture 'recurrent'")
    assert not out.exists()


def test_the_result_decodes_in_the_engine_with_exits(tmp_path: Path) -> None:
    """With nothing of the latent all depths agree, so tokens settle at once and none is lost."""
    retrofit(source_of(tmp_path), tmp_path / "out", PARTS, latent_share=0)
    checkpoint = load_checkpoint(tmp_path / "out")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    texts = []
    for rule in ("fixed:1", "fixed:4", "kl:1e-3,max=4"):
        engine = Engine.from_checkpoint(checkpoint, EngineConfig(exit=rule, max_depth=4))
        made = engine.generate(["Tom has"], params)[0].completions[0]
        texts.append(made.token_ids)
        if rule.startswith("kl"):
            assert set(made.exit_depths) == {2}
    assert texts[0] == texts[1] == texts[2]


def test_the_result_trains_with_random_depth(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    made = answer(run("retrofit", source, tmp_path / "out", *OPTIONS, "--json"))
    assert made["gate_error"] <= GATE
    small = ("seq=48", "micro_batch=2", "steps=3", "compile=off", "dtype=fp32", "eval_depths=[1,3]")
    trained = run(
        *("train", "--from", tmp_path / "out", "--data", "builtin:stories:16"),
        *sets(*(f"train.{item}" for item in small), "depth.mean=3", "depth.backprop_depth=2"),
        *("--out", tmp_path / "run", "--json"),
    )
    losses = answer(trained)["loss_nats_by_depth"]
    assert set(losses) == {"1", "3"}
    facts = json.loads((Path(answer(trained)["checkpoint"]) / "training.json").read_text())
    assert facts["special_ids"] == {"eos": [2]}
    assert facts["depth"]["true_mean"] == pytest.approx(3)
    before, after = load_checkpoint(tmp_path / "out"), load_checkpoint(tmp_path / "run")
    moved = after.model.state_dict()["adapter.weight"] - before.model.state_dict()["adapter.weight"]
    assert moved[:, :24].abs().max() > 0, "the latent's half learns"
    assert moved.abs().max() < 0.1, "it went on from the weights given"


def test_which_documents_the_source_was_trained_on_stays_known(tmp_path: Path) -> None:
    source, told = source_of(tmp_path), DocumentSketch.of([Document("a story")]).to_json()
    facts = json.loads((source / "training.json").read_text())
    (source / "training.json").write_text(json.dumps({**facts, TRAINED_ON: told}))
    retrofit(source, tmp_path / "out", PARTS)
    assert load_checkpoint(tmp_path / "out").training[TRAINED_ON] == told
