"""What a request asks of sampling, and what comes back: one token at a time, then as a whole."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Literal, cast

from loopwise.errors import ConfigError

# Log-probabilities are finite floats always: a token that cannot occur is given this one (nats).
# JSON has no infinity, and -9999 is what OpenAI's API shows for the same case.
LOGPROB_FLOOR = -9999.0

FinishReason = Literal["stop", "length", "cancelled", "error"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), the best first


class LogitBias(Mapping[int, float]):
    """What is added to the logits of single tokens; unlike a dict, it cannot change.

    Args:
        biases: token id to nats, sorted by id once.
    """

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = dict(sorted(biases.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(tuple(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. Hashable, checked when built.

    The defaults decode greedily and change nothing.

    Attributes:
        temperature: logits are divided by it; 0 takes the best token.
        top_k: only so many best tokens stay; None leaves all.
        top_p: only the fewest best tokens that hold this share of probability stay.
        min_p: only tokens at least this share as likely as the best stay.
        repetition_penalty: tokens of prompt and output: a positive logit is divided by it, a
            negative one multiplied (Hugging Face; Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: taken once from the logit of each token of the output (OpenAI).
        frequency_penalty: taken as often as the token is in the output (OpenAI).
        logit_bias: added to the logits of these token ids, in nats.
        stop: strings that end the text, and are not part of it.
        stop_ids: token ids that end the text, besides the model's own.
        ignore_eos: go on past the model's own end tokens; ``stop`` and ``stop_ids`` still hold.
        seed: of this request's randomness, any 64-bit integer; see `choice_seed`. None draws one
            when the request comes in, so that no two sample alike.
        logprobs: how many best alternatives each token is reported with; None for none.
        n: choices, each sampled by itself.
        max_tokens: tokens to make at most; None for as many as fit.
        is_plain_greedy: the best raw logit is the answer; nothing else need be worked out.
    Raises:
        ConfigError: a value outside what is allowed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: LogitBias({}))
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    max_tokens: int | None = None
    # Stored, since the sampler asks it of every row at every tick.
    is_plain_greedy: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked = {
            "temperature": _number("temperature", self.temperature, 0, 1e9),
            "top_k": _optional("top_k", self.top_k, 1, "None turns it off"),
            "top_p": _number("top_p", self.top_p, 0, 1, above=True),
            "min_p": _number("min_p", self.min_p, 0, 1),
            # Bounds that no float64 logit can overflow under.
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _biases(self.logit_bias),
            "stop": _strings(self.stop),
            "stop_ids": _ids(self.stop_ids),
            "seed": None
            if self.seed is None
            else _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1),
            "logprobs": _optional("logprobs", self.logprobs, 0, "None turns them off"),
            "n": _integer("n", self.n, 1),
            "max_tokens": _optional("max_tokens", self.max_tokens, 1, "None is as many as fit"),
        }
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r}; give true or false")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        plain = self.temperature == 0.0 and not self.changes_logits
        object.__setattr__(self, "is_plain_greedy", plain)

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1.0 or any(penalties)

    @property
    def changes_logits(self) -> bool:
        """Whether the best token need not be the one of the raw logits."""
        return self.needs_history or bool(self.logit_bias)

    def end_ids(self, model_end_ids: Iterable[int]) -> frozenset[int]:
        """Every token id that ends this request: its own, and the model's unless ignored."""
        return frozenset(self.stop_ids) | frozenset(() if self.ignore_eos else model_end_ids)

    def seeded(self) -> SamplingParams:
        """The same with a seed: its own, else one from the system, of so many bits as JSON keeps.

        Where no token is drawn it is 0, so that latents which start from noise do as well, and the
        same request has the same answer.
        """
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(53) if self.temperature > 0 else 0)

    def choice_seed(self, index: int) -> int:
        """Seed of choice ``index``: the first has the request's own, as it would have alone.

        The others are hashed, since ``seed + index`` would repeat under the next seed.
        """
        assert self.seed is not None, "a request that runs is seeded"
        if index == 0:
            return self.seed
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse what this vocabulary cannot do; call it when the request comes in.

        Args:
            vocab_size: ids of the tokenizer, which may be fewer than the model has rows.
        Raises:
            ConfigError: an id in ``logit_bias`` or ``stop_ids`` that no token has, or more
                ``logprobs`` than there are tokens.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_ids", self.stop_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ConfigError(
                        f"{name} names token {token_id}; this tokenizer's ids are 0 to "
                        f"{vocab_size - 1}: take it out"
                    )
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ConfigError(
                f"logprobs={self.logprobs}; this tokenizer has {vocab_size} ids: ask for fewer"
            )


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one choice.

    Attributes:
        text: what may be shown now; often empty, as text that may yet be cut is held back.
        exit_depth: recurrences of the token whose logits this one was chosen from.
        logprob: under the model's raw distribution, in nats, finite.
        top_logprobs: as many alternatives as were asked for, the best first.
    """

    token_id: int
    text: str
    exit_depth: int
    logprob: float
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole choice; per-token tuples are as long as ``token_ids``.

    Attributes:
        index: of the choice, from 0.
        text: the concatenation of all that was shown; cut before a stop string.
        top_logprobs: empty for a request that asked for none.
        finish_reason: ``stop`` for an end token or a stop string, ``length`` for ``max_tokens``
            or a full slot, ``cancelled`` for a client that left.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    exit_depths: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: FinishReason


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> float:
    """``value`` as a float in ``low..high``, or past ``low`` when ``above``; NaN never is."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = cast(float, value)  # compared before it is one: a vast int is no float
        inside = low < number if above else low <= number
        if inside and number <= high:
            return float(number)
    least = f"more than {low:g}" if above else f"{low:g}"
    raise ConfigError(f"{name}={value!r}; give a number, {least} up to {high:g}")


def _integer(name: str, value: object, low: int, high: int | None = None, off: str = "") -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    span = f"{low} or more" if high is None else f"{low} to {high}"
    raise ConfigError(
        f"{name}={value!r}; give a whole number, {span}" + (f"; {off}" if off else "")
    )


def _optional(name: str, value: object, low: int, off: str) -> int | None:
    return None if value is None else _integer(name, value, low, off=off)


def _biases(biases: object) -> LogitBias:
    if not isinstance(biases, Mapping):
        raise ConfigError(f"logit_bias={biases!r}; give a mapping of token ids to numbers")
    return LogitBias(
        {
            _integer("logit_bias id", i, 0): _number(f"logit_bias of token {i}", bias, -100, 100)
            for i, bias in biases.items()
        }
    )


def _strings(stop: object) -> tuple[str, ...]:
    if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
        raise ConfigError(f"stop={stop!r}; give a tuple of strings, none of them empty")
    return tuple(stop)


def _ids(stop_ids: object) -> tuple[int, ...]:
    if not isinstance(stop_ids, (tuple, list)):
        raise ConfigError(f"stop_ids={stop_ids!r}; give a tuple of token ids")
    return tuple(_integer("stop_ids id", token_id, 0) for token_id in stop_ids)
