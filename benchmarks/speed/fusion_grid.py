"""The α×β grid of stage II: all 36 points in one pass on cached features, against two other ways.

`published`: every point alone, the frozen network run again on augmented images in every epoch. Measured for a few
points (on a CPU for some epochs) and multiplied. Its images are on the device already and are augmented there; a second
figure reads them through torchvision's transforms and a DataLoader, as most published code does. Accuracies of both on
other images of the same classes show that they train the same.

`one point`: a single point on the same cached features, for 180+20 and 800+40 classes; features are random.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.common import Rows, Settings, base_model, compared, in_turns
from branchout.baselines.networks import Network
from branchout.data import augment
from branchout.data.images import ResidentImages, class_balanced, shuffled
from branchout.labels import LabelSpace
from branchout.method.features import extract
from branchout.method.recipes import GRID, REFERENCE
from branchout.method.score_fusion import HeadLayout, Stage2Data, fused_columns, head_layout, stage2_data, stage2_loss
from branchout.method.stage2 import TrainedDeltas, grid_predictions, initial_deltas, train_grid
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead, Pooler
from branchout.model.staged import Branch, branch_point
from branchout.training.device import wait_for
from branchout.training.loop import fit
from branchout.training.optimisation import Optimisation

K, VIEWS, PER_CLASS = 512, 10, 10
SETTINGS = replace(REFERENCE.stage_two, views=VIEWS)
Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]
"""Of an epoch: images on the device, and their positions."""


def rows(settings: Settings) -> Rows:
    yield published(settings)
    yield from one_point(settings)


class Task:
    """A network with a branch, exemplars of all classes, and other images of them: a pattern for each class, noise."""

    def __init__(self, settings: Settings) -> None:
        self.device = settings.device
        old, new = (18, 2) if settings.tiny else (180, 20) if settings.gpu else (45, 5)
        generator = torch.Generator().manual_seed(1)
        patterns = torch.rand(old + new, 3, 4, 4, generator=generator)
        self.labels = torch.arange(old + new).repeat_interleave(PER_CLASS)
        self.origin = (self.labels >= old).long()
        network = base_model("resnet10", old + new, self.device, width=settings.width)
        self.how = network.preprocessing
        self.exemplars, self.others = (self.images(patterns, generator) for _ in range(2))
        self.model = extended(self.trained(network, 20 if settings.gpu else 8), network, old)

    def images(self, patterns: Tensor, generator: torch.Generator) -> ResidentImages:
        noisy = patterns[self.labels] + 0.25 * torch.randn(len(self.labels), 3, 4, 4, generator=generator)
        pixels = torch.nn.functional.interpolate(noisy.clamp(0, 1) * 255, size=(64, 64), mode="bilinear").byte()
        return ResidentImages(pixels.to(self.device), self.how, self.device)

    def trained(self, model: Classifier, epochs: int) -> Network:
        """A network that knows all classes, so that there is an accuracy to compare."""
        network = Network.of(model).to(self.device).train()
        labels = self.labels.to(self.device)

        def batches(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
            orders = shuffled(len(labels), min(128, len(labels) // 4), epoch, drop_last=True)
            return zip(self.exemplars.plain(orders), (labels[torch.from_numpy(n)] for n in orders), strict=True)

        fit(
            network,
            list(network.parameters()),
            batches,
            len(labels) // min(128, len(labels) // 4),
            lambda batch: torch.nn.functional.cross_entropy(network(batch[0]), batch[1]),
            Optimisation(epochs, lr=0.1, schedule="cosine"),
            device=self.device,
        )
        return network

    def orders(self, epoch: int) -> list[np.ndarray]:
        return class_balanced(self.labels.numpy(), PER_CLASS, SETTINGS.optimisation.batch, epoch)

    def accuracy(self, fused: TrainedDeltas, point: int) -> float:
        features = extract(self.model, self.others, device=self.device)[0]
        return float((grid_predictions(self.model, features, fused)[point].cpu() == self.labels).float().mean())


def extended(network: Network, model: Classifier, old: int) -> Classifier:
    """The network as a base with the first classes and a branch with the others."""
    features = network.backbone.features
    heads = [CosineHead(features, old), CosineHead(features, len(network.head.weight) - old)]
    for head, rows in zip(heads, torch.split(network.head.weight.detach(), [old, len(heads[1].weight)]), strict=True):
        head.weight.data.copy_(rows)
    names = model.space.classes
    base = Classifier(model.arch, network.backbone, heads[0], names[:old], model.preprocessing)
    point = branch_point(base.backbone)
    step = Step(names[old:], "last", point.start, Branch.clone(base.backbone, point), heads[1])
    return base.extended(step).on_device(network.head.weight.device).eval().requires_grad_(False)


def one_pass(task: Task) -> TrainedDeltas:
    """Features of ten views, then all points."""
    device = task.device
    features = extract(task.model, task.exemplars, views=VIEWS, device=device)
    data = stage2_data(task.model, features, task.labels.to(device), task.origin.to(device))
    return train_grid(head_layout(task.model), [data], SETTINGS, per_class=PER_CLASS)


def alone(task: Task, point: tuple[float, float], epochs: int, batches: Batches) -> list[Tensor]:
    """One point, the frozen network run on new views in every epoch."""
    layout, device = head_layout(task.model), task.device
    labels, origin = task.labels.to(device), task.origin.to(device)
    like = torch.zeros(1, task.model.backbone.features, device=device)
    deltas = initial_deltas(layout, like.shape[-1], 1, 1, SETTINGS, 0, like)
    optimiser = torch.optim.SGD(deltas, lr=SETTINGS.optimisation.lr, momentum=0.9, weight_decay=1e-4)
    pooler, alpha = Pooler(layout.space, layout.pooler).to(device), torch.tensor([point[0]], device=device)
    for epoch in range(epochs):
        for pictures, index in batches(epoch):
            with torch.no_grad():
                features = torch.stack(task.model.features(task.model.backbone.arrange(pictures)), dim=1).float()
            data = stage2_data(task.model, features[None], labels[index][None], origin[index][None])
            columns = fused_columns(layout, data, deltas, [point], SETTINGS.beta_on_head)
            loss = stage2_loss(layout.space, data, columns, alpha, pooler, None)
            optimiser.zero_grad(set_to_none=True)
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return [delta.detach().transpose(1, 2).contiguous() for delta in deltas]


def resident_batches(task: Task) -> Batches:
    augmentation = augment.for_kind("photo", 64)

    def batches(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        orders = task.orders(epoch)
        views = task.exemplars.views(orders, augmentation, epoch)
        return zip(views, (torch.from_numpy(order).to(task.device) for order in orders), strict=True)

    return batches


def loader_batches(task: Task) -> Batches:
    """As most published code reads images: torchvision's transforms in worker processes."""
    from torchvision import transforms

    how = task.model.preprocessing
    change = transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.RandomResizedCrop(how.size),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4, 0.2),
            transforms.ToTensor(),
            transforms.Normalize(how.mean, how.std),
        ]
    )
    pixels = task.exemplars.pixels.cpu()

    class Read(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __getitem__(self, position: int) -> tuple[Tensor, int]:
            return change(pixels[position]), int(position)

    def batches(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        workers = min(len(os.sched_getaffinity(0)), 16)
        pinned = task.device.type == "cuda"
        loader = torch.utils.data.DataLoader(
            Read(),
            batch_sampler=[order.tolist() for order in task.orders(epoch)],
            num_workers=workers,
            pin_memory=pinned,
        )
        for pictures, index in loader:
            yield pictures.to(task.device, non_blocking=True), index.to(task.device)

    return batches


def published(settings: Settings) -> tuple[str, dict[str, object]]:
    task = Task(settings)
    found: list[TrainedDeltas] = []
    ours = in_turns({"": lambda: found.append(one_pass(task))}, settings.pick(3, 1) if settings.gpu else 1, task.device)
    points = [0, 14, 35] if settings.gpu else [14]
    epochs = settings.pick(SETTINGS.optimisation.epochs, 2)
    ways: dict[str, Batches] = {"resident": resident_batches(task), "loader": loader_batches(task)}
    seconds, accuracy = {}, {}
    for name, batches in ways.items():
        alone(task, GRID[14], 1, batches)  # warms up
        few = epochs if name == "resident" else min(epochs, 2 if settings.gpu else 1)
        start = time.perf_counter()
        trained = [alone(task, GRID[n], few, batches) for n in points]
        wait_for(task.device)
        taken = (time.perf_counter() - start) / len(points)
        seconds[name] = taken * len(GRID) * SETTINGS.optimisation.epochs / few
        if name == "resident":
            accuracy = {
                str(GRID[n]): {
                    "of": task.accuracy(found[-1], n),
                    "against": task.accuracy(TrainedDeltas((GRID[n],), tuple(deltas)), 0),
                }
                for n, deltas in zip(points, trained, strict=True)
            }
    row = compared(
        f"{len(GRID)} grid points in one pass with cached features, their computation included",
        "the published procedure: each point alone, the frozen network run in every epoch",
        ours[""],
        seconds["resident"],
        times_faster=seconds["resident"] / ours[""],
        against_loader_seconds=seconds["loader"],
        times_faster_than_with_a_loader=seconds["loader"] / ours[""],
        accuracy=accuracy,
        goal="100 times as fast on a GPU, 50 times on 2 cores",
        settings={
            "points_measured_alone": len(points),
            "epochs_measured": epochs,
            "classes": len(task.model.space.classes),
            "per_class": PER_CLASS,
            "views": VIEWS,
            "width": settings.width,
        },
    )
    return f"fusion-published-{settings.device.type}", row


def one_point(settings: Settings) -> Rows:
    device = settings.device
    for base, novel in ((18, 2),) if settings.tiny else ((180, 20), (800, 40)):
        epochs = SETTINGS.optimisation.epochs if settings.gpu else 2
        fewer = replace(SETTINGS, optimisation=replace(SETTINGS.optimisation, epochs=epochs))
        layout, data = random_data(base, novel, device)

        works = {
            name: partial(train_grid, layout, [data], replace(fewer, grid=grid), per_class=PER_CLASS)
            for name, grid in (("one", GRID[:1]), ("all", GRID))
        }
        taken = in_turns({**works, "products": partial(products, base, novel, epochs, device)}, 3, device)
        yield (
            f"fusion-grid-{device.type}-{base}+{novel}",
            compared(
                f"{len(GRID)} grid points in one pass, {base}+{novel} classes",
                "one point alone",
                taken["all"],
                taken["one"],
                goal="1.5 on a GPU, 6 on 2 cores",
                products_seconds=taken["products"],
                note="products_seconds: the matrix products of all points alone, which no order of the work avoids",
                settings={"epochs": epochs, "features": K, "views": VIEWS, "per_class": PER_CLASS},
            ),
        )


def products(base: int, novel: int, epochs: int, device: torch.device) -> None:
    """The matrix products of all points, forward and backward, and nothing else."""
    batch = SETTINGS.optimisation.batch
    u = torch.randn(1, batch, K, device=device)
    for width in (base, novel):
        deltas = torch.randn(1, K, len(GRID) * width, device=device)
        logits, gradients = torch.bmm(u, deltas), torch.empty_like(deltas)
        for _ in range(epochs * -(-(base + novel) * PER_CLASS // batch)):
            torch.bmm(u, deltas, out=logits)
            torch.bmm(u.transpose(1, 2), logits, out=gradients)


def random_data(base: int, novel: int, device: torch.device) -> tuple[HeadLayout, Stage2Data]:
    space = LabelSpace.of((f"b{n}" for n in range(base)), (f"n{n}" for n in range(novel)))
    generator = torch.Generator(device).manual_seed(0)
    count = (base + novel) * PER_CLASS
    labels = torch.arange(base + novel, device=device).repeat_interleave(PER_CLASS)
    data = Stage2Data(
        u=torch.randn(VIEWS, count, 2, K, generator=generator, device=device) * (4 / K**0.5),
        z=torch.randn(VIEWS, count, base + novel, generator=generator, device=device) * 3,
        labels=labels,
        origin=(labels >= base).long(),
    )
    return HeadLayout(space, (0, 1)), data
