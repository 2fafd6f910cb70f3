"""A loaded model that predicts and explains, and what it takes: images, folders, samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from branchout.api.sources import Source, samples_in
from branchout.data.decode import decode_picture
from branchout.data.images import Images, open_images
from branchout.data.preprocess import Picture
from branchout.data.samples import Samples
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError, whole_number
from branchout.evaluate.compare import logits
from branchout.evaluate.explain import Explanation, LabelledFeatures, explain
from branchout.method.features import extract
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.progress import OnProgress, silent
from branchout.training.loop import best_device

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Image = str | PathLike[str] | np.ndarray
"""An image file, or an array (height × width × channels, uint8)."""
Several = Iterable[Image]
Prediction = list[tuple[str, float]]
"""Class names and probabilities, the most probable first."""


def some_of(files: Sequence[PathLike[str]], most: int = 256) -> list[PathLike[str]]:
    """All files, or at most this many at even distances."""
    return [files[n * len(files) // min(most, len(files))] for n in range(min(most, len(files)))]


def picture_of(image: Image) -> Picture:
    return image if isinstance(image, np.ndarray) else decode_picture(image)


def is_one_image(images: Image | Several) -> TypeIs[Image]:
    """Whether it is a file or an array of one image; an array with a fourth dimension holds several images."""
    return isinstance(images, str | PathLike) or (isinstance(images, np.ndarray) and images.ndim <= 3)


class Predictor:
    """A classifier on its device; `Model` adds all that changes, measures or shares it."""

    def __init__(self, saved: SavedModel, folder: Path | None, device: torch.device | None = None) -> None:
        self.saved = saved
        self.folder = folder
        self.device = device or best_device()
        self.classifier = saved.model().on_device(self.device)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.classifier.space.classes

    def _images(self, samples: Samples) -> Images:
        return open_images(samples, self.classifier.preprocessing, self.device, cache=cache_folder())

    def _before(self) -> Classifier | None:
        """The classifier before its last step."""
        steps = len(self.classifier.steps)
        return self.saved.model(steps - 1).to(self.device) if steps else None

    def _check_flip(self, flip: bool) -> None:
        if flip and self.classifier.kind == "glyph":
            raise BranchoutError("A mirrored character is another character: --flip is for photographs")

    @overload
    def predict(self, images: Image, *, top: int = 5, flip: bool = False) -> Prediction: ...  # type: ignore[overload-overlap]

    @overload
    def predict(self, images: Several, *, top: int = 5, flip: bool = False) -> list[Prediction]: ...

    def predict(self, images: Image | Several, *, top: int = 5, flip: bool = False) -> Prediction | list[Prediction]:
        """The most probable classes of an image; a list of such lists for several. `flip` averages with the mirror."""
        if is_one_image(images):
            return self.predict([images], top=top, flip=flip)[0]
        self._check_flip(flip)
        top = whole_number("top", top, 1)
        how, everything = self.classifier.preprocessing, list(images)
        predictions: list[Prediction] = []
        for start in range(0, len(everything), 64):
            pixels = torch.stack([how.prepare(picture_of(image)) for image in everything[start : start + 64]])
            probabilities = logits(self.classifier, how.normalise(pixels.to(self.device)), flip).softmax(1)
            best = probabilities.topk(min(top, len(self.classes)), dim=1)
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                predictions.append([(self.classes[c], p) for p, c in zip(values, indices, strict=True)])
        return predictions

    @overload
    def explain(  # type: ignore[overload-overlap]
        self,
        images: Image,
        *,
        top: int = 3,
        expect: str | None = None,
        memory: Source | None = None,
        nearest: int = 5,
        on_progress: OnProgress = silent,
    ) -> Explanation: ...

    @overload
    def explain(
        self,
        images: Several,
        *,
        top: int = 3,
        expect: str | None = None,
        memory: Source | None = None,
        nearest: int = 5,
        on_progress: OnProgress = silent,
    ) -> list[Explanation]: ...

    def explain(
        self,
        images: Image | Several,
        *,
        top: int = 3,
        expect: str | None = None,
        memory: Source | None = None,
        nearest: int = 5,
        on_progress: OnProgress = silent,
    ) -> Explanation | list[Explanation]:
        """How the logits of an image come about; a list of explanations for several images.

        With `expect`, a class, also why it did not win. With `memory`, labelled images, it also names those whose
        features are nearest.
        """
        if is_one_image(images):
            return self.explain(
                [images], top=top, expect=expect, memory=memory, nearest=nearest, on_progress=on_progress
            )[0]
        labelled = None
        if memory is not None:
            samples = samples_in(memory)
            features = extract(self.classifier, self._images(samples), device=self.device, on_progress=on_progress)[0]
            labelled = LabelledFeatures(features, samples.ids.tolist(), samples.names.tolist(), nearest)
        before, how = self._before(), self.classifier.preprocessing
        pixels = (how.normalise(how.prepare(picture_of(image))[None].to(self.device)) for image in images)
        return [explain(self.classifier, before, each, top=top, expect=expect, labelled=labelled) for each in pixels]

    def features(self, samples: Samples, *, on_progress: OnProgress = silent) -> np.ndarray:
        """The base's penultimate features of every sample: one row each."""
        found = extract(self.classifier, self._images(samples), device=self.device, on_progress=on_progress)
        return np.asarray(found[0, :, 0].cpu())
