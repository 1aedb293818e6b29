"""What kind of text a token is: the axis along which paper 1 finds depth ordered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loopwise.tokenizer import Tokenizer

TOKEN_TYPES = (
    "whitespace",
    "punctuation",
    "digit",
    "function word",
    "content word",
    "subword continuation",
    "end of document",
)

# Closed-class words of English: articles, pronouns, prepositions, conjunctions, auxiliaries.
_WORDS = """
a an the this that these those some any no every each either neither both all such what which
whose i me my mine myself you your yours yourself yourselves he him his himself she her hers
herself it its itself we us our ours ourselves they them their theirs themselves who whom one
and or but nor so yet for if because although though while whereas unless until since when
whenever where wherever as than that whether of in on at by to from with without within into
onto over under above below between among through during before after about against across along
around behind beside besides beyond near off out outside inside up down upon toward towards per
via am is are was were be been being have has had having do does did doing will would shall
should can could may might must ought not n't there here then too very also just only again how
why
"""
_FUNCTION_WORDS = frozenset(_WORDS.split())


def classify_targets(tokenizer: Tokenizer, token: NDArray, target: NDArray) -> NDArray[np.int8]:
    """Type of each predicted token, as an index into TOKEN_TYPES.

    Args:
        token: the token before it, ``(tokens,)``.
        target: the token predicted, ``(tokens,)``.
    Returns:
        ``(tokens,)`` int8. A word piece that continues a word begun by the token before it counts
        as ``subword continuation``, whatever it spells.
    """
    kinds, starts, ends = _vocabulary_kinds(tokenizer)
    out = kinds[target].copy()
    word = (out == TOKEN_TYPES.index("function word")) | (out == TOKEN_TYPES.index("content word"))
    out[word & starts[target] & ends[token]] = TOKEN_TYPES.index("subword continuation")
    return out


def _vocabulary_kinds(
    tokenizer: Tokenizer,
) -> tuple[NDArray[np.int8], NDArray[np.bool_], NDArray[np.bool_]]:
    """For each id: its type on its own, whether it starts with a letter, whether it ends in one."""
    n = tokenizer.vocab_size
    kinds = np.zeros(n, dtype=np.int8)
    starts, ends = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    for i in range(n):
        raw = tokenizer.token_bytes(i)
        text = raw.decode("utf-8", errors="replace")
        kinds[i] = TOKEN_TYPES.index(_kind(raw, text))
        # A piece of a broken-up character is part of whatever word stands around it.
        starts[i] = bool(text) and (text[0].isalpha() or text[0] in "'\ufffd")
        ends[i] = bool(text) and (text[-1].isalpha() or text[-1] in "'\ufffd")
    return kinds, starts, ends


def _kind(raw: bytes, text: str) -> str:
    if not raw:
        return "end of document"
    core = text.strip()
    if not core:
        return "whitespace"
    if any(c.isdigit() for c in core):
        return "digit"
    if not any(c.isalpha() or c == "\ufffd" for c in core):
        return "punctuation"
    return "function word" if core.lower() in _FUNCTION_WORDS else "content word"
