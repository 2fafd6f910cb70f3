"""The part of the network that stage I does not train (paper, section 3.3: Φ_s, and all that earlier steps trained).

Symbols: Φ_s, Φ_b, W_b, Φ_n1, … → `Frozen` · h(x; Φ_s) → its first output · z_b, z_n1, … → its second
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images
from branchout.labels import Ints
from branchout.method.recipes import Stage1
from branchout.model.classifier import Classifier
from branchout.training import processes
from branchout.training.device import giving_back
from branchout.training.forward import in_full_batches
from branchout.training.loop import precision
from branchout.training.out_of_memory import in_parts


class Frozen:
    """Trunk, earlier branches and their heads, in eval mode and without gradients; what they see is augmented."""

    def __init__(
        self,
        model: Classifier,
        start: int,
        settings: Stage1,
        *,
        augmentation: Augmentation | None = None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.start = start
        self.logits = settings.replay
        self.device = device
        if augmentation is None:
            augmentation = augment.for_kind(model.kind, model.preprocessing.size, few=True)
            if settings.replay:
                augmentation = replace(augmentation, hue=min(augmentation.hue, settings.most_hue))
        self.augmentation = augmentation

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[Tensor]:
        """What enters the new branch, and with replay the logits of all earlier branches; otherwise no columns."""
        if self.logits:
            x, features = self.run(images)
            return [x, self.model.fused.frozen_columns(features)]
        images = self.model.backbone.arrange(images)
        with precision(self.device):
            return [self.model.activations(images, [self.start])[self.start], images.new_empty(len(images), 0)]

    def run(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What enters the new branch, and the features of all earlier branches."""
        model = self.model
        with precision(self.device):
            passed = model.activations(model.backbone.arrange(images), [self.start, *model.feature_starts])
            features = model.features_from(passed)
        return passed[self.start], [h.float() for h in features]

    def close(self) -> None:
        """Give back what another engine than torch keeps in memory, until it runs again."""
        if self.model.engine is not None:
            self.model.engine.close()

    def live(
        self, images: Images, order: Sequence[Ints], seed: int, *, full_batches: bool = False
    ) -> Iterator[list[Tensor]]:
        """The outputs for each batch; `full_batches` where their sizes differ."""
        run = in_full_batches if full_batches else in_parts
        for batch in giving_back(images.views(order, self.augmentation, seed, processes.part())):
            yield [output[: len(batch)] for output in run(self, processes.never_empty(batch))]
