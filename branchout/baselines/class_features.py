"""Features of a frozen network, class by class, for methods that describe a class by statistics of its features.

There is one group for every column of the label space. An overlapping class has one group for each step that has images
of it: the groups are described separately and pooled like its columns.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.labels import branch_name
from branchout.model.classifier import Classifier

Describe = Callable[[Samples], Tensor]
"""Samples → features (N, k)."""


def plain(model: Classifier, task: Task) -> Describe:
    """The base's features of plain images."""
    return lambda samples: feature_heads.cached(model, task, samples, views=0).features[0, :, 0]


def of_base(
    before: Classifier | OnFeatures, task: Task, *, everything: bool
) -> tuple[Classifier, nn.Module | None, list[Tensor]]:
    """The frozen base, the head of the step before (None at the first step), and features of each new column."""
    model = before if isinstance(before, Classifier) else before.model
    known = None if isinstance(before, Classifier) else before.head
    return model, known, new_groups(task, plain(model, task), first=known is None, everything=everything)


def new_groups(task: Task, describe: Describe, *, first: bool, everything: bool = False) -> list[Tensor]:
    """Features (n, k) for each column that is not described yet: those of this step, at the first the base's as well.

    The base's classes are known by their exemplars, or with `everything` by all their training images.
    """
    groups: list[Tensor] = []
    for branch in [0, task.step] if first else [task.step]:
        samples = task.new
        if branch == 0:
            known = feature_heads.everything(task) if everything else task.memory
            samples = known.select(known.origin == 0)
        kept = dict.fromkeys(samples.classes)
        missing = [name for name in task.space.branches[branch] if name not in kept]
        if missing:
            raise BranchoutError(
                f"{branch_name(branch)} knows {missing[0]!r}, but no image of it was given, and this method describes "
                "every class by its images: keep at least one exemplar of each class"
            )
        features, labels = describe(samples), task.labels(samples)
        groups += [features[labels == number] for number in task.space.index(task.space.branches[branch])]
    return groups
