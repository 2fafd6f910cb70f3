"""Shared by the methods that train a whole network: its start, its teacher, its images, distillation and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.feature_heads import Cached
from branchout.baselines.networks import Alter, MakeHead, Network, epochs_of, frozen_copy
from branchout.baselines.task import Task
from branchout.data.images import in_order
from branchout.data.samples import Samples, concatenate
from branchout.labels import Ints
from branchout.model.classifier import Classifier
from branchout.model.heads import new_head
from branchout.training.loop import fit, seed_for, warm_up_epochs
from branchout.training.losses import softened_kl
from branchout.training.optimisation import Optimisation, scale_to_dataset

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of images and their labels."""
TEMPERATURE = 2.0
"""Of distillation: LwF's, which iCaRL's successors, BiC and WA kept."""


def student_and_teacher(before: Classifier | Network, task: Task, make: MakeHead = new_head) -> tuple[Network, Network]:
    """The network with rows for the new classes, to be trained, and the network as it was, frozen."""
    feature_heads.seed_step(task)
    network = Network.of(before)
    network.to(task.device, memory_format=network.backbone.layout(task.device))  # type: ignore[call-overload]
    teacher = cast(Network, frozen_copy(network))
    return network.widened(len(task.space.classes), make), teacher


def new_and_exemplars(task: Task) -> Samples:
    """New images and exemplars in one table, so that every image is seen once an epoch."""
    return concatenate([task.new, task.memory]) if len(task.memory) else task.new


def first_of_each(samples: Samples, number: int) -> Ints:
    """The first exemplars of each class and origin: the best, where they were herded."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, group in enumerate(zip(samples.labels.tolist(), samples.origin.tolist(), strict=True)):
        places.setdefault(group, []).append(place)
    return np.concatenate([each[:number] for each in places.values()])


def step_classes(task: Task) -> Tensor:
    """Class numbers of this step, overlapping classes included."""
    return torch.from_numpy(task.space.index(task.space.branches[-1])).to(task.device)


def place_in_step(task: Task) -> Tensor:
    """For each class its place among the classes of this step; 0 for others."""
    classes = step_classes(task)
    place = torch.zeros(len(task.space.classes), dtype=torch.int64, device=task.device)
    place[classes] = torch.arange(len(classes), device=task.device)
    return place


def new_or_other(task: Task) -> Tensor:
    """For each class its place among the classes of this step, from 1 on; 0 for any other class."""
    return torch.where(in_step(task), 1 + place_in_step(task), 0)


def in_step(task: Task) -> Tensor:
    """A mask of the classes of this step."""
    mask = torch.zeros(len(task.space.classes), dtype=torch.bool, device=task.device)
    mask[step_classes(task)] = True
    return mask


def old_share(task: Task) -> float:
    """λ of BiC and WA: old classes / (old + new). An overlapping class counts on both sides."""
    known = len(task.space.upto(task.step - 1).classes)
    return known / (known + len(task.space.branches[-1]))


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """KL from the teacher's softened predictions to the student's."""
    return softened_kl(teacher, student, TEMPERATURE)


def distillation_loss(student: nn.Module, teacher: nn.Module, task: Task) -> Loss:
    """The loss of BiC and WA: distillation of the classes known before weighs λ, cross-entropy over all 1 − λ."""
    known = len(task.space.upto(task.step - 1).classes)
    share = old_share(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        z = student(pictures)
        return share * distillation(z[:, :known], teacher(pictures)) + (1 - share) * F.cross_entropy(z, target)

    return loss_of


def with_auxiliary(z: Tensor, auxiliary: Tensor, target: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy over all classes, and on the newest features over the classes of this step and "any other"."""
    return F.cross_entropy(z, target) + F.cross_entropy(auxiliary, answers[target])


def train(
    network: nn.Module,
    task: Task,
    samples: Samples,
    loss_of: Loss,
    work: str = "Training the network",
    optimisation: Optimisation | None = None,
    *,
    statistics: bool = True,
    alter: Alter | None = None,
    redrawn: Sequence[nn.Linear] = (),
) -> None:
    """Train all parameters that are not frozen on augmented views of these images; `statistics`: BatchNorm's too.

    `redrawn`: heads that start at random once more after the warm-up.
    """
    labelled = task.labelled(samples)
    optimisation = scale_to_dataset(optimisation or task.network, len(labelled.labels))
    drawn = warm_up_epochs(optimisation)
    batches_of = epochs_of(task, labelled, optimisation.batch, alter=alter)

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for head in redrawn if 0 < drawn == epoch else ():
            head.reset_parameters()
        return batches_of(epoch)

    network.train()
    for module in () if statistics else network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    fit(
        network,
        [parameter for parameter in network.parameters() if parameter.requires_grad],
        epoch_batches,
        max(len(labelled.labels) // optimisation.batch, 1),
        lambda batch: loss_of(*batch),
        optimisation,
        device=task.device,
        work=work,
        on_progress=task.on_progress,
    )
    network.eval()


@torch.no_grad()
def augmented_outputs(
    outputs: Callable[[Tensor], Tensor], task: Task, samples: Samples, views: int | None = None
) -> Tensor:
    """The outputs of a network in eval mode for `views` augmented views of each image: (views, N, …)."""
    images = task.images(samples)
    batches = in_order(len(samples), 500)
    rounds = (
        images.views(batches, task.head_augmentation, seed_for(task.seed, view))
        for view in range(task.views if views is None else views)
    )
    return torch.stack([torch.cat([outputs(pictures) for pictures in each]) for each in rounds])


@torch.no_grad()
def plain_outputs(outputs: Callable[[Tensor], Tensor], task: Task, samples: Samples) -> Tensor:
    """The outputs of a network in eval mode for plain images: (N, …)."""
    batches = in_order(len(samples), 500)
    return torch.cat([outputs(pictures) for pictures in task.images(samples).plain(batches)])


def balanced_views(network: nn.Module, task: Task) -> Cached:
    """Features of augmented views of as many images of each class, old or new, as of any other."""
    samples = feature_heads.balanced(task)
    features = augmented_outputs(network.features, task, samples).unsqueeze(2)  # type: ignore[arg-type]
    return Cached.of(features, task, samples)
