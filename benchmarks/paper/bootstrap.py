"""Differences between two rows with their 95% intervals, by a bootstrap over seeds and test images.

Seeds: every way to draw as many seeds with replacement is enumerated, so the result is exact and repeatable. Seeds that
both rows have are drawn in pairs; otherwise each row draws its own, and a row with one seed is given the other's
deviations. Deviations are scaled by √(n / (n − 1)), without which three seeds would give too narrow an interval.

Images: rows hold no answers for single images. What drawing other images would change is taken to be normal, with the
variance of one of the two accuracies: that is the variance of a difference of two whose answers correlate by one half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from statistics import NormalDist, fmean

from benchmarks.paper.rows import Row

LEVEL = 0.95
Draws = list[tuple[float, float]]
"""Deviations from the mean with their probabilities."""


@dataclass(frozen=True)
class Difference:
    margin: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "holds"
        return "does not hold" if self.high < 0 else "too close to tell"


def difference(first: Row, second: Row, metric: str, lead: float = 0.0) -> Difference:
    """By how much the first is above the second, less `lead` points."""
    ours, theirs = first.value(metric), second.value(metric)
    assert ours is not None
    assert theirs is not None
    variance = (first.image_variance(metric) + second.image_variance(metric)) / 2
    return interval(ours - theirs - lead, over_seeds(first.by_seed(metric), second.by_seed(metric)), variance)


def over_seeds(first: dict[int, float], second: dict[int, float]) -> Draws:
    both = sorted(first.keys() & second.keys())
    if len(both) > 1:
        return draws([first[seed] - second[seed] for seed in both])
    sides = [draws(list(side.values())) for side in (first, second) if len(side) > 1]
    if not sides:
        return [(0.0, 1.0)]
    ours, theirs = sides[0], sides[-1]
    return [(a - b, p * q) for (a, p), (b, q) in product(ours, theirs)]


def draws(values: Sequence[float]) -> Draws:
    """All means of as many values drawn with replacement, less the mean of the values."""
    count, mean = len(values), fmean(values)
    scale = math.sqrt(count / (count - 1))
    found = []
    for chosen in combinations_with_replacement(range(count), count):
        ways = math.factorial(count)
        for times in Counter(chosen).values():
            ways //= math.factorial(times)
        found.append((scale * (fmean(values[place] for place in chosen) - mean), ways / count**count))
    return found


def interval(margin: float, deviations: Draws, variance: float) -> Difference:
    """The middle 95% of the margin with seeds drawn and images drawn, by bisection."""
    normal, scale = NormalDist(), math.sqrt(max(variance, 1e-18))
    reach = max(abs(each) for each, _ in deviations) + 8 * scale

    def quantile(share: float) -> float:
        below, above = -reach, reach
        for _ in range(60):
            middle = (below + above) / 2
            if sum(weight * normal.cdf((middle - each) / scale) for each, weight in deviations) < share:
                below = middle
            else:
                above = middle
        return above

    return Difference(margin, margin + quantile((1 - LEVEL) / 2), margin + quantile((1 + LEVEL) / 2))
