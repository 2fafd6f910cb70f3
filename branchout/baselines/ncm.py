"""Nearest class mean: a picture gets the class whose mean feature points most nearly in the direction of its own. The
network is the frozen base and nothing is trained, so nothing is forgotten either.

Source: SimpleCIL (Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023).
Departures: the base's classes have means of their exemplars only (`ncm-all`: of all their images). A mean of n images
is longer than the class's own by its noise, which lowers every cosine to it; so cosines to means of n images are
multiplied by what that noise is estimated to take from them on average, and classes of ten images and of five hundred
are compared fairly. A class that comes again keeps one mean for each of its looks, and the nearer one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from branchout.baselines import class_features
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Task, on_base
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler, to_norm

LEAST = 0.1
"""What is left at least of the squared length of means without their noise: a single image of a class has much."""


class NearestMean(nn.Module):
    """Products with the means of all columns, on the scale of our heads (16·cos)."""

    means: Tensor

    def __init__(self, space: LabelSpace, means: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.pooler = Pooler(space, "max")

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network."""
        return self.means.numel()

    def forward(self, features: Tensor) -> Tensor:
        return self.pooler(to_norm(features.flatten(1)) @ self.means.T)  # type: ignore[no-any-return]


def class_means(groups: Sequence[Tensor]) -> Tensor:
    """The mean of each group (n, k) at length 4, times ‖m‖ / ‖μ‖ as estimated for all groups of n images.

    E‖m‖² = ‖μ‖² + tr Σ / n, with Σ the covariance that all classes share. For a single group of two images the
    estimate would be rough, and classes whose length is underestimated would win too often.
    """
    means = torch.stack([group.mean(0) for group in groups])
    counts = torch.tensor([len(group) for group in groups]).to(means)
    spread = sum((group - mean).square().sum() for group, mean in zip(groups, means, strict=True))
    noise = spread / (counts.sum() - len(groups)).clamp(min=1) / counts
    squared = means.square().sum(1)
    alike = (counts[:, None] == counts).to(means)
    kept: Tensor = (alike @ (squared - noise) / (alike @ squared).clamp(min=1e-24)).clamp(min=LEAST)
    return to_norm(means) / kept.sqrt()[:, None]


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    model, known, groups = class_features.of_base(before, task, everything=everything)
    means = class_means(groups)
    if isinstance(known, NearestMean):
        means = torch.cat([known.means, means])
    return OnFeatures(model, NearestMean(task.space, means).to(task.device))


BASELINES = on_base("ncm", "SimpleCIL (nearest class mean)", learn)
