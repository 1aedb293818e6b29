"""The tokenizer of a loopwise checkpoint as transformers sees it: the same ids, nothing added."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import getdoc, signature
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError, TokenizerError
from loopwise.hub.auto.config import LoopwiseConfig
from loopwise.hub.auto.folder import TOKENIZER, TRAINING
from loopwise.hub.auto.versions import check_version
from loopwise.tokenizer import BPETokenizer, ByteTokenizer, tokenizer_from_json

check_version(transformers.__version__)


class LoopwiseTokenizer(PreTrainedTokenizerFast):
    """Byte-level BPE or plain bytes, with the begin and end the checkpoint was trained with.

    - A text begins with the id its training documents began with, or as the source's tokenizer
      had it where the checkpoint was converted (`loopwise.tokenizer.Tokenizer.start`);
      ``add_bos_token=False`` or ``add_special_tokens=False`` leave it out.
    - Text that spells a special token stays text; ``split_special_tokens=False`` reads it as one.
    - ``decode(encode(text), skip_special_tokens=True) == text``; special tokens are spelt out
      otherwise, as by any tokenizer of transformers.
    - A chat template's special tokens become ids; what is handed to it may not spell one.
    - Padding is on the left, as generation needs it, and of the end token, which a mask hides.

    Args:
        source: text of the checkpoint's ``tokenizer.json``, written back as it is.
    """

    vocab_files_names: ClassVar[dict[str, str]] = {
        "loopwise_file": TOKENIZER,
        "training_file": TRAINING,
    }
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, *args: Any, source: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = source
        self._vocab_of_source = self.get_vocab()

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers loads tokenizers."""
        # The file names its added tokens itself; given none, transformers does not look in it for
        # a list that the byte tokenizer's file has not.
        kwargs.setdefault("added_tokens_decoder", {})
        return super().from_pretrained(source, *args, **kwargs)

    @classmethod
    def convert_to_native_format(
        cls,
        loopwise_file: str | None = None,
        training_file: str | None = None,
        tokenizer_file: str | None = None,
        begins_text: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of ``__init__`` from the files of a checkpoint.

        Raises:
            TokenizerError: no ``tokenizer.json``, or one this package cannot use.
        """
        if loopwise_file is None:
            raise TokenizerError(f"{kwargs.get('name_or_path')!r} has no {TOKENIZER}")
        text = Path(loopwise_file).read_text(encoding="utf-8")
        own = tokenizer_from_json(text)
        backend = byte_backend() if isinstance(own, ByteTokenizer) else _bpe_backend(text)
        training = {}
        if training_file is not None:
            training = read_json_object(Path(training_file), CheckpointError)
        own = own.told_by(training)
        start = own.start
        names = {
            "bos_token": backend.id_to_token(start.id),
            "eos_token": backend.id_to_token(own.end_ids[0]),
        }
        usual = {
            **names,
            "pad_token": kwargs.get("eos_token", names["eos_token"]),
            "padding_side": "left",
            "add_bos_token": start.added if begins_text is None else begins_text,
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        }
        return {**usual, **kwargs, "tokenizer_object": backend, "source": text}

    def apply_chat_template(
        self, conversation: Any, *args: Any, tokenizer_kwargs: Any = None, **kwargs: Any
    ) -> Any:
        """As transformers does; the template's special tokens become ids, those of messages not.

        Raises:
            TokenizerError: a message, a document, a tool or another value for the template spells
                a special token, which would pass for the template's;
                ``tokenizer_kwargs={"split_special_tokens": False}`` lets it.
        """
        if not {"split_special_tokens"} & set(tokenizer_kwargs or {}):
            tokenizer_kwargs = {**(tokenizer_kwargs or {}), "split_special_tokens": False}
            specials = [str(t) for t in self.added_tokens_decoder.values() if t.special]
            given = signature(super().apply_chat_template).bind(conversation, *args, **kwargs)
            values = {**given.arguments, **given.kwargs}
            own = {"chat_template", "kwargs", *self.special_tokens_map}  # which may spell them
            for text in _texts_in([v for k, v in values.items() if k not in own]):
                spelt = next((token for token in specials if token in text), None)
                if spelt is not None:
                    raise TokenizerError(
                        "a message, or another value for the chat template, spells the special "
                        f"token {spelt!r}, which would forge a turn; take it out, or allow it with "
                        "tokenizer_kwargs={'split_special_tokens': False}"
                    )
        return super().apply_chat_template(
            conversation, *args, tokenizer_kwargs=tokenizer_kwargs, **kwargs
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers does, with the checkpoint's own ``tokenizer.json`` while it still holds.

        Once tokens were added it holds no more, and the file is the one transformers writes.
        """
        written = super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        config = read_json_object(folder / "tokenizer_config.json", TokenizerError)
        config["begins_text"] = self.add_bos_token  # which transformers does not store
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
        )
        if self._source is not None and self.get_vocab() == self._vocab_of_source:
            (folder / TOKENIZER).write_text(self._source, encoding="utf-8")
        return written


def _texts_in(given: Any) -> Iterator[str]:
    """All text of what a template may print, however it is nested: names of fields too."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        yield from _texts_in([*given, *given.values()])
    elif isinstance(given, (list, tuple, set, frozenset)):
        for value in given:
            yield from _texts_in(value)
    elif callable(given):  # a tool, of which transformers makes a description
        yield getdoc(given) or ""
    elif is_dataclass(given):
        yield from _texts_in({field.name: getattr(given, field.name) for field in fields(given)})
    elif hasattr(given, "model_dump"):  # of pydantic
        yield from _texts_in(given.model_dump())
    else:
        yield str(given)


def byte_backend() -> tokenizers.Tokenizer:
    """`ByteTokenizer` as one of the tokenizers library: a vocabulary of bytes and no merges."""
    own, spelt = ByteTokenizer(), BPETokenizer.train([], 257)  # all bytes, and no merges either
    vocab = tokenizers.Tokenizer.from_str(spelt.to_json()).get_vocab()
    by_byte = {char: spelt.token_bytes(i)[0] for char, i in vocab.items() if i != spelt.bos_id}
    backend = tokenizers.Tokenizer(models.BPE(vocab=by_byte, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = [own.decode([i], special=True) for i in (own.bos_id, own.eos_id)]
    backend.add_special_tokens(specials)
    return backend


def _bpe_backend(text: str) -> tokenizers.Tokenizer:
    """Of a ``tokenizer.json`` that :class:`loopwise.tokenizer.BPETokenizer` has accepted."""
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()
    backend.no_truncation()
    return backend


AutoTokenizer.register(LoopwiseConfig, fast_tokenizer_class=LoopwiseTokenizer, exist_ok=True)
