"""RM, Rainbow Memory: batches are half new images and half exemplars, mixed with CutMix; and exemplars are spread
evenly from those the network is sure of, however they are perturbed, to those it is not.

Source: Bang et al., CVPR 2021; CutMix in every second batch with α = 1 and twelve perturbed copies are theirs.
Departures: `rainbow` takes the exemplars that everybody is given, and only `rainbow-own` those that this rule keeps of
the base's images; the task's augmentation takes the place of AutoAugment, in training and for the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import Network, epochs_of
from branchout.baselines.task import Baseline, Task
from branchout.data.memory import keep
from branchout.data.samples import Samples
from branchout.errors import DoesNotApply
from branchout.model.classifier import Classifier
from branchout.training.loop import fit, seed_for
from branchout.training.optimisation import scale_to_dataset

MIXED = 0.5
"""How many batches are mixed."""
COPIES = 12
"""Perturbed copies of an image whose predictions are compared."""

Mixed = tuple[Tensor, Tensor, Tensor, float]
"""Images, their labels, the labels of the pasted regions, and the share of each image that is its own."""


def learn(before: Classifier | Network, task: Task, *, own_memory: bool = False) -> Network:
    network, teacher = whole_network.student_and_teacher(before, task)
    if own_memory:
        task = replace(task, memory=kept(teacher, task))
    optimisation = scale_to_dataset(task.network, len(task.new) + len(task.memory))
    half = max(optimisation.batch // 2, 1)
    stream = epochs_of(task, task.labelled(task.new), half, stream=0)
    memory = epochs_of(task, task.labelled(task.memory), half, stream=1) if len(task.memory) else None

    def exemplar_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert memory is not None
        for turn in count():
            yield from memory(seed_for(epoch, turn))

    def epoch_batches(epoch: int) -> Iterator[Mixed]:
        rng = np.random.default_rng(seed_for(task.seed, epoch, 2))
        if memory is None:
            batches = stream(epoch)
        else:
            pairs = zip(stream(epoch), exemplar_batches(epoch), strict=False)
            batches = ((torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs)
        for pictures, target in batches:
            yield cutmix(pictures, target, rng) if rng.random() < MIXED else (pictures, target, target, 1.0)

    def loss_of(batch: Mixed) -> Tensor:
        pictures, target, pasted, share = batch
        z = network(pictures)
        return share * F.cross_entropy(z, target) + (1 - share) * F.cross_entropy(z, pasted)

    network.train()
    fit(
        network,
        list(network.parameters()),
        epoch_batches,
        max(len(task.new) // half, 1),
        loss_of,
        optimisation,
        device=task.device,
        work="Training the network",
        on_progress=task.on_progress,
    )
    return network.eval()


def kept(network: Network, task: Task) -> Samples:
    """As many of the base's images as everybody has, by how sure the base model is of them."""
    if task.step > 1:
        raise DoesNotApply(
            "rainbow-own chooses exemplars among the base's images, so it runs with one step only; use rainbow instead"
        )
    everything = feature_heads.everything(task)
    earlier = everything.select(everything.origin < task.step)
    answers = (
        whole_network.augmented_outputs(lambda pictures: network(pictures).argmax(1), task, earlier, COPIES)
        .cpu()
        .numpy()
    )
    return keep(earlier, per_class=task.per_class, rule="uncertainty", rows=answers.T)


def cutmix(pictures: Tensor, target: Tensor, rng: np.random.Generator, alpha: float = 1.0) -> Mixed:
    """Paste the same box into every picture of a batch from another; labels are shared as the area is.

    All is drawn on the host: numbers that come from the device, or go there, would make it wait.
    """
    height, width = pictures.shape[2:]
    side = np.sqrt(1 - rng.beta(alpha, alpha))
    middle = rng.integers((height, width))
    (top, left), (bottom, right) = (
        np.clip(middle + sign * (np.array([height, width]) * side).astype(int) // 2, 0, (height, width))
        for sign in (-1, 1)
    )
    away = int(rng.integers(1, max(len(pictures), 2)))  # batches are in random order, so any distance will do
    mixed = pictures.clone()
    mixed[:, :, top:bottom, left:right] = pictures[:, :, top:bottom, left:right].roll(away, 0)
    return mixed, target, target.roll(away, 0), 1 - float((bottom - top) * (right - left)) / (height * width)


BASELINES = (
    Baseline("rainbow", "RM", learn, on="network"),
    Baseline("rainbow-own", "RM, its own memory", partial(learn, own_memory=True), on="network"),
)
