"""Forms of A2 for ``bench_probes``, from the published one up, and how they are fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopwise.bench.compare import A1
from loopwise.measure.probe_fit import fit_probe

BATCH, CHECK_EVERY = 512, 100  # examples of a step; steps from one look at "choose" to the next
MAX_STEPS, MAX_EPOCHS = 2000, 30
MOVES = ("latent", "step", "norms")


@dataclass(frozen=True)
class Form:
    """One way to learn.

    Attributes:
        sees: of ``latent`` h_r, ``step`` h_r - h_{r-1}, ``norms`` (log relative change, log second
            difference, and the recurrence one-hot), ``output`` (entropy, margin, log KL to the
            previous output: a reading of coda and head at every check).
        predicts: ``changes`` (a later recurrence has another argmax), ``improves`` (the loss falls
            by IMPROVES_NATS until full depth), ``left`` (nats by which it falls), ``kl-last`` (log
            of the KL from the output of full depth, which needs no true token).
        weighted: both classes weigh the same.
        hidden: units of each of two hidden layers; 0 is linear.
    """

    sees: tuple[str, ...]
    predicts: str
    weighted: bool = False
    hidden: int = 0

    @property
    def classifies(self) -> bool:
        return self.predicts in ("changes", "improves")

    @property
    def policy(self) -> str:
        """The rule of the table whose readings it pays for."""
        return A1 if "output" in self.sees else "probe"


PAPER = "as published"
FORMS = {
    PAPER: Form(("latent",), "changes"),
    "class weights": Form(("latent",), "changes", weighted=True),
    "two latents": Form(("latent", "step"), "changes", weighted=True),
    "moves": Form(MOVES, "changes", weighted=True),
    "moves, mlp": Form(MOVES, "changes", weighted=True, hidden=64),
    "improves": Form(MOVES, "improves", weighted=True),
    "improves, mlp": Form(MOVES, "improves", weighted=True, hidden=64),
    "left": Form(MOVES, "left"),
    "left, mlp": Form(MOVES, "left", hidden=64),
    "kl-last": Form(MOVES, "kl-last"),
    "kl-last, mlp": Form(MOVES, "kl-last", hidden=64),
    "kl-last, mlp, output": Form((*MOVES, "output"), "kl-last", hidden=64),
}


@dataclass(frozen=True)
class Learned:
    """A fitted form: standardise, then the layers; more is less settled."""

    mean: Tensor
    std: Tensor
    layers: nn.Sequential
    steps: int

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        return self.layers((inputs - self.mean) / self.std).squeeze(-1)

    def products(self, d_model: int) -> float:
        """Multiply-adds of a check, in products over d_model."""
        linears = [m for m in self.layers if isinstance(m, nn.Linear)]
        return sum(m.weight.numel() for m in linears) / d_model


def fit(
    form: Form, learn: tuple[Tensor, Tensor], choose: tuple[Tensor, Tensor], seed: int
) -> Learned:
    """AdamW on examples ``(n, channels)`` and labels ``(n,)``; ``choose`` says when it was best."""
    inputs, labels = learn
    mean, std = inputs.mean(dim=0), inputs.std(dim=0).clamp_min(1e-6)
    scale = 1.0 if form.classifies else float(labels.std().clamp_min(1e-6))
    shift = 0.0 if form.classifies else float(labels.mean())
    positive = labels.mean().clamp(1e-3, 1 - 1e-3) if form.classifies else torch.tensor(0.5)
    weight = (1 - positive) / positive if form.weighted else torch.tensor(1.0)

    def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
        if form.classifies:
            return F.binary_cross_entropy_with_logits(outputs, wanted, pos_weight=weight)
        return F.mse_loss(outputs, (wanted - shift) / scale)

    torch.manual_seed(seed)
    layers = _layers(inputs.shape[1], form.hidden)
    rate = 1e-3 if form.hidden else 3e-3
    optimizer = torch.optim.AdamW(layers.parameters(), lr=rate, weight_decay=1e-2)
    total = min(MAX_STEPS, MAX_EPOCHS * -(-len(inputs) // BATCH))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / total)
    held, wanted = (choose[0] - mean) / std, choose[1]
    best, best_loss, best_step = _weights(layers), float("inf"), 0
    for step, of in enumerate(_shuffled(len(inputs), total), start=1):
        optimizer.zero_grad()
        loss_of(layers((inputs[of] - mean) / std).squeeze(-1), labels[of]).backward()
        optimizer.step()
        schedule.step()
        if step % CHECK_EVERY == 0 or step == total:
            with torch.no_grad():
                found = float(loss_of(layers(held).squeeze(-1), wanted))
            if found < best_loss:
                best, best_loss, best_step = _weights(layers), found, step
    layers.load_state_dict(best)
    return Learned(mean, std, layers, best_step)


def _layers(channels: int, hidden: int) -> nn.Sequential:
    if not hidden:
        return nn.Sequential(nn.Linear(channels, 1))
    inner = nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
    return nn.Sequential(*inner, nn.Linear(hidden, 1))


def _weights(layers: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layers.state_dict().items()}


def _shuffled(n: int, steps: int) -> Iterator[Tensor]:
    """Rows of each step, every row once before any comes again."""
    rows: Tensor = torch.randperm(n)
    for _ in range(steps):
        if not len(rows):
            rows = torch.randperm(n)
        yield rows[:BATCH]
        rows = rows[BATCH:]


def as_published(learn: tuple[Tensor, Tensor]) -> Learned:
    """The package's own fit, as one layer."""
    probe = fit_probe(*learn)
    layer = nn.Linear(len(probe.weight), 1)
    layer.load_state_dict({"weight": probe.weight[None], "bias": torch.tensor([probe.bias])})
    return Learned(probe.mean, probe.std, nn.Sequential(layer), 0)
