"""``loopwise generate``: text on the terminal, coloured by the depth each token used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from loopwise.engine.reference import ReferenceDecoder
from loopwise.errors import ConfigError
from loopwise.exits.rule import ExitRule, build_policy, parse_rule
from loopwise.models.checkpoint import Checkpoint, load_checkpoint

# From settled at once to still moving; readable on dark and light terminals.
_SHADES = ("#2a9d8f", "#6a994e", "#c9a227", "#e76f51", "#c1121f")


def generate_command(
    path: Path,
    prompt: str,
    depth: int | None,
    exit_rule: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """Decode one prompt and print it; returns text, token ids and exit depths."""
    if max_tokens < 0:
        raise ConfigError(f"--max-tokens {max_tokens} must not be negative")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature} must be 0 or more, finite")
    checkpoint = load_checkpoint(path)
    rule = choose_rule(checkpoint, depth, exit_rule)
    policy = build_policy(rule, checkpoint.fitted_policies())
    tokenizer = checkpoint.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    decoder = ReferenceDecoder(checkpoint.model, rule, policy, seed)
    steps = list(
        decoder.generate(ids, max_tokens, temperature=temperature, eos_id=tokenizer.eos_id)
    )
    depths = [s.exit_depth for s in steps]
    console.print(coloured(checkpoint, [s.token_id for s in steps], depths, rule.max_depth))
    console.print(legend(rule.max_depth))
    mean = sum(depths) / len(depths)
    console.print(f"rule {rule}; mean depth {mean:.2f} over {len(depths)} tokens", highlight=False)
    generated = [s.token_id for s in steps[len(ids) :]]
    return {
        "text": tokenizer.decode(generated),
        "token_ids": generated,
        "exit_depths": depths[len(ids) :],
        "rule": str(rule),
        "mean_depth": mean,
    }


def choose_rule(checkpoint: Checkpoint, depth: int | None, exit_rule: str | None) -> ExitRule:
    """The rule asked for; by default uniform depth at the training mean.

    Raises:
        ConfigError: both a depth and a rule.
    """
    if depth is not None and exit_rule is not None:
        raise ConfigError("give --depth or --exit, not both")
    limit = checkpoint.model.geometry.max_depth
    usual = min(round(checkpoint.trained_mean_depth or 1), limit or 256)
    if exit_rule is not None:
        return parse_rule(exit_rule, max_depth=usual)
    return parse_rule(f"fixed:{usual if depth is None else depth}")


def coloured(checkpoint: Checkpoint, ids: list[int], depths: list[int], deepest: int) -> Text:
    """Text in the colours of its tokens' depths; a character keeps that of its last token."""
    out = Text()
    waiting: list[int] = []
    for token_id, depth in zip(ids, depths, strict=True):
        waiting.append(token_id)
        text = checkpoint.tokenizer.decode(waiting)
        if not text.endswith("\ufffd"):  # a character may be spread over tokens
            out.append(text, style=shade(depth, deepest))
            waiting = []
    out.append(checkpoint.tokenizer.decode(waiting))
    return out


def legend(deepest: int) -> Text:
    out = Text("depth: ")
    for depth in range(1, deepest + 1):
        out.append(f" {depth} ", style=f"reverse {shade(depth, deepest)}")
    return out


def shade(depth: int, deepest: int) -> str:
    place = (depth - 1) / max(1, deepest - 1)
    return _SHADES[round(place * (len(_SHADES) - 1))]
