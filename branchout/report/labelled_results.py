"""Results on labelled images: what was gained and lost at every operating point, confusions, galleries.

All counts are computed here, for every point at once; templates and the page's script only look them up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.errors import printable
from branchout.evaluate.compare import ClassAccuracy, Comparison, check_classes
from branchout.labels import OVERLAP, LabelSpace
from branchout.method.features import extract
from branchout.metrics import METRICS, accuracies, part_of_class
from branchout.model.checkpoint import SavedModel
from branchout.report.answers_by_point import Count, PointValues, answers_by_point, count_at
from branchout.report.gallery import KINDS, members, select, thumbnail
from branchout.training.loop import Event, Report

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

THUMBNAIL_BYTES = 1_500_000
"""Above this, no further thumbnails are made for other points than the saved one."""


@dataclass(frozen=True)
class ClassResult:
    """One class with images."""

    number: int
    images: int
    before: float | None
    """Accuracy before the last step; None for a class that was not known then."""
    right: Count
    by_branch: list[Count]
    """Of an overlapping class: right answers by the branch whose logit was the highest."""


@dataclass(frozen=True)
class PartResult:
    """One part (base, a step, the overlap) with images."""

    number: int
    images: int
    right: Count
    wrong: dict[int, Count]
    """Wrong answers by the part of the answered class."""


@dataclass(frozen=True)
class Pair:
    """Images of one class that are answered with another, whose first branch is later (or earlier)."""

    label: int
    answer: int
    images: Count
    were_right: Count
    """Those of them that were right before the last step."""


@dataclass(frozen=True)
class Gallery:
    counts: dict[int, Count]
    """How many images belong to it, by part."""
    images: list[int]
    """Images with a thumbnail that belong to it at some point, best choice first."""

    def count_at(self, point: int) -> int:
        return sum(count_at(count, point) for count in self.counts.values())


@dataclass(frozen=True)
class Thumbnail:
    src: str
    file: str


@dataclass(frozen=True)
class LabelledResults:
    """Results on labelled images."""

    images: int
    labels: list[int]
    known: int
    """Classes with a smaller index were known before the last step."""
    before: list[int] | None
    """Answers of the model before its last step; None for a base model."""
    were_right: list[bool]
    """Images that were right before the last step."""
    answers: PointValues
    figures: dict[str, list[float | None]]
    figures_before: dict[str, float | None] | None
    classes: list[ClassResult]
    """Worst losses at the saved point first, then classes that were not known before, lowest accuracy first."""
    parts: list[PartResult]
    to_later: list[Pair]
    to_earlier: list[Pair]
    gallery: int
    """How many images a gallery shows."""
    galleries: dict[str, Gallery]
    thumbnails: dict[int, Thumbnail]


def labelled_results(
    saved: SavedModel,
    samples: Samples,
    point: int,
    points: int,
    *,
    gallery: int,
    device: torch.device,
    cache: Path | None,
    report: Report,
) -> LabelledResults:
    """Evaluate the model at all `points` operating points; `point` is the saved one."""
    model = saved.model().placed(device)
    space: LabelSpace = model.space
    check_classes(samples.classes, space)
    labels = space.index(samples.classes)[samples.labels]
    images = open_images(samples, model.preprocessing, device, cache=cache)
    # Features are cached: a report after `tune`, or on images that `extend` has seen, runs no network.
    features = extract(
        model, images, device=device, cache=cache, fingerprint=samples.fingerprint(), work="evaluate", report=report
    )[0]
    answers, branches = answers_by_point(saved, model, features, labels)
    known = _known_classes(saved)
    before = _answers_before(saved, features, device)
    compared = None if before is None else np.where(labels < known, before, -1)
    found = Comparison(space, labels, answers.at(point), compared, np.empty((0, 0)))
    were_right = np.zeros(len(labels), dtype=bool) if before is None else (before == labels) & (labels < known)
    measured = [accuracies(answers.at(each), labels, space) for each in range(points)]
    pairs: tuple[list[Pair], list[Pair]] = ([], [])
    galleries: dict[str, Gallery] = {}
    thumbnails: dict[int, Thumbnail] = {}
    if before is not None:
        pairs = _pairs(answers, labels, before == labels, space)
        chosen = {
            kind: select(kind, answers, points, point, labels, were_right, labels < known, gallery) for kind in KINDS
        }
        here = {kind: members(kind, found.answers, labels, were_right) for kind in KINDS}
        thumbnails = _thumbnails(samples, chosen, here, report)
        galleries = _galleries(chosen, thumbnails, answers, found, were_right)
    return LabelledResults(
        images=len(labels),
        labels=labels.tolist(),
        known=known,
        before=None if before is None else before.tolist(),
        were_right=were_right.tolist(),
        answers=answers,
        figures={name: [getattr(each, name) for each in measured] for name in METRICS},
        figures_before=None if found.before is None else asdict(found.before),
        classes=_class_results(found, answers, branches, points),
        parts=_part_results(answers, labels, space),
        to_later=pairs[0],
        to_earlier=pairs[1],
        gallery=gallery,
        galleries=galleries,
        thumbnails=thumbnails,
    )


def first_branch(space: LabelSpace) -> Ints:
    """For each class the branch that first knew it."""
    first: dict[str, int] = {}
    for number, names in enumerate(space.branches):
        for name in names:
            first.setdefault(name, number)
    return np.array([first[name] for name in space.classes], dtype=np.int64)


def _known_classes(saved: SavedModel) -> int:
    """How many classes the model knew before its last step; their indices come first."""
    steps = len(saved.classifier.steps)
    return len(saved.classifier.space.upto(max(steps - 1, 0)).classes)


@torch.no_grad()
def _answers_before(saved: SavedModel, features: torch.Tensor, device: torch.device) -> Ints | None:
    steps = len(saved.classifier.steps)
    if not steps:
        return None
    earlier = saved.model(steps - 1).to(device)
    # It uses the feature vectors of the base and of its own branches: the first ones of the newer model.
    answers: Ints = earlier.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers


def _class_results(found: Comparison, answers: PointValues, branches: PointValues, points: int) -> list[ClassResult]:
    def place(row: ClassAccuracy) -> tuple[bool, float, str]:
        return row.before is None, row.after - (row.before or 0.0), row.name

    labels, space = found.labels, found.space
    right = answers.counts(lambda image, answer: np.where(answer == labels[image], labels[image], -1))
    shared = np.flatnonzero(space.split_of_class[labels] == OVERLAP)
    width = len(space.branches)
    answered = PointValues.of(
        np.where(answers.at(point) == labels, branches.at(point), -1)[shared] for point in range(points)
    )
    by = answered.counts(lambda image, branch: np.where(branch < 0, -1, labels[shared][image] * width + branch))
    results = []
    for row in sorted(found.classes(), key=place):
        number = int(space.index([row.name])[0])
        by_branch = [by.get(number * width + d, [0, 0]) for d in range(width)] if row.name in space.overlap else []
        results.append(ClassResult(number, row.images, row.before, right.get(number, [0, 0]), by_branch))
    return results


def _part_results(answers: PointValues, labels: Ints, space: LabelSpace) -> list[PartResult]:
    part = part_of_class(space)
    count = len(space.branches) + 1
    images = np.bincount(part[labels], minlength=count).tolist()
    right = answers.counts(lambda i, answer: np.where(answer == labels[i], part[labels[i]], -1))
    wrong = answers.counts(lambda i, answer: np.where(answer == labels[i], -1, part[labels[i]] * count + part[answer]))
    present = sorted(set(part.tolist()))
    return [
        PartResult(
            n, images[n], right.get(n, [0, 0]), {other: wrong.get(n * count + other, [0, 0]) for other in present}
        )
        for n in present
        if images[n]
    ]


def _pairs(answers: PointValues, labels: Ints, were_right: Bools, space: LabelSpace) -> tuple[list[Pair], list[Pair]]:
    """Images answered with a class of a later branch, and of an earlier one; pairs in the order of names."""
    first, size = first_branch(space), len(space.classes)
    rank = {number: place for place, number in enumerate(np.argsort(space.classes, kind="stable").tolist())}

    def counted(sign: int) -> list[Pair]:
        def key(image: Ints, answer: Ints) -> Ints:
            crossing = np.sign(first[answer] - first[labels[image]]) == sign
            return np.where(crossing, labels[image] * size + answer, -1)

        every = answers.counts(key)
        earlier = answers.counts(lambda image, answer: np.where(were_right[image], key(image, answer), -1))
        pairs = [Pair(*divmod(name, size), count, earlier.get(name, [0, 0])) for name, count in every.items()]
        return sorted(pairs, key=lambda pair: (rank[pair.label], rank[pair.answer]))

    return counted(1), counted(-1)


def _galleries(
    chosen: dict[str, list[int]],
    thumbnails: dict[int, Thumbnail],
    answers: PointValues,
    found: Comparison,
    were_right: Bools,
) -> dict[str, Gallery]:
    labels, part = found.labels, part_of_class(found.space)

    def of_kind(kind: str) -> Gallery:
        counts = answers.counts(
            lambda i, answer: np.where(members(kind, answer, labels[i], were_right[i]), part[labels[i]], -1)
        )
        return Gallery(counts, [image for image in chosen[kind] if image in thumbnails])

    return {kind: of_kind(kind) for kind in KINDS}


def _thumbnails(
    samples: Samples, chosen: dict[str, list[int]], here: dict[str, Bools], report: Report
) -> dict[int, Thumbnail]:
    """Thumbnails of the chosen images. Those of the saved point come first and are made whatever their size."""
    wanted = [(image, bool(here[kind][image])) for kind, images in chosen.items() for image in images]
    wanted.sort(key=lambda each: not each[1])
    found: dict[int, Thumbnail] = {}
    size = 0
    for number, (image, shown) in enumerate(wanted):
        if (shown or size < THUMBNAIL_BYTES) and image not in found:
            copy = thumbnail(samples.read(image))
            size += len(copy)
            found[image] = Thumbnail(copy, printable(str(samples.ids[image])))
        report(Event("thumbnails", number + 1, len(wanted)))
    return found


def accuracy_at(result: ClassResult | PartResult, point: int) -> float:
    return count_at(result.right, point) / result.images
