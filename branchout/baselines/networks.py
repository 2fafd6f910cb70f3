"""The kinds of scorers most baselines train: a whole network, or a head on the features of a frozen model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from branchout.baselines.task import Task
from branchout.data.images import Images, in_order, on_device, shuffled
from branchout.method.new_branch import Labelled
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead, Head, new_head
from branchout.model.staged import Backbone
from branchout.training.loop import precision, seed_for

MakeHead = Callable[[Head, int], Head]
"""A head like another, for a number of classes."""
Alter = Callable[[Tensor], Tensor]
"""Changes augmented images further, a batch at a time."""


class Network(nn.Module):
    """A whole network that is trained: backbone and one head over all classes so far."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @classmethod
    def of(cls, before: Classifier | Network) -> Self:
        """A trainable copy of a network."""
        backbone = copy.deepcopy(before.backbone)
        head = copy.deepcopy(before.base_head if isinstance(before, Classifier) else before.head)
        backbone.frozen = False
        return cls(backbone.requires_grad_(True), head.requires_grad_(True))

    def widened(self, classes: int, make: MakeHead = new_head) -> Self:
        """The same network (not a copy) with head rows for more classes; earlier rows do not change."""
        known = len(self.head.weight)
        if classes > known:
            fresh = make(self.head, classes - known)
            grown = make(self.head, classes)
            with torch.no_grad():
                for name, value in grown.named_parameters():
                    old, new = self.head.get_parameter(name), fresh.get_parameter(name)
                    value.copy_(torch.cat([old.to(value.device), new.to(value.device)]))
            self.head = grown.to(old.device)
        return self

    def features(self, pictures: Tensor) -> Tensor:
        """h (N, k) in full precision; the network itself runs in the device's working precision."""
        with precision(pictures.device):
            h = self.backbone(self.backbone.arrange(pictures))
        return h.float()  # type: ignore[no-any-return]

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))  # type: ignore[no-any-return]


class OnFeatures(nn.Module):
    """A head on the features of a frozen model: (N, feature vectors, k) → (N, classes)."""

    def __init__(self, model: Classifier, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, pictures: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head(torch.stack(self.model.features(pictures), dim=1).float())  # type: ignore[no-any-return]


class ScaledBranches(nn.Module):
    """The frozen logits of all branches, each branch's scaled and shifted, then pooled: for FA+BiC and FA+WA."""

    scale: Tensor
    shift: Tensor

    def __init__(self, fused: FusedHead, scale: Sequence[float], shift: Sequence[float]) -> None:
        super().__init__()
        self.fused = fused
        widths = torch.tensor([len(names) for names in fused.space.branches])
        for name, values in (("scale", scale), ("shift", shift)):
            self.register_buffer(name, torch.repeat_interleave(torch.tensor(values), widths))

    def forward(self, features: Tensor) -> Tensor:
        z = self.fused.frozen_columns(features.unbind(1))
        return self.fused.pooler(z * self.scale + self.shift)  # type: ignore[no-any-return]


def with_scales(model: Classifier, scale: Sequence[float], shift: Sequence[float], device: torch.device) -> OnFeatures:
    return OnFeatures(model, ScaledBranches(model.fused, scale, shift)).to(device).eval()


def frozen_copy(network: nn.Module) -> nn.Module:
    """A teacher: a copy that is never trained."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def epochs_of(
    task: Task,
    labelled: Labelled,
    batch: int,
    stream: int = 0,
    alter: Alter | None = None,
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """For `fit`: epoch e's augmented batches (images, labels), every image once in random order.

    `stream` gives several streams of one training different random numbers.
    """
    targets = torch.from_numpy(labelled.labels).to(task.device)

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        seed = seed_for(task.seed, epoch, stream)
        batches = shuffled(len(targets), batch, seed, drop_last=True)
        views = labelled.images.views(batches, task.augmentation, seed)
        return zip(
            views if alter is None else map(alter, views),
            (targets[index] for index in on_device(batches, task.device)),
            strict=True,
        )

    return epoch_batches


@torch.no_grad()
def scores_of(scorer: nn.Module, images: Images, batch: int = 500) -> Tensor:
    """Scores (N, classes) of plain images."""
    scorer.eval()
    return torch.cat([scorer(pictures).float() for pictures in images.plain(in_order(len(images), batch))])
