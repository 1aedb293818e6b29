"""Tiny checkpoints, requests without the harness, and tiny question sets of the known fields."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import Checkpoint, save_checkpoint
from loopwise.models.layers import row_seeds
from loopwise.models.views import PackedView
from loopwise.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from tests.conftest import make_model

PAIRS = [
    ("Mia had 3 apples.", " She ate one."),
    ("Who has the red ball?", " Tom"),
    ("", "Once upon a time"),
    ("A much longer context than the others, so that rows of a batch are padded.", " Yes"),
    ("x", "y"),
]


def request(kind: str, *args: Any) -> Any:
    """What a model sees of an instance of the harness."""
    return SimpleNamespace(request_type=kind, args=args)


def pairs_as_requests(pairs: list[tuple[str, str]] = PAIRS) -> list[Any]:
    return [request("loglikelihood", *pair) for pair in pairs]


def loaded(path: Path, model: LoopedLM | None = None, **training: Any) -> Checkpoint:
    """A checkpoint on disk, with the model that is given in its own dtype."""
    model = make_model() if model is None else model
    tokenizer = ByteTokenizer()
    training = {"seq": 128, "depth": {"true_mean": 4.0}, **training}
    if not path.exists():
        save_checkpoint(path, model, tokenizer, training)
    return Checkpoint(path=path, model=model, tokenizer=tokenizer, training=training)


@torch.no_grad()
def log_softmax_of(model: LoopedLM, ids: list[int], depth: int) -> Tensor:
    """Log-probabilities after every token of one sequence alone, in float64, ``(seq, vocab)``."""
    positions = torch.arange(len(ids))[None]
    view = PackedView(model.geometry.rope, positions, None, model.dtype)
    injection = model.prelude(torch.tensor([ids]), view)
    latent = model.initial_latent(injection, row_seeds(positions))
    for r in range(1, depth + 1):
        latent = model.core_step(latent, injection, r, view)
    return model.coda(latent, depth, view)[0].double().log_softmax(dim=-1)


def naive_pair(
    model: LoopedLM, tokenizer: Tokenizer, pair: tuple[str, str], depth: int, bos: bool = True
) -> tuple[float, bool]:
    """Log-likelihood of a continuation by its definition."""
    context, continuation = pair
    given = [tokenizer.bos_id] if bos or not context else []
    given += tokenizer.encode(context)
    scored = tokenizer.encode(continuation)
    after = log_softmax_of(model, given + scored, depth)[len(given) - 1 : -1]
    hits = after.argmax(dim=-1).tolist() == scored
    return float(after.gather(1, torch.tensor(scored)[:, None]).sum()), hits


def framed(tokenizer: BPETokenizer) -> BPETokenizer:
    """The same tokenizer with a start token in its tokenizer.json, as Llama's have it."""
    content = json.loads(tokenizer.to_json())
    piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {
                "id": "<|endoftext|>",
                "ids": [tokenizer.bos_id],
                "tokens": ["<|endoftext|>"],
            }
        },
    }
    return BPETokenizer(json.dumps(content))


ARC = [
    {
        "id": str(i),
        "question": f"Which is number {i}?",
        "choices": {"text": ["ant", "bee", "cat", "dog"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[i % 4],
    }
    for i in range(6)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa-valid": [
        {"goal": f"open jar {i}", "sol1": "twist it", "sol2": "sing to it", "label": i % 2}
        for i in range(6)
    ],
    "arc-easy-test": ARC,
    "arc-challenge-test": ARC[::-1],
    "hellaswag-valid-1000": [
        {
            "ind": i,
            "query": f"Cooking: A man takes {i} eggs. He",
            "choices": ["breaks them.", "flies.", "sleeps.", "is blue."],
            "gold": i % 4,
        }
        for i in range(6)
    ],
    "winogrande-xl-valid": [
        {
            "sentence": f"Sarah met Maria {i} times because _ liked tea.",
            "option1": "Sarah",
            "option2": "Maria",
            "answer": "12"[i % 2],
        }
        for i in range(6)
    ],
    "openbookqa-test": [
        {
            "id": row["id"],
            "question_stem": row["question"],
            "choices": row["choices"],
            "answerKey": row["answerKey"],
        }
        for row in ARC
    ],
    "lambada-openai-test": [{"text": f"She had {i} cats and loved every cat"} for i in range(6)],
    "sciq-valid": [
        {
            "question": f"Who found {i}?",
            "distractor1": "Ann",
            "distractor2": "Bob",
            "distractor3": "Cy",
            "correct_answer": "Dee",
            "support": " Dee did." if i % 2 else "",
        }
        for i in range(6)
    ],
    "boolq-valid": [
        {"question": f"is {i} a number", "passage": f"On numbers -- {i} is one.", "label": i % 2}
        for i in range(6)
    ],
    "copa-valid": [
        {
            "premise": f"The man opened tap {i}.",
            "choice1": "The sink filled.",
            "choice2": "Water flowed.",
            "question": ["cause", "effect"][i % 2],
            "idx": i,
            "label": i % 2,
        }
        for i in range(6)
    ],
    "commonsenseqa-valid": [
        {
            "id": str(i),
            "question": f"Where is door {i}?",
            "question_concept": "door",
            "choices": {
                "label": ["A", "B", "C", "D", "E"],
                "text": ["bank", "sea", "sky", "mall", "tree"],
            },
            "answerKey": "ABCDE"[i % 5],
        }
        for i in range(6)
    ],
    "socialiqa-valid": [
        {
            "context": f"Tracy read {i} books.",
            "question": "What will she do?",
            "answerA": "read on",
            "answerB": "eat",
            "answerC": "run",
            "label": "123"[i % 3],
        }
        for i in range(6)
    ],
    "gsm8k-test": [
        {
            "context": f"Ann has {i} eggs and buys 2. How many?",
            "chain_of_thought": f"She has {i} + 2 = <<{i}+2={i + 2}>>{i + 2}.",
            "answer": str(i + 2),
        }
        for i in range(8)
    ],
    "wsc273-test": [
        {
            "context_options": [
                f"The {i} men refused the boys because the {i} men",
                f"The {i} men refused the boys because the boys",
            ],
            "continuation": "feared noise.",
            "gold": i % 2,
        }
        for i in range(6)
    ],
    "basic-arithmetic-valid": [
        {
            "id": str(i),
            "question": f"Calculate {i} + 9 =",
            "choices": {"text": ["1", "2", "3", str(i + 9)], "label": ["A", "B", "C", "D"]},
            "answerKey": "D",
            "type_tag": "easy",
        }
        for i in range(6)
    ],
    "blimp": [
        {
            "sentence_good": f"The {n} dogs bark.",
            "sentence_bad": f"The {n} dogs barks.",
            "UID": kind,
        }
        for kind in ("adjunct_island", "wh_island")
        for n in range(3)
    ],
}
WIKI = "\n".join(
    (
        "",
        " = Ann Lee = ",
        "",
        " Ann Lee is a test , she said .",
        " = = Life = = ",
        "",
        " She lived @-@ well .",
        " = Bob = ",
        "",
        " Bob is shorter .",
        "",
    )
)


def write_local(folder: Path) -> Path:
    """Question sets under their usual names, some of them compressed."""
    folder.mkdir(parents=True)
    for number, (name, rows) in enumerate(ROWS.items()):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if number % 3 == 0:
            (folder / f"{name}.jsonl").write_bytes(text)
        elif number % 3 == 1:
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text))
        else:
            (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(text))
    (folder / "wikitext2-test.txt").write_text(WIKI, encoding="utf-8")
    return folder
