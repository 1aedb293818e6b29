"""Models again, slowly: float64 loops over tokens, heads and recurrences, to check the package by.

Written from the description of the architectures and of the `per-loop` KV policy, not from the
package's forward code; all it takes from a model is its state dict and the values of its config.
One token is one ``(d_model,)`` array; an entry is the rotated key and the value of one token in one
layer, each ``(n_kv_heads, head_dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from loopwise.data.packing import TokenBatch
from loopwise.exits.rule import ExitRule

Array = NDArray[np.float64]
Entry = tuple[Array, Array]


@dataclass
class Decoded:
    """One document under exits; a list item or row per token.

    ``scores`` are all that were compared with the threshold, recurrences in order.
    """

    logits: Array
    exit_depth: list[int]
    scores: list[list[float]]


class Naive:
    """A `recurrent` or `fixed` model in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.weights = {
            name: tensor.detach().double().cpu().numpy()
            for name, tensor in model.state_dict().items()
        }
        self.recurrent = model.name == "recurrent"
        c = self.config
        self.head_dim = c.d_model // c.n_heads
        if self.recurrent:
            self.prelude = [f"prelude_blocks.{i}." for i in range(c.n_prelude_layers)]
            self.core = [f"core_blocks.{i}." for i in range(c.n_core_layers)]
            self.coda = [f"coda_blocks.{i}." for i in range(c.n_coda_layers)]
        else:
            self.prelude, self.coda = [], []
            self.core = [f"core_blocks.{i}." for i in range(c.n_layers)]

    # One token through one layer.

    def rms_norm(self, name: str, x: Array) -> Array:
        mean_square = sum(float(value) ** 2 for value in x) / len(x)
        return x / math.sqrt(mean_square + self.config.norm_eps) * self.weights[name]

    def rotate(self, x: Array, position: int) -> Array:
        half = self.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * self.config.rope_base ** (-2 * i / self.head_dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def attention(
        self, name: str, x: Array, position: int, earlier: list[Entry]
    ) -> tuple[Array, Entry]:
        """What the token takes from earlier tokens and itself, and the entry it leaves."""
        n_q, n_kv, size = self.config.n_heads, self.config.n_kv_heads, self.head_dim
        heads = (self.weights[name + "qkv.weight"] @ x).reshape(n_q + 2 * n_kv, size)
        keys = np.stack([self.rotate(head, position) for head in heads[n_q : n_q + n_kv]])
        own = (keys, heads[n_q + n_kv :])
        seen = [*earlier, own]
        mixed = []
        for j in range(n_q):
            kv = j // (n_q // n_kv)
            query = self.rotate(heads[j], position)
            scores = [float(query @ key[kv]) * size**-0.5 for key, _ in seen]
            top = max(scores)
            shares = [math.exp(score - top) for score in scores]
            total = sum(shares)
            values = (
                share / total * entry[1][kv] for share, entry in zip(shares, seen, strict=True)
            )
            mixed.append(sum(values, np.zeros(size)))
        return self.weights[name + "out.weight"] @ np.concatenate(mixed), own

    def mlp(self, name: str, x: Array) -> Array:
        both = self.weights[name + "up.weight"] @ x
        gate, value = both[: len(both) // 2], both[len(both) // 2 :]
        return self.weights[name + "down.weight"] @ (gate / (1 + np.exp(-gate)) * value)

    def block(
        self, name: str, x: Array, position: int, earlier: list[Entry]
    ) -> tuple[Array, Entry]:
        """Sandwich block of `recurrent`, pre-norm block of `fixed`."""
        mixed, own = self.attention(
            name + "attn.", self.rms_norm(name + "norm_attn_in.weight", x), position, earlier
        )
        x = x + mixed
        if self.recurrent:
            x = self.rms_norm(name + "norm_attn_out.weight", x)
        x = x + self.mlp(name + "mlp.", self.rms_norm(name + "norm_mlp_in.weight", x))
        if self.recurrent:
            x = self.rms_norm(name + "norm_mlp_out.weight", x)
        return x, own

    # Around the layers.

    def embed(self, token: int) -> Array:
        scale = math.sqrt(self.config.d_model) if self.recurrent else 1.0
        return self.weights["embedding.weight"][token] * scale

    def initial(self, injection: Array) -> Array:
        if not self.recurrent or self.config.latent_init == "injection":
            return injection
        assert self.config.latent_init == "zeros", "the noise is the package's own"
        return np.zeros_like(injection)

    def inject(self, latent: Array, injection: Array) -> Array:
        if not self.recurrent:
            return latent
        if self.config.injection == "add":
            return latent + injection
        return self.weights["adapter.weight"] @ np.concatenate([latent, injection])

    def head(self, x: Array) -> Array:
        tied = self.config.tie_embeddings
        matrix = self.weights["embedding.weight" if tied else "unembedding.weight"]
        return matrix @ self.rms_norm("norm_final.weight", x)

    # (a) All tokens at one depth, layer after layer.

    def forward(self, token_ids: list[int], depth: int) -> Array:
        """Logits ``(tokens, vocab)`` of one document at uniform ``depth``."""
        xs = self._layers(self.prelude, [self.embed(token) for token in token_ids])
        injections, latents = xs, [self.initial(x) for x in xs]
        for _ in range(depth):
            xs = [self.inject(h, e) for h, e in zip(latents, injections, strict=True)]
            latents = self._layers(self.core, xs)
        return np.stack([self.head(x) for x in self._layers(self.coda, latents)])

    def _layers(self, names: list[str], xs: list[Array]) -> list[Array]:
        for name in names:
            entries: list[Entry] = []
            out = []
            for position, x in enumerate(xs):
                y, own = self.block(name, x, position, entries)
                entries.append(own)
                out.append(y)
            xs = out
        return xs

    # (b) One token after another, each as deep as the rule says.

    def decode(self, token_ids: list[int], rule: ExitRule) -> Decoded:
        """One document token by token under `per-loop` keys and values.

        Every entry is kept: ``entries[layer][token][i - 1]`` was made at recurrence i, or, in
        prelude and coda layers that a token passed once, is the only one.
        """
        names = [*self.prelude, *self.core, *self.coda]
        entries: dict[str, list[list[Entry]]] = {name: [] for name in names}
        out = Decoded(np.empty((len(token_ids), self.config.vocab_size)), [], [])

        def run(names: list[str], x: Array, r: int) -> Array:
            for name in names:
                *before, mine = entries[name]
                earlier = [made[min(r, len(made)) - 1] for made in before]
                x, own = self.block(name, x, position, earlier)
                mine.append(own)
            return x

        for position, token in enumerate(token_ids):
            for name in names:
                entries[name].append([])
            injection = run(self.prelude, self.embed(token), 1)
            latent = self.initial(injection)
            logits = log_p = None
            hits, r, scores = 0, 0, []
            while True:
                r += 1
                previous, log_q = latent, log_p
                latent = run(self.core, self.inject(latent, injection), r)
                if rule.policy == "kl":
                    logits = self.head(run(self.coda, latent, r))
                    log_p = log_softmax(logits)
                scores.append(score(rule, latent, previous, log_p, log_q))
                hits = hits + 1 if scores[-1] <= rule.threshold else 0
                if r == rule.max_depth or (hits >= rule.patience and r >= rule.min_depth):
                    break
            if logits is None:
                logits = self.head(run(self.coda, latent, r))
            out.logits[position] = logits
            out.exit_depth.append(r)
            out.scores.append(scores)
        return out


def score(
    rule: ExitRule, latent: Array, previous: Array, log_p: Array | None, log_q: Array | None
) -> float:
    if rule.policy == "latent-change":
        return float(np.linalg.norm(latent - previous) / np.linalg.norm(latent))
    if rule.policy == "kl" and log_q is not None:
        return float(np.exp(log_p) @ (log_p - log_q))
    return math.inf


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def documents(batch: TokenBatch) -> Iterator[tuple[int, list[int]]]:
    """Row and columns of each document of a packed batch, in reading order."""
    for row, ids in enumerate(batch.document_ids.tolist()):
        for document in sorted(set(ids) - {-1}):
            yield row, [column for column, here in enumerate(ids) if here == document]


def roughen(model: nn.Module, seed: int, gain: float = 1.0) -> None:
    """Draw every weight afresh, norms too, so that no fault hides behind ones or small numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim == 1:
            parameter.data = 1 + 0.3 * noise
        elif "embedding" in name:
            parameter.data = 0.5 * noise
        else:
            parameter.data = gain * noise / math.sqrt(parameter.shape[1])
