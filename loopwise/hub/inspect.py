"""What a checkpoint is and costs, and whether exit rules may end its tokens early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import safe_open

from loopwise.data import PackedBlocks, ReadOptions, ReadReport, read_documents, tokenize
from loopwise.engine.kv_policy import KV_POLICIES, parse_kv_policy
from loopwise.errors import ConfigError, DivergenceError
from loopwise.hub.precision import precision_lines, precision_report
from loopwise.measure.calibrate import HORIZON, judge_convergence
from loopwise.measure.evaluate import batches, check_depths
from loopwise.measure.trace import trace_batch
from loopwise.models.base import Geometry, LoopedLM
from loopwise.models.checkpoint import Checkpoint
from loopwise.models.costs import flops_per_token, kv_bytes_per_token, parameters

Facts = dict[str, Any]

BUILT_IN = ("builtin:stories:40",)
RINGS = (2, 4)  # sizes of ring-N that are shown
CONTEXT = 1024  # tokens that attention is priced at
_SEQ = 128  # tokens of a block, where the model takes as many
_BATCH = 8  # blocks


def inspect_checkpoint(
    checkpoint: Checkpoint,
    sources: Sequence[str] | None = None,
    *,
    mean_depth: float | None = None,
    full_depth: int | None = None,
    tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Facts:
    """Shape, price, drift under bfloat16 and contraction of a checkpoint, as plain values.

    Args:
        sources: text to watch it on; by default some of the built-in corpus.
        mean_depth: recurrences a token would use on average; by default half of full depth.
        full_depth: recurrences without exits; by default the training mean.
        tokens: of the text, at most.
    Raises:
        ConfigError, DepthError: depths that do not fit the model or each other.
        DataError: text that cannot be read.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} must be at least 1")
    model = checkpoint.model
    full = _full_depth(checkpoint, full_depth)
    if full is None and mean_depth is not None:
        raise ConfigError(
            f"{str(checkpoint.path)!r} does not say at which depth it was trained; say from which "
            "depth --depth saves with --full-depth"
        )
    costs = flops_per_token(model, CONTEXT)
    facts: Facts = {
        "checkpoint": str(checkpoint.path),
        "architecture": model.name,
        "shape": shape_of(model.geometry),
        "parameters": parameters(model),
        "dtype": _stored_dtypes(checkpoint),
        "trained_mean_depth": checkpoint.trained_mean_depth,
        "trained_depths": checkpoint.trained_depths,
        "full_depth": full,
        "flops_per_token": {
            "context": CONTEXT,
            "prelude": costs.prelude,
            "core": costs.core,
            "coda": costs.coda,
            "head": costs.head,
        },
        "check_in_recurrences": costs.check_in_recurrences,
        "kv": kv_table(model, full),
    }
    if full is not None:
        mean = max(1.0, full / 2) if mean_depth is None else mean_depth
        if not 1 <= mean <= full:
            raise ConfigError(f"--depth {mean:g} must lie between 1 and the full depth of {full}")
        facts["cap"] = {"mean_depth": mean, "speed_up": costs.cap(full, mean)}
    documents = list(read_documents(list(sources or BUILT_IN), ReadOptions(), ReadReport()))
    seq = min(_SEQ, model.geometry.max_positions or _SEQ)
    blocks = PackedBlocks(tokenize(documents, checkpoint.tokenizer), seq, seed=0, shuffle=False)
    n_blocks = min(max(1, tokens // seq), blocks.n_blocks)
    facts["text"] = list(sources or BUILT_IN)
    facts["contraction"] = contraction_report(model, blocks, full, n_blocks, progress)
    facts["precision"] = precision_report(model, blocks.batch(0, 1), full)
    return facts


def shape_of(geometry: Geometry) -> Facts:
    names = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim")
    layers = ("n_prelude_layers", "n_core_layers", "n_coda_layers", "max_depth")
    return {name: getattr(geometry, name) for name in (*names, *layers)}


def kv_table(model: LoopedLM, full_depth: int | None) -> list[Facts]:
    """Entries a core layer keeps of a token, and bytes of a token, under each KV policy.

    With one entry a coda layer, as rules that read the latent leave it. Policies that keep an entry
    for each recurrence are left out where full depth is not known.
    """
    names = [name for name in KV_POLICIES if name != "ring-N"]
    names[2:2] = [f"ring-{size}" for size in RINGS]
    rows = []
    for name in names:
        if full_depth is None and name == "per-loop":
            continue
        entries = parse_kv_policy(name).entries(full_depth or max(RINGS))
        price = {
            f"bytes_{kind}": kv_bytes_per_token(model.geometry, entries, size)
            for kind, size in (("bf16", 2), ("fp32", 4))
        }
        rows.append({"policy": name, "entries": entries, **price})
    return rows


def contraction_report(
    model: LoopedLM,
    blocks: PackedBlocks,
    full_depth: int | None,
    n_blocks: int,
    progress: Callable[[int, int], None] | None = None,
) -> Facts:
    """Whether the loop settles on some text, with the verdict as one sentence.

    Returns:
        ``trusted``, ``sentence``, and what :func:`judge_convergence` measured; a model of one
        recurrence is not run.
    """
    limit = model.geometry.max_depth
    if limit == 1:
        sentence = "This model runs one recurrence, so there is nothing for an exit rule to save."
        return {"trusted": False, "sentence": sentence}
    # At depth 1 there is no step to judge, so the loop is judged where watching it ends.
    judged = full_depth if full_depth is not None and full_depth > 1 else _cut(HORIZON, limit)
    horizon = _cut(max(HORIZON, 2 * judged), limit)
    diverged = None
    try:
        seen = _watch(model, blocks, horizon, n_blocks, progress)
    except DivergenceError as err:
        diverged = str(err).split(":")[0]
        try:
            seen = _watch(model, blocks, judged, n_blocks, progress)
        except DivergenceError:
            return {"trusted": False, "sentence": f"{_NO}: {diverged}."}
    found = judge_convergence(seen["change"].numpy(), seen["kl_prev"].numpy(), judged, diverged)
    trusted = found["converges"] and found["settled"]
    sentence = f"{_YES if trusted else _NO}: {'; '.join(found['evidence'])}."
    return {"trusted": trusted, "sentence": sentence, **found}


_YES = "Exit rules that watch the model settle may be trusted"
_NO = "Exit rules that watch the model settle are not to be trusted"


@torch.no_grad()
def _watch(
    model: LoopedLM,
    blocks: PackedBlocks,
    horizon: int,
    n_blocks: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {"change": [], "kl_prev": []}
    done = 0
    for batch in batches(blocks, _BATCH, n_blocks):
        traced = trace_batch(model, batch, horizon)
        for name, columns in parts.items():
            columns.append(traced[name])
        done += len(batch.token_ids)
        if progress is not None:
            progress(done, n_blocks)
    return {name: torch.cat(columns) for name, columns in parts.items()}


def _full_depth(checkpoint: Checkpoint, asked: int | None) -> int | None:
    limit = checkpoint.model.geometry.max_depth
    if asked is not None:
        check_depths(checkpoint.model, [asked])
        return asked
    if limit == 1:
        return 1
    mean = checkpoint.trained_mean_depth
    return None if mean is None else _cut(round(mean), limit)


def _cut(depth: int, limit: int | None) -> int:
    return depth if limit is None else min(depth, limit)


def _stored_dtypes(checkpoint: Checkpoint) -> list[str]:
    with safe_open(checkpoint.path / "model.safetensors", framework="pt") as file:
        return sorted({file.get_slice(key).get_dtype() for key in file.keys()})  # noqa: SIM118


def inspect_lines(facts: Facts) -> list[str]:
    """The facts for people."""
    s, flops = facts["shape"], facts["flops_per_token"]
    layers = (
        f"{s['n_prelude_layers']} prelude, {s['n_core_layers']} core, {s['n_coda_layers']} coda"
    )
    heads = f"{s['n_heads']} heads ({s['n_kv_heads']} of keys and values) of {s['head_dim']}"
    trained = facts["trained_mean_depth"]
    full = facts["full_depth"]
    lines = [
        f"architecture  {facts['architecture']}; {layers} layers",
        f"shape         d_model {s['d_model']}, {heads}, vocabulary {s['vocab_size']}",
        f"parameters    {facts['parameters']:,} (tied ones once), {' and '.join(facts['dtype'])}",
        "trained at    "
        + ("not known" if trained is None else f"{trained:.3g} recurrences on average"),
        f"FLOPs/token   at {flops['context']} tokens of context, forward",
    ]
    for part, name in (
        ("prelude", "prelude"),
        ("core", "one recurrence"),
        ("coda", "coda"),
        ("head", "head"),
    ):
        lines.append(f"  {name:<16}{flops[part] / 1e6:>12,.2f} M")
    lines.append(
        f"  one reading of coda and head costs {facts['check_in_recurrences']:.2f} recurrences"
    )
    at = "" if full is None else f" at full depth {full}"
    lines.append(f"KV/token{at}, one coda entry (rules that read logits keep more)")
    for row in facts["kv"]:
        lines.append(
            f"  {row['policy']:<16}{row['bytes_bf16']:>12,.0f} B bf16"
            f"{row['bytes_fp32']:>12,.0f} B fp32"
        )
    if "cap" in facts:
        cap = facts["cap"]
        lines.append(
            f"cap           {cap['speed_up']:.2f}x at mean depth {cap['mean_depth']:g} of {full}, "
            "checks taken as free"
        )
    lines += precision_lines(facts["precision"])
    lines.append(facts["contraction"]["sentence"])
    return lines
