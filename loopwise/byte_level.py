"""Byte-level BPE from a published ``tokenizer.json``: the bytes of every id, and no surprises."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import processors

from loopwise.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"
# The (bos, eos) spellings of published byte-level tokenizers, the first pair present wins.
BOS_EOS = (
    (END_OF_TEXT, END_OF_TEXT),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|begin_text|>", "<|end_text|>"),
    ("<|bos|>", "<|eos|>"),
    ("<bos>", "<eos>"),
    ("<s>", "</s>"),
)


def parse(text: str) -> tuple[tokenizers.Tokenizer, int | None]:
    """A byte-level tokenizer that adds nothing, cuts nothing and reads no special token in text.

    Returns:
        The tokenizer, and the id that the file itself puts before a text, if any.
    Raises:
        TokenizerError: not a ``tokenizer.json``, not byte-level, or one that adds a space.
    """
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as err:  # the library raises nothing narrower
        raise TokenizerError(f"not a tokenizer.json of the tokenizers library: {err}") from err
    content: dict[str, Any] = json.loads(text)
    if "ByteLevel" not in _kinds(content.get("decoder")):
        raise TokenizerError(
            "the tokenizer is not byte-level, so text would not come back exactly; use a "
            "byte-level BPE tokenizer.json, 'byte', or train one"
        )
    if _prefix_space(content.get("pre_tokenizer")):
        raise TokenizerError("the tokenizer adds a space before the text (add_prefix_space=true)")
    inner.encode_special_tokens = True
    inner.no_padding()
    inner.no_truncation()
    first = _put_before(inner) if content.get("post_processor") else None
    # Offsets then cover a token's leading space; our documents add bos and eos themselves.
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner, first


def _put_before(inner: tokenizers.Tokenizer) -> int | None:
    plain = inner.encode("a", add_special_tokens=False).ids
    framed = inner.encode("a", add_special_tokens=True).ids
    return framed[0] if framed[:1] != plain[:1] else None


def _parts(part: Any) -> list[dict[str, Any]]:
    """A decoder or pre-tokenizer and, inside a ``Sequence``, its members."""
    if not isinstance(part, dict):
        return []
    members = part.get("decoders") or part.get("pretokenizers") or []
    return [part, *members]


def _kinds(part: Any) -> set[str]:
    return {member["type"] for member in _parts(part)}


def _prefix_space(part: Any) -> bool:
    return any(m["type"] == "ByteLevel" and m.get("add_prefix_space") for m in _parts(part))


def bos_and_eos(ids: dict[str, int]) -> tuple[int, int]:
    """The ids of the first pair of BOS_EOS among special tokens, by spelling.

    Raises:
        TokenizerError: none is there.
    """
    for bos, eos in BOS_EOS:
        if bos in ids and eos in ids:
            return ids[bos], ids[eos]
    pairs = ", ".join(f"{bos} {eos}" for bos, eos in BOS_EOS)
    found = ", ".join(ids) or "none"
    raise TokenizerError(f"no known bos and eos among the special tokens: {found}; known: {pairs}")


def byte_table(
    inner: tokenizers.Tokenizer, specials: dict[int, str], plain: dict[int, bytes]
) -> list[bytes]:
    """The bytes of every id; ids that no token uses stand for nothing.

    Args:
        specials, plain: what added tokens are written as, by id.
    Raises:
        TokenizerError: a token that is not in byte-level form.
    """
    vocab = inner.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    to_byte = _byte_of_char()
    for token, token_id in vocab.items():
        if token_id in plain:
            table[token_id] = plain[token_id]
        elif token_id not in specials:
            try:
                table[token_id] = bytes(to_byte[char] for char in token)
            except KeyError as err:
                raise TokenizerError(f"token {token!r} is not written in byte-level form") from err
    return table


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, the rest counts up from U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {chr(v): v for v in own} | {chr(0x100 + i): v for i, v in enumerate(others)}
