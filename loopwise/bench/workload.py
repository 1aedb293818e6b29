"""What a serving benchmark decodes: prompts and continuations from real text, lengths drawn."""

from __future__ import annotations

from bisect import bisect_right
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

    A prompt begins with one start token, at the beginning of a document or within a long one where
    another ended. One that is longer than its document goes on with the next, after end-of-text.

    Raises:
        DataError: the text is shorter than one job.
    """
    longest = lengths.prompt[1] + lengths.output[1]
    stream: list[int] = []
    ends: list[int] = []  # of documents, one past end-of-text
    for document in documents:
        stream += [*tokenizer.encode(document.text), tokenizer.eos_id]
        ends.append(len(stream))
        if len(stream) >= 2 * n * longest:  # what is passed over is shorter than a job
            break
    if len(stream) <= longest:
        raise DataError(f"the text has {len(stream)} tokens, one job needs {longest + 1}")
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    start = 0
    while len(jobs) < n:
        if start + longest > len(stream):
            start = 0
        prompt = int(rng.integers(lengths.prompt[0], lengths.prompt[1] + 1))
        new = int(rng.integers(lengths.output[0], lengths.output[1] + 1))
        cut = start + prompt - 1
        document_end = ends[bisect_right(ends, cut)]
        stop = min(cut + new, document_end)
        ids = (tokenizer.bos_id, *stream[start:cut])
        jobs.append(Job(ids, tuple(stream[cut:stop]), new))
        start = stop if document_end - stop >= longest else document_end
    return jobs
