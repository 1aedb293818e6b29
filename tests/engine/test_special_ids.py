"""What begins and ends a text: tokenizer, checkpoint and settings together, none lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwise.engine import Engine, EngineConfig
from loopwise.engine.request import SamplingParams
from loopwise.errors import CheckpointError, EngineError
from loopwise.models.checkpoint import load_checkpoint, save_checkpoint
from loopwise.tokenizer import ByteTokenizer
from tests.conftest import make_model
from tests.engine.test_requests import scripted

BYTE_EOS = ByteTokenizer().eos_id


def engine(folder: Path, special_ids: Any, **settings: Any) -> Engine:
    training = {} if special_ids is None else {"special_ids": special_ids}
    save_checkpoint(folder / "checkpoint", make_model(), ByteTokenizer(), training)
    config = EngineConfig(exit="fixed:1", max_depth=1, max_seq=16, **settings)
    return Engine.from_checkpoint(load_checkpoint(folder / "checkpoint"), config)


@pytest.mark.parametrize("end", [5, 6, 9, BYTE_EOS])
@pytest.mark.parametrize("ignored", [False, True])
def test_every_source_of_end_ids_ends_a_text(tmp_path: Path, end: int, ignored: bool) -> None:
    """U55: ids of a generation config replaced the tokenizer's instead of adding to them."""
    one = engine(tmp_path, {"eos": [5, 6]}, end_ids=(9,))
    assert one.end_ids == {5, 6, 9, BYTE_EOS}
    scripted(one, 65, end, 66, 67)
    made = one.generate([[1]], SamplingParams(max_tokens=4, ignore_eos=ignored))[0].completions[0]
    if ignored:
        assert (made.finish_reason, len(made.token_ids)) == ("length", 4)
    else:
        assert (made.finish_reason, made.token_ids) == ("stop", (65, end))


def test_prompts_begin_with_what_the_checkpoint_says(tmp_path: Path) -> None:
    one = engine(tmp_path, {"bos": 1, "eos": 2})
    assert one.generate(["A"], SamplingParams(max_tokens=1))[0].prompt_ids == (1, 65)
    assert one.end_ids == {2, BYTE_EOS}


def test_settings_win_for_what_begins_a_text(tmp_path: Path) -> None:
    one = engine(tmp_path, {"bos": 1}, bos_id=3)
    assert one.generate(["A"], SamplingParams(max_tokens=1))[0].prompt_ids == (3, 65)


def test_without_special_ids_the_tokenizer_decides(tmp_path: Path) -> None:
    one = engine(tmp_path, None)
    assert one.generate(["A"], SamplingParams(max_tokens=1))[0].prompt_ids == (256, 65)
    assert one.end_ids == {BYTE_EOS}


@pytest.mark.parametrize("said", [{"eos": 9999}, {"eos": [5, "6"]}, {"bos": True}, {"bos": -1}])
def test_ids_that_are_none_are_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="training.json .* has the"):
        engine(tmp_path, said)


def test_a_setting_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine.bos_id has token id 9999"):
        engine(tmp_path, None, bos_id=9999)
