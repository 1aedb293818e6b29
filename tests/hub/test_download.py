"""A path or a hub id; the hub itself is played by a stand-in."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loopwise.errors import CheckpointError, MissingExtraError
from loopwise.hub.download import PACKAGED, source_folder


class HfHubHTTPError(Exception):
    pass


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, list[str]]]:
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    hub: Any = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    errors: Any = ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError = HfHubHTTPError
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return asked


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, RuntimeError("not to be asked"))
    assert source_folder(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert source_folder("owner/name") == Path("owner/name"), "a folder wins over the hub"
    assert asked == []


def test_a_hub_id_is_downloaded_without_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in(monkeypatch, tmp_path)
    assert source_folder("ByteDance/Ouro-1.4B") == tmp_path
    assert source_folder("some.one/thing", allow_pickle=True) == tmp_path
    safe, all_kinds = (patterns for _, patterns in asked)
    assert safe == ["*.json", "*.safetensors", "*.jinja", "README.md"]
    assert all_kinds == [*safe, "*.bin", "*.pt", "*.pth"]


@pytest.mark.parametrize("error", [OSError("no network\nlong tail"), HfHubHTTPError("404 gone")])
def test_what_the_hub_does_not_give_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stand_in(monkeypatch, error)
    with pytest.raises(CheckpointError, match=r"cannot get 'owner/name' from the hub") as failure:
        source_folder("owner/name")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at/all", "a/b/c", "https://x.y/z"])
def test_a_wrong_path_is_called_one(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    stand_in(monkeypatch, RuntimeError("not to be asked"))
    with pytest.raises(CheckpointError, match="no checkpoint folder at"):
        source_folder(source)


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="'hub' extra"):
        source_folder("owner/name")


def test_a_packaged_checkpoint_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is a plugin of another program, whose machinery has no place here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "smollm2", ("a_made_up_plugin", "smollm2"))
    with pytest.raises(MissingExtraError, match=r"loopwise\[smollm2\]"):
        source_folder("smollm2")
    package = tmp_path / "a_made_up_plugin"
    package.mkdir()
    importlib.invalidate_caches()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(CheckpointError, match="holds 0 GGUF files"):
        source_folder("smollm2")
    (package / "some.gguf").touch()
    assert source_folder("smollm2") == package / "some.gguf"
    (tmp_path / "smollm2").mkdir()
    assert source_folder("smollm2") == Path("smollm2")
