"""Token ids to text as they come: what is shown is final, and adds up to the full decode."""

from __future__ import annotations

import codecs

from loopwise.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing list of tokens, cut before the first stop string.

    All that `push` and `flush` return, put together, is ``tokenizer.decode(ids)`` up to the cut.
    The bytes of an unfinished character and any ending that may become a stop string wait; so a
    token costs what waits, not what was said. Bytes that are no text become U+FFFD just as in the
    full decode.

    The first stop string to be *complete* cuts, as if characters came one by one; of several that
    end together, the longest. So the text does not depend on how it was split into tokens.

    Args:
        tokenizer: of the model; special tokens have no text.
        stop: strings that end the text, none empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._beginnings = frozenset(s[:n] for s in stop for n in range(1, len(s)))
        self._longest = max(map(len, self._beginnings), default=0)  # characters
        self._waiting = ""  # decoded, and perhaps the beginning of a stop string

    def push(self, token_id: int) -> str:
        """The text that may be shown once this token is known; nothing after the cut.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        if self.stopped:
            return ""
        shown = self._advance(self._decoder.decode(self._token_bytes(token_id)))
        if not self.stopped:
            held = self._beginning_of_a_stop(shown)
            shown, self._waiting = shown[: len(shown) - held], shown[len(shown) - held :]
        return shown

    def flush(self) -> str:
        """What still waits, when no token will follow."""
        if self.stopped:
            return ""
        return self._advance(self._decoder.decode(b"", final=True))

    def _advance(self, new: str) -> str:
        """What waited and the new text, up to the cut if there is one now."""
        text, self._waiting = self._waiting + new, ""
        starts = ((text.find(s), len(s)) for s in self._stop)
        # By end, then by start: complete first, and the longest of those that end together.
        cuts = [(start + length, start) for start, length in starts if start >= 0]
        if not cuts:
            return text
        self.stopped = True
        return text[: min(cuts)[1]]

    def _beginning_of_a_stop(self, text: str) -> int:
        """Characters of the longest ending of ``text`` that begins a stop string."""
        for n in range(min(self._longest, len(text)), 0, -1):
            if text[-n:] in self._beginnings:
                return n
        return 0
