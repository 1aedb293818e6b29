"""Which token ids begin and end texts: a tokenizer's own, and what a checkpoint says besides.

A ``tokenizer.json`` does not always tell, or tells wrongly: ``training.json`` beside it then does
(``special_ids``), and that it belongs to a converted checkpoint, whose prompts begin as at its
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loopwise.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class StartToken:
    """Whether prompts begin with a start token.

    Attributes:
        id: of the token; it also stands for an empty prompt, whatever ``added`` says.
        why: for the result file.
    """

    id: int
    added: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"id": self.id, "added": self.added, "why": self.why}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of one tokenizer.

    Attributes:
        own: bos and eos of the tokenizer itself.
        put_before: what ``tokenizer.json`` puts before a text; None: nothing.
        said: besides, see `with_said`.
        converted: it is that of a converted checkpoint.
    """

    own: tuple[int, int]
    put_before: int | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    converted: bool = False

    @property
    def bos(self) -> int:
        """What a document begins with, in training."""
        begins = _listed(self.said.get("bos", []))
        return begins[0] if begins else self.own[0]

    @property
    def eos(self) -> int:
        """What a document ends with, in training."""
        said = self.said.get("eos")
        return said if isinstance(said, int) else self.own[1]

    @property
    def ends(self) -> tuple[int, ...]:
        """Every id that ends a text, those first that were said."""
        return tuple(dict.fromkeys([*_listed(self.said.get("eos", [])), self.own[1]]))

    @property
    def start(self) -> StartToken:
        """See `Tokenizer.start`."""
        if self.put_before is not None:
            return StartToken(self.put_before, True, "tokenizer.json puts it before a text")
        if self.converted:
            return StartToken(self.bos, False, "tokenizer.json puts none before a text")
        return StartToken(self.bos, True, "the documents of its training begin with it")

    def with_said(self, said: Mapping[str, Any], size: int) -> SpecialIds:
        """With other ids said besides the tokenizer's own.

        Args:
            said: see `Tokenizer.with_special_ids`.
            size: of the vocabulary.
        Raises:
            TokenizerError: another name, or an id that is none.
        """
        if not isinstance(said, Mapping) or not said.keys() <= {"bos", "eos"}:
            raise TokenizerError(f"special_ids is {said!r}; it says bos and eos, nothing else")
        for name, ids in ((name, _listed(said.get(name, []))) for name in ("bos", "eos")):
            if name == "bos" and len(ids) > 1:
                raise TokenizerError(f"special_ids has {len(ids)} bos ids; a text begins with one")
            for i in ids:
                if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < size:
                    raise TokenizerError(
                        f"special_ids has the {name} id {i!r}; ids are 0 to {size - 1}"
                    )
        return replace(self, said=dict(said))


def _listed(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]
