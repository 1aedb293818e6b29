"""The config of a loopwise checkpoint as transformers sees it: our config.json, and depth."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import transformers
from transformers import AutoConfig, PreTrainedConfig

from loopwise.config import from_table, to_table
from loopwise.hub.auto.versions import check_version
from loopwise.models import MODELS
from loopwise.models.base import Geometry
from loopwise.models.checkpoint import FORMAT, MODEL_TYPE, VERSION, architecture_of, usual_depth

check_version(transformers.__version__)

_RUNTIME = "_coda_entries"  # of the attributes, what is no property of a checkpoint


class LoopwiseConfig(PreTrainedConfig):
    """Architecture, its settings, and how many recurrences run where a call does not say.

    What transformers asks under its own names (``hidden_size``, ``num_hidden_layers`` ...) is read
    off the architecture. ``num_hidden_layers`` counts the layers a token passes, each core layer
    once per recurrence, since that is what caches are sized by; ``num_physical_layers`` counts
    those that have weights.

    Args:
        architecture: a row of MODELS.
        model: its settings, as in config.json; None takes the defaults.
        num_loops: recurrences where a call gives none; None where nothing is known of training.
        use_cache: whether forward passes outside training return a KV cache.
    Raises:
        ConfigError: an unknown architecture, or settings it cannot have.
        CheckpointError: written by a newer loopwise, or of another kind.
    """

    model_type = MODEL_TYPE
    # What evaluation loops should not gather: no tensors of (batch, ...), or no logits.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "cache",
        "exit_depths",
        "hidden_states",
    ]

    def __init__(
        self,
        architecture: str = "recurrent",
        model: dict[str, Any] | None = None,
        num_loops: int | None = None,
        use_cache: bool = True,
        format: str = FORMAT,
        version: int = VERSION,
        **kwargs: Any,
    ) -> None:
        said = {"format": format, "version": version, "architecture": architecture}
        source = str(kwargs.get("name_or_path") or "this config")
        name, table = architecture_of({**said, "model": model or {}}, source)
        config_class = MODELS[name].config_class
        self.format, self.version = format, VERSION
        self.architecture = name
        self.model = to_table(from_table(config_class, table, "model."))
        self.num_loops = num_loops
        self.use_cache = use_cache
        self._coda_entries = 1
        kwargs.setdefault("tie_word_embeddings", self.model.get("tie_embeddings", False))
        super().__init__(**kwargs)

    @property
    def settings(self) -> Any:
        """The dataclass of the architecture, from `model`."""
        return from_table(MODELS[self.architecture].config_class, self.model, "model.")

    @property
    def geometry(self) -> Geometry:
        return self.settings.geometry

    @property
    def usual_loops(self) -> int:
        """Recurrences where a call gives none."""
        if self.num_loops is None:
            return usual_depth({}, self.geometry.max_depth)
        return self.num_loops

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, rows: int) -> None:
        self.model = {**self.model, "vocab_size": rows}

    @property
    def hidden_size(self) -> int:
        return self.geometry.d_model

    @property
    def num_attention_heads(self) -> int:
        return self.geometry.n_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.geometry.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.geometry.head_dim

    @property
    def num_physical_layers(self) -> int:
        return self.geometry.n_layers

    @property
    def num_hidden_layers(self) -> int:
        """Attention layers a token passes at `usual_loops`, which is what a cache must hold."""
        extra = (self._coda_entries - 1) * self.geometry.n_coda_layers
        return self.geometry.effective_layers(self.usual_loops) + extra

    def at(self, num_loops: int, coda_entries: int = 1) -> LoopwiseConfig:
        """A copy at another depth: what ``DynamicCache(config=...)`` needs for such calls.

        Args:
            num_loops: recurrences, or the most an exit rule may take.
            coda_entries: entries a coda layer keeps of a token; more than one under exit rules that
                read logits.
        """
        other = copy.deepcopy(self)
        other.num_loops, other._coda_entries = num_loops, coda_entries
        return other

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_dict().items() if k != _RUNTIME}


AutoConfig.register(LoopwiseConfig.model_type, LoopwiseConfig, exist_ok=True)
