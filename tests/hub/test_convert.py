"""From folder to checkpoint: the format is found or the folder described; tokenizers must fit."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwise.engine import Engine, EngineConfig, SamplingParams
from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import CheckpointError, WriteError
from loopwise.exits.fixed import FixedDepth
from loopwise.exits.rule import parse_rule
from loopwise.harness.encoding import Encoder
from loopwise.hub.chat import templates_in, write_templates
from loopwise.hub.convert import MAX_PADDING, convert
from loopwise.hub.export import export_checkpoint
from loopwise.hub.formats import FORMATS
from loopwise.models import MODELS
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from loopwise.tokenizer import BPETokenizer
from tests.conftest import full_disk
from tests.harness.cases import framed
from tests.hub.folders import VOCAB, fill, write_folder
from tests.hub.naive_llama import shapes as llama_shapes
from tests.hub.test_llama import CONFIG as LLAMA
from tests.hub.test_ouro import CONFIG, shapes, tensors
from tests.test_cli import answer, run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ouro", CONFIG, tensors())


def test_the_summary_says_what_was_made(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out")
    assert (done.format, done.architecture, done.dtype) == ("ouro", "ouro", "float32")
    assert done.parameters == sum(value.numel() for value in tensors().values())
    assert (done.vocab_size, done.tokenizer_size) == (VOCAB, 258)
    saved = load_checkpoint(tmp_path / "out")
    assert saved.tokenizer.encode("Tom") == [84, 111, 109]
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["converted_from"] == {"format": "ouro", "folder": "ouro", "dtype": ["float32"]}


def test_fields_nothing_was_made_of_are_told(tmp_path: Path) -> None:
    config = {**CONFIG, "router_temperature": 0.7, "use_something": False}
    done = convert(write_folder(tmp_path / "ouro", config, tensors()), tmp_path / "out")
    told = [note for note in done.notes if "nothing was made of" in note]
    assert told == ["fields of config.json that nothing was made of: router_temperature"]


def test_an_unknown_folder_is_described_with_what_it_would_take(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    path = write_folder(tmp_path / "mamba", config, {"backbone.norm_f.weight": torch.ones(4)})
    with pytest.raises(CheckpointError) as failure:
        convert(path, tmp_path / "out")
    message = str(failure.value)
    assert "model_type 'mamba', architectures ['MambaForCausalLM']" in message
    assert "1 tensors (backbone.norm_f.weight [4])" in message
    assert "loopwise/hub/formats" in message
    for name in FORMATS:
        assert f"{name} (" in message


@pytest.mark.parametrize(
    ("config", "key", "named"),
    [
        ({"model_type": "inkling2_loop"}, "model.norm.weight", "Inkling 2 loop .* experts"),
        ({"model_type": "mor"}, "model.layers.1.mor_router.router.weight", "Recursions .* routers"),
    ],
    ids=["inkling2", "mor"],
)
def test_models_that_cannot_run_yet_say_what_they_need(
    tmp_path: Path, config: dict[str, str], key: str, named: str
) -> None:
    path = write_folder(tmp_path / "peer", config, {key: torch.ones(4)})
    with pytest.raises(CheckpointError, match=named):
        convert(path, tmp_path / "out")


def test_a_folder_of_two_minds_is_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "llama"}
    path = write_folder(tmp_path / "both", config, tensors())
    with pytest.raises(CheckpointError, match="looks like ouro and llama at once"):
        convert(path, tmp_path / "out")


def test_a_loopwise_checkpoint_is_called_one(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a loopwise checkpoint already"):
        convert(tmp_path / "out", tmp_path / "again")


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "out")


def test_a_tokenizer_with_more_ids_than_rows_is_refused(source: Path, tmp_path: Path) -> None:
    texts = ["some text to learn from, some more text to learn from " * 20]
    big = BPETokenizer.train(texts, 300)
    assert big.vocab_size > VOCAB
    (source / "tokenizer.json").write_text(big.to_json())
    with pytest.raises(
        CheckpointError, match=f"has {big.vocab_size} ids but the embedding {VOCAB}"
    ):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(("padding", "fits"), [(MAX_PADDING - 1, True), (MAX_PADDING, False)])
def test_rows_far_beyond_the_tokenizer_are_no_padding(
    tmp_path: Path, padding: int, fits: bool
) -> None:
    rows = 258 + padding
    changed = {
        key: (rows, *shape[1:]) if shape[0] == VOCAB else shape for key, shape in shapes().items()
    }
    path = write_folder(tmp_path / "ouro", {**CONFIG, "vocab_size": rows}, fill(changed))
    if fits:
        assert convert(path, tmp_path / "out").vocab_size == rows
    else:
        with pytest.raises(CheckpointError, match="do not belong together"):
            convert(path, tmp_path / "out")


def test_a_tokenizer_can_be_given(source: Path, tmp_path: Path) -> None:
    """Raw training checkpoints come without one."""
    (source / "tokenizer.json").unlink()
    convert(source, tmp_path / "out", tokenizer="byte")
    assert load_checkpoint(tmp_path / "out").tokenizer.vocab_size == 258


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_it_is(name: str) -> None:
    format = FORMATS[name]()
    assert format.name == name
    assert format.about


def test_architectures_of_the_formats_are_rows_of_the_table() -> None:
    assert {"raven", "ouro", "fixed", "loopformer", "dory", "parcae"} <= set(MODELS)


@pytest.mark.parametrize(
    ("config", "generation", "kept"),
    [
        (257, None, None),
        (None, None, None),
        (2, None, {"eos": [2]}),
        ([257, 8], [9, 257], {"eos": [8, 9]}),
        (257, {"eos": 7}, None),
        (9999, None, None),
    ],
    ids=["the tokenizer's", "none", "another", "of two files", "nonsense", "no id"],
)
def test_every_end_id_of_the_source_is_kept(
    tmp_path: Path, config: Any, generation: Any, kept: Any
) -> None:
    """U55: an instruct model ends its turns with another id than its documents."""
    path = write_folder(
        tmp_path / "llama", {**LLAMA, "eos_token_id": config}, fill(llama_shapes(LLAMA))
    )
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    convert(path, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").training.get("special_ids") == kept


@pytest.mark.parametrize("kept", ["settings", "list", "jinja"])
def test_chat_templates_go_along(tmp_path: Path, kept: str) -> None:
    """From wherever a source has them to where transformers looks for them; files win."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    import loopwise.hub  # noqa: F401 - what makes the Auto classes know us

    source = write_folder(tmp_path / "llama", LLAMA, fill(llama_shapes(LLAMA)))
    text = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    said: Any = {
        "settings": text,
        "list": [{"name": "default", "template": text}, {"name": "tools", "template": "x"}],
        "jinja": "an older one",
    }[kept]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": said}))
    if kept == "jinja":
        (source / "chat_template.jinja").write_text(text)
    done = convert(source, tmp_path / "out")
    assert done.chat_templates == (("default", "tools") if kept == "list" else ("default",))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Tom"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|bos|>[Tom]"
    assert tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] == [256, *b"[Tom]"]
    if kept == "list":
        assert tokenizer.apply_chat_template(chat, chat_template="tools", tokenize=False) == "x"
    export_checkpoint(load_checkpoint(tmp_path / "out"), tmp_path / "exported", "fp32")
    assert templates_in(tmp_path / "exported") == templates_in(tmp_path / "out")


@pytest.mark.parametrize("name", ["../a", "a/b", "..", ".", "", "a\n"])
def test_no_template_is_written_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"chat template named .*; rename it"):
        write_templates(folder, {"default": "x", name: "evil"})
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_templates_that_a_disk_refuses_leave_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole")
    write_templates(source, {"default": "{{ messages }}", "more": "x"})
    write_templates(tmp_path / "whole", {"default": "{{ messages }}", "more": "x"})
    own = Path.write_text

    def refuse(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
        if "more.jinja" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own(path, text, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", refuse)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_checkpoint(load_checkpoint(tmp_path / "whole"), tmp_path / "out", "fp32")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with full_disk(), pytest.raises(WriteError, match=r"more.jinja': File too large"):
        write_templates(tmp_path / "whole", {"more": "y"})
    assert templates_in(tmp_path / "whole")["more"] == "x"


@pytest.mark.parametrize("said", [7, [{"name": "a"}], ["x"], [{"name": "../a", "template": "x"}]])
def test_a_malformed_chat_template_is_one_line(source: Path, tmp_path: Path, said: Any) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": said}))
    with pytest.raises(CheckpointError, match=r"chat.template"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_settings", [True, False, None])
def test_texts_begin_as_with_the_sources_tokenizer(
    tmp_path: Path, in_file: bool, in_settings: bool | None
) -> None:
    """SmolLM2's tokenizer puts nothing before a text; the converted one, and then the engine, did.

    Now engine, `loopwise generate`, harness and transformers' tokenizers agree; an empty prompt,
    which transformers would not take, is a start token.
    """
    transformers = pytest.importorskip("transformers")
    import loopwise.hub  # noqa: F401 - what makes the Auto classes know us

    tokenizer = BPETokenizer.train(["the dog and the cat"] * 20, 258)
    source = write_folder(tmp_path / "llama", LLAMA, fill(llama_shapes(LLAMA)))
    tokenizer = framed(tokenizer) if in_file else tokenizer
    (source / "tokenizer.json").write_text(tokenizer.to_json())
    said: dict[str, Any] = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    if in_settings is not None:
        said |= {"add_bos_token": in_settings}
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    convert(source, tmp_path / "out")
    stock = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the dog", ""):
        assert ours(text)["input_ids"] == stock(text)["input_ids"], text
    assert (ours("the")["input_ids"][0] == tokenizer.bos_id) is in_file
    converted = load_checkpoint(tmp_path / "out")
    engine = Engine.from_checkpoint(converted, EngineConfig(exit="fixed:1", max_depth=1))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    told, empty = engine.generate(["the dog", ""], params)
    assert list(told.prompt_ids) == stock("the dog")["input_ids"]
    assert list(told.prompt_ids) == Encoder(converted).prompts(["the dog"])[0]
    assert list(empty.prompt_ids) == Encoder(converted).prompts([""])[0] == [tokenizer.bos_id]
    made = answer(run("generate", tmp_path / "out", "the dog", "--max-tokens", "3", "--json"))
    reference = ReferenceDecoder(converted.model, parse_rule("fixed:1"), FixedDepth())
    greedy = [int(reference.feed_chunk(stock("the dog")["input_ids"])[-1].logits.argmax())]
    while len(greedy) < len(made["token_ids"]):
        greedy.append(int(reference.feed(greedy[-1]).logits.argmax()))
    assert made["token_ids"] == greedy
    save_checkpoint(tmp_path / "again", *_parts(load_checkpoint(tmp_path / "out")))
    ours.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("the dog")["input_ids"] == stock("the dog")["input_ids"]


def _parts(checkpoint: Checkpoint) -> tuple[Any, ...]:
    return checkpoint.model, checkpoint.tokenizer, checkpoint.training
