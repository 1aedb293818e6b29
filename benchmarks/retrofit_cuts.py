"""Which layers of a Llama-shaped model stand around and in the loop? Every cut's loss, untrained.

For each cut ``PRELUDE/CORE/CODA`` (layer lists, as ``loopwise retrofit`` takes them) the loss in
nats at a few depths, on the same blocks of text, with one or several ``--latent-share``. What a cut
loses here is what training has to bring back.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.common import finish, parser, table
from loopwise.data import PackedBlocks, ReadOptions, ReadReport, read_documents, tokenize
from loopwise.hub.retrofit import LATENT_SHARE, PARTS, parse_layers, raven_config, surgery
from loopwise.measure.evaluate import batches, loss_by_depth
from loopwise.models.base import LoopedLM
from loopwise.models.checkpoint import load_checkpoint
from loopwise.models.costs import flops_per_token
from loopwise.models.raven import RavenModel


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("source", type=Path, help="a checkpoint of architecture fixed")
    args.add_argument("cuts", nargs="+", help="for example 0-7/11-16/20-29")
    args.add_argument("--data", required=True)
    args.add_argument("--depth", type=int, nargs="+", default=[1, 2, 3])
    args.add_argument("--latent-share", type=float, nargs="+", default=[LATENT_SHARE])
    args.add_argument("--block", type=int, default=256)
    args.add_argument("--blocks", type=int, default=12)
    options = args.parse_args()
    checkpoint = load_checkpoint(options.source)
    stored = load_file(checkpoint.path / "model.safetensors")
    documents = read_documents((options.data,), ReadOptions(), ReadReport())
    held_out = PackedBlocks(
        tokenize(documents, checkpoint.tokenizer), options.block, seed=0, shuffle=False
    )
    n = min(options.blocks, held_out.n_blocks)

    def losses(model: LoopedLM, depths: list[int]) -> dict[str, float]:
        by_depth = loss_by_depth(model, batches(held_out, 4, n), depths)
        return {f"depth {r}": by_depth[r] for r in depths}

    whole = flops_per_token(checkpoint.model, options.block // 2).forward(1)
    rows = [
        {"cut": "source", "share": "", "layers": checkpoint.model.config.n_layers, "FLOPs": 1.0}
    ]
    first = losses(checkpoint.model, [1])
    rows[0] |= {f"depth {r}": first["depth 1"] for r in options.depth}
    for cut, share in product(options.cuts, options.latent_share):
        lists = dict(zip(PARTS, cut.split("/"), strict=True))
        taken = {p: parse_layers(lists[p], p, checkpoint.model.config.n_layers) for p in PARTS}
        model = RavenModel(raven_config(checkpoint.model.config, taken, share))
        model.load_state_dict({k: v.float() for k, v in surgery(stored, taken, share).items()})
        cost = flops_per_token(model, options.block // 2).forward(1) / whole
        n_layers = sum(map(len, taken.values()))
        facts = {"cut": cut, "share": share, "layers": n_layers, "FLOPs": cost}
        rows.append(facts | losses(model.eval(), options.depth))
        table("Loss in nats by depth, untrained", [rows[-1]])
    table("Loss in nats by depth, untrained (FLOPs: depth 1 over the source)", rows)
    facts = {"data": options.data, "block": options.block, "blocks": n}
    finish("retrofit-cuts", {**facts, "rows": rows}, options.save)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
