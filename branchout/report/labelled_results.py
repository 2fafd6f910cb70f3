"""Results on labelled images: every image's answer at every operating point, accuracies, and images to show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.errors import printable
from branchout.evaluate.compare import check_classes
from branchout.evaluate.explain import branch_shares
from branchout.goals import METRICS
from branchout.labels import Bools, Ints, LabelSpace
from branchout.method.features import extract
from branchout.metrics import accuracies
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.report.answers_by_point import PointValues, answers_by_point
from branchout.report.gallery import KINDS, members, select, thumbnail
from branchout.training.loop import Event, OnProgress

THUMBNAILS = "Making thumbnails"
"""What progress calls the last part of the work."""
THUMBNAIL_BYTES = 1_500_000
"""Above this, no further thumbnails are made for other points than the saved one."""


@dataclass(frozen=True)
class Thumbnail:
    src: str
    file: str
    shares: list[float]
    """Each branch's share of the answer at the saved point."""


@dataclass(frozen=True)
class LabelledResults:
    """Results on labelled images."""

    labels: list[int]
    known: int
    """Classes with a smaller index were known before the last step."""
    before: list[int] | None
    """Answers of the model before its last step; None for a base model."""
    were_right: list[bool]
    """Images that were right before the last step."""
    answers: PointValues
    branches: PointValues
    """The branch with the highest logit for the image's own class."""
    figures: dict[str, list[float | None]]
    """For each metric its value at every operating point."""
    figures_before: dict[str, float | None] | None
    gallery: int
    """How many images a gallery shows."""
    galleries: dict[str, list[int]]
    """Images with a thumbnail that belong to a gallery at some point, best choice first."""
    thumbnails: dict[int, Thumbnail]

    @property
    def images(self) -> int:
        return len(self.labels)


def labelled_results(
    saved: SavedModel,
    samples: Samples,
    point: int,
    points: int,
    *,
    gallery: int,
    device: torch.device,
    cache: Path | None,
    on_progress: OnProgress,
) -> LabelledResults:
    """Evaluate the model at all `points` operating points; `point` is the saved one."""
    model = saved.model().on_device(device)
    space: LabelSpace = model.space
    check_classes(samples.classes, space)
    labels = samples.labels_in(space)
    images = open_images(samples, model.preprocessing, device, cache=cache)
    # Features are cached: a report after `tune`, or on images that `extend` has seen, runs no network.
    features = extract(
        model,
        images,
        device=device,
        cache=cache,
        fingerprint=samples.fingerprint(),
        work="Evaluating images",
        on_progress=on_progress,
    )[0]
    answers, branches = answers_by_point(saved, model, features, labels)
    known = _known_classes(saved)
    before = _answers_before(saved, features, device)
    were_right = np.zeros(len(labels), dtype=bool) if before is None else (before == labels) & (labels < known)
    measured = [accuracies(answers.at(each), labels, space) for each in range(points)]
    galleries: dict[str, list[int]] = {}
    thumbnails: dict[int, Thumbnail] = {}
    if before is not None:
        galleries = {
            kind: select(kind, answers, points, point, labels, were_right, labels < known, gallery) for kind in KINDS
        }
        here = {kind: members(kind, answers.at(point), labels, were_right) for kind in KINDS}
        thumbnails = _thumbnails(samples, galleries, here, model, features, on_progress)
    if not any(galleries.values()):
        on_progress(Event(THUMBNAILS, 1, 1))  # whoever waits for the end is told, though there is nothing to make
    return LabelledResults(
        labels=labels.tolist(),
        known=known,
        before=None if before is None else before.tolist(),
        were_right=were_right.tolist(),
        answers=answers,
        branches=branches,
        figures={name: [getattr(each, name) for each in measured] for name in METRICS},
        figures_before=_figures_before(before, labels, known, space),
        gallery=gallery,
        galleries={kind: [image for image in images if image in thumbnails] for kind, images in galleries.items()},
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
    answers: Ints = earlier.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers


def _figures_before(before: Ints | None, labels: Ints, known: int, space: LabelSpace) -> dict[str, float | None] | None:
    """Accuracies before the last step, on the images of classes that were known then."""
    old = labels < known
    if before is None or not old.any():
        return None
    return asdict(accuracies(before[old], labels[old], space))


@torch.no_grad()
def _thumbnails(
    samples: Samples,
    chosen: dict[str, list[int]],
    here: dict[str, Bools],
    model: Classifier,
    features: torch.Tensor,
    on_progress: OnProgress,
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
            shares = branch_shares(model.fused, model.fused.columns(features[image : image + 1].unbind(1)))
            rounded = [round(share, 3) for share in shares[0].tolist()]
            found[image] = Thumbnail(copy, printable(str(samples.ids[image])), rounded)
        on_progress(Event(THUMBNAILS, number + 1, len(wanted)))
    return found
