"""FOSTER, feature boosting and compression: a second network fits what the frozen one gets wrong, and both are then
distilled into one network, so that every step ends with a single backbone.

Source: Wang, Zhou, Ye and Zhan, ECCV 2022; β₁ = 0.96, β₂ = 0.97, temperature 2, equal weights of the three losses, and
a new module and a student that start at the old network are from their published experiments. As published the base
has a linear head with bias, features enter the head as they are, rows of new classes start at random on both networks'
features, β₁ grows with the number of exemplars, photos are changed by AutoAugment and Cutout, the base has 200 epochs,
the stages 170 and 130, and compression no weight decay. Departures of the default, which starts from the shared base:
the stages have the schedule of the task; rows of new classes start at zero on the old features; and features are
brought to length 4 where the base has a cosine head, so that the old rows start with the old logits. Departures of
both: a step's accuracy is that of the compressed network, and an overlapping class has one row.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import whole_network
from branchout.baselines.auto_augment import auto_augmented
from branchout.baselines.networks import Alter, Network
from branchout.baselines.published_training import first, linear_head, random_rows, scaled
from branchout.baselines.task import Baseline, Published, Task
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead, head_bias, new_head, to_norm
from branchout.training.optimisation import Optimisation

BOOSTING, COMPRESSION = 0.96, 0.97
"""β₁ and β₂: how strongly the number of images of a class counts in either stage."""
BASE, BOOST, COMPRESS = (
    Optimisation(epochs, lr=0.1, batch=128, weight_decay=decay, schedule="plain-cosine")
    for epochs, decay in ((200, 5e-4), (170, 5e-4), (130, 0.0))
)
"""The three trainings as published."""


class Boosted(nn.Module):
    """The frozen old network and a new one side by side, with one linear head on the features of both."""

    def __init__(self, old: Network, classes: int, *, published: bool = False) -> None:
        super().__init__()
        self.old = old
        self.cosine = isinstance(old.head, CosineHead)
        self.fresh = copy.deepcopy(old.backbone).requires_grad_(True)
        self.fresh.frozen = False
        old.backbone.freeze()
        known, k = old.head.weight.shape
        bias = head_bias(old.head)
        make = random_rows if published else nn.Linear
        self.head = make(2 * k, classes, bias=bias is not None)
        self.enhancing = make(k, classes, bias=published)
        """A head on the new features alone; used in training only."""
        with torch.no_grad():
            if not published:
                self.head.weight[:, :k] = 0.0  # what the old network knows says nothing of new classes
            self.head.weight[:known, :k] = to_norm(old.head.weight) if self.cosine else old.head.weight
            if bias is not None:
                self.head.bias[:known] = bias

    def features(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, k) of the old and of the new network."""
        with torch.no_grad():
            old = self.old.features(pictures)
        new = Network(self.fresh, self.head).features(pictures)
        return (to_norm(old), to_norm(new)) if self.cosine else (old, new)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(torch.cat(self.features(pictures), dim=1))  # type: ignore[no-any-return]


def learn(before: Classifier | Network, task: Task, *, published: bool = False) -> Network:
    student, old = whole_network.student_and_teacher(before, task, linear_head if published else new_head)
    images = whole_network.new_and_exemplars(task)
    counts = np.bincount(task.labels(images), minlength=len(task.space.classes))
    teacher = boost(old, task, counts, published=published)
    weights = class_weights(counts, COMPRESSION).to(task.device)

    def loss_of(pictures: Tensor, _: Tensor) -> Tensor:
        return balanced_distillation(student(pictures), teacher(pictures), weights)

    stage, alter = as_published(COMPRESS, task) if published else (None, None)
    whole_network.train(student, task, images, loss_of, "compress into one network", stage, alter=alter)
    return student


def boost(old: Network, task: Task, counts: np.ndarray, *, published: bool = False) -> nn.Module:
    """The first stage: the new network fits the residual of the old one."""
    boosted = Boosted(old, len(task.space.classes), published=published).to(task.device)
    beta = boosting_beta(counts[: len(old.head.weight)]) if published else BOOSTING
    weights = class_weights(counts, beta).to(task.device)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        features = boosted.features(pictures)
        z, enhanced = boosted.head(torch.cat(features, dim=1)), boosted.enhancing(features[1])
        return boosting_loss(z, enhanced, old(pictures), target, weights)

    stage, alter = as_published(BOOST, task) if published else (None, None)
    images = whole_network.new_and_exemplars(task)
    whole_network.train(boosted, task, images, loss_of, "Training a new module", stage, alter=alter)
    return boosted.requires_grad_(False)


def as_published(stage: Optimisation, task: Task) -> tuple[Optimisation, Alter | None]:
    """The training of a stage, and how it changes photos beyond the task's augmentation."""
    alter = auto_augmented(task.preprocessing) if task.preprocessing and task.kind == "photo" else None
    return scaled(stage, task.network), alter


def first_as_published(task: Task) -> Network:
    optimisation, alter = as_published(BASE, task)
    return first(task, bias=True, optimisation=optimisation, alter=alter)


def boosting_beta(old_counts: np.ndarray) -> float:
    """β₁ by the exemplars of an old class as in their settings: 0.98 for 200, 0.975 for 100, … 0.94 for 22 or fewer."""
    return float(max(0.985 - 1 / max(old_counts.min(), 1), 0.94))


def class_weights(counts: np.ndarray, beta: float) -> Tensor:
    """One over the effective number of images of each class, (1 - β) / (1 - βⁿ), with mean 1."""
    weights = (1 - beta) / (1 - np.power(beta, np.maximum(counts, 1)))
    return torch.from_numpy(weights / weights.mean()).float()


def boosting_loss(z: Tensor, enhanced: Tensor, remembered: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Logits alignment + feature enhancement + distillation of the classes known before.

    Alignment divides each logit by its class's weight in training: rows of new classes, of which there are many images,
    need not grow longer than those of old ones.
    """
    aligned = F.cross_entropy(z / weights, target)
    known = remembered.shape[1]
    return aligned + F.cross_entropy(enhanced, target) + whole_network.distillation(z[:, :known], remembered)


def balanced_distillation(
    student: Tensor, teacher: Tensor, weights: Tensor, temperature: float = whole_network.TEMPERATURE
) -> Tensor:
    """Cross-entropy to the teacher's probabilities, which are first multiplied by the class weights."""
    taught = F.softmax(teacher / temperature, dim=1) * weights
    return F.cross_entropy(student / temperature, taught / taught.sum(1, keepdim=True))


BASELINES = (
    Baseline(
        "foster", "FOSTER", learn, on="network", published=Published(first_as_published, partial(learn, published=True))
    ),
)
