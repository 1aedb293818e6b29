"""Does cached decoding compute what the full forward pass computes? The looped family, float32.

For every variant of arXiv:2605.18797 and several loop counts: the largest difference of a logit
between one pass over a whole text and (a) the reference decoder, token by token, and of a
log-probability between that pass and (b) the engine, with all texts in flight. Weights are drawn
afresh, output projections too, whose zero start would hide every fault.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from benchmarks.common import finish, parser, table
from loopwise.data import TokenBatch
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.reference import ReferenceDecoder
from loopwise.exits.rule import build_policy, parse_rule
from loopwise.measure.evaluate import trajectory
from loopwise.models.looped import Inject, LoopedConfig, LoopedModel
from loopwise.tokenizer import ByteTokenizer

LOOPS = (1, 3, 6, 12)
LIMIT = 1e-4


def make(inject: Inject) -> LoopedModel:
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=ByteTokenizer().vocab_size, d_model=128, d_ff=512, n_layers=3, inject=inject
    )
    model = LoopedModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.5 * p.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def forward(model: LoopedModel, ids: Tensor, depth: int) -> Tensor:
    """Logits ``(batch, seq, vocab)`` of one pass over ``ids (batch, seq)``."""
    positions = torch.arange(ids.shape[1], dtype=torch.int32).expand(ids.shape)
    zeros = torch.zeros(ids.shape, dtype=torch.int32)
    batch = TokenBatch(
        token_ids=ids,
        targets=ids,
        document_ids=zeros,
        positions=positions,
        hops=zeros.to(torch.uint8),
    )
    *_, (r, latent, view) = trajectory(model, batch, depth)
    return model.coda(latent, r, view)


def gaps(model: LoopedModel, ids: Tensor, depth: int) -> dict[str, float]:
    wanted = forward(model, ids, depth)
    rule = parse_rule(f"fixed:{depth}")
    decoder = ReferenceDecoder(model, rule, build_policy(rule))
    steps = torch.stack([decoder.feed(i).logits for i in ids[0].tolist()])
    engine = Engine(
        model,
        ByteTokenizer(),
        EngineConfig(exit=str(rule), max_depth=depth, max_seq=ids.shape[1], chunk=4, page_size=4),
    )
    at = ids.shape[1] // 2  # what follows is decoded
    texts = ids.tolist()
    requests = [engine.submit(t[:at], forced=t[at:]) for t in texts]
    while not engine.idle:
        engine.step()
    made = torch.tensor([r.generation().completions[0].logprobs for r in requests])
    logprobs = wanted[:, at - 1 : -1].log_softmax(dim=-1)
    scored = logprobs.gather(-1, ids[:, at:, None])[..., 0]
    return {
        "token by token": float((steps - wanted[0]).abs().max()),
        "engine": float((made - scored).abs().max()),
    }


def main() -> None:
    args = parser(__doc__ or "", smoke=True).parse_args()
    loops, seq, batch = ((1, 3), 12, 2) if args.smoke else (LOOPS, 48, 8)
    ids = torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(1))
    rows, worst = [], 0.0
    for inject in get_args(Inject):
        model = make(inject)
        for depth in loops:
            found = gaps(model, ids, depth)
            worst = max(worst, *found.values())
            rows.append({"inject": inject, "K": depth, **{k: f"{v:.1e}" for k, v in found.items()}})
    table("largest difference to one pass over the text", rows)
    finish("parity", {"rows": rows, "worst": worst, "limit": LIMIT}, args.save)
    if worst > LIMIT:
        raise SystemExit(f"decoding differs from the forward pass by {worst:.1e}, above {LIMIT}")


if __name__ == "__main__":
    main()
