"""Which old samples to keep: the exemplars. Features and predictions are passed in as arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from branchout.data.samples import Samples
from branchout.errors import BranchoutError, unknown

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

RULES = ("random", "herding", "uncertainty")


def keep(
    samples: Samples,
    *,
    per_class: int,
    rule: str = "random",
    seed: int = 0,
    features: Floats | None = None,
    predictions: Ints | None = None,
) -> Samples:
    """Choose exemplars, `per_class` for every class.

    A class that came from several origins is kept from each: its old look and its new one. Classes with fewer samples
    keep them all. `herding` needs `features` (samples × k), `uncertainty` needs `predictions` (copies × samples).
    """
    groups, group_of = np.unique(np.stack([samples.labels, samples.origin]), axis=1, return_inverse=True)
    if per_class < 1:
        raise BranchoutError(f"at least one exemplar a class is needed, found {per_class}")
    if rule not in RULES:
        raise unknown("memory rule", rule, RULES)
    if rule == "herding" and (features is None or len(features) != len(samples)):
        raise BranchoutError(f"herding needs one feature vector for each of the {len(samples)} samples")
    if rule == "uncertainty" and (predictions is None or predictions.shape[1] != len(samples)):
        raise BranchoutError(f"the uncertainty rule needs predictions for each of the {len(samples)} samples")

    rng = np.random.default_rng(seed)
    kept = []
    for group in range(groups.shape[1]):
        members = np.flatnonzero(group_of.ravel() == group)
        number = min(per_class, len(members))
        if rule == "herding":
            assert features is not None
            chosen = herd(features[members], number)
        elif rule == "uncertainty":
            assert predictions is not None
            chosen = spread(uncertainty(predictions[:, members]), number)
        else:
            chosen = rng.permutation(len(members))[:number]
        kept.append(members[chosen])
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
    """Samples at even distances along the order of uncertainty: certain, doubtful and all between."""
    order = np.argsort(uncertainties, kind="stable")
    return order[np.arange(number) * len(order) // number]
