"""What a serving benchmark decodes: prompts and continuations from real text, lengths drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loopwise.data import Document
from loopwise.errors import DataError
from loopwise.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload.

    Attributes:
        prompt: token ids, begin-of-text included.
        continuation: the text's own next tokens, to the end of their document at most.
        new_tokens: how many are decoded.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform distributions of prompt and output tokens, ends included."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def __str__(self) -> str:
        (a, b), (c, d) = self.prompt, self.output
        return f"prompts of {a}-{b} tokens, {c}-{d} new ones"


def make_jobs(
    documents: Iterable[Document], tokenizer: Tokenizer, lengths: Lengths, n: int, seed: int
) -> list[Job]:
    """Cut ``n`` jobs out of documents, the same ones for the same seed.

    A prompt begins with one start token, at the beginning of a document or further on in a long
    one. Documents that do not hold a prompt are passed over, since models are trained to attend to
    one document at a time; where none does, they are joined by end-of-text.

    Raises:
        DataError: the text is shorter than one job.
    """
    longest = lengths.prompt[1] + lengths.output[1]
    texts: list[list[int]] = []  # of a job each, at most
    joined: list[int] = []
    for document in documents:
        ids = [*tokenizer.encode(document.text), tokenizer.eos_id]
        if len(ids) >= lengths.prompt[1]:
            texts += _pieces(ids, longest)
        else:
            joined += ids
        if len(texts) >= n or (not texts and len(joined) >= n * longest):
            break
    if not texts:
        if len(joined) < longest:
            raise DataError(f"the text has {len(joined)} tokens, one job needs {longest}")
        texts = _pieces(joined, longest)
    rng = np.random.default_rng(seed)
    jobs = []
    for i in range(n):
        prompt = int(rng.integers(lengths.prompt[0], lengths.prompt[1] + 1))
        new = int(rng.integers(lengths.output[0], lengths.output[1] + 1))
        ids = texts[i % len(texts)]
        continuation = ids[prompt - 1 : prompt - 1 + new]
        jobs.append(Job((tokenizer.bos_id, *ids[: prompt - 1]), tuple(continuation), new))
    return jobs


def _pieces(ids: list[int], size: int) -> list[list[int]]:
    """The beginning, up to ``size`` tokens, and every whole piece of that size after it."""
    return [ids[:size]] + [ids[a : a + size] for a in range(size, len(ids) - size + 1, size)]
