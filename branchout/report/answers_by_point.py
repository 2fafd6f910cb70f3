"""The predicted class of every image at every operating point, from one pass over the images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from branchout.labels import Floats, Ints, LabelSpace
from branchout.method.choose import apply_point
from branchout.method.dial import prediction_changes
from branchout.method.frontier import Frontier
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.model.classifier import Classifier

CHUNK = 4096
"""Images whose logits are in memory at once while the points of a grid are evaluated."""


@dataclass(frozen=True)
class PointValues:
    """An integer for every image at every point: the values at the first point, and every later change."""

    first: Ints
    image: Ints
    point: Ints
    """In ascending order: from this point on, the value of `image` is `value`."""
    value: Ints

    @classmethod
    def of(cls, rows: Iterable[Ints]) -> PointValues:
        """From the values of all images at the first point, at the second, and so on."""
        remaining = iter(rows)
        first = current = next(remaining)
        images, points, values = [], [], []
        for point, row in enumerate(remaining, 1):
            changed = np.flatnonzero(row != current)
            images.append(changed)
            points.append(np.full(len(changed), point))
            values.append(row[changed])
            current = row
        none = np.empty(0, dtype=np.int64)
        return cls(first, *(np.concatenate([none, *parts]) for parts in (images, points, values)))

    def at(self, point: int) -> Ints:
        upto = np.searchsorted(self.point, point, side="right")
        values = self.first.copy()
        values[self.image[:upto]] = self.value[:upto]  # of several changes of one image the last one stays
        return values


def point_order(frontier: Frontier) -> Ints:
    """The points from those that favour old classes to those that favour new ones."""
    if frontier.kind == "dial":
        return np.argsort(frontier.settings[:, 0], kind="stable")
    old, novel, overlap = (np.nan_to_num(frontier.accuracies[name], nan=-1) for name in ("base", "novel", "overlap"))
    return np.lexsort((-old, overlap, novel))


def answers_by_point(
    saved: SavedModel, model: Classifier, features: Tensor, labels: Ints
) -> tuple[PointValues, PointValues]:
    """The predicted class at every point, and the branch with the highest logit for the image's own class.

    `features` has the shape (images, feature vectors, k). Points are in the order of `point_order`.
    """
    if not saved.step_points:
        return PointValues.of([_answers(model, features)]), PointValues.of([np.zeros(len(labels), dtype=np.int64)])
    points = saved.step_points[-1]
    frontier = Frontier.from_dict(points.frontier)
    order = point_order(frontier)
    if frontier.kind == "dial":
        return _on_dial(model, points, frontier.settings[order, 0], features, labels)
    pairs = list(_on_grid(model, points, order, features, labels))
    apply_point(model, points)
    return PointValues.of(answers for answers, _ in pairs), PointValues.of(branches for _, branches in pairs)


def _on_dial(
    model: Classifier, points: StepPoints, values: Floats, features: Tensor, labels: Ints
) -> tuple[PointValues, PointValues]:
    offsets = np.array([0.0, *(points.offsets or [0.0] * len(model.steps))])
    columns = _columns(model, features) + offsets[model.space.branch_of_column]
    turns, answers = prediction_changes(columns, model.space, model.fused.pooler.kind)
    every = np.arange(len(labels))
    own = _own_logits(columns, labels, model.space)
    new = np.arange(own.shape[1]) > 0
    return (
        PointValues.of(answers[every, (turns < b).sum(1)] for b in values),
        PointValues.of((own + b * new).argmax(1) for b in values),
    )


def _on_grid(
    model: Classifier, points: StepPoints, order: Ints, features: Tensor, labels: Ints
) -> Iterator[tuple[Ints, Ints]]:
    for point in order.tolist():
        apply_point(model, replace(points, point=point))
        answers, branches = [], []
        for start in range(0, len(labels), CHUNK):
            some = features[start : start + CHUNK]
            answers.append(_answers(model, some))
            own = _own_logits(_columns(model, some), labels[start : start + CHUNK], model.space)
            branches.append(own.argmax(1))
        yield np.concatenate(answers), np.concatenate(branches)


@torch.no_grad()
def _answers(model: Classifier, features: Tensor) -> Ints:
    answers: Ints = model.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers


@torch.no_grad()
def _columns(model: Classifier, features: Tensor) -> Floats:
    """Logits of every column, without the dial."""
    columns: Floats = model.fused.columns(features.unbind(1)).cpu().double().numpy()
    return columns


def _own_logits(columns: Floats, labels: Ints, space: LabelSpace) -> Floats:
    """Each branch's logit of each image's own class (images × branches); -inf where a branch does not know it."""
    column = np.full((len(space.classes), len(space.branches)), -1)
    column[space.class_of_column, space.branch_of_column] = np.arange(space.columns)
    own = column[labels]
    logits: Floats = np.where(own >= 0, columns[np.arange(len(labels))[:, None], own], -np.inf)
    return logits
