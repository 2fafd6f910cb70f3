"""What every baseline is given and what it gives back.

A baseline is one function, `learn(before, task) -> scorer`. `before` is the base model at the first step and at later
steps the baseline's own result of the step before. A scorer is a module that turns a batch of pictures into one score
per class, in the order of `task.space.classes`; whatever a baseline must remember for its next step is an attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images, in_order, on_device, shuffled
from branchout.data.samples import Samples
from branchout.labels import LabelSpace
from branchout.method.recipes import PAPER
from branchout.method.stage1 import Labelled
from branchout.model.classifier import Classifier
from branchout.model.heads import Head, new_head
from branchout.model.staged import Backbone
from branchout.training.loop import Report, best_device, precision, seed_for, silent
from branchout.training.optimisation import Optimisation
from branchout.training.pretrain import FAST

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """One step, as every method sees it: the same images, exemplars, schedule and augmentation as ours."""

    space: LabelSpace
    """After this step. Labels are its class numbers; those of earlier classes stay what they were."""
    new: Samples
    """All new images; their origin is the number of this step."""
    memory: Samples
    """Exemplars of every earlier class, each with its origin: 0 for the base, t for step t."""
    images: Callable[[Samples], Images]
    """Opens the pictures of a table, on the device."""
    kind: str
    size: int
    network: Optimisation = PAPER.stage_one.optimisation
    """How a network is trained in one step: as our stage I."""
    pretraining: Optimisation = FAST
    """How the base was trained, which is how an oracle is."""
    heads: Optimisation = PAPER.stage_two.optimisation
    """How a head on cached features is trained: as our stage II."""
    per_class: int = 10
    """Exemplars kept of each class; heads on cached features see as many of the new classes too."""
    views: int = 10
    """Augmented views of which features are cached."""
    everything: Samples | None = None
    """All training images of all steps so far: for oracles, and for variants named as such."""
    from_scratch: Callable[[Samples], Classifier] | None = None
    """Trains a network as the base was trained, or finds one that was trained on the same images before."""
    features: Callable[[Classifier, Samples, int, int], Tensor] | None = None
    """Features by model, pictures, number of views and seed, or finds those that another method has asked for."""
    augmented: str | None = None
    """The name of an augmentation for all training, if not the one that the kind of picture declares."""
    seed: int = 0
    device: torch.device = field(default_factory=best_device)
    report: Report = silent

    @property
    def step(self) -> int:
        return len(self.space.branches) - 1

    @property
    def augmentation(self) -> Augmentation:
        """Of pictures that train a network: as in our stage I."""
        return augment.for_kind(self.kind, self.size, few=True, named=self.augmented)

    @property
    def head_augmentation(self) -> Augmentation:
        """Of pictures whose cached features train a head: as in our stage II."""
        return augment.for_kind(self.kind, self.size, named=self.augmented)

    def labels(self, samples: Samples) -> Ints:
        """Class numbers of `space`."""
        return self.space.index(list(samples.classes))[samples.labels]

    def labelled(self, samples: Samples) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples))


class Network(nn.Module):
    """A whole network that is trained: backbone and one head over all classes so far."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @classmethod
    def of(cls, before: Classifier | Network) -> Self:
        """A copy of a network that can be trained, whatever it was before."""
        backbone = copy.deepcopy(before.backbone)
        head = copy.deepcopy(before.base_head if isinstance(before, Classifier) else before.head)
        backbone.frozen = False
        return cls(backbone.requires_grad_(True), head.requires_grad_(True))

    def widened(self, classes: int) -> Self:
        """The same network (not a copy) whose head has rows for more classes; earlier rows stay what they are."""
        known = len(self.head.weight)
        if classes > known:
            fresh = new_head(self.head, classes - known)
            grown = new_head(self.head, classes)
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


def frozen_copy(network: nn.Module) -> nn.Module:
    """A teacher: the network as it is now, which never changes again."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def epochs_of(
    task: Task, labelled: Labelled, batch: int, stream: int = 0
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """For `fit`: epoch e's augmented batches (pictures, labels), every picture once in random order.

    `stream` sets apart the randomness of several streams in one training.
    """
    targets = torch.from_numpy(labelled.labels).to(task.device)

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        seed = seed_for(task.seed, epoch, stream)
        batches = shuffled(len(targets), batch, seed, drop_last=True)
        views = labelled.images.views(batches, task.augmentation, seed)
        return zip(views, (targets[index] for index in on_device(batches, task.device)), strict=True)

    return epoch_batches


@torch.no_grad()
def scores_of(scorer: nn.Module, images: Images, batch: int = 500) -> Tensor:
    """Scores (N, classes) of plain pictures."""
    scorer.eval()
    return torch.cat([scorer(pictures).float() for pictures in images.plain(in_order(len(images), batch))])
