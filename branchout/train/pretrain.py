"""Train a base model, or the oracle that sees all classes at once: the same thing with more classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.batches import Images, on_device, shuffled
from branchout.data.preprocess import Preprocessing
from branchout.model import resnet
from branchout.model.classifier import Classifier
from branchout.model.fusion import CosineHead
from branchout.train.loop import Report, fit, precision, seed_for, silent
from branchout.train.recipes import Optimisation, fitted

PAPER = Optimisation(epochs=90, lr=0.1, batch=256, weight_decay=1e-4, schedule="thirds")
"""The paper's: 90 epochs, ×0.1 every 30."""
FAST = Optimisation(epochs=40, lr=0.4, batch=512, weight_decay=5e-4, nesterov=True, schedule="cosine")
"""Ours for small images: as good in less than half the epochs."""
SCHEDULES = {"paper": PAPER, "fast": FAST}


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
    optimisation: Optimisation = FAST,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    device: torch.device,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> Classifier:
    """A network with a cosine head, trained from scratch. `labels` index `classes`.

    It sees views by `augmentation`, or by what its kind of picture declares. Without `last_relu` its features can be
    negative, as those of CIFAR's ResNet-32 in the incremental literature.
    """
    torch.manual_seed(seed)
    description: dict[str, Any] = {
        "family": "resnet",
        "name": arch,
        "stem": "small" if preprocessing.size <= 96 else "large",
        "width": width,
        "in_channels": preprocessing.channels,
    }
    if not last_relu:
        description["last_relu"] = False
    settings = {key: value for key, value in description.items() if key not in ("family", "name")}
    backbone = resnet.build(arch, **settings).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = CosineHead(backbone.features, len(classes)).to(device)
    network = nn.ModuleDict({"backbone": backbone, "head": head})
    forward = torch.compile(backbone) if device.type == "cuda" else backbone
    seen = augmentation or augment.for_kind(kind, preprocessing.size)
    optimisation = fitted(optimisation, len(images))
    targets = torch.from_numpy(labels).to(device)

    def epoch_batches(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        seed_now = seed_for(seed, epoch)
        batches = shuffled(len(images), optimisation.batch, seed_now, drop_last=True)
        views = images.views(batches, seen, seed_now)
        return zip(views, (targets[index] for index in on_device(batches, device)), strict=True)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, target = batch
        with precision(device):
            h = forward(pictures.contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(head(h.float()), target)

    network.train()
    steps = max(len(images) // optimisation.batch, 1)
    fit(
        network,
        list(network.parameters()),
        epoch_batches,
        steps,
        loss_of,
        optimisation,
        device=device,
        work="pretrain",
        checkpoint=checkpoint,
        report=report,
    )
    return Classifier(description, backbone, head, classes, preprocessing, kind)
