"""The `looped` architecture again, slowly: one token, one layer and one recurrence at a time.

Written from the description of the five injections and of the `per-loop` KV policy, not from the
package's forward code; all it takes from a model is its state dict and the values of its config.
Because attention is causal, a token runs all its recurrences before the next one starts: what it
left in a layer at recurrence r is kept, and later tokens at recurrence r read it (or, where the
token stopped earlier, the last thing it left).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from naive import Array, Entry
from torch import nn


class NaiveLooped:
    """A `looped` model in float64; a token is one ``(d_model,)`` array."""

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.weights = {
            name: tensor.detach().double().cpu().numpy()
            for name, tensor in model.state_dict().items()
        }
        self.head_dim = self.config.d_model // self.config.n_heads

    # Norms, phase, attention, MLP.

    def rms(self, x: Array) -> Array:
        mean_square = sum(float(value) ** 2 for value in x) / len(x)
        return x / math.sqrt(mean_square + self.config.norm_eps)

    def norm(self, name: str, x: Array) -> Array:
        """A norm between layers, with a weight where the model has learned norms."""
        if not self.config.learned_norms:
            return self.rms(x)
        return self.rms(x) * self.weights[name + ".weight"]

    def rotate(self, x: Array, position: int) -> Array:
        half = self.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * self.config.rope_base ** (-2 * i / self.head_dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def phased(self, head: Array, position: int) -> Array:
        """Phase first, then the q/k norm, in the order of the paper."""
        head = self.rotate(head, position)
        return self.rms(head) if self.config.qk_norm else head

    def attention(
        self, block: str, asks: Array, seen: Array, position: int, earlier: list[Entry]
    ) -> tuple[Array, Entry]:
        """The query of ``asks`` over keys and values of earlier tokens and of ``seen``."""
        n_q, n_kv, size = self.config.n_heads, self.config.n_kv_heads, self.head_dim
        queries = (self.weights[block + "query.weight"] @ asks).reshape(n_q, size)
        both = (self.weights[block + "key_value.weight"] @ seen).reshape(2 * n_kv, size)
        own = (np.stack([self.phased(head, position) for head in both[:n_kv]]), both[n_kv:])
        mixed = []
        for j in range(n_q):
            kv = j // (n_q // n_kv)
            query = self.phased(queries[j], position)
            entries = [*earlier, own]
            scores = [float(query @ keys[kv]) / math.sqrt(size) for keys, _ in entries]
            shares = [math.exp(score - max(scores)) for score in scores]
            total = np.zeros(size)
            for share, (_, values) in zip(shares, entries, strict=True):
                total += share / sum(shares) * values[kv]
            mixed.append(total)
        return self.weights[block + "out.weight"] @ np.concatenate(mixed), own

    def mlp(self, block: str, x: Array) -> Array:
        up = self.weights[block + "mlp.up.weight"] @ x
        if self.config.mlp == "relu2":
            inner = np.where(up > 0, up, 0.0) ** 2
        else:
            gate, value = up[: len(up) // 2], up[len(up) // 2 :]
            inner = gate / (1 + np.exp(-gate)) * value
        return self.weights[block + "mlp.down.weight"] @ inner

    # One recurrence of one token.

    def recurrence(
        self, r: int, x0: Array, state: Array | None, position: int, earlier: list[list[Entry]]
    ) -> tuple[Array, list[Entry]]:
        """The new state and what the token leaves in each layer.

        Args:
            state: what recurrence r - 1 left; None at r = 1.
            earlier: per layer, one entry per earlier token.
        """
        inject = self.config.inject
        x = x0
        if r > 1:
            h = self.norm("norm_latent", state)
            if inject == "none":
                x = h
            elif inject == "input":
                x = self.norm("norm_latent", x0 + h)
        made = []
        for layer in range(self.config.n_layers):
            block = f"core_blocks.{layer}."
            if r > 1 and inject == "residual-all":
                x = self.norm("norm_latent", x + h)
            seen = self.norm(block + "norm_attn", x)
            asks = seen
            if r > 1 and (inject == "attn-all" or (inject == "attn-first" and layer == 0)):
                asks = self.norm(block + "norm_attn", h)
            mixed, own = self.attention(block, asks, seen, position, earlier[layer])
            made.append(own)
            x = x + mixed
            x = x + self.mlp(block, self.norm(block + "norm_mlp", x))
        return x, made

    def start(self, token: int) -> Array:
        return self.norm("norm_embedding", self.weights["embedding.weight"][token])

    def read(self, state: Array) -> Array:
        """Logits ``(vocab,)``."""
        tied = self.config.tie_embeddings
        matrix = self.weights["embedding.weight" if tied else "unembedding.weight"]
        logits = matrix @ self.norm("norm_final", state)
        cap = self.config.logit_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    # A document.

    def states(self, token_ids: Sequence[int], depths: Sequence[int]) -> list[list[Array]]:
        """The state of every token after each recurrence it ran; ``depths`` has one per token."""
        layers = range(self.config.n_layers)
        left: list[list[list[Entry]]] = []  # token, recurrence - 1, layer
        out = []
        for position, (token, depth) in enumerate(zip(token_ids, depths, strict=True)):
            x0, state = self.start(token), None
            mine: list[list[Entry]] = []
            states = []
            for r in range(1, depth + 1):
                last = [recurrences[min(r, len(recurrences)) - 1] for recurrences in left]
                earlier = [[entries[layer] for entries in last] for layer in layers]
                state, made = self.recurrence(r, x0, state, position, earlier)
                mine.append(made)
                states.append(state)
            left.append(mine)
            out.append(states)
        return out

    def forward(self, token_ids: Sequence[int], depth: int) -> Array:
        """Logits ``(depth, tokens, vocab)`` after every recurrence, all tokens equally deep."""
        states = self.states(token_ids, [depth] * len(token_ids))
        return np.stack([[self.read(token[r]) for token in states] for r in range(depth)])

    def decode(self, token_ids: Sequence[int], depths: Sequence[int]) -> Array:
        """Logits ``(tokens, vocab)`` where each token stops at a depth of its own."""
        return np.stack([self.read(token[-1]) for token in self.states(token_ids, depths)])
