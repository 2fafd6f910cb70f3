"""The accuracies of the paper (section 5.1, "Metrics"). Their names and wording are in `goals.py`.

Every test image belongs to one part, by its class: known to the base alone, added by one step alone, or known to
several branches (overlap). Acc_all counts images; Acc_avg is the mean over the parts that have images, which is the
paper's definition in all its cases: (base + novel)/2, (base + n1 + … + nT)/(T+1), (base + novel + overlap)/3 and, when
every new class overlaps, (base + overlap)/2. Predictions are always among all classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchout.errors import BranchoutError
from branchout.labels import OVERLAP, Floats, Ints, LabelSpace, branch_name


@dataclass(frozen=True)
class Accuracies:
    """Fractions between 0 and 1; None for a part without images."""

    all: float
    base: float | None
    novel: float | None
    """Over all classes that only new branches know; `steps` has one accuracy for each step."""
    steps: tuple[float | None, ...]
    overlap: float | None
    avg: float

    @property
    def balanced(self) -> float:
        """The mean of `all` and `avg`. The recipe `reference` chooses by their product instead."""
        return (self.all + self.avg) / 2


def part_of_class(space: LabelSpace) -> Ints:
    """The part of every class: 0 for the base, t for step t, and the last number for the overlap."""
    return np.where(space.split_of_class == OVERLAP, len(space.branches), space.split_of_class)


def images_of_parts(actual: Ints, space: LabelSpace) -> dict[str, int]:
    """How many images each accuracy counts, by its name; those of each step as `step 1`, `step 2`, …"""
    base, *steps, overlap = np.bincount(part_of_class(space)[actual], minlength=len(space.branches) + 1).tolist()
    by_step = {branch_name(number): images for number, images in enumerate(steps, 1)}
    return {"all": len(actual), "base": base, "novel": sum(steps), "overlap": overlap, **by_step}


def accuracies(predicted: Ints, actual: Ints, space: LabelSpace) -> Accuracies:
    """All accuracies of predictions, both given as class numbers of `space`."""
    if predicted.shape != actual.shape:
        raise BranchoutError(f"{len(predicted):,} predictions were given for {len(actual):,} labels.")
    if not len(actual):
        raise BranchoutError("There are no images to measure an accuracy on.")
    part = part_of_class(space)[actual]
    parts = len(space.branches) + 1
    total = np.bincount(part, minlength=parts)
    correct = np.bincount(part[predicted == actual], minlength=parts)
    figures = {name: values.item() for name, values in from_counts(correct, total).items()}
    per_part = [c / n if n else None for c, n in zip(correct.tolist(), total.tolist(), strict=True)]
    return Accuracies(
        all=figures["all"],
        base=per_part[0],
        novel=None if np.isnan(figures["novel"]) else figures["novel"],
        steps=tuple(per_part[1:-1]),
        overlap=per_part[-1],
        avg=figures["avg"],
    )


def from_counts(correct: npt.NDArray[np.integer], total: npt.NDArray[np.integer]) -> dict[str, Floats]:
    """Accuracies from the number of correct images in each part, for many operating points at once.

    `correct` has shape (…, parts), `total` (parts,); the result has the leading shape, NaN for parts without images.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        each = correct / total
        return {
            "all": correct.sum(-1) / total.sum(),
            "base": each[..., 0],
            "novel": correct[..., 1:-1].sum(-1) / total[1:-1].sum(),
            "overlap": each[..., -1],
            "avg": each[..., total > 0].mean(-1),
        }


FEWEST = 10
"""An overlap with fewer validation images than this is no part of its own in `weighted_by_class`."""


def weighted_by_class(
    correct: npt.NDArray[np.integer], total: npt.NDArray[np.integer], space: LabelSpace
) -> dict[str, Floats]:
    """`all` and `avg` for choosing an operating point with few validation images, unevenly spread over the classes.

    Acc_all weighs each part by its number of classes instead of images: 200 held-out images of 1,000 old classes and
    200 of 100 new ones would otherwise count the same. Acc_avg leaves out an overlap with fewer than `FEWEST` images:
    one image of a single overlapping class would otherwise count a third. Steps count in it by their number of classes:
    a class of a step of ten counts no more than one of a step of ninety. Shapes are those of `from_counts`.
    """
    classes = np.bincount(part_of_class(space), minlength=len(total))
    present = total > 0
    enough = present & ((total >= FEWEST) | (np.arange(len(total)) < len(total) - 1))
    enough = enough if enough.any() else present
    each = correct / np.maximum(total, 1)
    weight = np.where(present, classes, 0)
    by_part = each.copy()
    steps = np.flatnonzero(present[1:-1]) + 1
    by_part[..., steps] = (each[..., steps] * (classes[steps] / classes[steps].sum())).sum(-1, keepdims=True)
    return {"all": (each * weight).sum(-1) / weight.sum(), "avg": by_part[..., enough].mean(-1)}


def incremental(steps: Sequence[Accuracies]) -> float:
    """Incremental accuracy: the mean of Acc_all after t = 0 (the base model), 1, …, T steps."""
    return float(np.mean([step.all for step in steps]))


def average_over_steps(steps: Sequence[Accuracies]) -> float:
    """The mean of Acc_avg after t = 0 (the base model), 1, …, T steps."""
    return float(np.mean([step.avg for step in steps]))


def per_class(predicted: Ints, actual: Ints, space: LabelSpace) -> dict[str, float | None]:
    """The accuracy of every class; None for a class without images."""
    count = len(space.classes)
    total = np.bincount(actual, minlength=count)
    correct = np.bincount(actual[predicted == actual], minlength=count)
    return {name: int(c) / int(n) if n else None for name, c, n in zip(space.classes, correct, total, strict=True)}


def confusion_between_parts(predicted: Ints, actual: Ints, space: LabelSpace) -> Ints:
    """How many images of each part (rows) are predicted as a class of each part (columns).

    Parts as in `part_of_class`; row 0, column 1 counts base images predicted as a class of step 1.
    """
    part = part_of_class(space)
    parts = len(space.branches) + 1
    return np.bincount(part[actual] * parts + part[predicted], minlength=parts * parts).reshape(parts, parts)
