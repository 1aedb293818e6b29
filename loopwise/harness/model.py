"""The model that lm-evaluation-harness drives: three kinds of requests over one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

import loopwise
from loopwise.errors import ConfigError
from loopwise.exits.rule import ExitRule, parse_rule
from loopwise.harness.chat import ChatTemplates
from loopwise.harness.encoding import Bos, Encoder, Pair, is_chat
from loopwise.harness.generating import ask, generate
from loopwise.harness.installed import harness
from loopwise.harness.scoring import Piece, Progress, Scorer
from loopwise.measure.tiers import named_rule, tier_rule
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, usual_depth

NAME = "loopwise"
DEFAULT_MAX_LENGTH = 2048  # tokens, where a checkpoint does not say what it was trained on
Dtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a checkpoint is evaluated.

    Attributes:
        depth, exit, tier: uniform recurrences, an exit rule, or a calibrated tier by name, one of
            them at most; none is the training mean.
        kv_policy: as the engine serves it; ``per-loop`` is scored in parallel.
        max_length: tokens a request may feed; None: what the checkpoint was trained on.
        bos: whether prompts begin with a start token; ``auto`` does as the tokenizer says.
        batch: requests together at most; None: as many as fit in a bounded number of tokens.
    """

    depth: int | None = None
    exit: str | None = None
    tier: str | None = None
    kv_policy: str = "per-loop"
    max_length: int | None = None
    dtype: Dtype = "fp32"
    bos: Bos = "auto"
    batch: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("depth", "exit", "tier") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"give one of --{' and --'.join(given)}, not {len(given)} of them")
        for name, allowed in (("dtype", Dtype), ("bos", Bos)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"--{name} {getattr(self, name)!r} must be {' or '.join(get_args(allowed))}"
                )
        for name in ("max_length", "batch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value!r} must be a whole number, at least 1")
        if self.depth is not None:
            parse_rule(f"fixed:{self.depth}")
        if self.exit is not None and ":" in self.exit:
            parse_rule(self.exit)

    def rule(self, checkpoint: Checkpoint) -> ExitRule:
        """The rule that is meant.

        Raises:
            ExitError: a rule or tier this checkpoint does not have.
        """
        usual = usual_depth(checkpoint.training, checkpoint.model.geometry.max_depth)
        if self.tier is not None:
            return tier_rule(checkpoint, self.tier)
        if self.exit is not None:
            return named_rule(checkpoint, self.exit, usual)
        return parse_rule(f"fixed:{usual if self.depth is None else self.depth}")


class LoopwiseLM:
    """A checkpoint as a model of the harness; mixed with the harness's own base class on use.

    Args:
        checkpoint: a folder, or one that is loaded.
        batch_size: the harness's word for `ModelOptions.batch`: a number or ``auto``.
        max_batch_size: the most that ``auto`` may choose.
        device: ``cpu``, which is where checkpoints are loaded.
        progress: told (what, done, all).
        options: fields of `ModelOptions`.
    Raises:
        ConfigError: options that contradict each other or that there are not, or one of several
            processes.
        CheckpointError, ExitError, DepthError: a checkpoint that cannot be read or run so.
    """

    def __init__(
        self,
        checkpoint: str | Path | Checkpoint,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes != "1":
            raise ConfigError(
                f"WORLD_SIZE={processes}: a checkpoint is evaluated in one process; start it "
                "without accelerate launch or torchrun"
            )
        unknown = [name for name in options if name not in ModelOptions.__dataclass_fields__]
        if unknown:
            raise ConfigError(
                f"model argument {unknown[0]!r} is not known; there are checkpoint, "
                f"{', '.join(ModelOptions.__dataclass_fields__)} (give an exit rule with commas "
                "as JSON)"
            )
        if device not in (None, "cpu"):
            raise ConfigError(f"--device {device!r}: checkpoints are evaluated on the cpu")
        if "batch" not in options:
            options["batch"] = _batch(batch_size, max_batch_size)
        self.options = ModelOptions(**options)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = load_checkpoint(Path(checkpoint), _DTYPES[self.options.dtype])
        self.checkpoint = checkpoint
        self.chat = ChatTemplates(checkpoint)
        self.encoder = Encoder(checkpoint, self.options.bos, self.chat.texts)
        self._told = False  # what was answered last, by get_model_info
        trained = checkpoint.training.get("seq", DEFAULT_MAX_LENGTH)
        limit = checkpoint.model.geometry.max_positions
        trained = trained if limit is None else min(trained, limit)
        self.scorer = Scorer(
            checkpoint,
            self.options.rule(checkpoint),
            kv_policy=self.options.kv_policy,
            max_length=self.options.max_length or trained,
            batch=self.options.batch,
        )
        self.progress = progress

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The largest batches that ran; the harness puts them into its result file."""
        return dict(self.scorer.tally.batches)

    @property
    def eot_token_id(self) -> int:
        return self.checkpoint.tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests tells tokenizers and templates apart by."""
        name = f"{NAME}-{self.checkpoint.tokenizer.fingerprint[:16]}"
        return name if self.chat.digest is None else f"{name}-{self.chat.digest[:16]}"

    # What the harness asks for.

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template of the evaluation that comes: by name, or the default; False is none.

        Raises:
            ConfigError: no such template.
        """
        self._told = False
        if chat_template is False or chat_template is None:
            self.chat.used = None
            return None
        return self.chat.choose(chat_template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as one prompt; what it begins with is the template's, or else one start token."""
        self._told = False
        return self.chat.render(chat_history, add_generation_prompt)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether greedy decoding makes it."""
        self._label([request.args[0] for request in requests])
        pairs = self.encoder.pairs([request.args for request in requests])
        pieces = [self._piece(pair) for pair in pairs]
        self.scorer.tally.count("loglikelihood", len(pairs), sum(map(self._is_long, pairs)))
        out = [(s.logprob, s.is_greedy) for s in self.scorer.score(pieces, self.progress)]
        self._remember("loglikelihood", requests, out)
        return out

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, from one start token, over windows without gaps."""
        if self._told:  # another evaluation, and whole texts are no chats
            self._label([])
        windows: list[Piece] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for pair in self._windows(self.checkpoint.tokenizer.encode(text)):
                windows.append(self._piece(pair))
                owners.append(index)
        out = [0.0] * len(requests)
        for owner, score in zip(owners, self.scorer.score(windows, self.progress), strict=True):
            out[owner] += score.logprob
        self.scorer.tally.count("loglikelihood_rolling", len(requests), 0)
        self._remember("loglikelihood_rolling", requests, out)
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts made by the engine up to a stop string, the end of text or the token limit."""
        self._label([request.args[0] for request in requests])
        asked = ask(self.encoder, [request.args for request in requests], self.max_length)
        self.scorer.tally.count("generate_until", len(asked), sum(a.truncated for a in asked))
        out = generate(self.scorer, asked, self.progress)
        self._remember("generate_until", requests, out)
        return out

    def is_too_long(self, request: Any) -> bool:
        """Whether a request of the harness would be truncated."""
        if request.request_type == "generate_until":
            return ask(self.encoder, [request.args], self.max_length)[0].truncated
        if request.request_type == "loglikelihood":
            return self._is_long(self.encoder.pairs([request.args])[0])
        return False

    def get_model_info(self) -> dict[str, Any]:
        """Settings and what was run; the harness puts it into its result file."""
        checkpoint, rule = self.checkpoint, self.scorer.rule
        self._told = True
        return {
            "loopwise": loopwise.__version__,
            "checkpoint": str(checkpoint.path),
            "weights_hash": checkpoint.weights_hash,
            "tokenizer_hash": checkpoint.tokenizer.fingerprint,
            "architecture": checkpoint.model.name,
            "exit_rule": str(rule),
            "kv_policy": self.scorer.kv_policy.name,
            "start_token": self.encoder.start.to_json(),
            "chat_template": self.chat.to_json(),
            "options": {
                **asdict(self.options),
                "max_length": self.max_length,
                "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
            },
            "ran": self.scorer.tally.to_json(),
        }

    def _label(self, prompts: Sequence[str]) -> None:
        """Tell by the prompts which template made them: the harness is silent where none did."""
        self._told = False
        if not any(map(is_chat, prompts)):
            self.chat.used = None
        elif self.chat.used is None:  # made before, and kept by the harness
            self.chat.choose(True)

    def _windows(self, ids: list[int]) -> list[Pair]:
        utils = harness("lm_eval.utils")
        windows = utils.get_rolling_token_windows(
            token_list=ids,
            prefix_token=self.encoder.start.id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [utils.make_disjoint_window(window) for window in windows]

    def _is_long(self, pair: Pair) -> bool:
        context, continuation = pair
        return len(context) + len(continuation) > self.max_length + 1

    def _piece(self, pair: Pair) -> Piece:
        """Cut from the left to what may be fed; the last token is predicted, not fed."""
        context, continuation = pair
        ids = [*context, *continuation][-(self.max_length + 1) :]
        return Piece(ids, min(len(continuation), len(ids) - 1))

    def _remember(self, kind: str, requests: Sequence[Any], answers: Sequence[Any]) -> None:
        """Hand answers to the harness's cache, where it keeps one."""
        hook = getattr(self, "cache_hook", None)  # of the harness's base class
        if hook is not None:
            for request, answer in zip(requests, answers, strict=True):
                hook.add_partial(kind, request.args, answer)


@cache
def harness_class() -> type:
    """`LoopwiseLM` with the harness's base class, as its registry and its evaluator want it.

    Raises:
        MissingExtraError: the harness is not installed.
    """
    base = harness("lm_eval.api.model").LM
    return type("LoopwiseHarnessLM", (LoopwiseLM, base), {"__module__": __name__})


def register() -> None:
    """Make ``--model loopwise`` known to the harness; twice does no harm.

    Raises:
        MissingExtraError: the harness is not installed.
    """
    harness("lm_eval.models")  # fills the table with its own, which it does only while it is empty
    harness("lm_eval.api.registry").register_model(NAME)(harness_class())


def _batch(size: int | str | None, most: int | None) -> int | None:
    if size is None or (isinstance(size, str) and size.startswith("auto")):
        return most
    try:
        return int(size)
    except ValueError:
        raise ConfigError(f"--batch_size {size!r} must be a number or auto") from None
