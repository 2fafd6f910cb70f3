"""The input pipeline: how much of pure compute a training reaches, and large JPEGs against torchvision's DataLoader.

`compute`: epochs of a whole-network training at 64 pixels with images drawn, cropped and recoloured for every step,
against the same steps on batches that are ready. `jpegs`: a folder of photos of several megapixels, read once for
evaluation and once in random crops, by as many processes as there are cores, against `ImageFolder` and a `DataLoader`
with torchvision's transforms; both end on the device. On a GPU ours crops there, from images that are decoded once.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.speed.common import Rows, Settings, base_model, compared, in_turns, random_images
from branchout.baselines.networks import Network
from branchout.data import augment
from branchout.data.folders import scan
from branchout.data.images import StreamedImages, cores, in_order, on_device, shuffled
from branchout.data.preprocess import Preprocessing
from branchout.training.loop import Event, fit
from branchout.training.optimisation import Optimisation

MEGAPIXELS = (1600, 1200)


def rows(settings: Settings) -> Rows:
    yield compute(settings)
    yield from jpegs(settings)


def compute(settings: Settings) -> tuple[str, dict[str, object]]:
    device, batch = settings.device, settings.pick(512, 8) if settings.gpu else 64
    model = base_model("resnet10", 200, device, width=settings.width)
    count = settings.pick(64 * batch, 2 * batch) if settings.gpu else 4 * batch
    images = random_images(count, model, device)
    labels = torch.arange(count, device=device) % 200
    augmentation = augment.for_kind("photo", 64)
    ready = [(torch.randn(batch, 3, 64, 64, device=device), labels[:batch]) for _ in range(2)]

    def drawn(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        orders = shuffled(count, batch, epoch, drop_last=True)
        views = images.views(orders, augmentation, epoch)
        return zip(views, (labels[index] for index in on_device(orders, device)), strict=True)

    def prepared(_: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (ready[n % 2] for n in range(count // batch))

    seconds = {}
    for name, batches in (("pure", prepared), ("whole", drawn)):
        network = Network.of(model).to(device).train()
        taken: list[float] = []
        fit(
            network,
            list(network.parameters()),
            batches,
            count // batch,
            lambda given, network=network: F.cross_entropy(network(given[0]), given[1]),  # type: ignore[misc]
            Optimisation(epochs=settings.pick(8 if settings.gpu else 12, 3), lr=0.01, batch=batch),
            device=device,
            on_progress=Clock(taken),
        )
        seconds[name] = float(np.median(np.diff(taken)))
    row = compared(
        "one epoch of steps on batches that are ready, ResNet10, 64 px",
        "one epoch with images drawn, cropped and recoloured",
        seconds["pure"],
        seconds["whole"],
        goal="0.9 on a GPU",
        settings={"batch": batch, "images": count, "width": settings.width},
    )
    return f"pipeline-compute-{device.type}", row


class Clock:
    """Takes the time of every epoch."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __call__(self, event: Event) -> None:
        if "loss" in event.figures:
            self.times.append(time.perf_counter())


def jpegs(settings: Settings) -> Rows:
    count = settings.pick(64 * cores(), 4)
    how = Preprocessing(224, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), count)
        samples, batches = scan(Path(folder))[0], in_order(count, 16)
        augmentation = augment.for_kind("photo", 224)

        def images() -> StreamedImages:
            """With nothing decoded yet."""
            return StreamedImages(samples, how, settings.device, cores())

        ours: dict[str, Callable[[], Iterator[Tensor]]] = {
            "plain": lambda: images().plain(batches),
            "views": lambda: images().views(batches, augmentation, 0),
        }
        for name, read in ours.items():
            loader = torchvision_loader(folder, how, train=name == "views", pin=settings.gpu)
            theirs = partial(moved, loader, settings.device)
            works = {"ours": partial(used_up, read), "theirs": partial(used_up, theirs)}
            taken = in_turns(works, settings.pick(5, 1), settings.device)
            yield (
                f"pipeline-jpeg-{name}-{settings.device.type}",
                compared(
                    f"{count} JPEGs of {MEGAPIXELS[0]}×{MEGAPIXELS[1]} pixels to 224 px, {name}",
                    "ImageFolder and DataLoader of torchvision",
                    taken["ours"],
                    taken["theirs"],
                    images_per_second=count / taken["ours"],
                    settings={"processes": cores(), "batch": 16},
                ),
            )


def used_up(read: Callable[[], Iterator[object]]) -> None:
    for _ in read():
        pass


def moved(loader: torch.utils.data.DataLoader[Tensor], device: torch.device) -> Iterator[Tensor]:
    for images, _ in loader:
        yield images.to(device, non_blocking=True)


def write_photos(folder: Path, count: int) -> None:
    """So many files of 32 photos: drawing one takes longer than reading it."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(min(count, 32)):
        coarse, file = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)), io.BytesIO()
        coarse.resize(MEGAPIXELS, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        drawn.append(file.getvalue())
    for number in range(count):
        place = folder / f"class {number % 4}"
        place.mkdir(exist_ok=True)
        # A comment of their own keeps equal photos from being left out as identical files.
        comment = b"\xff\xfe\x00\x06" + number.to_bytes(4, "big")
        photo = drawn[number % len(drawn)]
        (place / f"{number}.jpg").write_bytes(photo[:2] + comment + photo[2:])


def torchvision_loader(
    folder: str, how: Preprocessing, *, train: bool, pin: bool = False
) -> torch.utils.data.DataLoader[Tensor]:
    from torchvision import datasets, transforms

    whole = [transforms.Resize(256), transforms.CenterCrop(how.size)]
    cropped = [
        transforms.RandomResizedCrop(how.size),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.4, 0.4, 0.4, 0.2),
    ]
    last = [transforms.ToTensor(), transforms.Normalize(how.mean, how.std)]
    data = datasets.ImageFolder(folder, transforms.Compose([*(cropped if train else whole), *last]))
    return torch.utils.data.DataLoader(data, batch_size=16, num_workers=cores(), shuffle=train, pin_memory=pin)
