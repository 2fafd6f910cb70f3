"""What an extension would do, told before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from branchout.cli.display import duration, size
from branchout.data.images import cores
from branchout.method.config import ExtendConfig
from branchout.method.extend import VIEWS, Extension
from branchout.method.recipes import BRANCHOUT
from branchout.model.checkpoint import weight_bytes
from branchout.model.heads import sources
from branchout.model.staged import Branch, branch_point

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.method.extend import DataSplit


def forecast(model: Model, material: DataSplit, where: str) -> Iterator[str]:
    """Lines that say what is there, what overlaps, what is missing, and what it will cost."""
    classifier = model.classifier
    known = set(classifier.space.classes)
    new = material.new
    shared = [name for name in new.classes if name in known]
    yield f"base: {len(known):,} classes"
    yield f"new: {len(new.classes):,} classes, {len(new):,} images to learn from"
    few = [name for name, count in new.counts().items() if count < 10]
    if few:
        yield f"  fewer than 10 images: {_listed(few)}"
    if shared:
        yield f"  known already, so their branches will be pooled: {_listed(shared)}"
    near = _near_misses(new.classes, known)
    if near:
        yield "  nearly the name of an old class, but not quite: " + "; ".join(f"{a} / {b}" for a, b in near[:5])
    if material.memory is None:
        yield "memory: none. Pseudo-exemplars will be made from the base's weights"
    else:
        missing = sorted(known - set(material.memory.classes))
        yield f"memory: {len(material.memory):,} images of {len(material.memory.classes):,} old classes"
        if missing:
            yield f"  no image of: {_listed(missing)}"
    if material.measured == "pseudo":
        yield "  base accuracy cannot be measured: there are no images of most old classes to do it with"
    how = {"dev": "given", "held-out": "held out from the images above", "pseudo": "of new classes only"}
    yield f"to choose and to report: {len(material.dev):,} + {len(material.test):,} images, {how[material.measured]}"
    point = branch_point(classifier.backbone, where)
    added = Branch.clone(classifier.backbone, point).parameter_count
    base = sum(p.numel() for p in classifier.backbone.parameters())
    yield f"branch {where}: {size(added)} parameters beside the base's {size(base)}"
    yield f"time: about {duration(_seconds(model, material))} on this {model.device.type}"
    kept, more = disk(model, material, where)
    free = shutil.disk_usage(Path.cwd()).free
    yield f"disk: about {size(kept + more)}B for the model, {size(more)}B of it new; {size(free)}B free"


def disk(model: Model, material: DataSplit, where: str) -> tuple[int, int]:
    """Bytes of all that the base model holds, and of what this step would add to it: branch, head, deltas."""
    classifier = model.classifier
    files = [] if model.folder is None else list(model.folder.glob("*.safetensors"))
    kept = sum(file.stat().st_size for file in files) or weight_bytes(model.saved)
    point = branch_point(classifier.backbone, where)
    own = Branch.clone(classifier.backbone, point).own_state_dict().values()
    width, names = classifier.backbone.features, material.new.classes
    more = sum(each.numel() * each.element_size() for each in own) + 4 * width * len(names)
    if _fuses(model, material):
        # A delta for each pair of a branch's columns and another branch's features; nothing cloned has none of its own.
        feature_of = classifier.fused.feature_of
        new = 0 if point.start == len(classifier.backbone.names) else max(feature_of) + 1
        branches = classifier.space.extend(names).branches
        each_reads = sources([*feature_of, new])
        more += 4 * width * sum(len(read) * len(of) for read, of in zip(each_reads, branches, strict=True))
    return kept, more


def _fuses(model: Model, material: DataSplit) -> bool:
    return Extension(model.classifier, material, ExtendConfig(), device=model.device).fuses()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _near_misses(new: tuple[str, ...], known: set[str]) -> list[tuple[str, str]]:
    """New names that differ from an old one only in case, spaces, hyphens or underscores."""

    def simple(name: str) -> str:
        return "".join(c for c in name.casefold() if c.isalnum())

    old = {simple(name): name for name in known if simple(name)}
    return [(name, old[simple(name)]) for name in new if name not in known and simple(name) in old]


def _seconds(model: Model, material: DataSplit) -> float:
    """A rough forecast, from how long a few pictures take to read, the network to run and the deltas to learn."""
    new, memory = len(material.new), 0 if material.memory is None else len(material.memory)
    replayed = 2 if memory else 1
    # The trunk sees some views of every picture once; the branch alone is then trained on them, forwards and backwards.
    reads = VIEWS[model.device.type] * (new + memory) + 2 * (new + memory + len(material.dev) + len(material.test))
    training = BRANCHOUT.stage_one.optimisation.epochs * new * replayed
    running = _running(model)
    seconds = reads * (_reading(model, material) / cores() + running) + training * running
    space = model.classifier.space
    if _fuses(model, material):
        images = ExtendConfig().exemplars * (len(space.classes) + len(material.new.classes))
        batch = BRANCHOUT.stage_two.optimisation.batch
        seconds += BRANCHOUT.stage_two.optimisation.epochs * -(-images // batch) * _fusing(model, min(images, batch))
    return seconds


def _reading(model: Model, material: DataSplit, count: int = 8) -> float:
    """Seconds to decode and cut one picture."""
    rows = range(0, len(material.new), max(1, len(material.new) // count))
    start = time.perf_counter()
    for row in rows:
        model.classifier.preprocessing.prepare(material.new.read(row))
    return (time.perf_counter() - start) / len(rows)


@torch.no_grad()
def _running(model: Model, count: int = 16) -> float:
    """Seconds for one picture through the network."""
    prep = model.classifier.preprocessing
    pictures = torch.rand(count, prep.channels, prep.size, prep.size, device=model.device)
    pictures = model.classifier.backbone.arrange(pictures)
    return _timed(model, lambda: model.classifier(pictures)) / count


def _fusing(model: Model, batch: int) -> float:
    """Seconds for one step of stage II on the base's columns."""
    width, classes = model.classifier.backbone.features, len(model.classifier.space.classes)
    features = torch.rand(batch, width, device=model.device)
    deltas = torch.zeros(width, classes, device=model.device, requires_grad=True)
    optimiser = torch.optim.SGD([deltas], lr=0.0, momentum=0.9)

    def step() -> None:
        (features @ deltas).logsumexp(1).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return _timed(model, step)


def _timed(model: Model, work: Callable[[], object]) -> float:
    """The shortest of a few times: the first warms up, and others may wait for whatever else the machine does."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
