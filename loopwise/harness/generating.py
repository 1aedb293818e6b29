"""Generation requests of a harness as sampling settings of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loopwise.engine.request import SamplingParams
from loopwise.errors import ConfigError
from loopwise.harness.encoding import Encoder
from loopwise.harness.scoring import Progress, Scorer
from loopwise.registry import did_you_mean

MAX_NEW_TOKENS = 256  # where a task says nothing, as the harness's own backends have it
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_KNOWN = ("until", "do_sample", "seed", *LENGTHS, *_SAMPLING)


@dataclass(frozen=True, slots=True)
class Asked:
    """One generation request.

    Attributes:
        prompt_ids: cut from the left to what leaves room for the answer.
        truncated: whether anything was cut.
    """

    prompt_ids: list[int]
    params: SamplingParams
    truncated: bool


def sampling(settings: Mapping[str, Any], repeat: int = 0) -> SamplingParams:
    """Sampling settings of one request, greedy unless it asks to sample.

    Args:
        repeat: how often the same request came before; each gets randomness of its own.
    Raises:
        ConfigError: a setting this engine does not have, or a value it cannot take.
    """
    for name in settings:
        if name not in _KNOWN:
            hint = did_you_mean(name, _KNOWN) or ";"
            raise ConfigError(
                f"generation setting {name!r} is not supported{hint} known: {', '.join(_KNOWN)}"
            )
    until = settings.get("until") or ()
    lengths = [settings[name] for name in LENGTHS if settings.get(name) is not None]
    temperature = settings.get("temperature")
    samples = settings.get("do_sample")
    if samples is None:
        samples = bool(temperature)
    given = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    if samples:
        given.setdefault("temperature", 1.0)
    else:  # the best token whatever else is said; a penalty still changes which is best
        given = {k: v for k, v in given.items() if k == "repetition_penalty"}
    return SamplingParams(
        **given,
        stop=tuple(s for s in ([until] if isinstance(until, str) else until) if s),
        max_tokens=lengths[0] if lengths else MAX_NEW_TOKENS,
        seed=settings.get("seed", 0) + repeat,
    )


def ask(
    encoder: Encoder, requests: Sequence[tuple[str, Mapping[str, Any]]], max_length: int
) -> list[Asked]:
    """Prompts with their settings, each leaving room for its answer.

    Raises:
        ConfigError: an answer that alone fills ``max_length``.
    """
    before: Counter[str] = Counter()
    asked = []
    prompts = encoder.prompts([context for context, _ in requests])
    for (context, settings), ids in zip(requests, prompts, strict=True):
        key = f"{context}\0{settings}"
        params = sampling(settings, before[key])
        before[key] += 1
        room = room_for_prompt(params, max_length)
        asked.append(Asked(ids[-room:], params, len(ids) > room))
    return asked


def room_for_prompt(params: SamplingParams, max_length: int, who: str = "a task") -> int:
    """Tokens that an answer leaves for its prompt.

    Raises:
        ConfigError: an answer that alone fills ``max_length``.
    """
    assert params.max_tokens is not None, "sampling() sets one"
    room = max_length - params.max_tokens
    if room < 1:
        raise ConfigError(
            f"{who} asks for {params.max_tokens} new tokens, which leaves no room for a prompt in "
            f"{max_length}; raise --max-length or ask for fewer with --max-gen-toks (under "
            "python -m loopwise.harness: --gen_kwargs max_gen_toks=N)"
        )
    return room


def generate(scorer: Scorer, asked: Sequence[Asked], progress: Progress | None = None) -> list[str]:
    """The answers' texts, in order, without their stop strings."""
    if not asked:
        return []
    longest = max(len(a.prompt_ids) + (a.params.max_tokens or 0) for a in asked)
    engine = scorer.engine(longest, len(asked))
    answers = engine.generate(
        [a.prompt_ids for a in asked],
        [a.params for a in asked],
        progress=None if progress is None else lambda done, n: progress("generation", done, n),
    )
    scorer.count_engine(engine)
    scorer.tally.busy_s += engine.stats()["busy_s"]
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        depths = answer.completions[0].exit_depths
        scorer.tally.scored += len(depths)
        scorer.tally.scored_depth += sum(depths)
    return [answer.text for answer in answers]
