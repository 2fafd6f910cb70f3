"""How time, memory and the size on disk grow: with classes, new images, exemplars and steps.

Each row states the exponent e that the arithmetic gives (time ∝ size^e) before the measured one, which is the slope of
log(seconds) against log(size) over the larger half. Features are random: their values do not change the work.

- classes to 20,000: an epoch of stage II (images and columns both grow with the classes: 2), the dial's curve on 1,000
  images (1), and the bytes of a saved base (1 for its head; the network stays);
- new images to 10⁶: an epoch of a head on cached features (1), the dial's curve on as many held-out images (1, and a
  little more for sorting);
- exemplars to 80 of each class: an epoch of stage II (1).

Steps are measured by `many-steps`. The curve and the bytes need no device, so a GPU machine leaves them out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.speed.common import Peak, Row, Rows, Settings, base_model, compared, exponent, seconds_of
from branchout.labels import LabelSpace
from branchout.method.dial import dial_frontier
from branchout.method.recipes import REFERENCE
from branchout.method.score_fusion import HeadLayout, Stage2Data
from branchout.method.stage2 import train_grid
from branchout.model import checkpoint
from branchout.training.loop import fit
from branchout.training.optimisation import Optimisation

K, NEW = 64, 20
ONE_EPOCH = replace(
    REFERENCE.stage_two, optimisation=replace(REFERENCE.stage_two.optimisation, epochs=1), grid=((0.4, 0.4),), views=1
)


@dataclass(frozen=True)
class Growth:
    name: str
    unit: str
    of: str
    expected: float
    sizes: Sequence[int]
    work: Callable[[int, torch.device], Callable[[], object]]
    """Prepares a size and returns what is measured."""
    on_gpu: bool = True


def space_of(old: int, new: int = NEW) -> LabelSpace:
    return LabelSpace.of((f"b{n}" for n in range(old)), (f"n{n}" for n in range(new)))


def stage_two(old: int, per_class: int, device: torch.device) -> Callable[[], object]:
    space = space_of(old)
    labels = torch.arange(old + NEW, device=device).repeat_interleave(per_class)
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, len(labels), 2, K)
    u = torch.randn(shape, generator=generator, device=device) * (4 / K**0.5)
    # Frozen logits of every image would take more memory than stage II itself; a view of one row costs none.
    z = torch.zeros((1, 1, old + NEW), device=device).expand(1, len(labels), -1)
    data = Stage2Data(u, z, labels, (labels >= old).long())
    return lambda: train_grid(HeadLayout(space, (0, 1)), [data], ONE_EPOCH, per_class=per_class)


def curve(images: int, old: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    space = space_of(old)
    columns = rng.standard_normal((images, old + NEW), dtype=np.float32).astype(np.float64)
    labels = rng.integers(0, old + NEW, images)
    return lambda: dial_frontier(columns, labels, space)


def head_epoch(images: int, device: torch.device) -> Callable[[], object]:
    x, y = torch.randn(images, K, device=device), torch.arange(images, device=device) % NEW
    head = nn.Linear(K, NEW).to(device)
    steps = images // 1000

    def batches(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch)).to(device)
        return [(x[part], y[part]) for part in torch.split(order, 1000)[:steps]]

    return lambda: fit(
        head,
        list(head.parameters()),
        batches,
        steps,
        lambda batch: F.cross_entropy(head(batch[0]), batch[1]),
        Optimisation(1, lr=0.1),
        device=device,
    )


def growths(settings: Settings) -> list[Growth]:
    classes = [1250, 2500, 5000, 10_000, 20_000]
    images = [62_500, 125_000, 250_000, 500_000, 1_000_000]
    exemplars = [5, 10, 20, 40, 80]
    if settings.tiny:
        classes, images, exemplars = [50, 100, 200, 400], [1000, 2000, 4000, 8000], [1, 2, 4, 8]
    return [
        Growth(
            "classes-fusion",
            "classes",
            "an epoch of stage II, one exemplar a class",
            2,
            classes,
            lambda n, d: stage_two(n, 1, d),
        ),
        Growth(
            "classes-curve",
            "classes",
            "the dial's curve on 1,000 images",
            1,
            classes,
            lambda n, _: curve(1000, n),
            on_gpu=False,
        ),
        Growth("images-head", "new images", "an epoch of a head on cached features", 1, images, head_epoch),
        Growth(
            "images-curve",
            "held-out images",
            "the dial's curve, 100+20 classes",
            1,
            images,
            lambda n, _: curve(n, 100),
            on_gpu=False,
        ),
        Growth(
            "exemplars",
            "exemplars a class",
            "an epoch of stage II, 500+20 classes",
            1,
            exemplars,
            lambda n, d: stage_two(500, n, d),
        ),
    ]


def rows(settings: Settings) -> Rows:
    for growth in growths(settings):
        if growth.on_gpu or not settings.gpu:
            yield f"growth-{growth.name}-{settings.device.type}", measured(growth, settings.device)
    if not settings.gpu:
        yield f"growth-classes-bytes-{settings.device.type}", bytes_row(settings)


def measured(growth: Growth, device: torch.device) -> Row:
    seconds, memory = [], []
    for size in growth.sizes:
        work = growth.work(size, device)
        with Peak(device) as peak:
            first = seconds_of(work, device)
        again = 2 if first < 10 else 0  # other work on the machine slows single runs
        seconds.append(min([first, *(seconds_of(work, device) for _ in range(again))]))
        memory.append(peak.bytes)
        print(f"{growth.name}, {size:,} {growth.unit}: {seconds[-1]:.3f} s, {memory[-1] / 1e6:.0f} MB", flush=True)
    sizes = [float(size) for size in growth.sizes]
    return compared(
        f"{growth.of}: {growth.sizes[-1]:,} {growth.unit}",
        f"{growth.sizes[0]:,} {growth.unit}",
        seconds[-1],
        seconds[0],
        expected_exponent=growth.expected,
        exponent=exponent(sizes, seconds),
        unit=growth.unit,
        sizes=list(growth.sizes),
        seconds=seconds,
        peak_bytes=memory,
        settings={"features": K, "new_classes": NEW},
    )


def bytes_row(settings: Settings) -> Row:
    """The bytes of a saved base of so many classes."""
    sizes = growths(settings)[0].sizes
    found, taken = [], []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            out = Path(folder) / str(size)
            model = base_model("resnet10", size, torch.device("cpu"), width=16)
            saved = checkpoint.SavedModel(model, (), ())
            taken.append(seconds_of(lambda saved=saved, out=out: checkpoint.save(saved, out), torch.device("cpu")))  # type: ignore[misc]
            found.append(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()))
    return compared(
        f"saving a base of {sizes[-1]:,} classes",
        f"{sizes[0]:,} classes",
        taken[-1],
        taken[0],
        expected_exponent=1,
        exponent=exponent([float(size) for size in sizes], [float(size) for size in found]),
        unit="classes",
        sizes=list(sizes),
        seconds=taken,
        bytes=found,
        settings={"width": 16, "bytes_have_the_exponent": True},
    )
