"""What an extension would do and cost, computed before it starts: counts, overlaps, missing images, time, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from branchout.errors import some
from branchout.method.config import ExtendConfig
from branchout.method.extend import needs_deltas
from branchout.method.new_branch import learns_correction
from branchout.method.recipes import recipe_named
from branchout.method.running.effort import Plan
from branchout.method.running.prepared_extension import Prepared
from branchout.method.split import IMAGES_OF_OLD_CLASSES, DataSplit
from branchout.model.classifier import Classifier
from branchout.model.heads import delta_inputs
from branchout.model.staged import Branch, branch_point
from branchout.units import count, duration, parameters, size


def forecast(prepared: Prepared, plan: Plan, *, device: torch.device, base_bytes: int) -> Iterator[str]:
    """Lines that describe an extension of a model whose weights take `base_bytes` on disk."""
    model, split, where = prepared.base, prepared.split, plan.branch
    yield from _classes(model, split)
    dial = recipe_named(prepared.config.recipe).dial
    yield from _old_images(model, split, dial=dial)
    yield f"validation: {described_validation(split, dial=dial, ends_training=plan.effort.stops)}"
    added = Branch.clone(model.backbone, branch_point(model.backbone, where)).parameter_count
    base = sum(p.numel() for p in model.backbone.parameters())
    yield f"branch {where}: {parameters(added)} parameters; the base has {parameters(base)}"
    yield f"time: about {duration(plan.seconds or 0.0)} on this {'CPU' if device.type == 'cpu' else 'GPU'}"
    more = added_bytes(model, split, prepared.config, where)
    free = shutil.disk_usage(Path.cwd()).free
    yield f"disk: about {size(base_bytes + more)} for the model, {size(more)} of it new; {size(free)} free"


def _classes(model: Classifier, split: DataSplit) -> Iterator[str]:
    known, new = set(model.space.classes), split.new
    yield f"base: {count(len(known), 'class', 'classes')}"
    yield f"new: {count(len(new.classes), 'class', 'classes')}, {_divided(len(new), split.held_out[0])}"
    few = [name for name, count in new.counts().items() if count < 10]
    if few:
        yield f"  fewer than 10 images: {some(few)}"
    shared = [name for name in new.classes if name in known]
    if shared:
        yield f"  known to the base too, so their logits will be pooled: {some(shared)}"


def _old_images(model: Classifier, split: DataSplit, *, dial: bool) -> Iterator[str]:
    if split.memory is None:
        yield "memory: none. Pseudo-exemplars will be computed from the base's weights"
    else:
        untrained = set(model.space.classes) - set(split.memory.classes)
        held_out = untrained & {*split.dev.classes, *split.test.classes} - set(split.new.classes)
        of_memory = {*split.memory.classes, *(held_out if split.held_out[1] else ())}  # else those are of --val
        of = f" of {count(len(of_memory), 'old class', 'old classes')}"
        yield f"memory: {_divided(len(split.memory), split.held_out[1], of)}"
        if untrained - held_out:
            yield f"  no image of: {some(sorted(untrained - held_out))}"
        if held_out:
            yield f"  only held-out images of: {some(sorted(held_out))}"
    if split.unmeasured:
        chosen = "pseudo-exemplars choose the operating point"
        if model.has_linear_head and dial:
            chosen = (
                "held-out new images choose the operating point for `balanced`, and pseudo-exemplars those for other "
                "goals"
            )
        yield f"  base accuracy cannot be measured: {split.unmeasured}; {chosen}"
        yield f"  {IMAGES_OF_OLD_CLASSES}"


def _divided(train: int, held_out: int, of: str = "") -> str:
    """How many images there are, and how many of them train: `10 images: 8 to train on, 2 held out`."""
    if not held_out:
        return f"{count(train, 'image')}{of} to train on"
    return f"{count(train + held_out, 'image')}{of}: {train:,} to train on, {held_out:,} held out"


def described_validation(split: DataSplit, *, dial: bool, ends_training: bool) -> str:
    """Where the validation images come from, and what each of them is for; `ends_training` as of the first half."""
    dev, test = f"{len(split.dev):,}", f"{len(split.test):,}"
    crossed = split.halves_cross and dial
    if crossed and not ends_training:
        roles = [f"{dev} and {test}, each tested at the point that the others choose"]
    else:
        end = "to end training and choose with" if ends_training else "to choose with"
        roles = [f"{dev} {end}", f"{test} to {'test and then choose with' if crossed else 'test'}"]
    if split.calibration is not None:
        roles.append(f"{len(split.calibration):,} to calibrate pseudo-exemplars")
    parts = (split.dev, split.test, split.calibration)
    every = sum(len(part) for part in parts if part is not None)
    return f"{count(every, 'image')} {_source(split)}: {', '.join(roles)}"


def _source(split: DataSplit) -> str:
    new, kept = split.held_out
    return "held out" if new else "of --val, and held out from --memory" if kept else "of --val"


def added_bytes(model: Classifier, split: DataSplit, config: ExtendConfig, where: str) -> int:
    """Bytes that this step would add to the model: branch, head, correction, deltas."""
    point = branch_point(model.backbone, where)
    branch = Branch.clone(model.backbone, point)
    own = branch.own_state_dict().values()
    width, names = model.backbone.features, split.new.classes
    more = sum(each.numel() * each.element_size() for each in own) + 4 * width * len(names)
    if split.memory is not None and learns_correction(model, branch, config.full_recipe().stage_one):
        more += 4 * width * model.space.columns
    space = model.space.extend(names)
    if needs_deltas(model, space, split, config):
        # A delta for each pair of a branch's columns and another branch's features; a branch that clones nothing reads
        # the base's.
        feature_of = model.fused.feature_of
        new = 0 if point.start == len(model.backbone.names) else max(feature_of) + 1
        reads = delta_inputs([*feature_of, new])
        more += 4 * width * sum(len(read) * len(of) for read, of in zip(reads, space.branches, strict=True))
    return more
