"""The model card: what the model is, how deep it was trained, and what depth costs in quality."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopwise.hub.origin import known_model
from loopwise.models.base import LoopedLM
from loopwise.models.costs import flops_per_token, parameters
from loopwise.writing import write_whole

log = logging.getLogger(__name__)

CARD = "README.md"
_MARK = "\n<!-- written by loopwise and replaced by it; kept once it is edited: {} -->\n"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{64})") + r"\Z")
_CONTEXT = 1024  # tokens that attention is priced at
_LOOPED = (
    "A depth-recurrent language model: one block of layers is applied again and again, and how "
    "often is chosen when it runs."
)
_ONCE = "A language model of layers that run once, stored as a looped one of a single recurrence."
_USE = """\
```python
import loopwise.hub
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
{ids}
text = model.generate(**ids, {depth}max_new_tokens=40)[0]
print(tokenizer.decode(text, skip_special_tokens=True))
```"""
_TEXT = 'ids = tokenizer("Once upon a time", return_tensors="pt")'
_CHAT = """\
chat = [{"role": "user", "content": "Tell me a story."}]
ids = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


def model_card(
    model: LoopedLM,
    training: Mapping[str, Any],
    exits: Mapping[str, Any],
    *,
    name: str,
    num_loops: int,
    tags: Sequence[str] = (),
    chats: bool = False,
) -> str:
    """The text of a ``README.md`` for the hub.

    Args:
        training, exits: what ``training.json`` and ``exits.json`` hold.
        name: folder or repository the example loads.
        num_loops: recurrences where a call does not say.
        tags: besides our own.
        chats: whether the example is one of the checkpoint's chat template.
    """
    tiers, loops = exits.get("tiers", {}), model.geometry.max_depth != 1
    depth = f'exit="{next(iter(tiers))}", ' if tiers else f"num_loops={num_loops}, " * loops
    known = ["loopwise", *["depth-recurrent"] * loops, f"loopwise-{model.name}"]
    head = ["---", "library_name: transformers", *_origin_lines(training)]
    head += ["pipeline_tag: text-generation", "tags:"]
    head += [f"- {tag}" for tag in [*known, *(t for t in tags if t not in known)]]
    parts = [
        "\n".join([*head, "---"]),
        f"# {Path(name).name}",
        f"{_LOOPED if loops else _ONCE} It needs the Python package `loopwise` "
        "(`pip install loopwise[hub]`); no remote code.",
        "Where transformers says that it does not recognize model type `loopwise`, the line "
        "`import loopwise.hub` is missing: it must come before the model is loaded.",
        _USE.format(name=name, depth=depth, ids=_CHAT if chats else _TEXT),
        "## Architecture",
        _architecture(model),
        "## Training",
        _training(training, num_loops if loops else None),
        "## Calibrated tiers",
        _tiers(tiers) if loops else "None: there is one depth.",
        "## Results",
        _results(training, tiers),
    ]
    text = "\n\n".join(parts) + "\n"
    return text + _MARK.format(_hash(text))


def _origin_lines(training: Mapping[str, Any]) -> list[str]:
    """Of the header; a licence only where the source says one."""
    folder = training.get("converted_from", {}).get("folder", "")
    said = {"base_model": known_model(folder), **training.get("origin", {})}
    return [f"{key}: {said[key]}" for key in ("base_model", "license") if said.get(key)]


def write_card(folder: Path, text: str) -> None:
    """The ``README.md`` of a folder, where there is none or one of ours that nobody edited.

    Raises:
        WriteError: the disk refuses.
    """
    file = folder / CARD
    if file.exists() and not is_own_card(file):
        log.warning(
            "%s is kept as it is: it is no model card of loopwise, or was edited; remove it to "
            "have one written",
            file,
        )
        return
    write_whole(file, text)


def is_own_card(file: Path) -> bool:
    """Whether a file is a card of ours to the letter: its mark holds the hash of all before it."""
    text = file.read_text(encoding="utf-8", errors="replace")
    found = _MARKED.search(text)
    return found is not None and found[1] == _hash(text[: found.start()])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _architecture(model: LoopedLM) -> str:
    g, costs = model.geometry, flops_per_token(model, _CONTEXT)
    rows = [
        ("architecture", model.name),
        ("parameters", f"{parameters(model):,} (tied ones once)"),
        ("layers", f"{g.n_prelude_layers} prelude, {g.n_core_layers} core, {g.n_coda_layers} coda"),
        ("d_model", f"{g.d_model}, {g.n_heads} heads ({g.n_kv_heads} of keys and values)"),
        ("vocabulary", f"{g.vocab_size:,}"),
        (
            f"FLOPs a token at {_CONTEXT} tokens of context",
            f"{costs.core / 1e6:,.2f} M a recurrence, "
            f"{(costs.prelude + costs.coda + costs.head) / 1e6:,.2f} M besides",
        ),
    ]
    return _table(("", ""), rows)


def _training(training: Mapping[str, Any], num_loops: int | None) -> str:
    """What is known of it; ``num_loops`` is None for a model that has one depth."""
    data = training.get("data", {})
    lines = []
    if num_loops is not None:
        lines.append(_trained_depth(training.get("depth", {})))
        lines.append(f"Runs {_recurrences(num_loops)} unless told otherwise.")
    if training.get("tokens_seen") is not None:
        lines.append(f"{training['tokens_seen']:,} tokens seen.")
    if data.get("sources"):
        lines.append(f"Data: {', '.join(Path(source).name for source in data['sources'])}.")
    lines += _origin(training)
    if training.get("weights_changed_by"):
        lines.append("Trained on with transformers since; the figures are from before.")
    if training.get("weights_rounded_to"):
        lines.append(f"Rounded to {training['weights_rounded_to']} since; not trained further.")
    return " ".join(lines) or "Nothing is recorded."


def _trained_depth(depth: Mapping[str, Any]) -> str:
    if depth.get("true_mean") is None:
        return "The depth it was trained at is not known."
    low, high = depth.get("min"), depth.get("max")
    if low is not None and low == high:
        return f"Trained at a depth of {_recurrences(low)}."
    spread = f", {low} to {high}" if low is not None and high is not None else ""
    return f"Trained at a mean depth of {depth['true_mean']:.3g} recurrences{spread}."


def _recurrences(number: int) -> str:
    return f"{number} recurrence{'' if number == 1 else 's'}"


def _origin(training: Mapping[str, Any]) -> list[str]:
    """Which weights it was made of, and what became of them."""
    cut, source = training.get("retrofitted_from"), training.get("converted_from")
    lines = []
    if cut:
        of = {part: _runs(layers) for part, layers in cut["layers"].items()}
        lines.append(
            f"Retrofitted from {cut['checkpoint']}, a model of layers that run once: its layers "
            f"{of['prelude']} are the prelude, {of['core']} the core, which is looped, and "
            f"{of['coda']} the coda; it has no others of them."
        )
        if not (training.get("tokens_seen") or training.get("weights_changed_by")):
            lines.append("Not trained since: what it says beyond depth 1 is not to be relied on.")
    if source:
        what = f"{cut['checkpoint']} was converted" if cut else "Converted"
        lines.append(f"{what} from {source['folder']} ({source['format']}).")
    return lines


def _runs(numbers: Sequence[int]) -> str:
    """In their order, neighbours as one: 0-2, 5, 3."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _tiers(tiers: Mapping[str, Any]) -> str:
    if not tiers:
        return "None: `loopwise calibrate` makes them from a budget in nats."
    rows = [
        (f"`{name}`", f"`{tier['rule']}`", _nats(tier.get("budget_nats")), _share(tier))
        for name, tier in tiers.items()
    ]
    columns = ("`exit=`", "exit rule", "budget, nats a token", "compute of full depth")
    return _table(columns, rows)


def _results(training: Mapping[str, Any], tiers: Mapping[str, Any]) -> str:
    lines = []
    loss = training.get("last_train_loss_nats")
    if loss is not None:
        lines.append(f"Last training loss: {loss:.3f} nats a token.\n")
    rows = [
        (
            f"`{name}`",
            _nats(tier["live"].get("mean_depth")),
            _nats(tier["live"].get("p95_depth")),
            _nats(tier["live"].get("token_excess_nats")),
            _nats(tier.get("risk", {}).get("upper_bound")),
        )
        for name, tier in tiers.items()
        if "live" in tier
    ]
    columns = ("`exit=`", "mean depth", "p95 depth", "excess nats a token", "upper bound, nats")
    if rows:
        lines.append(_table(columns, rows))
        lines.append("\nMeasured live, against full depth, on text held out from training.")
    return "\n".join(lines) if lines else "None stored with the checkpoint."


def _nats(value: Any) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(tier: Mapping[str, Any]) -> str:
    share = tier.get("live", {}).get("charged_share")
    return "" if share is None else f"{share:.0%}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
