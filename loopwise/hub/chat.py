"""Chat templates of a checkpoint: read from a source, kept beside the weights as transformers does.

A template writes special tokens out as text. Content that spells one must not become one, so it is
marked before a template sees it and unmarked when the text is cut into tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError
from loopwise.hub.read import DEFAULT_TEMPLATE, refuse_pointer
from loopwise.tokenizer import Tokenizer
from loopwise.writing import make_folder, write_whole

FILE, MORE = "chat_template.jinja", "additional_chat_templates"
SETTINGS = "tokenizer_config.json"  # where older folders have theirs
MARK = "\ufdd0"  # a code point that no text may hold
Templates = dict[str, str]


def templates_in(folder: Path) -> Templates:
    """The templates of a published folder or a checkpoint, by name; files win over settings.

    Raises:
        CheckpointError: a file that is a Git LFS pointer, no UTF-8 or no JSON; settings that hold
            something else.
    """
    found: Templates = {}
    settings = folder / SETTINGS
    if settings.is_file():
        refuse_pointer(settings)
        found |= _of_settings(read_json_object(settings, CheckpointError), settings)
    for file in [folder / FILE, *sorted((folder / MORE).glob("*.jinja"))]:
        if file.is_file():
            refuse_pointer(file)
            name = DEFAULT_TEMPLATE if file.name == FILE else file.stem
            try:
                found[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as err:
                raise CheckpointError(f"{str(file)!r} is not UTF-8 ({err}); copy it again") from err
    return found


def check_names(names: Iterable[Any], file: Path) -> None:
    """Refuse names of templates that are no plain file names, and might lead out of a folder.

    Raises:
        CheckpointError: names the first, and ``file``, which has it.
    """
    for name in names:
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
        if not plain or name in (".", ".."):
            raise CheckpointError(f"{str(file)!r} has a chat template named {name!r}; rename it")


def template_files(templates: Mapping[str, str]) -> dict[str, str]:
    """Their texts by the files of a checkpoint folder in which transformers looks for them."""
    check_names(templates, Path(MORE))
    return {
        FILE if name == DEFAULT_TEMPLATE else f"{MORE}/{name}.jinja": text
        for name, text in templates.items()
    }


def write_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Into a checkpoint folder that is there.

    Raises:
        CheckpointError: a name that is no plain file name; nothing was written.
        WriteError: the disk refuses.
    """
    for name, text in template_files(templates).items():
        make_folder((folder / name).parent)
        write_whole(folder / name, text)


def _of_settings(settings: Mapping[str, Any], file: Path) -> Templates:
    said = settings.get("chat_template")
    if said is None:
        return {}
    try:
        entries = [(DEFAULT_TEMPLATE, said)] if isinstance(said, str) else _named(said)
    except (TypeError, KeyError):
        entries = [(None, None)]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in entries):
        raise CheckpointError(
            f"{str(file)!r} has a chat_template that is neither text nor a list of name and "
            "template; put it right, or remove it"
        )
    check_names((name for name, _ in entries), file)
    return dict(entries)


def _named(said: Any) -> list[tuple[Any, Any]]:
    if isinstance(said, dict):
        return list(said.items())
    return [(entry["name"], entry["template"]) for entry in said]


class ChatTexts:
    """Texts that a template made, as token ids; and content that goes into one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def specials(self) -> dict[str, int]:
        """Ids of special tokens by their spelling."""
        empty = [int(i) for i in (self.tokenizer.byte_lengths() == 0).nonzero()[0]]
        spelt = {self.tokenizer.decode([i], special=True): i for i in empty}
        return {text: i for text, i in spelt.items() if text}

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def spelt_in(self, text: str) -> str | None:
        """The first special token that ``text`` spells."""
        found = self._spelling.search(text)
        return found.group() if found else None

    def marked(self, content: str) -> str:
        """Content in which nothing reads as a special token; `encode` gives its own tokens."""
        return self._spelling.sub(lambda found: found[0][:1] + MARK + found[0][1:], content)

    def encode(self, rendered: str) -> list[int]:
        """Token ids, special ones where the template wrote them."""
        ids: list[int] = []
        at = 0
        for found in self._spelling.finditer(rendered):
            ids += self.tokenizer.encode(rendered[at : found.start()].replace(MARK, ""))
            ids.append(self.specials[found.group()])
            at = found.end()
        return ids + self.tokenizer.encode(rendered[at:].replace(MARK, ""))
