"""How an engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from loopwise.config import check_choices
from loopwise.engine.scheduler import Limits
from loopwise.errors import EngineError
from loopwise.exits.rule import MAX_DEPTH

_WHOLE = ("max_depth", "slots", "max_seq", "page_size", "chunk", "coda_delay", "max_wait")
_WHOLE_OR_NONE = ("pages", "prefill_rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs; the defaults suit a laptop.

    Attributes:
        exit: rule of requests that name none.
        max_depth: most recurrences of any token; sizes the storage of ``per-loop``.
        kv_policy: ``per-loop``, ``last``, ``ring-N`` or ``first-then-last``.
        slots: requests in flight at once.
        max_seq: tokens of one request, prompt and output.
        pages: of KV storage; None holds every slot at full length.
        page_size: tokens of a page.
        chunk: prompt tokens that enter the core together; under an approximate KV policy a part
            of the result's meaning.
        prefill_rows: prompt tokens in the core at once; None: one chunk.
        prefix_cache: keep finished prompts and share what begins alike.
        logits_exits: serve rules whose checks run the coda (they read logits, or what logits are
            made of), which keep a coda entry per recurrence.
        coda_delay: ticks a settled token may wait for others that are about to settle, since coda
            and head cost almost as much for a few rows as for many.
        batching: ``continuous`` starts a token as soon as another stops. For comparison,
            ``lockstep`` lets all wait for the deepest token of each step, and ``static`` in
            addition starts no request before all of a batch are finished.
        max_wait: ticks a request may be overtaken by smaller ones.
        bos_id: what every prompt given as text begins with; None: what the tokenizer says
            (`Tokenizer.start`), which may be nothing.
        end_ids: ids that end a text, beside the tokenizer's own.
        compile: compile the model's functions, once for any number of rows.
        kernels: ``auto`` builds the attention of single rows and small chunks with the machine's C
            compiler, where there is one; :meth:`Engine.stats` says which is used.
        packed: ``auto`` keeps a second copy of bfloat16 weights as the processor's matrix products
            want them, where that is faster and the model has no forward hooks. Hooks of later do
            not reach the engine then, and it refuses requests once the weights have changed.
    """

    exit: str = "fixed:8"
    max_depth: int = 8
    kv_policy: str = "per-loop"
    slots: int = 32
    max_seq: int = 1024
    pages: int | None = None
    page_size: int = 32
    chunk: int = 128
    prefill_rows: int | None = None
    prefix_cache: bool = True
    logits_exits: bool = True
    coda_delay: int = 4
    batching: Literal["continuous", "lockstep", "static"] = "continuous"
    max_wait: int = 1000
    bos_id: int | None = None
    end_ids: tuple[int, ...] = ()
    compile: Literal["on", "off"] = "off"
    kernels: Literal["auto", "off"] = "auto"
    packed: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (*_WHOLE, *_WHOLE_OR_NONE):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole and (value is not None or name in _WHOLE):
                raise EngineError(f"engine.{name}={value!r} must be a whole number")
        if not 1 <= self.max_depth <= MAX_DEPTH:
            raise EngineError(
                f"engine.max_depth={self.max_depth} must be at least 1 and at most {MAX_DEPTH}"
            )
        if self.coda_delay < 0:
            raise EngineError(f"engine.coda_delay={self.coda_delay} must not be negative")

    def limits(self) -> Limits:
        """Raises EngineError where they do not fit together."""
        per_slot = -(-self.max_seq // max(1, self.page_size))
        return Limits(
            slots=self.slots,
            max_seq=self.max_seq,
            chunk=self.chunk,
            prefill_rows=self.chunk if self.prefill_rows is None else self.prefill_rows,
            pages=self.slots * per_slot if self.pages is None else self.pages,
            page_size=self.page_size,
            max_wait=self.max_wait,
        )
