"""What lies beside the weights of a loopwise checkpoint, and goes with them when they are saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError, TokenizerError, require_extra
from loopwise.exits.rule import ExitRule
from loopwise.hub import chat
from loopwise.hub.auto.plan import rule_only
from loopwise.hub.chat import templates_in, write_templates
from loopwise.measure.tiers import named_rule, why_not_promised
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, file_hash, load_checkpoint
from loopwise.tokenizer import tokenizer_from_json

log = logging.getLogger(__name__)

WEIGHTS, TOKENIZER, TRAINING, EXITS = (
    "model.safetensors",
    "tokenizer.json",
    "training.json",
    "exits.json",
)
# Of from_pretrained's arguments, those that say where a file of the hub is.
HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


@dataclass(frozen=True, slots=True)
class Beside:
    """The files beside the weights of one checkpoint, read.

    Attributes:
        path: the folder; None for a model that comes from no checkpoint.
        tokenizer: text of ``tokenizer.json``; None where there is none.
        training, exits: what those files hold.
        chat_templates: by name.
    """

    path: Path | None = None
    tokenizer: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    exits: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    _rules: dict[tuple[str, int], tuple[ExitRule, Mapping[str, Any]]] = field(
        default_factory=dict, compare=False
    )  # by text and largest depth: found once, since that hashes the weights

    def checkpoint(self, model: LoopedLM) -> Checkpoint | None:
        """As the rest of loopwise knows it; None where there is too little for one."""
        if self.path is None or self.tokenizer is None:
            return None
        return Checkpoint(
            path=self.path,
            model=model,
            tokenizer=tokenizer_from_json(self.tokenizer),
            training=dict(self.training),
            exits=dict(self.exits),
        )

    def check(self, rows: int) -> None:
        """Refuse a tokenizer that cannot be used or has more ids than the model rows.

        Raises:
            CheckpointError, TokenizerError: as `load_checkpoint` says it.
        """
        if self.path is None or self.tokenizer is None:
            return
        try:
            fits = tokenizer_from_json(self.tokenizer).vocab_size <= rows
        except TokenizerError:
            fits = False
        if not fits:
            say_what_is_wrong(self.path)

    def rule(
        self, model: LoopedLM, text: str, max_depth: int
    ) -> tuple[ExitRule, Mapping[str, Any]]:
        """The tier or exit rule ``text`` names, and the state of fitted policies.

        Raises:
            ExitError: no such rule or tier, or ``exits.json`` was made for other weights.
            DepthError: a depth out of range.
        """
        key = (text, max_depth)
        if key not in self._rules:
            self._rules[key] = self._find(model, text, max_depth)
        return self._rules[key]

    def _find(
        self, model: LoopedLM, text: str, max_depth: int
    ) -> tuple[ExitRule, Mapping[str, Any]]:
        checkpoint = self.checkpoint(model)
        if checkpoint is None:
            return rule_only(text, max_depth)
        doubt = why_not_promised(checkpoint, text.strip(), "per-loop")
        if doubt is not None:
            log.warning("%s", doubt)
        return named_rule(checkpoint, text, max_depth), checkpoint.fitted_policies()


# What transformers raises for files that are broken or not there.
BROKEN = (SafetensorError, OSError, RuntimeError, ValueError)


def say_what_is_wrong(folder: Path) -> None:
    """Raise what `load_checkpoint` finds wrong with a folder, in one line; or nothing."""
    if folder.is_dir():
        load_checkpoint(folder)


def read_beside(source: str, subfolder: str = "", **where: Any) -> Beside:
    """The files beside the weights of a local folder or a hub repository.

    Args:
        where: those of `HUB_ARGUMENTS` that were given.
    Raises:
        CheckpointError: a file that is no JSON object.
    """
    folder = Path(source) / subfolder
    if not folder.is_dir():
        found = _download(source, subfolder, where)
        if found is None:
            return Beside()
        folder = found
    texts = folder / TOKENIZER
    return Beside(
        path=folder,
        tokenizer=texts.read_text(encoding="utf-8") if texts.is_file() else None,
        training=_read(folder / TRAINING),
        exits=_read(folder / EXITS),
        chat_templates=templates_in(folder),
    )


def _download(repo_id: str, subfolder: str, where: Mapping[str, Any]) -> Path | None:
    """The local folder of a repository's snapshot, with those files in it that it has."""
    hub = require_extra("huggingface_hub", "hub", f"loading {repo_id!r}")
    errors = require_extra("huggingface_hub.errors", "hub", f"loading {repo_id!r}")
    folder = None
    for name in (TOKENIZER, TRAINING, EXITS, chat.FILE, chat.SETTINGS):
        try:
            file = hub.hf_hub_download(repo_id, name, subfolder=subfolder or None, **where)
        except (errors.EntryNotFoundError, errors.LocalEntryNotFoundError):
            continue
        folder = Path(file).parent
    if folder is not None:  # templates whose names only the repository knows
        more = "/".join([*filter(None, [subfolder]), chat.MORE, "*.jinja"])
        with suppress(errors.LocalEntryNotFoundError):
            hub.snapshot_download(repo_id, allow_patterns=[more], **where)
    return folder


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, CheckpointError) if path.is_file() else {}


Since = Literal["same", "rounded", "other"]


def weights_since(path: Path | None, state: Mapping[str, Tensor]) -> Since:
    """What became of the weights that ``path`` holds, by our names.

    ``same`` numbers, in whichever dtype they now are; ``rounded`` to a narrower one and otherwise
    the same; or ``other`` ones.
    """
    if path is None or not (path / WEIGHTS).is_file():
        return "other"
    found: Since = "same"
    with safe_open(path / WEIGHTS, framework="pt") as file:
        if set(file.keys()) != set(state):
            return "other"
        for key, tensor in state.items():
            stored, now = file.get_tensor(key), tensor.detach().cpu()
            wide = torch.promote_types(stored.dtype, now.dtype)
            if stored.shape != now.shape:
                return "other"
            if not torch.equal(stored.to(wide), now.to(wide)):
                if not torch.equal(stored.to(now.dtype), now):
                    return "other"
                found = "rounded"
    return found


def beside_these(beside: Beside, state: Mapping[str, Tensor]) -> Beside:
    """What may be saved beside the weights ``state``; asked before anything is overwritten.

    Exit rules hold for the weights they were made for. With others they stay behind, and
    ``training.json`` says that the weights have moved on.
    """
    if beside.path is None:
        return beside
    since = weights_since(beside.path, state)
    training = dict(beside.training)
    if since == "other":
        training["weights_changed_by"] = "transformers; on which data is not recorded"
    elif since == "rounded":
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in state.values()})
        training["weights_rounded_to"] = " and ".join(dtypes)
    valid = since == "same" and beside.exits.get("weights_hash") == file_hash(beside.path / WEIGHTS)
    if beside.exits and not valid:
        log.warning(
            "exits.json is not saved: its rules hold for the weights of %s as they were measured; "
            "make others with `loopwise calibrate`",
            beside.path,
        )
    return replace(beside, training=training, exits=beside.exits if valid else {})


def write_beside(folder: Path, beside: Beside) -> None:
    """Complete a folder that holds weights and config already."""
    tokenizer = folder / TOKENIZER
    if beside.tokenizer is not None and not tokenizer.is_file():
        tokenizer.write_text(beside.tokenizer, encoding="utf-8")
        write_templates(folder, beside.chat_templates)
    _write(folder / TRAINING, beside.training)
    if beside.exits:
        _write(folder / EXITS, {**beside.exits, "weights_hash": file_hash(folder / WEIGHTS)})
    else:
        (folder / EXITS).unlink(missing_ok=True)  # it was for the weights that lay here before


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
