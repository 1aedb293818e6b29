"""Requests while they run, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from torch import Tensor

from loopwise.engine.detokenize import Detokenizer
from loopwise.engine.request import Completion, FinishReason, SamplingParams, TokenOutput
from loopwise.engine.sampler import History
from loopwise.engine.sequence import Sequence
from loopwise.errors import EngineError
from loopwise.exits.rule import ExitRule


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request came to.

    Attributes:
        prompt_ids: as fed, begin-of-text included.
        prompt_exit_depths: recurrences of each prompt token; None for those found in the cache.
        completions: one per choice.
        seed: the request's own or the one it was given; with it the request can be repeated.
        ttft_s: from submission to the first token, of the first choice that had one.
        total_s: from submission to the last token.
        reused_tokens: of the prompt, found in the prefix cache.
        error: what ended it, where its choices finished with reason ``error``; they hold what was
            made until then.
    """

    prompt_ids: tuple[int, ...]
    prompt_exit_depths: tuple[int | None, ...]
    completions: tuple[Completion, ...]
    seed: int
    ttft_s: float
    total_s: float
    reused_tokens: int
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Of the first choice; raises ``error`` where there is one."""
        if self.error is not None:
            raise self.error
        return self.completions[0].text


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request while it runs.

    Attributes:
        policy: index of its exit policy in the runner.
        logits: of the next token, once its row has been read.
    """

    request: Request
    index: int
    sequence: Sequence
    text: Detokenizer
    policy: int
    outputs: list[TokenOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: Tensor | None = None

    @property
    def next_forced(self) -> int | None:
        forced = self.request.forced
        return None if forced is None else forced[len(self.outputs)]

    @property
    def history(self) -> History | None:
        """What penalties count; None where there are none."""
        if not self.request.params.needs_history:
            return None
        return History(self.request.prompt_ids, [o.token_id for o in self.outputs])

    def take_logits(self) -> Tensor:
        logits, self.logits = self.logits, None
        assert logits is not None, "a settled row has been read"
        return logits

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "a completion is of a finished choice"
        outputs = self.outputs
        asked = self.request.params.logprobs is not None
        return Completion(
            index=self.index,
            token_ids=tuple(o.token_id for o in outputs),
            text="".join(o.text for o in outputs),
            exit_depths=tuple(o.exit_depth for o in outputs),
            logprobs=tuple(o.logprob for o in outputs),
            top_logprobs=tuple(o.top_logprobs for o in outputs) if asked else (),
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters, and what has come of it so far.

    Attributes:
        params: with a seed.
        error: why it could not be finished; the others go on.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rule: ExitRule
    max_tokens: int
    end_ids: frozenset[int]
    submitted_s: float
    choices: list[Choice] = field(default_factory=list)
    depths: list[int | None] = field(default_factory=list)
    forced: SequenceOf[int] | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.choices)

    @property
    def seed(self) -> int:
        return self.params.choice_seed(0)

    def generation(self) -> Generation:
        return Generation(
            prompt_ids=self.prompt_ids,
            prompt_exit_depths=tuple(self.depths),
            completions=tuple(c.completion() for c in self.choices),
            seed=self.seed,
            ttft_s=self.ttft_s,
            total_s=self.total_s,
            reused_tokens=self.choices[0].sequence.reused,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of a running request, as :meth:`Engine.stream` yields them.

    Attributes:
        index: of the choice.
        finish_reason: with the last token of a choice.
    """

    index: int
    output: TokenOutput
    finish_reason: FinishReason | None


def forcing(params: SamplingParams, forced: SequenceOf[int], room: int) -> SamplingParams:
    """Parameters under which just the forced tokens are made."""
    if not forced or len(forced) > room:
        raise EngineError(f"{len(forced)} forced tokens; this prompt leaves room for 1 to {room}")
    return replace(params, max_tokens=len(forced), ignore_eos=True, stop=(), stop_ids=(), n=1)
