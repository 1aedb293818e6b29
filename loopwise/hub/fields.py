"""Values of a published config by name: typed, with what cannot be done refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopwise.errors import CheckpointError
from loopwise.models.base import RopeScaling

# Fields of transformers' configs that change no number the model computes.
HARMLESS = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures attention_dropout
    auto_map bos_token_id cross_attention_hidden_size dtype embd_pdrop eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id
    max_position_embeddings max_window_layers model_type output_attentions output_hidden_states
    pad_token_id pretraining_tp resid_pdrop return_dict task_specific_params tokenizer_class
    torch_dtype torchscript transformers.js_config transformers_version use_cache
    """.split()  # noqa: SIM905 - a list of words reads best as words
)


class Fields:
    """A config that remembers what was read of it, so that the rest can be named.

    Args:
        table: the source's ``config.json``.
        format: name of the format, for messages.
        where: what the table is called, for messages.
    """

    def __init__(self, table: Mapping[str, Any], format: str, where: str = "config.json") -> None:
        self._table, self._format, self._where = table, format, where
        self._read: set[str] = set()

    def _get(self, names: tuple[str, ...], default: Any) -> Any:
        """The first of ``names`` that has a value; the others are spellings of the same thing."""
        self._read.update(names)
        for name in names:
            if self._table.get(name) is not None:
                return self._table[name]
        if default is None:
            spelt = " or ".join(names)
            raise CheckpointError(
                f"{self._where} has no {spelt}, which a {self._format} checkpoint needs"
            )
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self._get(names, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(names[0], value, "a whole number")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._get(names, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(names[0], value, "a number")
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        value = self._get(names, default)
        if not isinstance(value, bool):
            raise self._wrong(names[0], value, "true or false")
        return value

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A table inside the config; None where there is none."""
        self._read.add(name)
        value = self._table.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "a table")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field that asks for what cannot be done; an absent one is the first allowed.

        Raises:
            CheckpointError: naming the field, its value and what is allowed.
        """
        self._read.add(name)
        value = self._table.get(name)
        if value is not None and value not in allowed:
            can = " or ".join(repr(a) for a in allowed)
            raise CheckpointError(
                f"{self._where} has {name}={value!r}; loopwise reads {self._format} checkpoints "
                f"with {name}={can} only"
            )

    def never(self, *names: str) -> None:
        """Refuse switches that would change the mathematics, where they are switched on."""
        self._read.update(names)
        for name in names:
            if self._table.get(name):
                raise CheckpointError(
                    f"{self._where} has {name}={self._table[name]!r}; loopwise reads "
                    f"{self._format} checkpoints without it only"
                )

    def ignore(self, *names: str) -> None:
        """Fields that change no number the model computes."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """Fields with a value that nobody asked for, in order."""
        rest = set(self._table) - self._read - HARMLESS
        return sorted(name for name in rest if self._table[name] not in (None, False, [], {}))

    def close(self) -> None:
        """Refuse a table of which something was not read.

        Raises:
            CheckpointError: naming the fields.
        """
        if rest := self.unread():
            raise CheckpointError(
                f"{self._where} has {', '.join(rest)}, which loopwise does not know of "
                f"{self._format} checkpoints"
            )

    def rope(self, *, default_base: float | None = None) -> tuple[float, RopeScaling | None]:
        """Rotary base and scaling, in the old spelling or as one ``rope_parameters`` table.

        Raises:
            CheckpointError: a kind of scaling other than none and ``llama3``.
        """
        table = self.section("rope_parameters")
        if table is not None:
            self.ignore("rope_theta", "rope_scaling")
            name = "rope_parameters"
            base = Fields(table, self._format, name).number("rope_theta")
        else:
            base, name = self.number("rope_theta", default=default_base), "rope_scaling"
            table = self.section("rope_scaling")
        kind = (table or {}).get("rope_type", (table or {}).get("type", "default"))
        if table is None or kind == "default":
            return base, None
        if kind != "llama3":
            raise CheckpointError(
                f"config.json has {name} of type {kind!r}; loopwise reads types 'default' and "
                "'llama3' only"
            )
        inner = Fields(table, self._format, name)
        return base, RopeScaling(
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_length=inner.integer("original_max_position_embeddings"),
        )

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._where} has {name}={value!r}; it must be {wanted}")
