"""The next token of every row that left the core, greedy or drawn.

A row's logits go through these, in this order, each skipped where it is off:

1. ``logit_bias``, then the repetition, frequency and presence penalties;
2. greedy rows take the best token here, the lowest id of equals; the others go on;
3. temperature;
4. ``min_p``, then ``top_k``, then ``top_p``, each on what the one before left;
5. one draw by inverse distribution function.

The order is vLLM's. All after the raw logits is float64. `top_k` and `top_p` leave an exact number
of tokens: of equals at the border the lower ids stay, so ``top_k=1`` is greedy even in bfloat16,
where equal logits are common. The best token always stays.

A model's head may have more rows than its tokenizer has ids. No such row is ever chosen or
reported; like transformers and `measure`, log-probabilities count its share all the same.

Every operation works on rows one by one or element by element, so neighbours do not matter: a row
gets the same token and the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from loopwise.engine.request import LOGPROB_FLOOR, SamplingParams, TopLogprobs
from loopwise.errors import ConfigError, NonFiniteError, ShapeError
from loopwise.exits.largest import likeliest
from loopwise.models.layers import seeded_uniform

# Keeps the draws apart from latent noise, which hashes (seed, position) without it.
_STREAM = -0x5DEECE66D1CE4E5B
# Most nuclei are smaller: so many best tokens are looked at before a row is sorted whole.
_NUCLEUS_GUESS = 128
# On a CPU so many logits are worked on at once: in float64 half a MiB, which a cache holds.
_CPU_LOGITS = 1 << 16
# Read without a loop in Python: every tick asks every row.
_is_plain_greedy, _alternatives_asked = attrgetter("is_plain_greedy"), attrgetter("logprobs")


@dataclass(frozen=True, slots=True)
class History:
    """The token ids a row's penalties count."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen, on the device of the logits.

    Attributes:
        token_ids: ``(rows,)`` int64.
        logprobs: of the chosen token under the softmax of the raw logits, before bias, penalties
            and temperature; nats, ``(rows,)`` float32, at least `LOGPROB_FLOOR`.
        top_logprobs: row to its best alternatives under the same softmax, of equals the lower id
            first; only rows that asked for one or more.
    """

    token_ids: Tensor
    logprobs: Tensor
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)


class LogitsError(NonFiniteError):
    """Rows whose logits are no distribution; ``rows`` names them, the others are sound."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


@torch.no_grad()
def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    histories: Sequence[History | None] | None = None,
    forced: Sequence[int | None] | None = None,
    vocab_size: int | None = None,
) -> Sampled:
    """Choose one token per row.

    Args:
        logits: ``(rows, vocab)``, any float dtype, taken as float32; never written to.
        params: of each row.
        seeds: of each row's choice, 64-bit; see `SamplingParams.choice_seed`.
        positions: of the token to be chosen in its sequence, from 0 at the prompt's first.
        histories: of each row; None where it has no penalties.
        forced: of each row, the token to take whatever the logits say (teacher forcing); None
            where the row chooses.
        vocab_size: ids that can be chosen, from 0 on; None for all that have a logit.
    Raises:
        ShapeError: the arguments disagree on the number of rows.
        ConfigError: a row with penalties but no history.
        LogitsError: a row with NaN or +inf, or where nothing that can be chosen is above -inf.
    """
    rows = len(params)
    others = (len(seeds), len(positions), rows if histories is None else len(histories))
    if logits.ndim != 2 or logits.shape[0] != rows or others != (rows, rows, rows):
        raise ShapeError(
            f"logits {tuple(logits.shape)} for {rows} params, and {others} seeds, positions and "
            "histories; give one of each per row"
        )
    raw = logits.float()
    vocab = raw.shape[-1] if vocab_size is None else vocab_size
    # Not logsumexp: log_softmax is faster, and its kernel never splits a row between threads.
    log_p = raw.log_softmax(dim=-1)
    token_ids = likeliest(raw[:, :vocab])
    logprobs = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if not logprobs.isfinite().all():
        raise _broken(raw, logprobs, vocab)
    if not all(map(_is_plain_greedy, params)):
        at = [i for i, p in enumerate(params) if not p.is_plain_greedy]
        u = uniforms([seeds[i] for i in at], [positions[i] for i in at]).to(raw.device)
        few = max(1, _CPU_LOGITS // raw.shape[-1])
        size = few if raw.device.type == "cpu" else len(at)
        for first in range(0, len(at), size):
            some = at[first : first + size]
            known = [histories[i] if histories is not None else None for i in some]
            draws = u[first : first + size]
            token_ids[some] = _choose(raw[some], [params[i] for i in some], draws, known, vocab)
        logprobs = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if forced is not None and any(token is not None for token in forced):
        at = [i for i, token in enumerate(forced) if token is not None]
        token_ids[at] = torch.tensor([forced[i] for i in at], device=token_ids.device)
        logprobs = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    top: dict[int, TopLogprobs] = {}
    if any(map(_alternatives_asked, params)):
        asked = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs]
        top = {i: _alternatives(raw[i, :vocab], log_p[i], n) for i, n in asked}
    return Sampled(token_ids, logprobs.clamp(min=LOGPROB_FLOOR), top)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One draw in (0, 1) per (seed, position), whatever the batch; ``(rows,)`` float64.

    Unlike latent noise, which keeps 31 bits of a seed, all 64 matter.
    """
    keys = torch.tensor(seeds, dtype=torch.int64) ^ _STREAM
    streams = (seeded_uniform(keys, 1).squeeze(-1) * 2.0**53).long() << 10
    at = torch.tensor(positions, dtype=torch.int64)
    return seeded_uniform(streams + at, 1).squeeze(-1)


def _choose(
    raw: Tensor,
    params: Sequence[SamplingParams],
    u: Tensor,
    histories: Sequence[History | None],
    vocab: int,
) -> Tensor:
    """Token ids of rows that are more than an argmax, ``(rows,)`` int64; ``u (rows,)`` float64."""
    x = raw.double()
    for row, p, history in zip(x, params, histories, strict=True):
        if p.changes_logits:
            _adjust_(row, p, history)
    x = x[:, :vocab]
    token_ids = likeliest(x)
    hot = [i for i, p in enumerate(params) if p.temperature > 0]
    if hot:
        token_ids[hot] = _draw(_distribution(x[hot], [params[i] for i in hot]), u[hot])
    return token_ids


def _adjust_(row: Tensor, p: SamplingParams, history: History | None) -> None:
    """Bias and penalties, in place; ``row (vocab,)`` float64."""
    if p.logit_bias:
        biases = torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
        row[list(p.logit_bias)] += biases
    if not p.needs_history:
        return
    if history is None:
        raise ConfigError("a row has penalties but no history; pass its prompt and output ids")

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=row.device)

    if p.repetition_penalty != 1.0:
        seen = torch.cat((ids(history.prompt_ids), ids(history.output_ids)))
        x = row[seen]
        # A token that is there twice is written twice with the same value.
        row[seen] = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    counts = torch.bincount(ids(history.output_ids), minlength=len(row)).double()
    row -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)


def _distribution(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature and filters, ``(rows, vocab)`` float64.

    What was filtered by `top_p` is 0 without the rest being scaled up; `_draw` allows for that.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=x.dtype, device=x.device).unsqueeze(-1)

    # The best becomes 0 before the division, so no temperature overflows upwards.
    z = x - x.amax(dim=-1, keepdim=True)
    z /= column([p.temperature for p in params])
    if any(p.min_p for p in params):
        least = column([p.min_p for p in params]).log()  # -inf where off
        z.masked_fill_(z < least, -torch.inf)
    at = [i for i, p in enumerate(params) if p.top_k is not None and p.top_k < z.shape[-1]]
    if at:
        counts = torch.tensor([params[i].top_k for i in at], device=z.device).unsqueeze(-1)
        some = z[at]
        best = some.topk(int(counts.max()), dim=-1).values
        z[at] = some.masked_fill(~_best(some, best, counts), -torch.inf)
    shares = z.softmax(dim=-1)
    at = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if at:
        shares[at] = _nucleus(shares[at], column([params[i].top_p for i in at]))
    return shares


def _best(values: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Mask of exactly the ``counts`` best, lower ids first among equals, ``(rows, vocab)``.

    Args:
        values: ``(rows, vocab)``.
        ordered: the best of them, falling, ``(rows, at least counts)``.
        counts: how many stay, ``(rows, 1)`` int64.
    """
    border = ordered.gather(-1, counts - 1)
    above, equal = values > border, values == border
    room = counts - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """``p (rows, vocab)`` with all but the fewest best tokens that reach ``top_p (rows, 1)`` 0."""
    ordered = p.topk(min(_NUCLEUS_GUESS, p.shape[-1]), dim=-1).values
    kept, full = _cut(p, ordered, top_p)
    if ordered.shape[-1] < p.shape[-1] and full.any():
        p, top_p = p[full], top_p[full]
        kept[full], _ = _cut(p, p.sort(dim=-1, descending=True).values, top_p)
    return kept


def _cut(p: Tensor, ordered: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """`_nucleus` as far as the ``ordered`` best reach, and which rows took them all."""
    better = ordered.cumsum(dim=-1) - ordered  # probability of those before
    counts = (better < top_p).sum(dim=-1, keepdim=True)
    kept = p.masked_fill(~_best(p, ordered, counts), 0.0)
    return kept, counts.squeeze(-1) == ordered.shape[-1]


def _draw(p: Tensor, u: Tensor) -> Tensor:
    """Token ids where the running sum of ``p (rows, vocab)`` passes ``u (rows,)`` of its total."""
    sums = p.cumsum(dim=-1)
    total = sums[:, -1:]
    # Below the total, or rounding could point past the last token that has a share.
    target = torch.minimum(u.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).squeeze(-1)


def _alternatives(raw: Tensor, log_p: Tensor, n: int) -> TopLogprobs:
    """The ``n`` best tokens of one row, ordered by raw logits, which rounding cannot equate."""
    ids = (raw >= raw.topk(n).values[-1]).nonzero().squeeze(-1)  # rising, so ties are as well
    ids = ids[raw[ids].sort(descending=True, stable=True).indices[:n]]
    values = log_p[ids].clamp(min=LOGPROB_FLOOR)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _broken(raw: Tensor, logprobs: Tensor, vocab: int) -> LogitsError:
    rows = (~logprobs.isfinite()).nonzero().squeeze(-1).tolist()
    first = raw[rows[0]]
    if first.isnan().any():
        what = f"{int(first.isnan().sum())} of {len(first)} logits are NaN"
    elif (first == torch.inf).any():
        what = f"{int((first == torch.inf).sum())} of {len(first)} logits are +inf"
    else:
        what = f"all {vocab} logits are -inf"
    return LogitsError(
        f"row {rows[0]} has no next token: {what} (broken rows: {rows}, of {len(raw)}); the model "
        "overflowed on it: run in float32, or at a lower depth",
        tuple(rows),
    )
