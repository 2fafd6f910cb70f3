"""Two-fold accuracy: choose an operating point on half of the validation images, measure on the rest; swap; average.

It uses every image to measure and none to measure its own choice, so that small test sets give half the variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchout.goals import GOALS
from branchout.labels import Floats, Ints, LabelSpace
from branchout.method.dial import dial_frontier, predict, step_offsets, with_bias
from branchout.method.frontier import grid_frontier
from branchout.metrics import Accuracies, accuracies


def stratified_halves(labels: Ints, seed: int = 0) -> tuple[Ints, Ints]:
    """The positions of two random halves, with about as many images of each class in both."""
    order = np.random.default_rng(seed).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return order[::2], order[1::2]


@dataclass(frozen=True)
class Scored:
    """A goal's operating point, chosen on some images and measured on others."""

    goal: str
    setting: tuple[float, ...]
    test: Accuracies
    """Chosen on dev, measured on test."""
    two_fold: float
    """The goal's own metric: chosen on dev and measured on test, and the reverse; the mean of both."""
    spread: float
    """Half the difference between the two."""
    offsets: tuple[float, ...]
    """The offset of each step's branch, where there are several steps."""
    both: Accuracies
    """On all images, each predicted with the choice that the other half made."""
    right: npt.NDArray[np.bool_] = field(compare=False)
    """Whether each of them is predicted correctly: first those of test, then those of dev."""

    @classmethod
    def of(
        cls,
        goal: str,
        setting: tuple[float, ...],
        answers: Sequence[Ints],
        labels: Sequence[Ints],
        space: LabelSpace,
        offsets: tuple[float, ...] = (),
    ) -> Scored:
        """From predictions and labels of test and of dev; under a condition the metric is Acc_all."""
        folds = [accuracies(*fold, space) for fold in zip(answers, labels, strict=True)]
        values = [getattr(fold, goal if goal in GOALS else "all") for fold in folds]
        spread = float(abs(values[0] - values[1]) / 2)
        predicted, actual = np.concatenate(answers), np.concatenate(labels)
        both = accuracies(predicted, actual, space)
        return cls(goal, setting, folds[0], float(np.mean(values)), spread, offsets, both, predicted == actual)


def score_dial(
    dev: tuple[Floats, Ints], test: tuple[Floats, Ints], space: LabelSpace, goals: Sequence[str], pooler: str = "max"
) -> dict[str, Scored]:
    """Choose b on each half, with the steps' offsets where there are several; measure on the other half.

    `dev` and `test` hold logits before the dial (images × columns) and labels.
    """
    chosen: dict[str, list[float]] = {goal: [] for goal in goals}
    answers: dict[str, list[Ints]] = {goal: [] for goal in goals}
    chosen_offsets: list[tuple[float, ...]] = []
    for here, there in ((dev, test), (test, dev)):
        offsets = step_offsets(here[0], here[1], space, pooler)
        chosen_offsets.append(tuple(offsets.tolist()) if len(offsets) > 1 else ())
        frontier = dial_frontier(with_bias(here[0], space, offsets), here[1], space, pooler)
        for goal in goals:
            b = float(frontier.settings[frontier.choose(goal), 0])
            chosen[goal].append(b)
            answers[goal].append(predict(there[0], space, (offsets + b).tolist(), pooler))
    labels = (test[1], dev[1])
    return {
        goal: Scored.of(goal, (chosen[goal][0],), answers[goal], labels, space, chosen_offsets[0]) for goal in goals
    }


def score_grid(
    dev: tuple[Ints, Ints],
    test: tuple[Ints, Ints],
    space: LabelSpace,
    grid: Sequence[tuple[float, float]],
    goal: str,
    balanced_by: str,
) -> Scored:
    """Choose (α, β) on each half and measure on the other.

    `dev` and `test` hold the predictions of every grid point (points × images) and labels.
    """
    chosen, answers = [], []
    for here, there in ((dev, test), (test, dev)):
        point = grid_frontier(here[0], here[1], space, grid, balanced_by).choose(goal)
        chosen.append(grid[point])
        answers.append(there[0][point])
    return Scored.of(goal, chosen[0], answers, (test[1], dev[1]), space)
