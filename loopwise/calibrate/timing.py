"""The finalists of a tier in wall clock: an engine each, in turns on the same requests."""

from __future__ import annotations

from functools import partial

from loopwise.bench.common import interleaved, ratios, record, spread
from loopwise.bench.drive import drive
from loopwise.bench.workload import Lengths, make_jobs
from loopwise.calibrate.options import Event, progress
from loopwise.calibrate.running import Calibration
from loopwise.calibrate.texts import FreshText
from loopwise.engine import Engine, EngineConfig
from loopwise.exits.rule import ExitRule

REPEATS = 5
_REQUESTS = 32  # as many as an engine has slots for by default
_LONGEST = 96  # tokens of a request, where the model has so many positions


def race(run: Calibration, text: FreshText, rule: ExitRule, uniform: ExitRule) -> Event:
    """Tokens per second of both, and how many times faster the exit rule is, repeat by repeat.

    Which of two rules is faster may be looked at on any text: both have kept their budget.

    Raises:
        DataError: the text is shorter than one request.
    """
    checkpoint, seed = run.checkpoint, run.options.seed
    longest = min(_LONGEST, run.model.geometry.max_positions or _LONGEST)
    third = longest // 3
    lengths = Lengths((third // 2, third), (third, longest - third))
    jobs = make_jobs(text.documents, checkpoint.tokenizer, lengths, _REQUESTS, seed)
    calls = None
    passes = {}
    for name, one in {"exit_rule": rule, "uniform": uniform}.items():
        config = EngineConfig(
            exit=str(one),
            max_depth=run.full,
            slots=_REQUESTS,
            max_seq=longest,
            prefix_cache=False,
        )
        fitted = checkpoint.fitted_policies()
        engine = Engine(checkpoint.model, checkpoint.tokenizer, config, fitted, calls)
        calls = engine.runner.calls
        passes[name] = partial(drive, engine, jobs)
    stage = f"timing {rule.policy} beside uniform depth {uniform.max_depth}"
    run.emit(progress(stage, 0, 1))
    seconds = interleaved(passes, REPEATS)
    run.emit(progress(stage, 1, 1))
    made = sum(job.new_tokens for job in jobs)
    found = {
        "rules": {"exit_rule": str(rule), "uniform": str(uniform)},
        "tokens_per_s": {name: spread([made / s for s in of]) for name, of in seconds.items()},
        "speedup": ratios(seconds["uniform"], seconds["exit_rule"]),
        "repeats": REPEATS,
        "requests": _REQUESTS,
        "workload": str(lengths),
    }
    return record("calibrate", found)
