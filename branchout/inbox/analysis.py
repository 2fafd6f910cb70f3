"""What a model says of the photos in an inbox: which fit no class well, and which of those look alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.api import Model, Source, samples_in
from branchout.data.decode import UnreadableImage, decode_picture
from branchout.data.images import open_images
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError
from branchout.evaluate.compare import check_classes
from branchout.evaluate.unknown import FALSE_ALARMS, Outputs, energy, group, threshold
from branchout.inbox.folder import Inbox, Photo, reason
from branchout.inbox.groups import Analysis, SeenPhoto
from branchout.method.features import extract
from branchout.training.loop import Event, OnProgress, silent
from branchout.training.out_of_memory import in_parts

BATCH = 16
MAX_PIXELS = 50_000_000


@dataclass
class Analyzer:
    """Scores and groups photos. What it computed for a photo it keeps, so that only new photos cost time."""

    model: Model
    known_scores: npt.NDArray[np.float64]
    """Of labelled images of known classes, which set the threshold."""
    threshold: float | None = None
    """The threshold, if it was given."""
    _features: dict[str, Tensor] = field(default_factory=dict)
    _unreadable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        known: Source | None,
        limit: float | None = None,
        *,
        classes_from: str | None = None,
        on_progress: OnProgress = silent,
    ) -> Analyzer:
        """`known` are labelled images of known classes: they set the threshold, unless `limit` gives it."""
        if limit is not None:
            return cls(model, np.empty(0), limit)
        if known is None:
            raise BranchoutError(
                "Images of known classes tell which score counts as unknown: add --memory OLD/, or better --test TEST/ "
                "with images that the model was not trained with (one folder per class)."
            )
        return cls(model, known_scores(model, known, classes_from, on_progress))

    def analyze(self, inbox: Inbox, photos: Sequence[Photo], *, on_progress: OnProgress = silent) -> Analysis:
        self._compute(inbox, photos, on_progress)
        share = inbox.false_alarms or FALSE_ALARMS
        found = Analysis(
            threshold=threshold(self.known_scores, share) if self.threshold is None else self.threshold,
            known_images=len(self.known_scores),
            false_alarms=share if self.threshold is None else None,
            photos=[],
            groups=[],
            classes=list(self.model.classes),
            unreadable={file: why for photo, why in self._unreadable.items() for file in inbox.copies.get(photo, ())}
            | inbox.broken,
        )
        usable = [photo for photo in photos if photo.id in self._features]
        if not usable:
            return found
        outputs = Outputs.of(self.model.classifier, torch.stack([self._features[photo.id] for photo in usable]))
        scores = energy(outputs.logits)
        probabilities = torch.from_numpy(outputs.logits).softmax(1).max(1)
        found.photos = [
            SeenPhoto(photo=photo.id, file=photo.file, score=value, answer=self.model.classes[answer], probability=p)
            for photo, value, answer, p in zip(
                usable, scores.tolist(), probabilities.indices.tolist(), probabilities.values.tolist(), strict=True
            )
        ]
        unknown = np.flatnonzero(scores > found.threshold)
        numbers = group(outputs.features[unknown])
        groups = [[usable[n].id for n in unknown[numbers == number]] for number in range(numbers.max(initial=-1) + 1)]
        found.groups = sorted(groups, key=len, reverse=True)
        return found

    @torch.no_grad()
    def _compute(self, inbox: Inbox, photos: Sequence[Photo], on_progress: OnProgress) -> None:
        classifier = self.model.classifier
        new = [photo for photo in photos if photo.id not in self._features and photo.id not in self._unreadable]
        for start in range(0, len(new), BATCH):
            pixels: dict[str, Tensor] = {}
            for photo in new[start : start + BATCH]:
                try:
                    picture = decode_picture(inbox.path(photo), max_pixels=MAX_PIXELS)
                    pixels[photo.id] = classifier.preprocessing.prepare(picture)
                except UnreadableImage as error:
                    self._unreadable[photo.id] = reason(error)
            if pixels:
                batch = classifier.preprocessing.normalise(torch.stack(list(pixels.values())).to(self.model.device))
                found = torch.stack(in_parts(classifier.features, classifier.backbone.arrange(batch)), dim=1).float()
                self._features.update(zip(pixels, found, strict=True))
            on_progress(Event("Computing features of photos", min(start + BATCH, len(new)), len(new)))


def known_scores(
    model: Model, known: Source, classes_from: str | None, on_progress: OnProgress
) -> npt.NDArray[np.float64]:
    """The scores of labelled images of known classes."""
    samples = samples_in(known, known=model.classes, classes_from=classes_from)
    classifier = model.classifier
    check_classes(samples.classes, classifier.space)
    images = open_images(samples, classifier.preprocessing, model.device, cache=cache_folder())
    features = extract(classifier, images, device=model.device, cache=cache_folder(),
                       fingerprint=samples.fingerprint(), on_progress=on_progress)[0]  # fmt: skip
    return energy(Outputs.of(classifier, features).logits)
