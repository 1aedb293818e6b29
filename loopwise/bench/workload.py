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
        continuation: the text's own next tokens.
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

    A prompt begins with one start token. Short documents are joined by end-of-text, which in some
    tokenizers is the same token.

    Raises:
        DataError: the text is shorter than one job.
    """
    stream: list[int] = []
    need = n * (lengths.prompt[1] + lengths.output[1])
    for document in documents:
        stream += [*tokenizer.encode(document.text), tokenizer.eos_id]
        if len(stream) >= need:
            break
    rng = np.random.default_rng(seed)
    jobs = []
    longest = lengths.prompt[1] + lengths.output[1]
    if len(stream) <= longest:
        raise DataError(f"the text has {len(stream)} tokens, one job needs {longest + 1}")
    for i in range(n):
        prompt = int(rng.integers(lengths.prompt[0], lengths.prompt[1] + 1))
        new = int(rng.integers(lengths.output[0], lengths.output[1] + 1))
        start = (i * longest) % (len(stream) - longest)
        start += stream[start] == tokenizer.eos_id  # a prompt is not begun twice
        ids = stream[start : start + prompt - 1 + new]
        jobs.append(Job((tokenizer.bos_id, *ids[: prompt - 1]), tuple(ids[prompt - 1 :]), new))
    return jobs
