"""What a model answers at every operating point it can be moved to, from one pass over the images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.labels import LabelSpace
from branchout.method.extend import apply_fusion
from branchout.method.frontier import Frontier, stretches
from branchout.model.checkpoint import Fusion, SavedModel
from branchout.model.classifier import Classifier

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CHUNK = 4096
"""Images whose scores are held at once while a grid's points are tried."""


@dataclass(frozen=True)
class Along:
    """A number for every image at every point: what it is at the first, and each change from one point to the next."""

    first: Ints
    image: Ints
    point: Ints
    """In rising order: at this point `image` becomes `value`."""
    value: Ints

    @classmethod
    def of(cls, rows: Iterable[Ints]) -> Along:
        """From the numbers of all images at the first point, at the second, and so on."""
        remaining = iter(rows)
        first = current = next(remaining)
        images, points, values = [], [], []
        for point, row in enumerate(remaining, 1):
            moved = np.flatnonzero(row != current)
            images.append(moved)
            points.append(np.full(len(moved), point))
            values.append(row[moved])
            current = row
        none = np.empty(0, dtype=np.int64)
        return cls(first, *(np.concatenate([none, *parts]) for parts in (images, points, values)))

    def at(self, point: int) -> Ints:
        upto = np.searchsorted(self.point, point, side="right")
        numbers = self.first.copy()
        numbers[self.image[:upto]] = self.value[:upto]  # of several changes of one image the last one stays
        return numbers


def in_order(frontier: Frontier) -> Ints:
    """The points from those that favour old classes to those that favour new ones."""
    if frontier.kind == "dial":
        return np.argsort(frontier.settings[:, 0], kind="stable")
    old, novel, overlap = (np.nan_to_num(frontier.figures[name], nan=-1) for name in ("base", "novel", "overlap"))
    return np.lexsort((-old, overlap, novel))


def answers_along(kept: SavedModel, model: Classifier, features: Tensor, labels: Ints) -> tuple[Along, Along]:
    """For features (images, feature vectors, k) the class answered at every point, and who speaks for the true class.

    The speaker is the branch whose column of an image's own class is the highest. Points are ordered by `in_order`.
    """
    if not kept.fusions:
        return Along.of([_answers(model, features)]), Along.of([np.zeros(len(labels), dtype=np.int64)])
    fusion = kept.fusions[-1]
    frontier = Frontier.from_dict(fusion.frontier)
    order = in_order(frontier)
    if frontier.kind == "dial":
        return _along_dial(model, fusion, frontier.settings[order, 0], features, labels)
    pairs = list(_along_grid(model, fusion, order, features, labels))
    apply_fusion(model, fusion)
    return Along.of(answers for answers, _ in pairs), Along.of(speakers for _, speakers in pairs)


def _along_dial(
    model: Classifier, fusion: Fusion, values: Floats, features: Tensor, labels: Ints
) -> tuple[Along, Along]:
    shifts = np.array([0.0, *(fusion.shifts or [0.0] * len(model.steps))])
    columns = _columns(model, features) + shifts[model.space.branch_of_column]
    turns, answers = stretches(columns, model.space, model.fused.pooler.kind)
    every = np.arange(len(labels))
    own = _own_scores(columns, labels, model.space)
    new = np.arange(own.shape[1]) > 0
    return (
        Along.of(answers[every, (turns < b).sum(1)] for b in values),
        Along.of((own + b * new).argmax(1) for b in values),
    )


def _along_grid(
    model: Classifier, fusion: Fusion, order: Ints, features: Tensor, labels: Ints
) -> Iterator[tuple[Ints, Ints]]:
    for point in order.tolist():
        apply_fusion(model, replace(fusion, point=point))
        answers, speakers = [], []
        for start in range(0, len(labels), CHUNK):
            some = features[start : start + CHUNK]
            answers.append(_answers(model, some))
            own = _own_scores(_columns(model, some), labels[start : start + CHUNK], model.space)
            speakers.append(own.argmax(1))
        yield np.concatenate(answers), np.concatenate(speakers)


@torch.no_grad()
def _answers(model: Classifier, features: Tensor) -> Ints:
    answers: Ints = model.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers


@torch.no_grad()
def _columns(model: Classifier, features: Tensor) -> Floats:
    """Scores before the dial."""
    columns: Floats = model.fused.columns(features.unbind(1)).double().cpu().numpy()
    return columns


def _own_scores(columns: Floats, labels: Ints, space: LabelSpace) -> Floats:
    """Each branch's score of each image's own class (images × branches); a branch that does not know it has none."""
    column = np.full((len(space.classes), len(space.branches)), -1)
    column[space.class_of_column, space.branch_of_column] = np.arange(space.columns)
    mine = column[labels]
    scores: Floats = np.where(mine >= 0, columns[np.arange(len(labels))[:, None], mine], -np.inf)
    return scores
