"""Reference decoding: one request, one token, one recurrence at a time. Slow, obviously right.

Every entry a token leaves in attention is kept by (layer, recurrence). A token at recurrence i
reads an earlier token's entry i or, where that token stopped earlier, its last one (KV policy
`per-loop`). The coda's own entries follow the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.errors import DataError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.rule import ExitRule, should_exit
from loopwise.measure.evaluate import check_depths
from loopwise.models.base import LoopedLM, Rope
from loopwise.models.layers import row_seeds

Entries = dict[int, tuple[Tensor, Tensor]]  # recurrence -> key, value, each (n_kv_heads, head_dim)


class ReferenceView:
    """The KVView of a single token that sees all entries of the tokens before it."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.position = -1
        self._entries: dict[int, list[Entries]] = {}  # layer -> one Entries per position

    def next_token(self) -> None:
        self.position += 1

    def attend(self, layer: int, r: int | Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        r = int(r)
        cos, sin = self.rope.tables(torch.tensor([self.position], device=q.device), q.dtype)
        q, k = self.rope.rotate(q, cos, sin), self.rope.rotate(k, cos, sin)  # (1, heads, head_dim)
        tokens = self._entries.setdefault(layer, [])
        if len(tokens) == self.position:
            tokens.append({})
        tokens[self.position][r] = (k[0], v[0])
        seen = [entries.get(r) or entries[max(entries)] for entries in tokens]
        keys = torch.stack([key for key, _ in seen])  # (tokens, n_kv_heads, head_dim)
        values = torch.stack([value for _, value in seen])
        groups = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[0], keys) * q.shape[-1] ** -0.5
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One token that went through the model.

    Attributes:
        token_id: the token fed.
        exit_depth: recurrences it ran.
        logits: of the next token, ``(vocab,)``.
    """

    token_id: int
    exit_depth: int
    logits: Tensor


class ReferenceDecoder:
    """Feeds one token after another through a model under an exit rule.

    Args:
        model: frozen.
        rule, policy: when a token stops.
        seed: of the request, for models whose latent starts from noise.
    Raises:
        ExitError: the rule cannot decide token by token.
        DepthError: ``rule.max_depth`` is past the model's limit.
    """

    def __init__(self, model: LoopedLM, rule: ExitRule, policy: ExitPolicy, seed: int = 0) -> None:
        if policy.reads is Reads.TRUTH:
            raise ExitError(f"exit rule {policy.name!r} needs later recurrences; it cannot decode")
        check_depths(model, [rule.max_depth])
        self.model, self.rule, self.policy, self.seed = model, rule, policy, seed
        self.view = ReferenceView(model.geometry.rope)

    @torch.no_grad()
    def feed(self, token_id: int) -> DecodedToken:
        """Run one token to its exit."""
        model, policy, rule = self.model, self.policy, self.rule
        self.view.next_token()
        injection = model.prelude(torch.tensor([token_id]), self.view)  # (1, d_model)
        seeds = row_seeds(torch.tensor([self.view.position]), self.seed)
        latent = model.initial_latent(injection, seeds)
        width = policy.memory_width(model.geometry.vocab_size, injection.shape[-1])
        memory = torch.zeros(1, width)
        hits = torch.zeros(1, dtype=torch.int64)
        for r in range(1, rule.max_depth + 1):
            previous, latent = latent, model.core_step(latent, injection, r, self.view)
            reads = policy.reads is Reads.LOGITS
            logits = model.coda(latent, r, self.view) if reads else None
            seen = Observation(r=r, latent=latent, previous=previous, logits=logits)
            score, memory = policy.score(seen, memory)
            stop, hits = should_exit(rule, score, hits, r)
            if bool(stop):
                break
        if logits is None:
            logits = model.coda(latent, r, self.view)
        return DecodedToken(token_id, r, logits[0].float())

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        eos_id: int | None = None,
    ) -> Iterator[DecodedToken]:
        """Feed the prompt, then sampled tokens; yields every token as it is fed.

        The last sampled token is fed too, so that its depth is known. Stops after ``eos_id``.

        Raises:
            DataError: an empty prompt.
        """
        if not prompt:
            raise DataError("the prompt is empty; start it with at least the begin-of-text token")
        generator = torch.Generator().manual_seed(self.seed)
        for token_id in prompt:
            last = self.feed(token_id)
            yield last
        for _ in range(max_tokens):
            token_id = sample(last.logits, temperature, generator)
            last = self.feed(token_id)
            yield last
            if token_id == eos_id:
                return


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Greedy at temperature 0, else one draw from the softmax of ``logits / temperature``."""
    if temperature == 0.0:
        return int(logits.argmax())
    p = (logits.double() / temperature).softmax(dim=-1)
    return int(torch.multinomial(p, 1, generator=generator))
