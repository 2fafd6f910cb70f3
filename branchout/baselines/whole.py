"""What the methods share that train a whole network: where it starts, what it sees, its teacher and its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import heads
from branchout.baselines.common import Network, Task, epochs_of, frozen_copy
from branchout.data.images import in_order
from branchout.data.samples import Samples, concatenate
from branchout.method.stage1 import Labelled
from branchout.model.classifier import Classifier
from branchout.training.loop import fit, seed_for
from branchout.training.optimisation import scale_to_dataset

TEMPERATURE = 2.0
"""Of distillation: LwF's, which iCaRL's successors, BiC and WA kept."""


def student_and_teacher(before: Classifier | Network, task: Task) -> tuple[Network, Network]:
    """The network with rows for the new classes, to be trained, and the network as it was, frozen."""
    heads.seeded(task)
    network = Network.of(before)
    network.to(task.device, memory_format=network.backbone.layout(task.device))  # type: ignore[call-overload]
    teacher = cast(Network, frozen_copy(network))
    return network.widened(len(task.space.classes)), teacher


def replayed(task: Task) -> Samples:
    """New images and exemplars in one table, so that every image is seen once an epoch."""
    return concatenate([task.new, task.memory]) if len(task.memory) else task.new


def taught(task: Task) -> Tensor:
    """The numbers of the classes that this step brings, those known already among them."""
    return torch.from_numpy(task.space.index(task.space.branches[-1])).to(task.device)


def place_among_taught(task: Task) -> Tensor:
    """For each class its place among those that this step brings; 0 for others."""
    classes = taught(task)
    place = torch.zeros(len(task.space.classes), dtype=torch.int64, device=task.device)
    place[classes] = torch.arange(len(classes), device=task.device)
    return place


def is_taught(task: Task) -> Tensor:
    """For each class whether this step brings it."""
    mask = torch.zeros(len(task.space.classes), dtype=torch.bool, device=task.device)
    mask[taught(task)] = True
    return mask


def known_share(task: Task) -> float:
    """λ of BiC and WA: old classes / (old + new). A class that comes again counts on both sides."""
    known = len(task.space.upto(task.step - 1).classes)
    return known / (known + len(task.space.branches[-1]))


def distillation(student: Tensor, teacher: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """KL from the teacher's softened answers to the student's; its gradient is that of the cross-entropy they write."""
    log_p, log_q = F.log_softmax(student / temperature, dim=1), F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def remembering(student: nn.Module, teacher: nn.Module, task: Task) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """The loss of BiC and WA: distillation of the classes known before weighs λ, cross-entropy over all 1 − λ."""
    known = len(task.space.upto(task.step - 1).classes)
    share = known_share(task)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        with torch.no_grad():
            remembered = teacher(pictures)
        z = student(pictures)
        return share * distillation(z[:, :known], remembered) + (1 - share) * F.cross_entropy(z, target)

    return loss_of


def train(
    network: nn.Module,
    task: Task,
    labelled: Labelled,
    loss_of: Callable[[tuple[Tensor, Tensor]], Tensor],
    work: str = "train the network",
) -> None:
    """Train all of a network that is not frozen, BatchNorm's statistics too, on augmented views."""
    optimisation = scale_to_dataset(task.network, len(labelled.labels))
    network.train()
    fit(
        network,
        [parameter for parameter in network.parameters() if parameter.requires_grad],
        epochs_of(task, labelled, optimisation.batch),
        max(len(labelled.labels) // optimisation.batch, 1),
        loss_of,
        optimisation,
        device=task.device,
        work=work,
        report=task.report,
    )
    network.eval()


@torch.no_grad()
def views_of(outputs: Callable[[Tensor], Tensor], task: Task, samples: Samples, views: int | None = None) -> Tensor:
    """What a network in eval mode makes of `views` augmented views of each picture: (views, N, …)."""
    images = task.images(samples)
    batches = in_order(len(samples), 500)
    rounds = (
        images.views(batches, task.head_augmentation, seed_for(task.seed, view))
        for view in range(task.views if views is None else views)
    )
    return torch.stack([torch.cat([outputs(pictures) for pictures in each]) for each in rounds])


@torch.no_grad()
def plain(outputs: Callable[[Tensor], Tensor], task: Task, samples: Samples) -> Tensor:
    """What a network in eval mode makes of the plain pictures: (N, …)."""
    batches = in_order(len(samples), 500)
    return torch.cat([outputs(pictures) for pictures in task.images(samples).plain(batches)])
