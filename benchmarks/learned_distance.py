"""A rule taught the distance to the last output (``kl-last``), as it would run live.

Not a rule of the package: it gains in replay and not live, see ``docs/results/exits.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from loopwise.data import TokenBatch
from loopwise.exits.base import ExitPolicy, Observation, Reads
from loopwise.exits.kl import step_kl
from loopwise.exits.latent_change import latent_size, relative_norm
from loopwise.exits.latent_kl import log_of
from loopwise.exits.rule import ExitRule
from loopwise.exits.second_difference import remembered_step
from loopwise.measure.latent_kl_fit import KL_FLOOR
from loopwise.measure.live import run_live
from loopwise.models.base import LoopedLM

HIDDEN = 64  # units of one layer
_STEPS, _BATCH, _LOOK_EVERY = 3000, 512, 100
_RATE, _DECAY = 3e-3, 1e-2
_HELD = 10  # one token in so many, the last ones, says which step was best
_EARLY = 3  # recurrences; where tokens leave that do not stay

Net = dict[str, Tensor]


@dataclass(frozen=True)
class LearnedDistance(ExitPolicy):
    """Predicted KL(p_r || p_last) in nats, with a verdict at recurrence 1.

    log KL = out . gelu(weight z + bias_r) + moves_r . (log relative change, log second difference)
    + offset_r, with z the standardised latent and moves of at least 0.
    """

    net: Net
    mean: Tensor
    std: Tensor

    name = "learned-distance"
    reads = Reads.LATENT
    products = HIDDEN

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return d_model  # the previous step

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        step = remembered_step(self.name, observation, memory)
        latent = observation.latent.float()
        moves = relative_norm(torch.stack((step, step - memory), dim=-2), _size(latent))
        seen = _Examples((latent - self.mean) / self.std, log_of(moves), moves)
        at = torch.as_tensor(observation.r).clamp(max=len(self.net["offset"])) - 1
        return predict(self.net, seen, at).exp(), step


def _size(latent: Tensor) -> Tensor:
    return latent_size(latent).unsqueeze(-1)


@dataclass(frozen=True)
class _Examples:
    """Standardised latents, logarithms of both moves, and log KL: ``(tokens, r, ...)``."""

    latent: Tensor
    moves: Tensor
    log_kl: Tensor

    def __getitem__(self, of: slice | tuple[Tensor, ...]) -> _Examples:
        return _Examples(self.latent[of], self.moves[of], self.log_kl[of])


def predict(net: Net, seen: _Examples, at: Tensor) -> Tensor:
    """Log KL; ``at`` says which recurrence, from 0, and broadcasts."""
    units = F.gelu(seen.latent @ net["weight"].T + net["bias"][at])
    return units @ net["out"] + (net["moves"][at] * seen.moves).sum(dim=-1) + net["offset"][at]


@dataclass(eq=False)
class _Leaving(ExitPolicy):
    """Lets tokens leave early by lot, and keeps what the others come to."""

    generator: torch.Generator
    stay: float
    rows: list[Tensor] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    hiddens: list[Tensor] = field(default_factory=list)

    name = "leaving"
    reads = Reads.HIDDEN

    def memory_width(self, vocab_size: int, d_model: int) -> int:
        return 2  # number of the row, and where it leaves

    def score(self, observation: Observation, memory: Tensor) -> tuple[Tensor, Tensor]:
        n = len(memory)
        if observation.r == 1:
            leaves = torch.randint(1, _EARLY + 1, (n,), generator=self.generator).float()
            leaves[torch.rand(n, generator=self.generator) < self.stay] = torch.inf
            memory = torch.stack((torch.arange(n).float(), leaves), dim=1)
            self.latents.append(observation.previous.float())
        self.rows.append(memory[:, 0].long())
        self.latents.append(observation.latent.float())
        assert observation.output is not None, "it reads the hidden state"
        self.hiddens.append(observation.output.hidden)
        return (memory[:, 1] > observation.r).float(), memory

    def of_last(self) -> tuple[list[Tensor], list[Tensor]]:
        """Latents and hidden states of the tokens that ran to full depth, by recurrence."""
        end, rows = self.rows[-1], [self.rows[0], *self.rows]
        latents = [x[torch.searchsorted(of, end)] for x, of in zip(self.latents, rows, strict=True)]
        pairs = zip(self.hiddens, self.rows, strict=True)
        return latents, [x[torch.searchsorted(of, end)] for x, of in pairs]


@torch.no_grad()
def learn(
    model: LoopedLM, batches: Sequence[TokenBatch], depth: int, stay: float = 1.0, passes: int = 1
) -> LearnedDistance:
    """Fit on what tokens do that run to full depth.

    Args:
        depth: full depth.
        stay: share of such tokens; the others leave at recurrences 1 to 3, and their entries stay
            as they are then, as under live exits. 1: all of them run to full depth, as in replay.
        passes: over the text, with other tokens that leave.
    """
    parts: list[list[Tensor]] = []
    rule = ExitRule(policy="probe", threshold=0.0, max_depth=depth)
    generator = torch.Generator().manual_seed(0)
    for _ in range(passes):
        for batch in batches:
            leaving = _Leaving(generator, stay)
            run_live(model, [batch], rule, leaving)
            parts.append(_columns(model, *leaving.of_last()))
    latent, moves, log_kl = (torch.cat(p)[:, : depth - 1] for p in zip(*parts, strict=True))
    mean, std = latent.mean(dim=(0, 1)), latent.std(dim=(0, 1)).clamp_min(1e-3)
    return LearnedDistance(fit(_Examples((latent - mean) / std, moves, log_kl)), mean, std)


def _columns(model: LoopedLM, latents: list[Tensor], hiddens: list[Tensor]) -> list[Tensor]:
    """Latents, log moves and log KL to the last output, ``(tokens, depth, ...)``."""
    last = model.head(hiddens[-1]).float().log_softmax(dim=-1)
    before, moves, kl = torch.zeros_like(latents[0]), [], []
    for r, hidden in enumerate(hiddens, start=1):
        step = latents[r] - latents[r - 1]
        pair = torch.stack((step, step - before), dim=-2)
        moves.append(log_of(relative_norm(pair, _size(latents[r]))))
        kl.append(step_kl(model.head(hidden).float().log_softmax(dim=-1), last))
        before = step
    log_kl = torch.stack(kl, dim=1).clamp_min(KL_FLOOR).log()
    return [torch.stack(latents[1:], dim=1), torch.stack(moves, dim=1), log_kl]


def fit(examples: _Examples) -> Net:
    """Least squares of log KL; moves are centred and log KL is standardised meanwhile."""
    centre, level = examples.moves.mean(dim=0), examples.log_kl.mean()
    scale = examples.log_kl.std()
    centred = _Examples(examples.latent, examples.moves - centre, (examples.log_kl - level) / scale)
    net = _descended(centred)
    slopes = net["moves"] * scale
    offset = net["offset"] * scale + level - (slopes * centre).sum(dim=-1)
    return {**net, "out": net["out"] * scale, "moves": slopes, "offset": offset}


@torch.enable_grad()
def _descended(examples: _Examples) -> Net:
    """AdamW; the parameters that were best on tokens held apart."""
    n, depth = examples.log_kl.shape
    held, learnt = examples[n - n // _HELD :], examples[: n - n // _HELD]
    generator = torch.Generator().manual_seed(0)
    net = _start(examples, generator)
    optimizer = torch.optim.AdamW(net.values(), lr=_RATE, weight_decay=_DECAY)
    best, lowest = net, float("inf")
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / _STEPS)
        token = torch.randint(len(learnt.log_kl), (_BATCH,), generator=generator)
        at = torch.randint(depth, (_BATCH,), generator=generator)
        some = learnt[token, at]
        optimizer.zero_grad()
        F.mse_loss(predict(net, some, at), some.log_kl).backward()
        optimizer.step()
        with torch.no_grad():
            net["moves"].clamp_min_(0.0)
            if (step + 1) % _LOOK_EVERY == 0:
                found = float(F.mse_loss(predict(net, held, torch.arange(depth)), held.log_kl))
                if found < lowest:
                    best, lowest = {k: p.detach().clone() for k, p in net.items()}, found
    return best


def _start(examples: _Examples, generator: torch.Generator) -> Net:
    depth, d_model = examples.log_kl.shape[1], examples.latent.shape[-1]
    draw = partial(torch.randn, generator=generator)
    net = {
        "weight": draw(HIDDEN, d_model) / d_model**0.5,
        "bias": torch.zeros(depth, HIDDEN),
        "out": draw(HIDDEN) / HIDDEN**0.5,
        "moves": torch.zeros(depth, 2),
        "offset": torch.zeros(depth),
    }
    return {name: p.requires_grad_() for name, p in net.items()}
