"""Accuracy before and after the last step, per part and per class, on the same labelled images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from branchout.data.images import Images, forward_batch, in_order
from branchout.errors import LIST_CLASSES, BranchoutError, did_you_mean, some
from branchout.labels import Floats, Ints, LabelSpace
from branchout.metrics import Accuracies, accuracies, confusion_between_parts, images_of_parts, part_of_class, per_class
from branchout.model.classifier import Classifier
from branchout.progress import Event, OnProgress, silent
from branchout.training.device import giving_back
from branchout.training.forward import in_full_batches
from branchout.training.out_of_memory import in_parts


def part_names(space: LabelSpace) -> list[str]:
    """The names of the parts of a label space: base, step 1, …, overlap."""
    return ["base", *(f"step {n}" for n in range(1, len(space.branches))), "overlap"]


def check_classes(classes: Iterable[str], space: LabelSpace) -> None:
    """Labelled images must be of classes that the model knows."""
    unknown = sorted(set(classes) - set(space.classes))
    if unknown:
        raise BranchoutError(
            f"The model does not know {len(unknown):,} of these classes: {some(unknown)}. It knows "
            f"{len(space.classes):,} others. Name the folders of images as the model names its classes."
            + did_you_mean(unknown, space.classes)
            + LIST_CLASSES
        )


@dataclass(frozen=True)
class ClassAccuracy:
    """The accuracy of one class; `before` is None for a class that was not known before the last step."""

    name: str
    part: str
    images: int
    before: float | None
    after: float


@dataclass(frozen=True)
class ImageAnswer:
    """The answers to one image; `before` is None if its class was not known before the last step."""

    file: str
    name: str
    before: str | None
    after: str


def as_row(found: ClassAccuracy | ImageAnswer) -> dict[str, Any]:
    """An accuracy or answer as a row of JSON and CSV files, where `name` is called `class`."""
    return {"class" if key == "name" else key: value for key, value in asdict(found).items()}


@dataclass(frozen=True)
class Comparison:
    """Answers before and after the last step on the same images, and the accuracies that follow."""

    space: LabelSpace
    labels: Ints
    answers: Ints
    before_answers: Ints | None
    """Of the model before its last step, -1 for images of classes it did not know; None for a base model."""
    columns: Floats
    """Logits without the dial, from which the answers at any other operating point follow."""

    @property
    def after(self) -> Accuracies:
        return accuracies(self.answers, self.labels, self.space)

    @property
    def before(self) -> Accuracies | None:
        """On the images whose class was known before the last step."""
        if self.before_answers is None or not (self.before_answers >= 0).any():
            return None
        known = self.before_answers >= 0
        return accuracies(self.before_answers[known], self.labels[known], self.space)

    @property
    def parts(self) -> dict[str, int]:
        """How many images each accuracy counts, by its name."""
        return images_of_parts(self.labels, self.space)

    def classes(self) -> list[ClassAccuracy]:
        """One row per class with images, largest losses first."""
        after = per_class(self.answers, self.labels, self.space)
        before: dict[str, float | None] = {}
        if self.before_answers is not None:
            known = self.before_answers >= 0
            before = per_class(self.before_answers[known], self.labels[known], self.space)
        counts = np.bincount(self.labels, minlength=len(self.space.classes)).tolist()
        parts = part_of_class(self.space).tolist()
        rows = [
            ClassAccuracy(name, part_names(self.space)[part], count, before.get(name), now)
            for name, part, count in zip(self.space.classes, parts, counts, strict=True)
            if (now := after[name]) is not None
        ]
        return sorted(rows, key=lambda row: row.after - (1.0 if row.before is None else row.before))

    def confusion(self) -> Ints:
        """How many images of each part (rows) are answered with a class of each part (columns)."""
        return confusion_between_parts(self.answers, self.labels, self.space)

    def images(self, files: Sequence[str]) -> list[ImageAnswer]:
        """One row per image; `files` are the names of the images."""
        names = self.space.classes
        old = np.full(len(self.labels), -1) if self.before_answers is None else self.before_answers
        return [
            ImageAnswer(file, names[label], names[was] if was >= 0 else None, names[now])
            for file, label, was, now in zip(files, self.labels, old, self.answers, strict=True)
        ]

    def to_dict(self, files: Sequence[str]) -> dict[str, Any]:
        """Everything, as JSON-able data; accuracies are shares between 0 and 1."""
        return {
            "images": len(self.labels),
            "before": None if self.before is None else asdict(self.before),
            "after": asdict(self.after),
            "classes": [as_row(row) for row in self.classes()],
            "confusion": {"parts": part_names(self.space), "counts": self.confusion().tolist()},
            "answers": [as_row(row) for row in self.images(files)],
        }


@torch.no_grad()
def logits(model: Classifier, images: torch.Tensor, flip: bool = False) -> torch.Tensor:
    """Class logits; with `flip` averaged over each image and its mirror image."""
    views = [images, images.flip(3)] if flip else [images]
    found = [in_parts(lambda part: [model(part)], model.backbone.arrange(view))[0] for view in views]
    return found[0] if not flip else (found[0] + found[1]) / 2


@torch.no_grad()
def compare(
    model: Classifier,
    before: Classifier | None,
    images: Images,
    labels: Ints,
    *,
    flip: bool = False,
    on_progress: OnProgress = silent,
) -> Comparison:
    """Run both models over the images once. `labels` are class indices of the newer model."""
    batches = in_order(len(images), forward_batch(images, 256))
    answers, old_answers, columns = [], [], []
    for order, batch in zip(batches, giving_back(images.plain(batches)), strict=True):
        batch = model.backbone.arrange(batch)
        seen = [in_full_batches(model.features, view) for view in ([batch, batch.flip(3)] if flip else [batch])]
        answers.append(_answers(model, seen))
        columns.append(torch.stack([model.fused.columns(h) for h in seen]).mean(0).cpu().double())
        if before is not None:
            old_answers.append(_answers(before, seen))
        on_progress(Event("Evaluating images", int(order[-1]) + 1, len(images)))
    old = None
    if before is not None:
        known = np.isin(labels, np.arange(len(before.space.classes)))  # old classes keep their indices
        old = np.where(known, torch.cat(old_answers).numpy(), -1)
    return Comparison(model.space, labels, torch.cat(answers).numpy(), old, torch.cat(columns).numpy())


def _answers(model: Classifier, seen: list[list[torch.Tensor]]) -> torch.Tensor:
    """Predicted classes, from the features of each view of some images."""
    return torch.stack([model.fused(h) for h in seen]).mean(0).argmax(1).cpu()
