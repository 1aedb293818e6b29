"""Prompts in a checkpoint's chat template, rendered as transformers renders them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from loopwise.errors import ConfigError, require_extra
from loopwise.hub.chat import MARK, ChatTexts, templates_in
from loopwise.hub.read import DEFAULT_TEMPLATE
from loopwise.models.checkpoint import Checkpoint
from loopwise.registry import did_you_mean


class ChatTemplates:
    """The templates beside a checkpoint, and which of them is used.

    Attributes:
        texts: what the encoder cuts rendered prompts with.
        used: name of the template that the present evaluation's prompts are made with; None where
            they are plain.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.templates = templates_in(checkpoint.path)
        self.texts = ChatTexts(checkpoint.tokenizer)
        self.used: str | None = None

    def choose(self, name: bool | str) -> str:
        """The template of that name; True is the default, or the only one.

        Raises:
            ConfigError: there is none.
        """
        if not self.templates:
            raise ConfigError(
                f"{str(self.checkpoint.path)!r} has no chat template; convert its source anew, put "
                "a chat_template.jinja there, or evaluate without"
            )
        only = next(iter(self.templates)) if len(self.templates) == 1 else DEFAULT_TEMPLATE
        wanted = only if name is True or name == "" else str(name)
        if wanted not in self.templates:
            hint = did_you_mean(wanted, list(self.templates)) or ";"
            raise ConfigError(
                f"no chat template named {wanted!r}{hint} there are: {', '.join(self.templates)}"
            )
        self.used = wanted
        return self.templates[wanted]

    def render(self, history: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt that a chat becomes; without a generation prompt its last message goes on.

        It begins with a mark, by which the encoder knows it from plain text.

        Raises:
            ConfigError: no template, or it refuses these messages.
            MissingExtraError: transformers is not installed.
        """
        template = self.choose(self.used or True)
        messages = [self._marked(message) for message in history]
        errors = require_extra("jinja2.exceptions", "eval", "chat templates")
        try:
            made = self._renderer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except errors.TemplateError as err:
            roles = ", ".join(str(message.get("role")) for message in history)
            raise ConfigError(
                f"the chat template {self.used!r} refuses messages of {roles}: {err}"
            ) from err
        return f"{MARK}{made}"

    def to_json(self) -> dict[str, Any] | None:
        """What was used, for the result file."""
        if self.used is None:
            return None
        return {"name": self.used, "sha256": self.digest, "text": self.templates[self.used]}

    @property
    def digest(self) -> str | None:
        """SHA-256 of the template in use, in hexadecimal."""
        if self.used is None:
            return None
        return hashlib.sha256(self.templates[self.used].encode()).hexdigest()

    @cached_property
    def _renderer(self) -> Any:
        require_extra("transformers", "hub", "rendering a chat template")
        from loopwise.hub.auto.tokenizer import LoopwiseTokenizer

        return LoopwiseTokenizer.from_pretrained(str(self.checkpoint.path))

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: self.texts.marked(value) if isinstance(value, str) and key != "role" else value
            for key, value in message.items()
        }
