"""The command: check what is asked, divide the text, watch, propose, judge, store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopwise.calibrate.options import CalibrateOptions, Emit, Event, warning
from loopwise.calibrate.results import make_tiers
from loopwise.calibrate.running import Calibration
from loopwise.calibrate.texts import divide, read_fresh_text
from loopwise.errors import ConfigError, ExitError
from loopwise.exits import EXITS, needs_fitting
from loopwise.exits.base import Reads
from loopwise.exits.rule import ExitRule, build_policy
from loopwise.measure.evaluate import check_depths
from loopwise.measure.tiers import tiers_of, write_tiers
from loopwise.models.checkpoint import Checkpoint, load_checkpoint, write_exits

# Those that cost next to nothing to check; `kl` takes longer to judge than all of them and loses.
USUAL_RULES = ("latent-kl", "latent-change", "second-difference")


def calibrate_command(
    path: Path,
    sources: Sequence[str] | None,
    options: CalibrateOptions,
    asked: dict[str, Any],
    emit: Emit,
) -> Event:
    """Propose on one part of the text, judge live on the rest, store the tiers.

    Args:
        sources: text the model was not trained on; None for what its run held out.
        asked: settings of how text is read, as :func:`loopwise.settings.explicit_table` gives them.
    Returns:
        ``tiers`` as stored, ``convergence``, and ``exits``, the file they are in.
    Raises:
        ConfigError, DepthError, ExitError: options that do not fit the model.
        DataError: too little text, or text of the training.
        ExitError: a budget that nothing cheaper than full depth meets; nothing is stored then.
    """
    checkpoint = load_checkpoint(path)
    tiers_of(checkpoint)  # refuses a spoilt exits.json before any work
    full = _full_depth(checkpoint, options)
    rules = choose_rules(checkpoint, options, full, emit)
    text = read_fresh_text(checkpoint, sources, options, asked, emit)
    split = divide(text, checkpoint, options, sequences=len(rules) + 1)
    run = Calibration(checkpoint, options, full, split, emit)
    convergence = run.watch()
    rules = trusted_rules(rules, convergence, options, emit)
    run.fit_missing(rules)
    tiers = make_tiers(run, run.judge(rules), convergence, text)
    if run.checkpoint is not checkpoint:  # with rules fitted on the way
        checkpoint = write_exits(checkpoint, run.checkpoint.exits)
    checkpoint = write_tiers(checkpoint, tiers)
    return {
        "exits": str(checkpoint.path / "exits.json"),
        "tiers": tiers,
        "convergence": convergence,
    }


def choose_rules(
    checkpoint: Checkpoint, options: CalibrateOptions, full: int, emit: Emit
) -> list[ExitRule]:
    """The rules that compete, thresholds open; where none is fitted yet, they will be.

    Raises:
        ExitError: a name that is unknown, decides nothing live, is not fitted while others are,
            or does not fit the model.
    """
    fitted = checkpoint.fitted_policies()
    rules = []
    for name in dict.fromkeys(options.rules or USUAL_RULES):
        reads = EXITS[name].reads
        if reads is Reads.NOTHING:
            raise ExitError(f"--rules: {name!r} is uniform depth, which always competes; leave out")
        if reads is Reads.TRUTH:
            raise ExitError(
                f"--rules: {name!r} needs later recurrences, so it cannot be served; leave out"
            )
        rule = ExitRule(
            policy=name, min_depth=options.min_depth, max_depth=full, patience=options.patience
        )
        if needs_fitting(name) and not fitted:
            rules.append(rule)
            continue
        try:
            build_policy(rule, fitted, checkpoint.model)
        except ExitError as err:
            if options.rules:
                raise
            emit(warning(f"{name} does not compete: {err}"))
            continue
        rules.append(rule)
    return rules


def trusted_rules(
    rules: list[ExitRule], convergence: Event, options: CalibrateOptions, emit: Emit
) -> list[ExitRule]:
    """The rules that may compete on such a model; a warning where that takes one."""
    watching = [rule.policy for rule in rules if EXITS[rule.policy].watches_movement]
    if not watching or (convergence["converges"] and convergence["settled"]):
        return rules
    evidence, named = "; ".join(convergence["evidence"]), ", ".join(watching)
    if convergence["converges"]:
        text = (
            f"this model converges, but not by the full depth asked for ({evidence}): exit rules "
            f"that watch it settle ({named}) compete, and may find little that does; a larger "
            "--depth gives them more to watch"
        )
        emit(warning(text))
        return rules
    end = (
        "they are offered because --force insists"
        if options.force
        else f"{named} left out; --force insists on them"
    )
    text = (
        f"this model does not converge ({evidence}), so exit rules that watch it settle are not "
        f"to be trusted: {end}"
    )
    emit(warning(text))
    if options.force:
        return rules
    return [rule for rule in rules if rule.policy not in watching]


def _full_depth(checkpoint: Checkpoint, options: CalibrateOptions) -> int:
    limit = checkpoint.model.geometry.max_depth
    depth = options.depth
    if depth is None:
        mean = checkpoint.trained_mean_depth
        if mean is None:
            raise ConfigError(
                f"{str(checkpoint.path)!r} does not say at which depth it was trained; say what "
                "budgets are counted from with --depth"
            )
        depth = min(round(mean), limit or round(mean))
    check_depths(checkpoint.model, [depth])
    if depth < 2:
        raise ConfigError(
            f"at a full depth of {depth} recurrence there is nothing to save; "
            + ("this model runs no more" if limit == 1 else "give a larger --depth")
        )
    return depth
