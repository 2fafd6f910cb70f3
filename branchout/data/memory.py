"""Exemplars: which old samples to keep. A rule is one entry of RULES; what it needs is passed in as an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from branchout.data.samples import Samples
from branchout.errors import BranchoutError, unknown
from branchout.labels import Floats, Ints


def keep(
    samples: Samples, *, per_class: int, rule: str = "random", seed: int = 0, rows: npt.NDArray[Any] | None = None
) -> Samples:
    """Choose exemplars, `per_class` for every class; classes with fewer samples keep them all.

    A class that came from several origins is kept from each: its old look and its new one. `rows` has one row for each
    sample: features for `herding`, predictions of perturbed copies for `uncertainty`.
    """
    if per_class < 1:
        raise BranchoutError(f"expected at least one exemplar per class, found {per_class}")
    if rule not in RULES:
        raise unknown("memory rule", rule, RULES)
    if rows is None and rule == "random":
        rows = np.empty(len(samples))
    if rows is None or len(rows) != len(samples):
        raise BranchoutError(f"the memory rule {rule!r} needs one row for each of the {len(samples)} samples")
    rng = np.random.default_rng(seed)
    groups, group_of = np.unique(np.stack([samples.labels, samples.origin]), axis=1, return_inverse=True)
    kept = []
    for group in range(groups.shape[1]):
        members = np.flatnonzero(group_of.ravel() == group)
        kept.append(members[RULES[rule](rows[members], min(per_class, len(members)), rng)])
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


def uncertainty(predictions: Ints) -> Floats:
    """Rainbow Memory's uncertainty: one minus the share of perturbed copies that agree on the commonest answer.

    `predictions` has shape (samples, copies).
    """
    agreeing = np.array([np.unique(row, return_counts=True)[1].max() for row in predictions])
    found: Floats = 1.0 - agreeing / predictions.shape[1]
    return found


def spread(uncertainties: Floats, number: int) -> Ints:
    """Samples at even distances along the order of uncertainty: from certain to uncertain."""
    order = np.argsort(uncertainties, kind="stable")
    return order[np.arange(number) * len(order) // number]


RULES: dict[str, Callable[[npt.NDArray[Any], int, np.random.Generator], Ints]] = {
    "random": lambda rows, number, rng: rng.permutation(len(rows))[:number],
    "herding": lambda rows, number, rng: herd(rows, number),
    "uncertainty": lambda rows, number, rng: spread(uncertainty(rows), number),
}
"""From what is known of a class's samples, one row each, and a number: the positions to keep."""
