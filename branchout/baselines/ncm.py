"""Nearest class mean: a picture gets the class whose mean feature points most nearly in the direction of its own. The
network is the frozen base and nothing is trained, so nothing is forgotten either.

Source: SimpleCIL (Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023).
Departures: the base's classes have means of their exemplars only (`ncm-all`: of all their images). A mean of n images
is longer than the class's own by its noise, which lowers every cosine to it; so it is divided by the length that the
true mean is estimated to have, and classes of ten images and of five hundred are compared fairly. A class that comes
again keeps one mean for each of its looks, and the nearer one counts.
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
from branchout.model.heads import NORM, Pooler, to_norm

LEAST = 0.1
"""What is left at least of a mean's squared length without its noise: the estimate is rough where images are few."""


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
    """The mean of each group (n, k), divided by the estimated length of its class's true mean, times 4.

    E‖m‖² = ‖μ‖² + tr Σ / n, with Σ the covariance that all classes share.
    """
    means = torch.stack([group.mean(0) for group in groups])
    counts = torch.tensor([len(group) for group in groups]).to(means)
    spread = sum((group - mean).square().sum() for group, mean in zip(groups, means, strict=True))
    noise = spread / (counts.sum() - len(groups)).clamp(min=1) / counts
    squared = means.square().sum(1)
    return NORM * means / torch.maximum(squared - noise, LEAST * squared).clamp(min=1e-24).sqrt()[:, None]


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    model, known, groups = class_features.of_base(before, task, everything=everything)
    means = class_means(groups)
    if isinstance(known, NearestMean):
        means = torch.cat([known.means, means])
    return OnFeatures(model, NearestMean(task.space, means).to(task.device))


BASELINES = on_base("ncm", "SimpleCIL (nearest class mean)", learn)
