"""Intervals are those that drawing seeds and images many times would give."""

from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
from measured import data

from benchmarks.paper.audit import variance_of_difference
from benchmarks.paper.bootstrap import Difference, difference, draws, interval, over_seeds, paired_variance
from benchmarks.paper.rows import Row


def of_seeds(values: list[float], seeds: list[int], images: float = 10**9) -> Row:
    mean = sum(values) / len(values)
    per_seed = [{"base": value, "novel": value, "all": value} for value in values]
    figures = data("some", "plain", base=mean, novel=mean, all=mean)
    return Row(Path("x.json"), {**figures, "seeds": seeds, "per_seed": per_seed, "test_images": images})


def test_the_interval_is_that_of_many_random_draws() -> None:
    values, variance = [1.0, 2.0, 6.0], 0.5
    rng = np.random.default_rng(0)
    drawn = rng.choice(values, (200_000, 3)).mean(1) - 3.0
    drawn = 3.0 + np.sqrt(3 / 2) * drawn + rng.normal(0, np.sqrt(variance), len(drawn))
    found = interval(3.0, draws(values), variance)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.05)


def test_draws_have_the_mean_and_the_unbiased_variance_of_the_values() -> None:
    values = [1.0, 2.0, 6.0]
    found = draws(values)
    assert sum(weight for _, weight in found) == pytest.approx(1)
    assert sum(weight * each for each, weight in found) == pytest.approx(0)
    assert sum(weight * each**2 for each, weight in found) == pytest.approx(np.var(values, ddof=1) / 3)


def test_seeds_that_both_have_are_drawn_in_pairs() -> None:
    """Seeds move both rows by ten points and their difference by none."""
    first, second = of_seeds([50.0, 60.0, 70.0], [1, 2, 3]), of_seeds([49.0, 59.0, 69.0], [1, 2, 3])
    paired = difference(first, second, "all")
    assert (paired.low, paired.high) == pytest.approx((1.0, 1.0), abs=0.01)
    unpaired = difference(first, of_seeds([49.0, 59.0, 69.0], [4, 5, 6]), "all")
    assert unpaired.low < -5


def test_one_seed_is_given_the_spread_of_the_other_side() -> None:
    several, one = {1: 50.0, 2: 60.0, 3: 70.0}, {1: 55.0}

    def variance(found: list[tuple[float, float]]) -> float:
        return sum(weight * each**2 for each, weight in found)

    assert variance(over_seeds(several, one)) == pytest.approx(2 * variance(draws([50.0, 60.0, 70.0])))
    assert over_seeds(one, one) == [(0.0, 1.0)]


def test_fewer_images_make_the_interval_wider() -> None:
    many, few = (
        difference(of_seeds([60.0], [1], count), of_seeds([58.0], [1], count), "all") for count in (40_000, 1000)
    )
    assert many.verdict == "holds"
    assert few.verdict == "too close to tell"
    error = 1.96 * np.sqrt((60 * 40 + 58 * 42) / 2 / 1000)
    assert (few.low, few.high) == pytest.approx((2 - error, 2 + error), abs=0.01)
    assert difference(of_seeds([60.0], [1]), of_seeds([58.0], [1]), "all", lead=10).margin == pytest.approx(-8)


def test_images_are_paired_where_both_rows_say_which_are_correct() -> None:
    """Two rows that differ on every tenth image alone, in the same direction."""
    base = np.tile([True, False], 400)
    novel = np.tile([True, True, False, False], 50)
    better = base.copy()
    better[1::10] = True

    def of(right: np.ndarray) -> Row:
        packed = {"base": [text(right)], "step 1": [text(novel)]}
        shares = {"base": 100 * right.mean(), "novel": 50.0, "all": 10 * (8 * right.mean() + 1)}
        return Row(Path("x.json"), {**data("some", "plain", **shares), "correct": packed, "test_images": 500})

    def text(right: np.ndarray) -> str:
        return f"{len(right)}:{b64encode(np.packbits(right).tobytes()).decode()}"

    first, second = of(better), of(base)
    change = 100 * (better.astype(float) - base)
    assert paired_variance(first, second, "base") == pytest.approx(change.var() / 400)  # half of the images test
    assert paired_variance(first, second, "all") == pytest.approx(0.8**2 * change.var() / 400)
    assert paired_variance(second, second, "all") == 0
    unpaired = (first.image_variance("all") + second.image_variance("all")) / 2
    for metric in ("base", "novel", "all"):
        expected = variance_of_difference(first.data, second.data, metric)
        assert paired_variance(first, second, metric) == pytest.approx(expected)  # as the audit has it
    assert variance_of_difference(first.data, second.data, "all") < unpaired / 2
    without = Row(second.path, {**second.data, "correct": None})
    assert paired_variance(first, without, "all") is None
    assert difference(first, without, "all").low < difference(first, second, "all").low


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 2, "holds"), (-2, -0.1, "does not hold"), (-0.1, 2, "too close to tell")]
)
def test_an_interval_with_zero_inside_decides_nothing(low: float, high: float, verdict: str) -> None:
    assert Difference((low + high) / 2, low, high).verdict == verdict
