"""A published checkpoint folder into a loopwise checkpoint: recognise, map, check, write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loopwise.config import read_json_object
from loopwise.errors import CheckpointError
from loopwise.hub.chat import template_files, templates_in
from loopwise.hub.formats import FORMATS
from loopwise.hub.formats.base import Format, Plan
from loopwise.hub.formats.gaps import gap_of
from loopwise.hub.gguf import open_gguf
from loopwise.hub.keys import assemble
from loopwise.hub.origin import origin_of
from loopwise.hub.read import Source, open_source, refuse_pointer
from loopwise.models import MODELS
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import FORMAT, save_checkpoint
from loopwise.models.costs import parameters
from loopwise.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json

# Embeddings are padded to round numbers; Huginn's multiple, 4096, is the largest we know of.
MAX_PADDING = 4096


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was converted into what.

    Attributes:
        source, out: folders.
        format, architecture: rows of FORMATS and MODELS.
        parameters: unique ones.
        dtype: of the stored weights, unchanged.
        vocab_size: rows of the embedding.
        tokenizer_size: ids of the tokenizer.
        chat_templates: names of those that were carried along.
        depth: how the source was trained over depth.
        notes: what a person should know.
    """

    source: Path
    out: Path
    format: str
    architecture: str
    parameters: int
    dtype: str
    vocab_size: int
    tokenizer_size: int
    chat_templates: tuple[str, ...]
    depth: dict[str, Any]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "source": str(self.source), "out": str(self.out)}


def convert(
    source: Path,
    out: Path,
    *,
    allow_pickle: bool = False,
    tokenizer: str | Path | None = None,
) -> Conversion:
    """Read a published checkpoint strictly and write a loopwise one.

    Weights keep the dtype they are stored in (quantised ones become float32); no more than one
    copy of them is in memory.

    Args:
        source: folder with ``config.json``, weights and ``tokenizer.json``; or a GGUF file; or a
            pickle that holds settings beside its weights.
        out: checkpoint folder to make.
        allow_pickle: read ``.bin``, ``.pt`` and ``.pth`` files too, weights-only.
        tokenizer: for a source without one: ``"byte"``, a ``tokenizer.json`` or its folder.
    Raises:
        CheckpointError: what the source lacks or holds too much of, by name; a format we do not
            know; a tokenizer that does not fit; or ``out`` exists.
        TokenizerError: a tokenizer this package cannot use.
        ConfigError: a shape no model can have.
    """
    if out.exists():  # before gigabytes are read
        raise CheckpointError(f"{str(out)!r} exists already; choose another name")
    found = _open(source, allow_pickle)
    format = recognise(found)
    plan = format.plan(found)
    with torch.device("meta"):  # shapes only: the weights are the source's own tensors
        model: LoopedLM = MODELS[plan.architecture](plan.config)
    text = _tokenizer_of(found, tokenizer)
    _check_vocabulary(found, text, model.geometry.vocab_size)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    templates = found.chat_templates or templates_in(found.folder)
    state = assemble(found, plan.keys, own)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    notes = [*plan.notes, *_unread(plan), *_disagreements(found, plan, text)]
    facts = {
        "converted_from": {"format": format.name, "folder": source.name, "dtype": dtypes},
        "depth": plan.depth,
        "dtype": dtypes[0] if len(dtypes) == 1 else "mixed",
    }
    origin = origin_of(found)
    if origin:
        facts["origin"] = origin
    special_ids = _special_ids(found, plan, text)
    if special_ids:
        text = text.with_special_ids(special_ids)
    save_checkpoint(out, model, text, facts, state=state, files=template_files(templates))
    return Conversion(
        source=source,
        out=out,
        format=format.name,
        architecture=plan.architecture,
        parameters=parameters(model),
        dtype=" and ".join(dtypes),
        vocab_size=model.geometry.vocab_size,
        tokenizer_size=text.vocab_size,
        chat_templates=tuple(templates),
        depth=plan.depth,
        notes=tuple(notes),
    )


def conversion_lines(done: Conversion) -> list[str]:
    """The summary for people."""
    mean = done.depth.get("true_mean")
    trained = "" if mean is None else f", trained at a mean depth of {mean:.3g}"
    padding = done.vocab_size - done.tokenizer_size
    return [
        f"{done.source} ({done.format}) -> {done.out} ({done.architecture})",
        f"{done.parameters:,} parameters in {done.dtype}{trained}",
        f"{done.tokenizer_size} ids of the tokenizer and {padding} rows of padding",
        *(f"note: {note}" for note in done.notes),
    ]


def recognise(source: Source) -> Format:
    """The one format a source is of.

    Raises:
        CheckpointError: none knows it; says what was found, what is known, what it would take.
    """
    if source.config.get("format") == FORMAT:
        raise CheckpointError(f"{str(source.path)!r} is a loopwise checkpoint already")
    formats: list[Format] = [FORMATS[name]() for name in FORMATS]
    fitting = [format for format in formats if format.recognises(source)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(format.name for format in fitting)
        raise CheckpointError(
            f"{str(source.path)!r} looks like {names} at once; config.json and weights are of "
            f"different models (found: {source.describe()})"
        )
    gap = gap_of(source)
    if gap is not None:
        raise CheckpointError(
            f"{str(source.path)!r} is a {gap.name} checkpoint, which loopwise cannot run yet: it "
            f"needs {gap.needed}"
        )
    known = "; ".join(f"{format.name} ({format.about})" for format in formats)
    raise CheckpointError(
        f"{str(source.path)!r} is of no format loopwise reads; found: {source.describe()}. "
        f"Known: {known}. To read it, its config fields and keys must be mapped in a file of "
        "loopwise/hub/formats, and its mathematics must be a row of MODELS"
    )


def _open(source: Path, allow_pickle: bool) -> Source:
    if source.is_file() and source.suffix == ".gguf":
        return open_gguf(source)
    return open_source(source, allow_pickle=allow_pickle)


def _tokenizer_of(source: Source, given: str | Path | None) -> Tokenizer:
    if given is not None:
        return load_tokenizer(given)
    if source.tokenizer is not None:
        return tokenizer_from_json(source.tokenizer())
    file = source.folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{str(source.path)!r} has no tokenizer.json; copy the one it was trained with there, "
            "or give one with --tokenizer"
        )
    refuse_pointer(file)
    return load_tokenizer(file)


def _check_vocabulary(source: Source, tokenizer: Tokenizer, rows: int) -> None:
    """Embeddings may be padded a little; anything else is a tokenizer of another model."""
    if not 0 <= rows - tokenizer.vocab_size < MAX_PADDING:
        raise CheckpointError(
            f"{str(source.path)!r}: the tokenizer has {tokenizer.vocab_size} ids but the embedding "
            f"{rows} rows; they do not belong together (up to {MAX_PADDING - 1} rows of padding "
            "are taken as such)"
        )


def _unread(plan: Plan) -> list[str]:
    if not plan.unread:
        return []
    return [f"fields of config.json that nothing was made of: {', '.join(plan.unread)}"]


def _special_ids(source: Source, plan: Plan, tokenizer: Tokenizer) -> dict[str, Any]:
    """``bos`` and ``eos`` where the tokenizer alone would be wrong or would know too few.

    What is known of the format wins over what the source says. Every id that the source lets a text
    end with is kept: an instruct model ends its turns with another than its documents.
    """
    known: dict[str, Any] = {**source.special_ids, **plan.special_ids}
    if "eos" not in known:
        ends = set(_ids(source.config)) | set(_ids(_generation_config(source)))
        ends = {i for i in ends if 0 <= i < tokenizer.vocab_size} - {tokenizer.eos_id}
        if ends:
            known["eos"] = sorted(ends)
    own = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    return known if any(own[name] != value for name, value in known.items()) else {}


def _generation_config(source: Source) -> dict[str, Any]:
    file = source.folder / "generation_config.json"
    return read_json_object(file, CheckpointError) if file.is_file() else {}


def _ids(config: Mapping[str, Any]) -> list[int]:
    said = config.get("eos_token_id")
    ids = said if isinstance(said, list) else [said]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]


def _disagreements(source: Source, plan: Plan, tokenizer: Tokenizer) -> list[str]:
    """Where the config, what is known of the format, and the tokenizer disagree."""
    known = {**source.special_ids, **plan.special_ids}
    notes = []
    for name, own in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        said = known.get(name, source.config.get(f"{name}_token_id"))
        if said is not None and own not in (said if isinstance(said, list) else [said]):
            notes.append(f"the tokenizer's {name} is id {own}; the source says {said}")
    return notes
