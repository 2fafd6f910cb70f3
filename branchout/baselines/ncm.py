"""Nearest class mean: a picture gets the class whose mean feature points most nearly in the direction of its own. The
network is the frozen base and nothing is trained, so nothing is forgotten either.

Source: SimpleCIL (Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023).
Departures: the base's classes have means of their exemplars only (`ncm-all`: of all their images); a class that comes
again keeps one mean for each of its looks, and the nearer one counts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from branchout.baselines import class_features
from branchout.baselines.networks import OnFeatures
from branchout.baselines.registry import Baseline
from branchout.baselines.task import Task
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import Pooler, to_norm


class NearestMean(nn.Module):
    """Cosines to the means of all columns, on the scale of our heads (16·cos)."""

    means: Tensor

    def __init__(self, space: LabelSpace, means: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.pooler = Pooler(space, "max")

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network."""
        return self.means.numel()

    def forward(self, features: Tensor) -> Tensor:
        return self.pooler(to_norm(features.flatten(1)) @ to_norm(self.means).T)  # type: ignore[no-any-return]


def learn(before: Classifier | OnFeatures, task: Task, *, everything: bool = False) -> OnFeatures:
    model, known, groups = class_features.of_base(before, task, everything=everything)
    means = torch.stack([group.mean(0) for group in groups])
    if isinstance(known, NearestMean):
        means = torch.cat([known.means, means])
    return OnFeatures(model, NearestMean(task.space, means).to(task.device))


BASELINES = (
    Baseline("ncm", "SimpleCIL (nearest class mean), exemplars", learn, on="base"),
    Baseline("ncm-all", "SimpleCIL, all base images", partial(learn, everything=True), on="base", oracle=True),
)
