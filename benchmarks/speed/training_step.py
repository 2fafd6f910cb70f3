"""A training step launched kernel by kernel against one recorded as a CUDA graph, and against torch.compile.

Stage I and a whole-network baseline with a teacher, of ResNet10 and ResNet18 at 64 pixels, batches of 256, through
`fit` as the method and the baselines call it; random images. The first two epochs are left out of the times: they
compute frozen features, choose algorithms and record. The losses of every epoch must agree; how far two equal eager
runs differ is measured beside them. Also checked: steps that cannot be recorded train as eager ones do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.common import Rows, Settings, base_model, compared, random_images
from branchout.baselines.networks import Network, frozen_copy
from branchout.baselines.whole_network import distillation
from branchout.data import augment
from branchout.data.images import on_device, shuffled
from branchout.method import stage1
from branchout.method.new_branch import Labelled
from branchout.method.recipes import BRANCHOUT
from branchout.training import cuda_graphs
from branchout.training.loop import Event, fit
from branchout.training.optimisation import Optimisation, scale_to_dataset
from branchout.training.pretrain import pretrain

OLD, NEW = 180, 20
LEFT_OUT = 2
"""Epochs that are not timed."""


@dataclass
class Measured:
    milliseconds: float
    losses: list[float]
    reason: str
    megabytes: float


class Epochs:
    """Takes the time of every epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def __call__(self, event: Event) -> None:
        if "loss" in event.figures:
            self.times.append(time.perf_counter())
            self.losses.append(event.figures["loss"])

    def milliseconds(self, steps: int) -> float:
        return 1e3 * float(np.median(np.diff(self.times[LEFT_OUT - 1 :]))) / steps


Run = Callable[[], tuple[Epochs, int]]
"""A whole training; its epochs, and how many steps each has."""


def stage_one(arch: str, settings: Settings) -> Run:
    """Stage I with exemplars and distillation."""
    device = settings.device
    model = base_model(arch, OLD, device, width=settings.width)
    count, batch, epochs = settings.pick(8000, 64), settings.pick(256, 8), settings.pick(10, 4)
    new, old = random_images(count, model, device), random_images(settings.pick(1800, OLD), model, device, 1)
    fresh = Labelled(new, OLD + np.arange(count) % NEW)
    kept = Labelled(old, np.arange(len(old)) % OLD)
    recipe = replace(BRANCHOUT.stage_one, optimisation=Optimisation(epochs, lr=0.1, batch=batch, nesterov=True))

    def run() -> tuple[Epochs, int]:
        taken, names = Epochs(), [f"new {n}" for n in range(NEW)]
        stage1.train_branch(model, names, fresh, recipe, exemplars=kept, views=1, device=device, on_progress=taken)
        return taken, count // scale_to_dataset(recipe.optimisation, count).batch

    return run


def whole_network(arch: str, settings: Settings, optimiser: str = "sgd") -> Run:
    """Fine-tuning of a whole network with distillation from a frozen copy, on augmented images."""
    device = settings.device
    model = base_model(arch, OLD + NEW, device, width=settings.width)
    count, batch, epochs = settings.pick(8000, 32), settings.pick(256, 8), settings.pick(10, 4)
    images = random_images(count, model, device)
    labels = torch.arange(count, device=device) % (OLD + NEW)
    augmentation = augment.for_kind("photo", 64)
    optimisation = Optimisation(epochs, lr=0.1, batch=batch)

    def run() -> tuple[Epochs, int]:
        network = Network.of(model).to(device).train()
        teacher = frozen_copy(network)
        taken = Epochs()

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            orders = shuffled(count, batch, epoch, drop_last=True)
            views = images.views(orders, augmentation, epoch)
            return zip(views, (labels[index] for index in on_device(orders, device)), strict=True)

        def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                remembered = teacher(batch[0])
            z = network(batch[0])
            return F.cross_entropy(z, batch[1]) + distillation(z, remembered)

        steps = count // batch
        fit(
            network, list(network.parameters()), batches, steps, loss_of, optimisation, device=device, on_progress=taken
        )
        return taken, steps

    return run


def pretraining(arch: str, settings: Settings) -> Run:
    """A base model from scratch, whose network is compiled by torch.compile on a GPU."""
    model = base_model(arch, OLD, settings.device)
    count, batch, epochs = settings.pick(8192, 32), settings.pick(512, 8), settings.pick(10, 4)
    images = random_images(count, model, settings.device)
    optimisation = Optimisation(epochs, lr=0.1, batch=batch)

    def run() -> tuple[Epochs, int]:
        taken = Epochs()
        pretrain(
            images,
            np.arange(count) % OLD,
            model.space.classes,
            model.preprocessing,
            arch=arch,
            width=settings.width,
            optimisation=optimisation,
            device=settings.device,
            on_progress=taken,
        )
        return taken, count // scale_to_dataset(optimisation, count).batch

    return run


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


def eager() -> AbstractContextManager[object]:
    return patch.object(cuda_graphs, "FEWEST_STEPS", 10**9)


def recorded() -> AbstractContextManager[object]:
    return patch.object(cuda_graphs, "FEWEST_STEPS", 1)


def measured(run: Run, kind: AbstractContextManager[object]) -> Measured:
    notes, log = Notes(), logging.getLogger(cuda_graphs.__name__)
    log.addHandler(notes)
    level, log.level = log.level, logging.INFO
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with kind:
            taken, steps = run()
    finally:
        log.removeHandler(notes)
        log.setLevel(level)
    peak = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0
    return Measured(taken.milliseconds(steps), taken.losses, "; ".join(notes.notes), peak)


def difference(one: Measured, other: Measured) -> float:
    """The largest difference of the losses of an epoch, as a share."""
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(one.losses, other.losses, strict=True))


def compiled(settings: Settings) -> AbstractContextManager[object]:
    """Stage I's loss through torch.compile, which records graphs of its own."""
    mode = "reduce-overhead" if settings.gpu else "default"
    return patch.object(stage1, "stage1_loss", torch.compile(stage1.stage1_loss, mode=mode))


def unrecordable(settings: Settings) -> dict[str, dict[str, object]]:
    """Losses that wait for the device, or whose factor Python changes: the reason, and how far they are from eager."""
    device = settings.device
    found: dict[str, dict[str, object]] = {}

    def runner(kind: str) -> Run:
        def run() -> tuple[Epochs, int]:
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 8)).to(device)
            x, y = torch.randn(64, 32, device=device), torch.arange(64, device=device) % 8
            rng = np.random.default_rng(0)
            taken = Epochs()

            def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
                loss = F.cross_entropy(network(batch[0]), batch[1])
                if kind == "waits":
                    return loss * (1 + 0 * loss.item())
                return loss * float(rng.integers(1, 4)) if kind == "host" else loss

            optimisation = Optimisation(4, lr=0.05, batch=64, optimiser="adamw" if kind == "adamw" else "sgd")
            parameters = list(network.parameters())
            fit(
                network,
                parameters,
                lambda _: [(x, y)] * 20,
                20,
                loss_of,
                optimisation,
                device=device,
                on_progress=taken,
            )
            return taken, 20

        return run

    for kind in ("waits", "host", "adamw"):
        usual, other = measured(runner(kind), eager()), measured(runner(kind), recorded())
        found[kind] = {"reason": other.reason, "loss_difference": difference(other, usual)}
    return found


def rows(settings: Settings) -> Rows:
    if not settings.gpu and not settings.tiny:
        print("training-step needs a GPU: steps are not recorded on a CPU")
        return
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = settings.gpu  # as in a training of a thousand steps
    cases: list[dict[str, object]] = []
    archs = ("resnet10",) if settings.tiny or not settings.gpu else ("resnet10", "resnet18")
    kinds = {"stage I": stage_one, "whole network": whole_network, "pretraining": pretraining}
    for arch in archs:
        for name, make in kinds.items():
            if make is pretraining and arch != archs[0]:
                continue  # compiling takes long
            run = make(arch, settings)
            usual, again, graph = (measured(run, kind) for kind in (eager(), eager(), recorded()))
            case: dict[str, object] = {
                "of": f"{name}, {arch}",
                "eager_ms": usual.milliseconds,
                "graph_ms": graph.milliseconds,
                "ratio": graph.milliseconds / usual.milliseconds,
                "loss_difference": difference(graph, usual),
                "loss_difference_of_two_eager_runs": difference(again, usual),
                "reason": graph.reason,
                "eager_megabytes": usual.megabytes,
                "graph_megabytes": graph.megabytes,
                "losses": {"eager": usual.losses, "graph": graph.losses},
            }
            if make is stage_one and arch == archs[0] and not settings.tiny:
                with eager():
                    case |= compile_case(run, usual, settings)
            cases.append(case)
            print({key: value for key, value in case.items() if key != "losses"}, flush=True)
    torch.backends.cudnn.benchmark = before
    fallbacks = unrecordable(settings)
    print(fallbacks, flush=True)
    first = cases[0]
    yield (
        f"training-step-{settings.device.type}",
        compared(
            f"one step of {first['of']} as a CUDA graph, 64 px",
            "the same step launched kernel by kernel",
            float(first["graph_ms"]) / 1e3,  # type: ignore[arg-type]
            float(first["eager_ms"]) / 1e3,  # type: ignore[arg-type]
            cases=cases,
            unrecordable=fallbacks,
            settings={"batch": 256, "old": OLD, "new": NEW, "size": 64},
        ),
    )


def compile_case(run: Run, usual: Measured, settings: Settings) -> dict[str, object]:
    try:
        found = measured(run, compiled(settings))
    except Exception as error:  # a compiler is missing, or the graph cannot be compiled
        return {"compile": f"not available: {type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"compile_ms": found.milliseconds, "compile_loss_difference": difference(found, usual)}
