"""Pages of KV storage: who holds which, and which still hold a prompt somebody may ask again.

Plain Python over small integers. A page that nobody holds but whose content is known stays
findable until its place is needed; the longest unused goes first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence


class PagePool:
    """Counts holders of each page and remembers finished ones by their content.

    Content has an identity, a number never used twice. A page is known by the identity of what lies
    before it and by its own tokens, so equal keys mean equal prompts from the first token on, and
    no hash can collide.

    Args:
        pages: numbered from 1.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._blank = list(range(pages, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known content, no holder, oldest first
        self._holders = [0] * (pages + 1)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # page, identity
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._roots: OrderedDict[Hashable, int] = OrderedDict()  # last asked for at the end
        self._identities = itertools.count(1)

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._blank) + len(self._idle)

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds."""
        return sum(page in self._idle for page in pages)

    def take(self) -> int:
        """A page of unknown content, held once.

        Raises:
            IndexError: none is free; look at :attr:`free` first.
        """
        if self._blank:
            page = self._blank.pop()
        else:
            if not self._idle:
                raise IndexError("no page is free")
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give back one hold of each page."""
        # The last page first: what continues a prompt is worth less than its beginning.
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was released more often than taken"
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def root(self, key: Hashable) -> int:
        """Identity of the empty beginning of all prompts that share ``key``.

        As many keys as there are pages are remembered; more could not all have a page.

        Args:
            key: what else than tokens must be equal: exit rule, seed of the noise, ...
        """
        if key not in self._roots:
            self._roots[key] = self.private_root()
            if len(self._roots) > self.pages:
                self._roots.popitem(last=False)
        self._roots.move_to_end(key)
        return self._roots[key]

    def private_root(self) -> int:
        """Identity of an empty beginning that no other prompt shares."""
        return next(self._identities)

    def find(self, before: int, tokens: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
        """Pages that hold the beginning of ``tokens``, with identities.

        They are not held yet.

        Args:
            before: identity of what lies in front.
            size: tokens of a page.
        """
        for at in range(0, len(tokens) - size + 1, size):
            known = self._known.get((before, tuple(tokens[at : at + size])))
            if known is None:
                return
            yield known
            before = known[1]

    def hold(self, page: int) -> None:
        """Hold a page that :meth:`find` has found."""
        self._holders[page] += 1
        self._idle.pop(page, None)

    def learn(self, before: int, page: int, tokens: Sequence[int]) -> int:
        """Remember the content of a full page; returns its identity.

        Where another page is known by this content already, that one stays known and this one is
        not.
        """
        key = (before, tuple(tokens))
        if key not in self._known:
            self._known[key] = page, next(self._identities)
            self._key_of[page] = key
        return self._known[key][1]

    def _forget(self, page: int) -> None:
        del self._known[self._key_of.pop(page)]
