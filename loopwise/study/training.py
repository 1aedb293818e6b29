"""The training stage: text and settings in, checkpoints and metrics out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loopwise.config import merge
from loopwise.data import Document, PackedBlocks, TokenStore, load_or_tokenize
from loopwise.data.sketch import TRAINED_ON, DocumentSketch
from loopwise.errors import ConfigError
from loopwise.hub.chat import template_files, templates_in
from loopwise.models import MODELS
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint, read_config, resolve
from loopwise.models.costs import parameters
from loopwise.settings import RunConfig, differing
from loopwise.study.texts import cache_folder, make_tokenizer, read_texts
from loopwise.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, write_tokenizer
from loopwise.train.estimate import planned_gib
from loopwise.train.loop import Event, Trainer
from loopwise.train.loss import ObjectiveConfig, Teacher
from loopwise.train.machine import free_memory_gib, pick_device, pick_dtype
from loopwise.train.optim import make_optimizer
from loopwise.train.recurrence import DepthSampler
from loopwise.writing import writing


@dataclass(frozen=True)
class Prepared:
    """Everything a run reads, read: what can be refused has been refused."""

    config: RunConfig
    device: torch.device
    tokenizer: Tokenizer
    train: PackedBlocks
    held_out: PackedBlocks
    corpora: dict[str, list[Document]]  # held-out documents by corpus
    info: dict[str, Any]  # hashes and counts, for training.json
    sketch: DocumentSketch  # of the text to learn from


def prepare(config: RunConfig, tokenizer_folder: Path | None = None) -> Prepared:
    """Read and tokenise the text of a run; writes nothing but the cache of token files.

    Args:
        tokenizer_folder: of a run that goes on; otherwise one is made.
    """
    device = pick_device(config.device)
    texts = read_texts(config.data, config.seed)
    if tokenizer_folder is not None:
        tokenizer = load_tokenizer(tokenizer_folder)
    else:
        tokenizer = make_tokenizer(config.tokenizer, texts.train)
    aside = [d for documents in texts.held_out.values() for d in documents]
    train = load_or_tokenize(lambda: texts.train, tokenizer, cache_folder())
    held_out = load_or_tokenize(lambda: aside, tokenizer, cache_folder())
    info = {
        "sources": list(config.data.sources),
        "text_hash": train.text_hash,
        "held_out_text_hash": held_out.text_hash,
        "documents": train.n_documents,
        "tokens": train.n_tokens,
        "held_out_tokens": held_out.n_tokens,
        "held_out_corpora": list(texts.held_out),
        "held_out_documents": held_out.n_documents,
        "held_out_documents_learned_from": texts.shared,
        "read": texts.report.summary(),
    }
    seq = config.train.seq
    return Prepared(
        config=config,
        device=device,
        tokenizer=tokenizer,
        train=PackedBlocks(train, seq, config.seed, remedy=_shorter(train)),
        held_out=PackedBlocks(held_out, seq, config.seed, shuffle=False, remedy=_shorter(held_out)),
        corpora=texts.held_out,
        info=info,
        sketch=DocumentSketch.of(texts.train),
    )


def _shorter(store: TokenStore) -> str:
    """What to do about text that does not fill a block, other than adding to it."""
    return f"train with --set train.seq={store.n_tokens - 1} at most"


def warn_of_shared(prepared: Prepared, emit: Callable[[Event], None]) -> None:
    """One line where documents to measure on are learned from as well."""
    shared = prepared.info["held_out_documents_learned_from"]
    if shared:
        text = (
            f"{shared} of {prepared.info['held_out_documents']} held-out documents are in the "
            "training text too: what is measured on them is no held-out result"
        )
        emit({"event": "warning", "text": text})


def check_memory(config: RunConfig) -> None:
    """Refuse a run that cannot fit into the machine, from its settings alone.

    The model is laid out on the meta device, which takes no memory; where the machine does not say
    how much it has, nothing is checked.

    Raises:
        ConfigError: naming what is needed and what there is.
    """
    device, kind = pick_device(config.device), config.tokenizer.kind
    free = free_memory_gib(device)
    if free is None:
        return
    trained = kind == "bpe"
    vocab_size = config.tokenizer.vocab_size if trained else load_tokenizer(kind).vocab_size
    remedy = (
        "with --set lower model.d_model, the numbers of layers, train.micro_batch or train.seq, or "
        "add --set train.checkpoint_recurrences=true"
    )
    try:
        with torch.device("meta"):
            model = MODELS[config.architecture](config.model_config(vocab_size))
    except RuntimeError as err:  # past what a tensor's size can say
        first = str(err).splitlines()[0]
        raise ConfigError(f"no machine holds a model of this shape ({first}); {remedy}") from None
    optimizer = make_optimizer(
        model,
        config.optim,
        pick_dtype(config.train.dtype, device)[0],
        only=config.train.only,
        low_rank=config.train.low_rank,
    )
    needed = planned_gib(model, optimizer, config.train, DepthSampler(config.depth))
    if needed > free:
        raise ConfigError(
            f"training needs about {needed:,.1f} GiB ({parameters(model):,} parameters) and "
            f"{device.type} has {free:,.1f} GiB free; {remedy}"
        )


def settings_from(asked: dict[str, Any], path: Path) -> dict[str, Any]:
    """``asked`` with the architecture, shape and tokenizer of a checkpoint to train on.

    Raises:
        CheckpointError: it is missing or broken.
        ConfigError: other ones were asked for.
    """
    folder = resolve(path).absolute()
    architecture, model = read_config(folder)
    own = {
        "start_from": str(folder),
        "architecture": architecture,
        "model": {k: v for k, v in model.items() if k != "vocab_size"},
        "tokenizer": {"kind": str(folder)},
    }
    other = differing(own, {key: asked[key] for key in own if key in asked})
    if other:
        raise ConfigError(
            f"--from keeps the shape and tokenizer of {str(path)!r}, but {other[0]} was asked "
            "for; leave it out"
        )
    return merge(asked, own)


@dataclass(frozen=True)
class Start:
    """What training begins with.

    Attributes:
        carried: what ``training.json`` of its checkpoints goes on to say.
        files: texts that go on beside their weights, by name.
    """

    model: LoopedLM
    carried: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def first_model(config: RunConfig, tokenizer: Tokenizer) -> Start:
    """A fresh model, or that of ``start_from`` in float32 with its origin and chat templates.

    Raises:
        ConfigError: ``start_from`` is of another shape or tokenizer than the settings.
    """
    model_class = MODELS[config.architecture]
    wanted = config.model_config(tokenizer.vocab_size)
    if config.start_from is None:
        return Start(model_class(wanted))
    checkpoint = load_checkpoint(Path(config.start_from))
    model = checkpoint.model
    # The embedding may have rows of padding, which no tokenizer knows of.
    rows = model.geometry.vocab_size
    same = model.name == config.architecture and model.config == config.model_config(rows)
    if not same or checkpoint.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"start_from={config.start_from!r} is of another shape or tokenizer than the settings; "
            "start with loopwise train --from, which takes both from there"
        )
    carried: dict[str, Any] = {
        "started_from": {"checkpoint": config.start_from, "weights_hash": checkpoint.weights_hash}
    }
    # Not `converted_from`: texts begin as in the training that follows, no longer as at the source.
    told = ("retrofitted_from", "origin", TRAINED_ON)
    carried |= {name: checkpoint.training[name] for name in told if name in checkpoint.training}
    return Start(model.train(), carried, template_files(templates_in(checkpoint.path)))


def _teacher(
    objective: ObjectiveConfig, tokenizer: Tokenizer, device: torch.device
) -> Teacher | None:
    """The teacher of ``objective``, at the depth it was trained for, in its own dtype.

    Raises:
        ConfigError: it has other words than the model.
    """
    if objective.distil_from is None:
        return None
    checkpoint = load_checkpoint(Path(objective.distil_from))
    if checkpoint.tokenizer.to_json() != tokenizer.to_json():
        raise ConfigError(
            f"objective.distil_from={objective.distil_from!r} has another tokenizer than the run; "
            "distil from a model of the same vocabulary"
        )
    return Teacher(checkpoint.model.to(device), round(checkpoint.trained_mean_depth or 1))


def train_stage(
    prepared: Prepared, folder: Path, emit: Callable[[Event], None], resume: bool = False
) -> Event:
    """Train into ``folder``.

    Returns:
        The trainer's final event.
    Raises:
        ConfigError: ``start_from`` or the teacher does not fit.
        WriteError: the disk refuses; what was saved before stays.
    """
    config, tokenizer = prepared.config, prepared.tokenizer
    with writing(folder / TOKENIZER_FILE):
        write_tokenizer(folder, tokenizer)
    emit({"event": "data", **prepared.info})
    torch.manual_seed(config.seed)
    start = first_model(config, tokenizer)
    earlier = DocumentSketch.of_training(start.carried)
    sketch = prepared.sketch if earlier is None else prepared.sketch | earlier
    trainer = Trainer(
        start.model,
        tokenizer,
        prepared.train,
        prepared.held_out,
        config=config.train,
        optim=config.optim,
        depth=config.depth,
        seed=config.seed,
        folder=folder,
        data_info=prepared.info,
        carried={**start.carried, TRAINED_ON: sketch.to_json()},
        files=start.files,
        objective=config.objective,
        teacher=_teacher(config.objective, tokenizer, prepared.device),
        device=prepared.device,
        on_event=emit,
    )
    return trainer.run(resume=resume)
