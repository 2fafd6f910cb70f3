"""Train a base model from scratch: M_b of the paper, or the joint oracle, which is the same with all classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images, on_device, shuffled
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, unknown
from branchout.model import architectures, bases
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.progress import OnProgress, silent
from branchout.training import processes
from branchout.training.loop import fit, precision, seed_for
from branchout.training.optimisation import Optimisation, scale_to_dataset

PAPER = Optimisation(epochs=90, lr=0.1, batch=256, weight_decay=1e-4, schedule="thirds")
"""The paper's: 90 epochs, ×0.1 every 30."""
FAST = Optimisation(epochs=40, lr=0.4, batch=512, weight_decay=5e-4, nesterov=True, schedule="cosine")
"""Ours for small images: as good in less than half the epochs."""
TRANSFORMER = Optimisation(epochs=60, lr=1e-3, batch=512, weight_decay=0.05, schedule="cosine", optimiser="adamw")
"""Ours for vision transformers, which need more epochs and another optimiser."""
SCHEDULES = {"paper": PAPER, "fast": FAST}


def schedule_for(arch: str, name: str = "fast") -> Optimisation:
    """The schedule of this name for a network; transformers have only `fast`, with settings of their own."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    if not architectures.is_transformer(arch):
        return SCHEDULES[name]
    only_fast(arch, name)
    return TRANSFORMER


def only_fast(arch: str, name: str) -> None:
    """Refuse schedules that were made for ResNets for a transformer, which would hardly learn with them."""
    if architectures.is_transformer(arch) and name != "fast":
        raise BranchoutError(
            f"The schedule {name!r} has settings of SGD for ResNets, with which {arch} hardly learns. Use --schedule "
            f"fast: AdamW for {TRANSFORMER.epochs} epochs, or as many as --epochs says"
        )


def pretrain(
    images: Images,
    labels: np.ndarray,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    *,
    arch: str = "resnet10",
    width: int | None = None,
    last_relu: bool = True,
    kind: str = "photo",
    optimisation: Optimisation | None = None,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    device: torch.device,
    checkpoint: Path | None = None,
    on_progress: OnProgress = silent,
) -> Classifier:
    """A network with a cosine head, trained from scratch. `labels` index `classes`.

    It is trained on augmented views, by default those of its kind of image. Without `last_relu` its features can be
    negative, as those of CIFAR's ResNet-32 in the incremental literature. The schedule is the network's own `fast` one
    if none is given.
    """
    torch.manual_seed(seed)
    description = architectures.describe(arch, preprocessing, width=width, last_relu=last_relu)
    backbone, _ = bases.rebuild(description)
    backbone = backbone.to(device, memory_format=backbone.layout(device))  # type: ignore[call-overload]
    head = CosineHead(backbone.features, len(classes)).to(device)
    network = nn.ModuleDict({"backbone": backbone, "head": head})
    forward = torch.compile(backbone) if device.type == "cuda" and processes.count() == 1 else backbone
    seen = augmentation or augment.for_kind(kind, preprocessing.size)
    optimisation = scale_to_dataset(optimisation or schedule_for(arch), len(images))
    targets = torch.from_numpy(labels).to(device)

    def epoch_batches(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        seed_now = seed_for(seed, epoch)
        batches = shuffled(len(images), optimisation.batch, seed_now, drop_last=True)
        views = images.views(batches, seen, seed_now, processes.part())
        return zip(views, (targets[index] for index in on_device(batches, device)), strict=True)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        with precision(device):
            h = forward(backbone.arrange(pictures))
        return F.cross_entropy(head(processes.gather(h.float(), [len(target)])), target)

    fit(
        network.train(),
        list(network.parameters()),
        epoch_batches,
        max(len(images) // optimisation.batch, 1),
        loss_of,
        optimisation,
        device=device,
        work="Training the base model",
        checkpoint=checkpoint,
        split=_split,
        on_progress=on_progress,
    )
    return Classifier(description, backbone, head, classes, preprocessing, kind)


def _split(batch: tuple[Tensor, Tensor], parts: int) -> Iterable[tuple[float, tuple[Tensor, Tensor]]]:
    """Parts of a batch of images and targets, with the weight of each in the loss."""
    pictures, target = batch
    for rows in processes.divided([len(target)], parts):
        yield len(rows.whole) / len(target), (pictures[rows.own], target[rows.whole])
