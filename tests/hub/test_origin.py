"""What is said of a source's name and licence, from its folder to the model card."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from loopwise.hub.convert import convert
from loopwise.hub.origin import known_model
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.hub.folders import write_folder
from tests.hub.test_ouro import CONFIG as OURO
from tests.hub.test_ouro import tensors

INSTRUCT = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("SmolLM2-135M-Instruct", INSTRUCT),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", INSTRUCT),
        ("smollm2-135m-instruct-q8_0.gguf", INSTRUCT),
        ("SmolLM2-135M-f16.gguf", "HuggingFaceTB/SmolLM2-135M"),
        ("SmolLM2-135M-Instruct-mine", None),
        ("", None),
    ],
)
def test_names_of_published_models(name: str, known: str | None) -> None:
    assert known_model(name) == known


@pytest.mark.parametrize(
    ("card", "license"),
    [
        (None, None),
        ("---\ntags:\n- x\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---", "mit"),
        ("# A model\n\nlicense: mit\n", None),
        ("---\ntags:\n- x\n---\n\nlicense: mit\n", None),
        ("---\nlicense:\n- mit\n- cc0\n---\n", None),
    ],
)
def test_a_licence_is_what_the_header_of_the_source_says(
    tmp_path: Path, card: str | None, license: str | None
) -> None:
    source = write_folder(tmp_path / "ouro", OURO, tensors())
    if card is not None:
        (source / "README.md").write_text(card)
    convert(source, tmp_path / "out")
    origin = load_checkpoint(tmp_path / "out").training.get("origin")
    assert origin == (None if license is None else {"license": license})


def test_a_source_out_of_the_hubs_cache_is_told_by_its_repository(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "ouro", OURO, tensors())
    cached = tmp_path / "models--ByteDance--Ouro-1.4B" / "snapshots" / ("0" * 40)
    shutil.copytree(source, cached)
    convert(cached, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").training["origin"] == {
        "base_model": "ByteDance/Ouro-1.4B"
    }


@pytest.mark.parametrize("said", ["apache-2.0", "a: b\nc"])
def test_a_gguf_file_says_its_licence(tmp_path: Path, said: str) -> None:
    pytest.importorskip("gguf")
    from tests.hub.test_gguf import write

    path, *_ = write(tmp_path / "SmolLM2-135M-Instruct.Q8_0.gguf", license=said)
    convert(path, tmp_path / "out")
    wanted = {"base_model": INSTRUCT, "license": "apache-2.0"}
    if ":" in said:
        del wanted["license"]
    assert load_checkpoint(tmp_path / "out").training["origin"] == wanted


def saved_card(path: Path, training: dict[str, object], template: str | None = None) -> str:
    transformers = pytest.importorskip("transformers")
    import loopwise.hub  # noqa: F401 - what makes the Auto classes know us

    files = {} if template is None else {"chat_template.jinja": template}
    save_checkpoint(path, make_model(), ByteTokenizer(), training, files=files)
    transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)
    return (path / "README.md").read_text()


def test_the_card_names_the_source_and_its_licence_and_invents_none(tmp_path: Path) -> None:
    card = saved_card(tmp_path / "a", {"origin": {"base_model": "x/y", "license": "mit"}})
    assert "\nbase_model: x/y\nlicense: mit\n" in card.split("---")[1]
    older = {"converted_from": {"folder": "SmolLM2-135M-Instruct.Q4_1.gguf", "format": "llama"}}
    card = saved_card(tmp_path / "b", older)
    assert f"base_model: {INSTRUCT}\n" in card.split("---")[1] and "license" not in card
    card = saved_card(tmp_path / "c", {})
    assert "base_model" not in card and "license" not in card


@pytest.mark.parametrize("chats", [True, False])
def test_the_example_of_the_card_runs_in_the_chat_template_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chats: bool
) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    card = saved_card(tmp_path / "a", {}, template if chats else None)
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found is not None and ("Once upon a time" in found[1]) != chats
    exec(found[1].replace('"a"', repr(str(tmp_path / "a"))), {})
    assert ("<Tell me a story.>" in capsys.readouterr().out) == chats
