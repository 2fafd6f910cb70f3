"""What labelled images show of a model: gains and losses at every operating point, confusions, pictures.

images, labels                  how many, and the class of each
known, before                   classes below this number were known before the last step; what was answered then
answers                         what is answered now: at the first point, and every change from point to point
figures, figures_before         accuracies at every point, and before the last step
classes, confusion, overlap     at the saved point: per class, between parts, whose column speaks
to_later, to_earlier            at the saved point: class, class answered instead, images, of these right before
speakers                        along the points: the branch that speaks for images of overlapping classes
forgotten, won, pictures        how many at the saved point, which images have a small copy, and the copies
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.errors import BranchoutError, printable
from branchout.evaluate.compare import Comparison
from branchout.labels import OVERLAP, LabelSpace
from branchout.method.features import extract
from branchout.metrics import accuracies
from branchout.model.checkpoint import SavedModel
from branchout.report.answers_along import Along, answers_along
from branchout.report.gallery import forgotten, picked, thumbnail, won
from branchout.training.loop import Event, Report

Ints = npt.NDArray[np.int64]

FIGURES = ("all", "base", "novel", "overlap", "avg")
PICTURE_BYTES = 1_500_000
"""Beyond this, no more pictures are kept for other positions of the dial than the saved one."""


def findings(
    kept: SavedModel,
    samples: Samples,
    frontier: Mapping[str, Any] | None,
    *,
    gallery: int,
    device: torch.device,
    cache: Path | None,
    report: Report,
) -> dict[str, Any]:
    """The facts that `gather` calls `test`; `frontier` is what it found of the operating points."""
    model = kept.model().placed(device)
    space: LabelSpace = model.space
    strangers = sorted(set(samples.classes) - set(space.classes))
    if strangers:
        raise BranchoutError(
            f"these classes are not the model's: {', '.join(strangers[:5])}; it knows {len(space.classes):,} classes"
        )
    labels = space.index(samples.classes)[samples.labels]
    images = open_images(samples, model.preprocessing, device, cache=cache)
    # Cached: a report after `tune`, or on the images that `extend` has seen, runs no network.
    features = extract(
        model, images, device=device, cache=cache, fingerprint=samples.fingerprint(), work="evaluate", report=report
    )[0]
    along, speakers = answers_along(kept, model, features, labels)
    saved, points = (frontier["saved"], len(frontier["settings"])) if frontier else (0, 1)
    before, known = _before(kept, features, labels, device)
    found = Comparison(space, labels, along.at(saved), None if before is None else np.where(known, before, -1), _NONE)
    test = {
        "images": len(labels),
        "labels": labels.tolist(),
        "known": _known_classes(kept),
        "before": None if before is None else before.tolist(),
        "answers": _changes(along),
        "figures": _figures(along, points, labels, space),
        "figures_before": None if found.before is None else asdict(found.before),
        "classes": _class_rows(found),
        "confusion": found.confusion().tolist(),
        "overlap": _overlap_rows(found, speakers.at(saved)),
        "speakers": _speakers(speakers, labels, space),
    }
    taken = _taken(found, before if before is not None else np.full(len(labels), -1))
    test |= {"to_later": taken[0], "to_earlier": taken[1]}
    if before is not None:
        test |= _galleries(samples, along, points, saved, (labels, before, known), gallery, report)
    return test


_NONE: npt.NDArray[np.float64] = np.empty((0, 0))


def _known_classes(kept: SavedModel) -> int:
    """How many classes the model knew before its last step; their numbers come first."""
    steps = len(kept.classifier.steps)
    return len(kept.classifier.space.upto(max(steps - 1, 0)).classes)


@torch.no_grad()
def _before(
    kept: SavedModel, features: torch.Tensor, labels: Ints, device: torch.device
) -> tuple[Ints | None, npt.NDArray[np.bool_]]:
    """What the model before its last step says of every image, and of which images it knew the class."""
    known = labels < _known_classes(kept)
    steps = len(kept.classifier.steps)
    if not steps:
        return None, known
    earlier = kept.model(steps - 1).to(device)
    # It reads the base's feature vector and those of its own branches, which are the first of the newer model's.
    answers: Ints = earlier.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers, known


def _changes(along: Along) -> dict[str, list[int]]:
    return {
        "first": along.first.tolist(),
        "image": along.image.tolist(),
        "point": along.point.tolist(),
        "value": along.value.tolist(),
    }


def _figures(along: Along, points: int, labels: Ints, space: LabelSpace) -> dict[str, list[float | None]]:
    measured = [accuracies(along.at(point), labels, space) for point in range(points)]
    return {name: [getattr(each, name) for each in measured] for name in FIGURES}


def _class_rows(found: Comparison) -> list[dict[str, Any]]:
    """Worst losses first, then the classes that nobody knew before, lowest first; among equals by name."""

    def place(row: Mapping[str, Any]) -> tuple[bool, float, str]:
        new = row["before"] is None
        return new, row["after"] - (0.0 if new else row["before"]), row["class"]

    rows = sorted(found.classes(), key=place)
    numbers = found.space.index([row["class"] for row in rows]).tolist()
    return [
        {"class": number, **{key: row[key] for key in ("images", "before", "after")}}
        for row, number in zip(rows, numbers, strict=True)
    ]


def _taken(found: Comparison, before: Ints) -> tuple[list[list[int]], list[list[int]]]:
    """Which classes lose images to which: of earlier ones to later ones, and the reverse.

    Each row is the class, the class answered instead, how many images, and how many of them were right before.
    """
    first = first_branch(found.space)
    order = {number: place for place, number in enumerate(np.argsort(found.space.classes, kind="stable").tolist())}
    told: tuple[list[list[int]], list[list[int]]] = ([], [])
    for which, crossing in enumerate(
        (first[found.answers] > first[found.labels], first[found.answers] < first[found.labels])
    ):
        pairs, where, counts = np.unique(
            np.stack([found.labels[crossing], found.answers[crossing]], 1),
            axis=0,
            return_inverse=True,
            return_counts=True,
        )
        were_right = np.bincount(where.reshape(-1)[before[crossing] == found.labels[crossing]], minlength=len(pairs))
        rows = [
            [*pair, count, right]
            for pair, count, right in zip(pairs.tolist(), counts.tolist(), were_right.tolist(), strict=True)
        ]
        told[which].extend(sorted(rows, key=lambda row: (-row[2], order[row[0]], order[row[1]])))
    return told


def _overlap_rows(found: Comparison, speakers: Ints) -> list[dict[str, Any]]:
    """For each class that several branches know: its accuracies, and whose column speaks in its right answers."""
    by_class = {row["class"]: row for row in found.classes()}
    told = []
    for name in sorted(found.space.overlap):
        if name in by_class:
            number = int(found.space.index([name])[0])
            right = (found.labels == number) & (found.answers == number)
            by = np.bincount(speakers[right], minlength=len(found.space.branches)).tolist()
            row = by_class[name]
            told.append({"class": number, **{key: row[key] for key in ("images", "before", "after")}, "by": by})
    return told


def _speakers(speakers: Along, labels: Ints, space: LabelSpace) -> dict[str, list[int]]:
    """Of the images of overlapping classes, which branch speaks for the true class along the dial."""
    shared = np.flatnonzero(space.split_of_class[labels] == OVERLAP)
    among = np.isin(speakers.image, shared)
    return {
        "images": shared.tolist(),
        "first": speakers.first[shared].tolist(),
        "image": speakers.image[among].tolist(),
        "point": speakers.point[among].tolist(),
        "value": speakers.value[among].tolist(),
    }


def _galleries(
    samples: Samples,
    along: Along,
    points: int,
    saved: int,
    tested: tuple[Ints, Ints, npt.NDArray[np.bool_]],
    most: int,
    report: Report,
) -> dict[str, Any]:
    """Images forgotten and won: how many, and small copies of some."""
    now = along.at(saved)
    rules = {"forgotten": forgotten, "won": won}
    told: dict[str, Any] = {"gallery": most, "pictures": {}}
    chosen = {kind: picked(kind, along, points, saved, tested, most) for kind in rules}
    size = 0
    everything = [(kind, image) for kind, images in chosen.items() for image in images]
    # The saved point's pictures first: they are kept whatever they weigh.
    here = {kind: rule(now, *tested) for kind, rule in rules.items()}
    everything.sort(key=lambda each: not here[each[0]][each[1]])
    for number, (kind, image) in enumerate(everything):
        if (here[kind][image] or size < PICTURE_BYTES) and str(image) not in told["pictures"]:
            copy = thumbnail(samples.read(image))
            size += len(copy)
            told["pictures"][str(image)] = {"src": copy, "file": printable(str(samples.ids[image]))}
        report(Event("pictures", number + 1, len(everything)))
    for kind in rules:
        shown = [image for image in chosen[kind] if str(image) in told["pictures"]]
        told[kind] = {"count": int(here[kind].sum()), "images": shown}
    return told


def first_branch(space: LabelSpace) -> Ints:
    """For each class the branch that first knew it."""
    first: dict[str, int] = {}
    for number, names in enumerate(space.branches):
        for name in names:
            first.setdefault(name, number)
    return np.array([first[name] for name in space.classes], dtype=np.int64)
