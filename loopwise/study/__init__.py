"""The main job in stages over files: train, measure, frontier, report; ``run_study`` chains them.

A run folder holds ``config.json``, ``tokenizer.json``, ``metrics.jsonl``, ``checkpoints/``,
``traces/<corpus>/``, ``results.json``, ``report.html`` and ``plots/``.
"""

from loopwise.study.allocating import frontier_stage
from loopwise.study.commands import (
    frontier_command,
    measure_command,
    perplexity_command,
    run_study,
    train_command,
)
from loopwise.study.measuring import measure_stage
from loopwise.study.results import collect_results, write_results
from loopwise.study.training import prepare, train_stage

__all__ = [
    "collect_results",
    "frontier_command",
    "frontier_stage",
    "measure_command",
    "measure_stage",
    "perplexity_command",
    "prepare",
    "run_study",
    "train_command",
    "train_stage",
    "write_results",
]
