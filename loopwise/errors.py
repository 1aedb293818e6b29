"""The exceptions a user can meet, and nothing else.

LoopwiseError                one line for a person: what, the value, what is allowed, what to do
├── ConfigError              a setting, a flag or a combination of them
├── DataError                text, token files, documents
├── TokenizerError           a tokenizer that cannot be read or does not fit
├── ShapeError               tensors that disagree
├── DepthError               a recurrence count outside what can be run
├── ExitError                an exit rule that is unknown, or does not fit the model
├── EngineError              a request the engine cannot take, or settings it cannot run with
├── CheckpointError          a checkpoint that is missing, broken, foreign or newer
├── TraceError               a trace that is missing, broken or of another checkpoint
├── RunFolderError           an output folder that holds something else
├── WriteError               a place that cannot be written: full, missing, not ours
├── DivergenceError          a latent that grows without bound over the recurrences
├── NonFiniteError           a loss or a gradient that is not a number
└── MissingExtraError        an optional dependency that is not installed

The command line turns each into that one line and exit code 2.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class LoopwiseError(Exception):
    """Base of every error that is the input's fault and has a remedy."""


class ConfigError(LoopwiseError):
    """A setting is unknown, has the wrong type, or contradicts another."""


class DataError(LoopwiseError):
    """Text or token data is missing, unreadable or too short."""


class TokenizerError(LoopwiseError):
    """A tokenizer cannot be read, or does not fit the model."""


class ShapeError(LoopwiseError):
    """Two tensors disagree on an axis."""


class DepthError(LoopwiseError):
    """A recurrence count outside what the model or the policy can run."""


class ExitError(LoopwiseError):
    """An exit rule is unknown, malformed, or cannot be used here."""


class EngineError(LoopwiseError):
    """A request does not fit the engine, or the engine's settings do not fit together."""


class CheckpointError(LoopwiseError):
    """A checkpoint is missing, truncated, foreign, or of a newer format."""


class TraceError(LoopwiseError):
    """A trace is missing, truncated, or belongs to another checkpoint."""


class RunFolderError(LoopwiseError):
    """An output folder already holds another run."""


class WriteError(LoopwiseError):
    """The disk refuses a file or a folder."""


class DivergenceError(LoopwiseError):
    """A latent stopped being finite at some recurrence."""


class NonFiniteError(LoopwiseError):
    """A loss or a gradient stopped being finite; the update was not applied."""


class MissingExtraError(LoopwiseError):
    """A feature needs an optional dependency."""


@contextmanager
def telling_which(what: str) -> Iterator[None]:
    """Errors begin with ``what``, so that one of many inputs can be found."""
    try:
        yield
    except LoopwiseError as err:
        raise type(err)(f"{what}: {err}") from err


def require_extra(module: str, extra: str, feature: str) -> ModuleType:
    """Import ``module``, or say which extra brings it.

    Raises:
        MissingExtraError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is None or err.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{feature} needs the {extra!r} extra: pip install 'loopwise[{extra}]'"
        ) from err
