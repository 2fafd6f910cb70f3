"""What the stages of an extension read: the images of a step, with their labels and features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from branchout.data.images import Images, open_images
from branchout.data.samples import Samples
from branchout.labels import LabelSpace
from branchout.method.config import ExtendConfig
from branchout.method.features import extract
from branchout.method.new_branch import Labelled
from branchout.method.pseudo import Exemplars, pseudo_exemplars
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier
from branchout.training import processes
from branchout.training.loop import OnProgress, silent


class StepImages:
    """The images of one step as each stage needs them; features are cached where a folder is given."""

    def __init__(
        self,
        base: Classifier,
        split: DataSplit,
        config: ExtendConfig,
        *,
        device: torch.device,
        space: LabelSpace | None = None,
        cache: Path | None = None,
        images: Callable[[Samples], Images] | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        self.base = base.to(device)
        self.split = split
        self.config = config
        self.device = device
        self.cache = cache
        self.images = images or self.open_images
        self.on_progress = on_progress
        self.space = space or base.space.extend(split.new.classes)

    def open_images(self, samples: Samples) -> Images:
        with processes.first_on_machine():
            limit = self.config.memory_bytes
            return open_images(samples, self.base.preprocessing, self.device, cache=self.cache, memory_limit=limit)

    def labels(self, samples: Samples) -> np.ndarray:
        """Class numbers of the label space after this step."""
        return samples.labels_in(self.space)

    def labelled(self, samples: Samples) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples))

    def on_device(self, samples: Samples) -> Tensor:
        return torch.from_numpy(self.labels(samples)).to(self.device)

    def features(self, model: Classifier, samples: Samples, views: int = 0) -> Tensor:
        return extract(
            model,
            self.images(samples),
            views=views,
            seed=self.config.seed,
            device=self.device,
            cache=self.cache,
            fingerprint=samples.fingerprint(),
            on_progress=self.on_progress,
        )

    def held_out(self) -> tuple[Labelled, Labelled | None]:
        """Dev images of new classes, and of old ones; their loss decides when training ends. The second is None without
        exemplars: stage I then does not compare old logits with new ones."""
        is_new = np.isin(self.split.dev.names, self.split.new.classes)
        new, old = (self.split.dev.select(mask) for mask in (is_new, ~is_new))
        return self.labelled(new), self.labelled(old) if len(old) and self.split.memory is not None else None

    def pseudo(self, model: Classifier, seed: int, seen: Tensor) -> Exemplars:
        """Pseudo-exemplars of the old classes that have no image among the labels `seen`."""
        old = torch.from_numpy(self.space.index(self.base.space.classes)).to(self.device)
        if torch.isin(old, seen).all():
            return Exemplars(torch.empty(0), torch.empty(0), torch.empty(0))
        new = self.split.new
        # Where an exemplar was held out that was the only one of its class, no images were set aside.
        calibration = self.split.calibration or self.split.dev.of_classes(new.classes) or new
        trained, others = ((self.features(model, part)[0], self.on_device(part)) for part in (new, calibration))
        return pseudo_exemplars(model, trained, others, self.config.exemplars, seed).without(seen)
