"""The depth table has the mean it says, draws follow it, and a draw is a function of its step."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loopwise.errors import ConfigError
from loopwise.train.recurrence import DepthConfig, DepthSampler, DepthSchedule

KINDS = ["lognormal", "lognormal-poisson"]
DRAWS = 200_000


def sampler(**settings: Any) -> DepthSampler:
    return DepthSampler(DepthConfig(**settings))


def check_sample(table: NDArray[np.float64], depths: NDArray[np.int64]) -> None:
    """A sample is of the table: its mean, and chi-square over bins of at least 20 expected."""
    values = np.arange(1, table.size + 1)
    assert depths.min() >= 1
    assert depths.max() <= table.size
    mean = table @ values
    std = math.sqrt(table @ (values - mean) ** 2)
    assert abs(depths.mean() - mean) < 3 * std / math.sqrt(depths.size)
    counts = np.bincount(depths, minlength=table.size + 1)[1:]
    expected = table * depths.size
    common = expected >= 20
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 20:  # too rare even together: into the last common bin
        observed = np.append(observed[:-2], observed[-2:].sum())
        wanted = np.append(wanted[:-2], wanted[-2:].sum())
    freedom = wanted.size - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), f"{chi_square:.1f} of {freedom}"


@pytest.mark.parametrize("mean", [4, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_exactly_the_mean_asked_for(kind: str, mean: int) -> None:
    for sigma in (0.25, 0.5, 1.0):
        depths = sampler(kind=kind, mean=mean, sigma=sigma)
        assert (depths.pmf >= 0).all()
        assert abs(depths.pmf.sum() - 1) < 1e-12
        assert abs(depths.pmf @ np.arange(1, depths.pmf.size + 1) - mean) < 1e-6
        assert abs(depths.mean - mean) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_fractional_mean_and_a_tight_cut_are_met_too(kind: str) -> None:
    for mean, cut in ((5.3, 40), (7.5, 9), (1.01, 16)):
        depths = sampler(kind=kind, mean=mean, max_depth=cut)
        assert depths.pmf.size == cut
        assert abs(depths.mean - mean) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_the_table(kind: str) -> None:
    depths = sampler(kind=kind, mean=8)
    check_sample(depths.pmf, np.array([depths.draw(3, step) for step in range(DRAWS)]))


@pytest.mark.parametrize("mean", [4, 32])
def test_the_lognormal_table_is_that_of_rounded_lognormal_numbers(mean: int) -> None:
    depths = sampler(kind="lognormal", mean=mean, exact_mean=False, max_depth=1000)
    normal = np.random.default_rng(0).standard_normal(DRAWS)
    numbers = np.exp(math.log(mean) - 0.5**2 / 2 + 0.5 * normal)
    check_sample(depths.pmf, np.maximum(np.rint(numbers), 1).astype(np.int64))


@pytest.mark.parametrize(("mean", "backprop"), [(4, 8), (8, 8), (32, 8)])
def test_huginns_formula_has_one_more_than_its_mean(mean: int, backprop: int) -> None:
    depths = sampler(
        kind="lognormal-poisson",
        mean=mean,
        backprop_depth=backprop,
        exact_mean=False,
        max_depth=40 * max(mean, backprop),
    )
    wanted = max(mean, backprop) + 1
    assert abs(depths.mean - wanted) < 0.02 * wanted
    rng = np.random.default_rng(0)
    rate = np.exp(math.log(max(mean, backprop)) - 0.5**2 / 2 + 0.5 * rng.standard_normal(DRAWS))
    check_sample(depths.pmf, rng.poisson(rate) + 1)


@pytest.mark.parametrize("kind", [*KINDS, "uniform", "fixed"])
def test_quantiles_are_the_smallest_depths_that_hold_their_share(kind: str) -> None:
    depths = sampler(kind=kind, mean=8)
    for q in (0.01, 0.25, 0.5, 0.9, 0.95, 0.99):
        found = depths.quantile(q)
        assert depths.pmf[:found].sum() >= q - 1e-9
        assert depths.pmf[: found - 1].sum() < q
    found = [depths.quantile(q) for q in np.linspace(0.01, 0.99, 50)]
    assert found == sorted(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_belongs_to_its_seed_and_step(kind: str) -> None:
    """A resumed run, and every rank, must see the depths of the run they belong to."""
    first = sampler(kind=kind)
    wanted = [first.draw(5, step) for step in range(300)]
    np.random.seed(0)
    again = sampler(kind=kind)
    backwards = [again.draw(5, step) for step in reversed(range(300))]
    assert backwards[::-1] == wanted
    assert all(type(depth) is int for depth in wanted)
    other = [again.draw(6, step) for step in range(300)]
    assert np.mean(np.equal(other, wanted)) < 0.3, "two seeds draw alike"
    assert abs(np.corrcoef(other, wanted)[0, 1]) < 4 / math.sqrt(300)
    assert abs(np.corrcoef(wanted[1:], wanted[:-1])[0, 1]) < 4 / math.sqrt(300)


def test_fixed_is_one_depth_and_uniform_runs_to_twice_the_mean() -> None:
    fixed = sampler(kind="fixed", mean=5)
    assert {fixed.draw(0, step) for step in range(50)} == {5}
    assert (fixed.mean, fixed.std) == (5, 0)
    assert {fixed.quantile(q) for q in (0.01, 0.5, 1.0)} == {5}
    for mean, top in ((1, 1), (4, 7), (4.5, 8)):
        uniform = sampler(kind="uniform", mean=mean)
        assert np.allclose(uniform.pmf, 1 / top)
        assert uniform.pmf.size == top
        assert abs(uniform.mean - mean) < 1e-12
        drawn = {uniform.draw(0, step) for step in range(400)}
        assert drawn == set(range(1, top + 1))


def test_describe_says_what_is_true() -> None:
    depths = sampler(kind="lognormal", mean=8)
    told = depths.describe()
    drawn = np.array([depths.draw(0, step) for step in range(20_000)])
    assert abs(told["true_mean"] - drawn.mean()) < 4 * drawn.std() / math.sqrt(drawn.size)
    assert told["std"] == pytest.approx(drawn.std(), rel=0.05)
    assert told["median"] == np.median(drawn)
    assert abs(told["p95"] - np.quantile(drawn, 0.95)) <= 1
    assert told["asked_mean"] == 8
    assert told["max"] == 32


@pytest.mark.parametrize(
    "settings",
    [
        {"mean": 0.5},
        {"mean": 0},
        {"mean": math.nan},
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"sigma": 3.0},
        {"sigma": math.nan},
        {"backprop_depth": 0},
        {"mean": 8, "max_depth": 7},
        {"kind": "fixed", "mean": 2.5},
        {"kind": "uniform", "mean": 2.3},
    ],
    ids=str,
)
def test_impossible_distributions_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sampler(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"kind": "log-normal"}, {"kind": "uniform", "mean": 8, "max_depth": 10}, {"mean": math.inf}],
    ids=str,
)
def test_settings_that_cannot_be_met_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sampler(**settings)


# Over a run.


@pytest.mark.parametrize(("curriculum", "halfway"), [("linear", 4), ("1-sqrt", 3)])
def test_a_curriculum_deepens_in_whole_numbers_up_to_the_mean(curriculum, halfway) -> None:
    config = DepthConfig(mean=8, backprop_depth=4, curriculum=curriculum, curriculum_fraction=0.5)
    schedule = DepthSchedule(config, steps=1000)
    means = [schedule.at(step).mean for step in range(1000)]
    assert means[0] == pytest.approx(1)
    assert means == sorted(means)
    assert means[250] == pytest.approx(halfway)
    assert means[500:] == [pytest.approx(8)] * 500
    through = [schedule.at(step).config.backprop_depth for step in range(1000)]
    assert through == [min(4, round(mean)) for mean in means]
    assert schedule.average(lambda depth, _: depth) == pytest.approx(sum(means) / 1000, rel=0.02)


def test_without_a_curriculum_every_step_draws_from_the_final_table() -> None:
    schedule = DepthSchedule(DepthConfig(mean=4), steps=10)
    assert {schedule.at(step) for step in range(10)} == {schedule.final}
    assert schedule.average(lambda depth, _: depth) == pytest.approx(4)


def test_depths_are_drawn_per_step_or_per_micro_batch() -> None:
    per_step = DepthSchedule(DepthConfig(mean=8), steps=10)
    assert {per_step.draw(0, 3, index) for index in range(9)} == {per_step.final.draw(0, 3)}
    each = DepthSchedule(DepthConfig(mean=8, per="micro-batch"), steps=10)
    assert len({each.draw(0, 3, index) for index in range(9)}) > 1
    assert each.draw(0, 3, 2) == each.draw(0, 3, 2)
