"""Differences between two rows with their 95% intervals, by a bootstrap over seeds and test images.

Seeds: every way to draw as many seeds with replacement is enumerated, so the result is exact and repeatable. Seeds that
both rows have are drawn in pairs; otherwise each row draws its own, and a row with one seed is given the other's
deviations. Deviations are scaled by √(n / (n − 1)), without which three seeds would give too narrow an interval.

Images: what drawing other images would change is taken to be normal. Where both rows say which images they predict
correctly (`correct`), its variance is that of the difference image by image, within each part. Rows measured before
that do not say so; the variance is then that of one of the two accuracies, which is that of a difference of two whose
answers correlate by one half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from statistics import NormalDist, fmean

import numpy as np

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
    variance = paired_variance(first, second, metric)
    if variance is None:
        variance = (first.image_variance(metric) + second.image_variance(metric)) / 2
    return interval(ours - theirs - lead, over_seeds(first.by_seed(metric), second.by_seed(metric)), variance)


def paired_variance(first: Row, second: Row, metric: str) -> float | None:
    """The variance of a difference over images that both rows predict; None where they do not say which are correct."""
    one, other = first.right(), second.right()
    sizes = [{part: len(right) for part, right in each.items()} for each in (one, other)]
    if not one or sizes[0] != sizes[1] or metric in ("incremental", "avg_steps", "alone"):
        return None
    weights, images = first.weights(metric), first.images()
    steps = sum(part.startswith("step") for part in one)
    found = 0.0
    for part in one:
        of, share = ("novel", 1 / steps) if part.startswith("step") else (part, 1.0)  # steps are equally large
        variance = float(np.var(100 * (one[part] - other[part])))
        found += (weights.get(of, 0.0) * share) ** 2 * variance / (images[of] * share)
    return found


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
