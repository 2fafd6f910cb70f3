"""A few seconds of measurement: how fast this machine reads images, runs the frozen part, and trains each branch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from branchout.data.images import cores
from branchout.method.compressed_maps import as_cached
from branchout.method.config import ExtendConfig
from branchout.method.recipes import BRANCHOUT
from branchout.method.running.effort import CPU_BATCH
from branchout.method.running.engine import use_engine
from branchout.method.running.speeds import Speeds
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier
from branchout.model.staged import Branch, branch_point
from branchout.training.device import give_back_memory, wait_for
from branchout.training.loop import Event, OnProgress, silent
from branchout.training.optimisation import scale_to_dataset

LONG_STEP = 0.4
"""Seconds of a training step from which on no larger batch is measured."""
MOST_KEPT = 200_000_000
"""Bytes that a measured step may keep for its backward pass on a CPU: a deep branch would take gigabytes."""


def measure_speeds(
    model: Classifier,
    split: DataSplit,
    branches: Sequence[str],
    device: torch.device,
    engine: str,
    fused: bool,
    on_progress: OnProgress = silent,
) -> Speeds:
    """A few seconds of measurement; `fused` says whether stage II is trained."""
    total = 3 + len(branches)

    def done(count: int) -> None:
        on_progress(Event("Measuring this machine", count, total))

    done(0)
    starts = [branch_point(model.backbone, branch).start for branch in branches]
    engine = use_engine(model, engine, starts)
    try:
        done(1)
        training = {}
        for number, branch in enumerate(branches, 2):
            training[branch] = _training(model, split, branch, device)
            give_back_memory()  # tensors of the next branch have other sizes
            done(number)
        batch = min(BRANCHOUT.stage_two.optimisation.batch, ExtendConfig().exemplars * len(model.space.classes))
        fusing = _fusing(model, batch, device) if fused else 0.0
        reading, frozen = _reading(model, split), _running(model, device)
        done(total)
        sizes = {branch: _table_bytes(model, branch, device) for branch in branches}
        return Speeds(reading, frozen, training, fusing, cores(), device.type == "cuda", engine, sizes)
    finally:
        model.engine = None
        give_back_memory()


def _training(model: Classifier, split: DataSplit, where: str, device: torch.device) -> float:
    """Seconds for one image forwards and backwards through the branch, and through its losses.

    A small batch takes longer for each image, so the batch grows towards that of stage I while a step is short, and on
    a CPU takes little memory.
    """
    point = branch_point(model.backbone, where)
    branch = Branch.clone(model.backbone, point).to(device, memory_format=model.backbone.layout(device))  # type: ignore[call-overload]
    prep = model.preprocessing
    images = torch.rand(16, prep.channels, prep.size, prep.size, device=device)
    with torch.no_grad():
        entering = model.activations(model.backbone.arrange(images), [point.start])[point.start]
    head = nn.Linear(model.backbone.features, len(split.new.classes), device=device)
    copied = nn.Linear(model.backbone.features, len(model.space.classes), device=device)
    count = 16 if branch.parameter_count else 512
    batch = scale_to_dataset(BRANCHOUT.stage_one.optimisation, len(split.new)).batch
    most = 2 * (batch if device.type == "cuda" else min(batch, CPU_BATCH))  # new images and exemplars
    kept = 0.0  # bytes for each image
    while True:
        x = entering.repeat(-(-count // 16), *[1] * (entering.ndim - 1))
        old = torch.rand(count, len(model.space.classes), device=device)

        def step(x: Tensor = x, old: Tensor = old) -> None:
            h = branch.train()(x)
            loss = torch.cat([old, head(h)], 1).logsumexp(1).sum()
            if branch.parameter_count:
                loss = loss + copied(h).logsumexp(1).sum()
            loss.backward()  # type: ignore[no-untyped-call]

        if device.type == "cpu":
            kept = kept or kept_bytes(step, (branch, head, copied)) / count
        seconds = _timed(step, device)
        if seconds > LONG_STEP or 2 * count > most or 2 * count * kept > MOST_KEPT:
            return seconds / count
        count *= 2


def kept_bytes(step: Callable[[], object], modules: Sequence[nn.Module] = ()) -> int:
    """What the forward pass of a step keeps for its backward pass, without the weights of its modules."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()  # one tensor may be kept several times
        return tensor.detach()  # the tensor itself would refer to what keeps it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    weights = {each.untyped_storage().data_ptr() for module in modules for each in module.parameters()}
    return sum(size for place, size in sizes.items() if place not in weights)


@torch.no_grad()
def _table_bytes(model: Classifier, where: str, device: torch.device) -> int:
    """What enters the branch, compressed if it is a map, and the frozen logits."""
    prep, start = model.preprocessing, branch_point(model.backbone, where).start
    images = torch.rand(1, prep.channels, prep.size, prep.size, device=device)
    entering = model.activations(model.backbone.arrange(images), [start])[start]
    return as_cached(entering.float(), compressed=True).nbytes + 4 * len(model.space.class_of_column)


def _reading(model: Classifier, split: DataSplit) -> float:
    """Seconds to decode and resize one image."""
    rows = range(0, len(split.new), max(1, len(split.new) // 8))
    start = time.perf_counter()
    for row in rows:
        model.preprocessing.prepare(split.new.picture(row))
    return (time.perf_counter() - start) / len(rows)


@torch.no_grad()
def _running(model: Classifier, device: torch.device) -> float:
    """Seconds for one image through the network."""
    prep = model.preprocessing
    images = model.backbone.arrange(torch.rand(16, prep.channels, prep.size, prep.size, device=device))
    return _timed(lambda: model(images), device) / len(images)


def _fusing(model: Classifier, batch: int, device: torch.device) -> float:
    """Seconds for one step of stage II on the base's columns."""
    width, classes = model.backbone.features, len(model.space.classes)
    features = torch.rand(batch, width, device=device)
    deltas = torch.zeros(width, classes, device=device, requires_grad=True)
    optimiser = torch.optim.SGD([deltas], lr=0.0, momentum=0.9)

    def step() -> None:
        (features @ deltas).logsumexp(1).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return _timed(step, device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """The median of a few times, after one to warm up: what the machine gives now, while others use it too."""
    work()
    wait_for(device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
