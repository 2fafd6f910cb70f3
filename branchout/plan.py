"""What an extension would do, told before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from branchout.model.surgery import Branch, branch_point
from branchout.show import duration, size
from branchout.train.recipes import BRANCHOUT

if TYPE_CHECKING:
    from branchout.api import Model
    from branchout.train.extend import Material


def forecast(model: Model, material: Material, where: str) -> Iterator[str]:
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
        yield "memory: none. Pseudo-exemplars will be made from the base's weights; base accuracy cannot be measured"
    else:
        missing = sorted(known - set(material.memory.classes))
        yield f"memory: {len(material.memory):,} images of {len(material.memory.classes):,} old classes"
        if missing:
            yield f"  no image of: {_listed(missing)}"
    how = {"dev": "given", "held-out": "held out from the images above", "pseudo": "of new classes only"}
    yield f"to choose and to report: {len(material.dev):,} + {len(material.test):,} images, {how[material.measured]}"
    point = branch_point(classifier.backbone, where)
    added = Branch.clone(classifier.backbone, point).parameter_count
    base = sum(p.numel() for p in classifier.backbone.parameters())
    yield f"branch {where}: {size(added)} parameters beside the base's {size(base)}"
    yield f"time: about {duration(_seconds(model, material))} on this {model.device.type}"
    free = shutil.disk_usage(Path.cwd()).free
    yield f"disk: about {size(4.0 * (added + base))}B for the model, {size(free)}B free"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _near_misses(new: tuple[str, ...], known: set[str]) -> list[tuple[str, str]]:
    """New names that differ from an old one only in case, spaces, hyphens or underscores."""

    def simple(name: str) -> str:
        return "".join(c for c in name.casefold() if c.isalnum())

    old = {simple(name): name for name in known}
    return [(name, old[simple(name)]) for name in new if name not in known and simple(name) in old]


@torch.no_grad()
def _seconds(model: Model, material: Material) -> float:
    """A rough forecast from how long the network takes for a few random pictures."""
    prep = model.classifier.preprocessing
    count = 16
    pictures = torch.rand(count, prep.channels, prep.size, prep.size, device=model.device)
    model.classifier(pictures)
    start = time.perf_counter()
    model.classifier(pictures)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    each = (time.perf_counter() - start) / count
    memory = 0 if material.memory is None else len(material.memory)
    passes = 4 * (len(material.new) + memory) + 2 * (len(material.dev) + len(material.test))
    # Training the branch runs a fraction of the network forwards and backwards.
    training = BRANCHOUT.stage_one.optimisation.epochs * len(material.new) * (2 if memory else 1)
    return each * (passes + training)
