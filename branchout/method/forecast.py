"""What an extension would do and cost, computed before it starts: counts, overlaps, missing images, time, disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from branchout.data.images import cores
from branchout.method.config import ExtendConfig
from branchout.method.effort import effort_for
from branchout.method.extend import Extension
from branchout.method.recipes import BRANCHOUT
from branchout.method.split import DataSplit, listed
from branchout.model.classifier import Classifier
from branchout.model.heads import sources
from branchout.model.staged import Branch, branch_point
from branchout.units import duration, parameters, size


def forecast(
    model: Classifier, split: DataSplit, where: str, *, device: torch.device, base_bytes: int
) -> Iterator[str]:
    """Lines that describe an extension of a model whose weights take `base_bytes` on disk."""
    yield from _classes(model, split)
    yield from _old_images(model, split)
    added = Branch.clone(model.backbone, branch_point(model.backbone, where)).parameter_count
    base = sum(p.numel() for p in model.backbone.parameters())
    yield f"branch {where}: {parameters(added)} parameters; the base has {parameters(base)}"
    yield f"time: about {duration(_seconds(model, split, where, device))} on this {device.type}"
    more = added_bytes(model, split, where)
    free = shutil.disk_usage(Path.cwd()).free
    yield f"disk: about {size(base_bytes + more)} for the model, {size(more)} of it new; {size(free)} free"


def _classes(model: Classifier, split: DataSplit) -> Iterator[str]:
    known, new = set(model.space.classes), split.new
    yield f"base: {len(known):,} classes"
    yield f"new: {len(new.classes):,} classes, {len(new):,} images to train on"
    few = [name for name, count in new.counts().items() if count < 10]
    if few:
        yield f"  fewer than 10 images: {listed(few)}"
    shared = [name for name in new.classes if name in known]
    if shared:
        yield f"  known to the base too, so their logits will be pooled: {listed(shared)}"
    near = _near_misses(new.classes, known)
    if near:
        yield "  almost the name of an old class: " + "; ".join(f"{a} / {b}" for a, b in near[:5])


def _old_images(model: Classifier, split: DataSplit) -> Iterator[str]:
    if split.memory is None:
        yield "memory: none. Pseudo-exemplars will be computed from the base's weights"
    else:
        missing = sorted(set(model.space.classes) - set(split.memory.classes))
        yield f"memory: {len(split.memory):,} images of {len(split.memory.classes):,} old classes"
        if missing:
            yield f"  no image of: {listed(missing)}"
    if split.measured == "pseudo":
        yield "  base accuracy cannot be measured: most old classes have no images to measure it on"
    how = {"dev": "from --val", "held-out": "held out from the images above", "pseudo": "of new classes only"}
    yield f"validation: {len(split.dev):,} images to choose with, {len(split.test):,} to test, {how[split.measured]}"


def added_bytes(model: Classifier, split: DataSplit, where: str) -> int:
    """Bytes that this step would add to the model: branch, head, deltas."""
    point = branch_point(model.backbone, where)
    own = Branch.clone(model.backbone, point).own_state_dict().values()
    width, names = model.backbone.features, split.new.classes
    more = sum(each.numel() * each.element_size() for each in own) + 4 * width * len(names)
    if _needs_fusion(model, split):
        # A delta for each pair of a branch's columns and another branch's features; a branch that clones nothing reads
        # the base's.
        feature_of = model.fused.feature_of
        new = 0 if point.start == len(model.backbone.names) else max(feature_of) + 1
        reads = sources([*feature_of, new])
        branches = model.space.extend(names).branches
        more += 4 * width * sum(len(read) * len(of) for read, of in zip(reads, branches, strict=True))
    return more


def _needs_fusion(model: Classifier, split: DataSplit) -> bool:
    return Extension(model, split, ExtendConfig(), device=model.base_head.weight.device).needs_fusion()


def _near_misses(new: tuple[str, ...], known: set[str]) -> list[tuple[str, str]]:
    """New names that differ from an old one only in case, spaces, hyphens or underscores."""

    def simple(name: str) -> str:
        return "".join(c for c in name.casefold() if c.isalnum())

    old = {simple(name): name for name in known if simple(name)}
    return [(name, old[simple(name)]) for name in new if name not in known and simple(name) in old]


def _seconds(model: Classifier, split: DataSplit, where: str, device: torch.device) -> float:
    """A forecast, from the time to read a few images, to run the network, to train the branch and to learn deltas."""
    new, memory = len(split.new), 0 if split.memory is None else len(split.memory)
    effort, stage1 = effort_for(device, model.preprocessing.size), BRANCHOUT.stage_one.optimisation
    # The trunk sees some views of every image once. Features of new and held-out images are computed without views.
    passes = effort.views * new + len(split.dev) + len(split.test) + new
    passes += memory * (effort.exemplar_views or max(1, round(effort.views * new / max(memory, 1))))
    trained = (effort.epochs or stage1.epochs) * new * (1 + effort.exemplar_share * (memory > 0))
    # Images are read by other processes while the network runs.
    seconds = passes * max(_reading(model, split) / cores(), _running(model, device))
    seconds += trained * _training(model, where, device)
    if _needs_fusion(model, split):
        stage2 = BRANCHOUT.stage_two.optimisation
        images = ExtendConfig().exemplars * (len(model.space.classes) + len(split.new.classes))
        seconds += stage2.epochs * -(-images // stage2.batch) * _fusing(model, min(images, stage2.batch), device)
    return seconds


def _training(model: Classifier, where: str, device: torch.device, count: int = 16) -> float:
    """Seconds for one image forwards and backwards through the branch."""
    point = branch_point(model.backbone, where)
    branch = Branch.clone(model.backbone, point).to(device)
    if not branch.parameter_count:
        return 0.0
    prep = model.preprocessing
    with torch.no_grad():
        images = model.backbone.arrange(torch.rand(count, prep.channels, prep.size, prep.size, device=device))
        entering = model.activations(images, [point.start])[point.start]

    def step() -> None:
        branch.train()(entering).sum().backward()

    return _timed(step, device) / count


def _reading(model: Classifier, split: DataSplit, count: int = 8) -> float:
    """Seconds to decode and resize one image."""
    rows = range(0, len(split.new), max(1, len(split.new) // count))
    start = time.perf_counter()
    for row in rows:
        model.preprocessing.prepare(split.new.read(row))
    return (time.perf_counter() - start) / len(rows)


@torch.no_grad()
def _running(model: Classifier, device: torch.device, count: int = 16) -> float:
    """Seconds for one image through the network."""
    prep = model.preprocessing
    images = model.backbone.arrange(torch.rand(count, prep.channels, prep.size, prep.size, device=device))
    return _timed(lambda: model(images), device) / count


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
    """The shortest of a few times: the first includes warming up, and others may wait for other processes."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
