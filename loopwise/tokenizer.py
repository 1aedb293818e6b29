"""Text to token ids and exactly back: bytes, or byte-level BPE of our own or of a published model.

Both kinds stand on UTF-8 bytes, so every token has a known length in bytes (`byte_lengths`) and
``decode(encode(text)) == text``. Text never yields a special id: a document that spells
``<|endoftext|>`` stays a document. Only the packing and the engine add ``bos_id`` and ``eos_id``.

Which ids those are, the folder of a checkpoint may know better than its ``tokenizer.json`` (see
`special_ids`). `load_tokenizer` of a folder and `load_checkpoint` give a tokenizer that knows, so
nobody else has to look there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from loopwise.byte_level import END_OF_TEXT, bos_and_eos, byte_table, parse
from loopwise.errors import TokenizerError
from loopwise.special_ids import SpecialIds, StartToken

TOKENIZER_FILE, TRAINING_FILE = "tokenizer.json", "training.json"
Span = tuple[int, int]


class Tokenizer(Protocol):
    """What the rest of the package may ask of a tokenizer.

    Attributes:
        bos_id: what a document begins with, in training.
        eos_id: what a document ends with, in training.
        end_ids: every id that ends a text, those first that the checkpoint names.
        special_ids: what was said besides ``tokenizer.json``, see `with_special_ids`.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    end_ids: tuple[int, ...]
    special_ids: dict[str, Any]

    @property
    def start(self) -> StartToken:
        """What prompts begin with: as ``tokenizer.json`` says, else as documents of training did.

        A converted checkpoint does what its source does. There ``tokenizer.json`` alone decides, as
        in transformers 5, which looks for no ``add_bos_token`` beside one.
        """
        ...

    def told_by(self, training: Mapping[str, Any]) -> Self:
        """The same tokenizer as the ``training.json`` beside it has it.

        Raises:
            TokenizerError: see `with_special_ids`.
        """
        ...

    def with_special_ids(self, said: Mapping[str, Any]) -> Self:
        """The same tokenizer with ids that its ``tokenizer.json`` does not tell.

        Args:
            said: ``bos``, an id; ``eos``, an id that ends texts in training instead of the
                tokenizer's own, or a list of ids that end a text besides it, as instruct models
                end their turns. Decoding ends at any of them and at the tokenizer's own.
        Raises:
            TokenizerError: another name, or an id that is none.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, never a special one.

        Raises:
            TokenizerError: a lone surrogate, or a byte the vocabulary has no token for.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one faster call."""
        ...

    def encode_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids and the characters ``[start, end)`` each one touches."""
        ...

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ``ids``; bytes that are not UTF-8 (half a character) become U+FFFD.

        Args:
            ids: token ids.
            special: spell special tokens out; by default they decode to nothing.
        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; empty for a special token."""
        ...

    def byte_lengths(self) -> np.ndarray:
        """``len(token_bytes(id))`` of every id, ``(vocab,)`` int32."""
        ...

    def to_json(self) -> str:
        """The text of a ``tokenizer.json`` that `load_tokenizer` reads back."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `to_json` and of ids it does not tell, in hexadecimal."""
        ...


class _ByteTable:
    """Decoding shared by both kinds: a table of the bytes and the special spelling of each id."""

    bos_id: int
    eos_id: int
    end_ids: tuple[int, ...]
    special_ids: dict[str, Any]

    def __init__(self, table: list[bytes], specials: dict[int, str], ids: SpecialIds) -> None:
        self._table = table
        self._specials = specials
        self.vocab_size = len(table)
        self._take(ids)

    def _take(self, ids: SpecialIds) -> None:
        self._ids = ids
        self.bos_id, self.eos_id, self.end_ids = ids.bos, ids.eos, ids.ends
        self.special_ids = dict(ids.said)

    def _with(self, ids: SpecialIds) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("fingerprint", None)  # made for the ids of before
        made._take(ids)
        return made

    @property
    def start(self) -> StartToken:
        """See `Tokenizer.start`."""
        return self._ids.start

    def told_by(self, training: Mapping[str, Any]) -> Self:
        """See `Tokenizer.told_by`."""
        ids = self._ids.with_said(training.get("special_ids", {}), self.vocab_size)
        return self._with(replace(ids, converted="converted_from" in training))

    def with_special_ids(self, said: Mapping[str, Any]) -> Self:
        """See `Tokenizer.with_special_ids`."""
        return self._with(self._ids.with_said(said, self.vocab_size))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """See `Tokenizer.decode`."""
        parts = []
        for token_id in ids:
            token_id = int(token_id)
            if special and token_id in self._specials:
                parts.append(self._specials[token_id].encode())
            else:
                parts.append(self.token_bytes(token_id))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside 0..{self.vocab_size - 1}")
        return self._table[token_id]

    def byte_lengths(self) -> np.ndarray:
        """See `Tokenizer.byte_lengths`."""
        return np.fromiter(map(len, self._table), dtype=np.int32, count=self.vocab_size)

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        """See `Tokenizer.fingerprint`."""
        text = self.to_json()
        if (self.bos_id, *self.end_ids) != self._ids.own:
            text += json.dumps([self.bos_id, self.eos_id, sorted(self.end_ids)])
        return hashlib.sha256(text.encode()).hexdigest()


class ByteTokenizer(_ByteTable):
    """One token per UTF-8 byte, then ``<|bos|>`` 256 and ``<|eos|>`` 257; needs no file."""

    bos_id = 256
    eos_id = 257

    def __init__(self) -> None:
        table = [bytes([value]) for value in range(256)] + [b"", b""]
        bos, eos = type(self).bos_id, type(self).eos_id
        super().__init__(table, {bos: "<|bos|>", eos: "<|eos|>"}, SpecialIds((bos, eos)))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode_batch`."""
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """See `Tokenizer.encode_spans`."""
        ids = self.encode(text)
        if len(ids) == len(text):
            return ids, [(i, i + 1) for i in range(len(text))]
        return ids, [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return json.dumps({"type": "loopwise-byte"})


class BPETokenizer(_ByteTable):
    """Byte-level BPE in the ``tokenizer.json`` format of the `tokenizers` library.

    A published file keeps its normaliser, since its model was trained behind it; only with one
    (NFC, say) may `decode` give back an equivalent text instead of the same.

    Args:
        text: what the ``tokenizer.json`` holds; `to_json` returns it unchanged.
    Raises:
        TokenizerError: not a tokenizer, not byte-level, or no known pair of bos and eos.
    """

    def __init__(self, text: str) -> None:
        self._json = text
        self._inner, put_before = parse(text)
        added = self._inner.get_added_tokens_decoder()
        specials = {i: token.content for i, token in added.items() if token.special}
        by_name = {name: i for i, name in specials.items()}
        plain = {i: token.content.encode() for i, token in added.items() if not token.special}
        table = byte_table(self._inner, specials, plain)
        super().__init__(table, specials, SpecialIds(bos_and_eos(by_name), put_before))
        known = {token[0] for token in self._table if len(token) == 1}
        # Published vocabularies may lack bytes their training text never had, and the library
        # then drops the character without a word. C0, C1 and F5.. never occur in UTF-8.
        legal = set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
        self._missing = bytes(sorted(legal - known))
        for name in by_name:
            if not specials.keys().isdisjoint(self.encode(name)):
                raise TokenizerError(f"the tokenizer turns the text {name!r} into a special token")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn merges from ``texts``; the same texts in the same order give the same tokenizer.

        Digits stay single tokens, so that numbers are read and written digit by digit. Short text
        may hold fewer merges than asked for: read `vocab_size` of the result.

        Raises:
            TokenizerError: ``vocab_size`` cannot hold the 256 bytes and one special token.
        """
        if vocab_size < 257:
            raise TokenizerError(f"vocab_size={vocab_size}; byte-level BPE needs at least 257")
        inner = tokenizers.Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        self._check(text)
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode_batch`."""
        for text in texts:
            self._check(text)
        batch = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """See `Tokenizer.encode_spans`."""
        self._check(text)
        encoding = self._inner.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def to_json(self) -> str:
        """See `Tokenizer.to_json`."""
        return self._json

    def __reduce__(self) -> tuple[Any, ...]:
        # The library forgets encode_special_tokens when it is pickled.
        return _restored, (type(self), self._json, self._ids)

    def _check(self, text: str) -> None:
        raw = _utf8(text)
        if self._missing and len(raw.translate(None, self._missing)) != len(raw):
            char = next(c for c in text if any(b in self._missing for b in c.encode()))
            raise TokenizerError(
                f"the tokenizer has no token for the character {char!r} (U+{ord(char):04X}); "
                "take it out of the text, or use a tokenizer that holds all 256 bytes"
            )


def load_tokenizer(source: str | Path) -> Tokenizer:
    """``"byte"``, a ``tokenizer.json``, or a folder that holds one.

    Of a folder, a checkpoint's or a run's, ``training.json`` may know what the tokenizer alone does
    not; it then does (`Tokenizer.told_by`).

    Raises:
        TokenizerError: nothing there, or not a tokenizer this package can use.
    """
    if source == "byte":
        return ByteTokenizer()
    path = Path(source).expanduser()
    said: Mapping[str, Any] = {}
    if path.is_dir():
        said = _said_beside(path / TRAINING_FILE)
        path = path / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise TokenizerError(
            f"cannot read a tokenizer from {str(source)!r} ({type(err).__name__}: {path}); give "
            "'byte', a tokenizer.json, or a folder that holds one"
        ) from err
    try:
        return tokenizer_from_json(text).told_by(said)
    except TokenizerError as err:
        raise TokenizerError(f"{path}: {err}") from err


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Into a folder that holds no checkpoint yet, so that `load_tokenizer` reads back all of it."""
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    if tokenizer.special_ids:
        said = json.dumps({"special_ids": tokenizer.special_ids}, indent=2) + "\n"
        (folder / TRAINING_FILE).write_text(said, encoding="utf-8")


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_json` wrote, or one from a published ``tokenizer.json``.

    Raises:
        TokenizerError: not JSON, or not a tokenizer this package can use.
    """
    try:
        content = json.loads(text)
    except ValueError as err:
        raise TokenizerError(f"a tokenizer.json must be JSON: {err}") from err
    if isinstance(content, dict) and content.get("type") == "loopwise-byte":
        return ByteTokenizer()
    return BPETokenizer(text)


def _restored(kind: type[BPETokenizer], text: str, ids: SpecialIds) -> BPETokenizer:
    return kind(text)._with(ids)


def _said_beside(file: Path) -> Mapping[str, Any]:
    """What a ``training.json`` holds; nothing where there is no such file."""
    try:
        training = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise TokenizerError(f"{file} cannot be read ({err}); copy it again") from err
    return training if isinstance(training, dict) else {}


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        code = ord(text[err.start])
        raise TokenizerError(
            f"character {err.start} is U+{code:04X}, half of a surrogate pair, which is not text; "
            "take it out"
        ) from err
