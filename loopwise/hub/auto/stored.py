"""A model and the folder it lies in, both ways: strictly loaded, saved whole, uploaded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from loopwise.errors import CheckpointError, ConfigError
from loopwise.hub.auto.card import model_card, write_card
from loopwise.hub.auto.folder import (
    BROKEN,
    HUB_ARGUMENTS,
    WEIGHTS,
    Beside,
    beside_these,
    read_beside,
    say_what_is_wrong,
    write_beside,
)
from loopwise.hub.auto.upload import ONE_FILE, UPLOAD_ARGUMENTS, upload
from loopwise.hub.read import DEFAULT_TEMPLATE
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import usual_depth


class StoredModel(PreTrainedModel):
    """What transformers' classes know of folders, for a model of ours.

    Attributes:
        model: the :class:`loopwise.models.base.LoopedLM`.
        beside: what lay beside its weights.
    """

    base_model_prefix = "model"
    model: LoopedLM
    beside: Beside

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers loads models, but strict, and with what lies beside the weights.

        Raises:
            CheckpointError: tensors missing or unknown, by name; or what `load_checkpoint` says.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        except BROKEN:
            say_what_is_wrong(Path(source, kwargs.get("subfolder") or ""))
            raise
        problems = [f"missing {key}" for key in sorted(info["missing_keys"])]
        problems += [f"unknown {key}" for key in sorted(info["unexpected_keys"])]
        if problems:
            shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
            raise CheckpointError(f"{str(source)!r} does not fit its config: {shown}")
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        model.beside = read_beside(str(source), kwargs.get("subfolder") or "", **where)
        model.beside.check(model.config.vocab_size)
        if model.config.num_loops is None:  # an older config.json
            limit = model.model.geometry.max_depth
            model.config.num_loops = usual_depth(model.beside.training, limit)
        model._take_special_ids()
        return (model, info) if wants_info else model

    def _take_special_ids(self) -> None:
        """What begins and ends texts, where no generation_config.json said so."""
        checkpoint, generation = self.beside.checkpoint(self.model), self.generation_config
        if checkpoint is None or generation is None:
            return
        ends = list(checkpoint.tokenizer.end_ids)
        for name, usual in (
            ("bos_token_id", checkpoint.tokenizer.bos_id),
            ("eos_token_id", ends if len(ends) > 1 else ends[0]),
            ("pad_token_id", ends[0]),
        ):
            if getattr(generation, name) is None:
                setattr(generation, name, usual)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a loopwise checkpoint: one that transformers and loopwise both load.

        Exit rules and tiers go along as long as the weights are those they were made for. A model
        card that somebody edited is kept, in the folder and on the hub.

        Args:
            kwargs: of transformers' own method, and of `push_to_hub`.
        Raises:
            CheckpointError: the weights would be spread over several files.
        """
        given = {k: kwargs.pop(k) for k in ("repo_id", *UPLOAD_ARGUMENTS) if k in kwargs}
        kwargs.setdefault("max_shard_size", ONE_FILE)
        folder = Path(save_directory)
        state = self.state_dict() if state_dict is None else state_dict
        state = {key.removeprefix(f"{self.base_model_prefix}."): t for key, t in state.items()}
        beside = beside_these(self.beside, state)
        super().save_pretrained(folder, is_main_process, state, **kwargs)
        if not is_main_process:
            return
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(
                f"the weights in {str(folder)!r} are not in one {WEIGHTS}, as a loopwise "
                "checkpoint has them; leave max_shard_size and variant out"
            )
        write_beside(folder, beside)
        name = given.get("repo_id", folder.name)
        write_card(folder, self._card(beside, name, given.pop("tags", None) or ()))
        if push_to_hub:
            upload(folder, given.pop("repo_id", folder.name), **given)

    def _card(self, beside: Beside, name: str, tags: Sequence[str]) -> str:
        return model_card(
            self.model,
            beside.training,
            beside.exits,
            name=name,
            num_loops=self.config.usual_loops,
            tags=tags,
            chats=DEFAULT_TEMPLATE in beside.chat_templates,
        )

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload what `save_pretrained` writes, with its model card; the address of the commit.

        Args:
            kwargs: those of `UPLOAD_ARGUMENTS`.
        Raises:
            ConfigError: an argument that is not one of these.
        """
        unknown = sorted(set(kwargs) - set(UPLOAD_ARGUMENTS))
        if unknown:
            raise ConfigError(
                f"push_to_hub has no {', '.join(unknown)}; known: {', '.join(UPLOAD_ARGUMENTS)}"
            )
        tags = kwargs.pop("tags", None)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id=repo_id, tags=tags)
            return upload(Path(folder), repo_id, **kwargs)


def with_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets ``load_state_dict`` take the names of the file, as `Trainer` does when it resumes."""
    own = f"{prefix}{StoredModel.base_model_prefix}."
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(own)]:
        state_dict[own + key.removeprefix(prefix)] = state_dict.pop(key)
