"""Exemplars: which old samples to keep. A rule is one entry of RULES; what it needs is passed in as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from branchout.data.samples import Ints, Samples
from branchout.errors import BranchoutError, unknown

Floats = npt.NDArray[np.floating]


def keep(
    samples: Samples,
    *,
    per_class: int,
    rule: str = "random",
    seed: int = 0,
    features: Floats | None = None,
    predictions: Ints | None = None,
) -> Samples:
    """Choose exemplars, `per_class` for every class; classes with fewer samples keep them all.

    A class that came from several origins is kept from each: its old look and its new one. `herding` needs `features`
    (samples × k), `uncertainty` needs `predictions` (copies × samples).
    """
    if per_class < 1:
        raise BranchoutError(f"expected at least one exemplar per class, found {per_class}")
    if rule not in RULES:
        raise unknown("memory rule", rule, RULES)
    needs = RULES[rule].needs
    rows: npt.NDArray[Any] | None = np.empty(len(samples))
    if needs == "features":
        rows = features
    elif needs == "predictions":
        rows = None if predictions is None else predictions.T
    if rows is None or len(rows) != len(samples):
        raise BranchoutError(f"the memory rule {rule!r} needs {needs} for each of the {len(samples)} samples")
    rng = np.random.default_rng(seed)
    groups, group_of = np.unique(np.stack([samples.labels, samples.origin]), axis=1, return_inverse=True)
    kept = []
    for group in range(groups.shape[1]):
        members = np.flatnonzero(group_of.ravel() == group)
        kept.append(members[RULES[rule].choose(rows[members], min(per_class, len(members)), rng)])
    return samples.select(np.concatenate(kept))


def herd(features: Floats, number: int) -> Ints:
    """iCaRL's herding: the greedy sequence whose running mean stays nearest to the mean of all (unit) features."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    mean = unit.mean(0)
    chosen: list[int] = []
    running = np.zeros_like(mean)
    free = np.ones(len(unit), dtype=bool)
    for position in range(1, number + 1):
        distance = np.linalg.norm(mean - (running + unit) / position, axis=1)
        best = int(np.where(free, distance, np.inf).argmin())
        chosen.append(best)
        running = running + unit[best]
        free[best] = False
    return np.array(chosen, dtype=np.int64)


def uncertainty(predictions: Ints) -> npt.NDArray[np.float64]:
    """Rainbow Memory's uncertainty: one minus the share of perturbed copies that agree on the commonest answer."""
    agreeing = np.array([np.unique(column, return_counts=True)[1].max() for column in predictions.T])
    return 1.0 - agreeing / len(predictions)


def spread(uncertainties: npt.NDArray[np.float64], number: int) -> Ints:
    """Samples at even distances along the order of uncertainty: from certain to uncertain."""
    order = np.argsort(uncertainties, kind="stable")
    return order[np.arange(number) * len(order) // number]


@dataclass(frozen=True)
class Rule:
    """A way to choose exemplars."""

    needs: str
    """What is known of each sample: `features`, `predictions` of perturbed copies, or nothing."""
    choose: Callable[[npt.NDArray[Any], int, np.random.Generator], Ints]
    """From what is known of a class's samples (one row each) and a number: the positions to keep."""


RULES = {
    "random": Rule("", lambda rows, number, rng: rng.permutation(len(rows))[:number]),
    "herding": Rule("features", lambda rows, number, rng: herd(rows, number)),
    "uncertainty": Rule("predictions", lambda rows, number, rng: spread(uncertainty(rows.T), number)),
}
