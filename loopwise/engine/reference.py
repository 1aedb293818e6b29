"""Reference decoding: one request, one token, one recurrence at a time. Slow, obviously right.

Every token keeps, by attention layer, the entries its KV policy names; a later token reads those
the policy names for it. Where the checks of a rule run the coda, it keeps entries by the same
policy, else one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopwise.engine.kv_policy import KVPolicy, PerLoop
from loopwise.engine.request import SamplingParams
from loopwise.engine.sampler import History, sample
from loopwise.errors import DataError, ExitError
from loopwise.exits.base import ExitPolicy, Observation, Output, Reads
from loopwise.exits.rule import ExitRule, should_exit
from loopwise.measure.evaluate import check_depths, check_length
from loopwise.models.base import Geometry, LoopedLM
from loopwise.models.layers import row_seeds

Entries = dict[int, tuple[Tensor, Tensor]]  # entry -> key, value, each (n_kv_heads, head_dim)
GREEDY = SamplingParams()


class ReferenceView:
    """The KVView of a single token that sees what the tokens before it have kept.

    Args:
        kv_policy: of core layers.
        coda_policy: of coda layers; None keeps one entry.
    """

    def __init__(
        self, geometry: Geometry, kv_policy: KVPolicy, coda_policy: KVPolicy | None
    ) -> None:
        self.geometry, self.kv_policy, self.coda_policy = geometry, kv_policy, coda_policy
        self.position = self.token_id = 0  # of the row that goes through the model
        self._entries: dict[tuple[int, int], Entries] = {}  # by layer and position
        self._last: dict[tuple[int, int], int] = {}  # latest recurrence, by layer and position

    @property
    def positions(self) -> Tensor:
        return torch.tensor([self.position])

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([self.token_id])

    def attend(
        self,
        layer: int,
        r: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Tensor | None = None,
    ) -> Tensor:
        r, rope, policy = int(r), self.geometry.rope.at(layer), self._policy(layer)
        cos, sin = rope.tables(torch.tensor([self.position], device=q.device), q.dtype)
        q, k = rope.turn(q, k, cos, sin, scale)  # (1, heads, head_dim)
        own = self._entries.setdefault((layer, self.position), {})
        own[0 if policy is None else policy.slot(r)] = k[0], v[0]
        self._last[layer, self.position] = r
        seen = []
        for position in range(self._first(layer), self.position + 1):
            last = self._last[layer, position]
            entry = 0 if policy is None else policy.read(r, last)
            seen.append(self._entries[layer, position][entry])
        keys = torch.stack([key for key, _ in seen])  # (tokens, n_kv_heads, head_dim)
        values = torch.stack([value for _, value in seen])
        groups = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[0], keys) * q.shape[-1] ** -0.5
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values).unsqueeze(0)

    def _first(self, layer: int) -> int:
        """The earliest token this layer sees."""
        window = self.geometry.rope.window if self.geometry.rope.is_local(layer) else None
        return 0 if window is None else max(0, self.position - window + 1)

    def _policy(self, layer: int) -> KVPolicy | None:
        if layer < self.geometry.n_prelude_layers:
            return None
        return self.kv_policy if self.geometry.is_core(layer) else self.coda_policy


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


@dataclass(slots=True)
class _Row:
    """A token on its way through the core."""

    token_id: int
    position: int
    injection: Tensor
    latent: Tensor
    memory: Tensor
    hits: Tensor
    logits: Tensor | None = None
    depth: int = 0


class ReferenceDecoder:
    """Feeds one token after another through a model under an exit rule.

    Args:
        model: frozen.
        rule, policy: when a token stops.
        seed: of the request, for models whose latent starts from noise.
        kv_policy: what tokens keep and read.
        chunk: prompt tokens that go through the core together; matters to approximate KV policies.
    Raises:
        ExitError: the rule cannot decide token by token.
        DepthError: ``rule.max_depth`` is past the model's limit.
        ShapeError: while feeding, a token past the positions the model has learned.
    """

    def __init__(
        self,
        model: LoopedLM,
        rule: ExitRule,
        policy: ExitPolicy,
        seed: int = 0,
        kv_policy: KVPolicy | None = None,
        chunk: int = 1,
    ) -> None:
        if policy.reads is Reads.TRUTH:
            raise ExitError(f"exit rule {policy.name!r} needs later recurrences; it cannot decode")
        check_depths(model, [rule.max_depth])
        self.model, self.rule, self.policy, self.seed = model, rule, policy, seed
        self.chunk = chunk
        self.position = 0  # of the next token
        kept = PerLoop() if kv_policy is None else kv_policy
        self._runs_coda = policy.reads.runs_coda
        self.view = ReferenceView(model.geometry, kept, kept if self._runs_coda else None)

    def feed(self, token_id: int) -> DecodedToken:
        """Run one token to its exit."""
        return self.feed_chunk([token_id])[0]

    @torch.no_grad()
    def feed_chunk(self, token_ids: Sequence[int]) -> list[DecodedToken]:
        """Run tokens to their exits, all of them one recurrence at a time."""
        rows = [self._enter(token_id) for token_id in token_ids]
        for r in range(1, self.rule.max_depth + 1):
            for row in rows:
                if row.depth == 0:
                    self._recur(row, r)
        for row in rows:
            if row.logits is None:
                self.view.position, self.view.token_id = row.position, row.token_id
                row.logits = self.model.coda(row.latent, row.depth, self.view)
        return [_decoded(row) for row in rows]

    def _enter(self, token_id: int) -> _Row:
        check_length(self.model, self.position + 1)
        self.view.position, self.view.token_id = self.position, token_id
        injection = self.model.prelude(torch.tensor([token_id]), self.view)  # (1, d_model)
        seeds = row_seeds(torch.tensor([self.position]), self.seed)
        width = self.policy.memory_width(self.model.geometry.vocab_size, injection.shape[-1])
        row = _Row(
            token_id=token_id,
            position=self.position,
            injection=injection,
            latent=self.model.initial_latent(injection, seeds),
            memory=torch.zeros(1, width),
            hits=torch.zeros(1, dtype=torch.int64),
        )
        self.position += 1
        return row

    def _recur(self, row: _Row, r: int) -> None:
        """Recurrence ``r`` of one token, and whether it stops there."""
        self.view.position, self.view.token_id = row.position, row.token_id
        previous = row.latent
        row.latent = self.model.core_step(previous, row.injection, r, self.view)
        output = None
        if self._runs_coda:
            output = Output(self.model.hidden(row.latent, r, self.view), self.model.head)
        seen = Observation(r=r, latent=row.latent, previous=previous, output=output)
        score, row.memory = self.policy.score(seen, row.memory)
        stop, row.hits = should_exit(self.rule, score, row.hits, r)
        if bool(stop):
            row.depth = r
            row.logits = None if output is None else output.all()

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: SamplingParams = GREEDY,
        end_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> Iterator[DecodedToken]:
        """Feed the prompt, then sampled tokens; yields every token as it is fed.

        The last sampled token is fed too, so that its depth is known. Stops after one of
        ``end_ids``.

        Args:
            vocab_size: ids that can be chosen, as for `sample`.
        Raises:
            DataError: an empty prompt.
        """
        if not prompt:
            raise DataError("the prompt is empty; start it with at least the begin-of-text token")
        for at in range(0, len(prompt), self.chunk):
            for last in self.feed_chunk(prompt[at : at + self.chunk]):
                yield last
        made: list[int] = []
        seed = params.seeded().choice_seed(0)
        for _ in range(max_tokens):
            found = sample(
                last.logits.unsqueeze(0),
                [params],
                [seed],
                [self.position],
                [History(prompt, made)],
                vocab_size=vocab_size,
            )
            made.append(int(found.token_ids))
            last = self.feed(made[-1])
            yield last
            if last.token_id in end_ids:
                return


def _decoded(row: _Row) -> DecodedToken:
    assert row.logits is not None, "a row that has left the core has been read"
    return DecodedToken(row.token_id, row.depth, row.logits[0].float())
