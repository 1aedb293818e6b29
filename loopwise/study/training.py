"""The training stage: text and settings in, checkpoints and metrics out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from loopwise.data import PackedBlocks, load_or_tokenize
from loopwise.models import MODELS
from loopwise.settings import RunConfig
from loopwise.study.texts import cache_folder, make_tokenizer, read_texts
from loopwise.tokenizer import load_tokenizer
from loopwise.train.loop import Event, Trainer
from loopwise.train.machine import pick_device


def train_stage(
    config: RunConfig, folder: Path, emit: Callable[[Event], None], resume: bool = False
) -> Event:
    """Train into ``folder``.

    Returns:
        The trainer's final event.
    """
    device = pick_device(config.device)
    texts = read_texts(config.data, config.seed)
    tokenizer_file = folder / "tokenizer.json"
    if resume and tokenizer_file.is_file():
        tokenizer = load_tokenizer(tokenizer_file)
    else:
        tokenizer = make_tokenizer(config.tokenizer, texts.train)
        tokenizer_file.write_text(tokenizer.to_json(), encoding="utf-8")
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
        "read": texts.report.summary(),
    }
    emit({"event": "data", **info})
    torch.manual_seed(config.seed)
    model_class = MODELS[config.architecture]
    trainer = Trainer(
        model_class(config.model_config(tokenizer.vocab_size)),
        tokenizer,
        PackedBlocks(train, config.train.seq, config.seed),
        PackedBlocks(held_out, config.train.seq, config.seed, shuffle=False),
        config=config.train,
        optim=config.optim,
        depth=config.depth,
        seed=config.seed,
        folder=folder,
        data_info=info,
        device=device,
        on_event=emit,
    )
    return trainer.run(resume=resume)
