"""What a model gained and lost: before → after, per split and per class, on images nobody trained or chose with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchout.data.images import Images, in_order
from branchout.labels import LabelSpace
from branchout.metrics import Accuracies, accuracies, confusion_between_parts, part_of_class, per_class
from branchout.model.classifier import Classifier
from branchout.training.loop import Event, Report, silent

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Answers before and after the last step on the same images, and the figures that follow."""

    space: LabelSpace
    labels: Ints
    answers: Ints
    before_answers: Ints | None
    """Of the model before its last step, -1 for images of classes it did not know; None for a base model."""
    columns: Floats
    """Scores before the dial, from which any other operating point can be read."""

    @property
    def after(self) -> Accuracies:
        return accuracies(self.answers, self.labels, self.space)

    @property
    def before(self) -> Accuracies | None:
        """On the images whose class the model knew before."""
        if self.before_answers is None or not (self.before_answers >= 0).any():
            return None
        known = self.before_answers >= 0
        return accuracies(self.before_answers[known], self.labels[known], self.space)

    def classes(self) -> list[dict[str, Any]]:
        """One row per class with images: its accuracy before and after, worst losses first."""
        after = per_class(self.answers, self.labels, self.space)
        before: dict[str, float | None] = {}
        if self.before_answers is not None:
            known = self.before_answers >= 0
            before = per_class(self.before_answers[known], self.labels[known], self.space)
        counts = np.bincount(self.labels, minlength=len(self.space.classes))
        rows = []
        for number, name in enumerate(self.space.classes):
            if after[name] is not None:
                row = {"class": name, "part": self.parts[part_of_class(self.space)[number]]}
                rows.append(row | {"images": int(counts[number]), "before": before.get(name), "after": after[name]})
        return sorted(rows, key=lambda row: (row["after"] or 0) - (1.0 if row["before"] is None else row["before"]))

    @property
    def parts(self) -> list[str]:
        """What the parts of the label space are called: base, step 1, …, overlap."""
        return ["base", *(f"step {n}" for n in range(1, len(self.space.branches))), "overlap"]

    def confusion(self) -> Ints:
        return confusion_between_parts(self.answers, self.labels, self.space)

    def images(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """One row per image: its class, and what the models before and after said; `files` are the images' names."""
        names = self.space.classes
        old = np.full(len(self.labels), -1) if self.before_answers is None else self.before_answers
        return [
            {"file": file, "class": names[label], "before": names[was] if was >= 0 else None, "after": names[now]}
            for file, label, was, now in zip(files, self.labels, old, self.answers, strict=True)
        ]

    def to_dict(self, files: Sequence[str]) -> dict[str, Any]:
        """Everything, as plain data; accuracies are shares between 0 and 1."""
        before = self.before
        return {
            "images": len(self.labels),
            "before": None if before is None else asdict(before),
            "after": asdict(self.after),
            "classes": self.classes(),
            "confusion": {"parts": self.parts, "counts": self.confusion().tolist()},
            "answers": self.images(files),
        }


@torch.no_grad()
def logits(model: Classifier, pictures: torch.Tensor, flip: bool = False) -> torch.Tensor:
    """Class logits, averaged over the picture and its mirror image if asked."""
    pictures = model.backbone.arrange(pictures)
    plain: torch.Tensor = model(pictures)
    return plain if not flip else (plain + model(pictures.flip(3))) / 2


@torch.no_grad()
def compare(
    model: Classifier,
    before: Classifier | None,
    images: Images,
    labels: Ints,
    *,
    flip: bool = False,
    report: Report = silent,
) -> Comparison:
    """Run both models over the images once. `labels` are class numbers of the newer model."""
    batches = in_order(len(images), 256)
    answers, old_answers, columns = [], [], []
    for number, pictures in enumerate(images.plain(batches)):
        pictures = model.backbone.arrange(pictures)
        seen = [model.features(view) for view in ([pictures, pictures.flip(3)] if flip else [pictures])]
        answers.append(torch.stack([model.fused(h) for h in seen]).mean(0).argmax(1).cpu())
        columns.append(torch.stack([model.fused.columns(h) for h in seen]).mean(0).double().cpu())
        if before is not None:
            old_answers.append(logits(before, pictures, flip).argmax(1).cpu())
        report(Event("evaluate", number + 1, len(batches)))
    old = None
    if before is not None:
        known = np.isin(labels, np.arange(len(before.space.classes)))  # old classes keep their numbers
        old = np.where(known, torch.cat(old_answers).numpy(), -1)
    return Comparison(model.space, labels, torch.cat(answers).numpy(), old, torch.cat(columns).numpy())
