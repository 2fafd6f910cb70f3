"""How long an extension takes at the speeds of a machine, which `measure_speed.py` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from branchout.method.config import ExtendConfig
from branchout.method.extend import needs_deltas
from branchout.method.recipes import BRANCHOUT
from branchout.method.running.effort import Effort
from branchout.method.split import DataSplit
from branchout.method.stage1 import batch_sizes
from branchout.method.trunk_cache import views_per_source
from branchout.model.classifier import Classifier
from branchout.training.optimisation import scale_to_dataset

HEAD_EVALUATIONS = 170
"""Evaluations of the loss of a head alone: those of L-BFGS and of its line searches."""


@dataclass(frozen=True)
class Counts:
    """How many images an extension computes with."""

    new: int
    memory: int
    held: int
    """Dev and test images."""
    old_held: int
    """Those of old classes: the base alone predicts them too, for before → after."""
    new_classes: int
    old_classes: int
    fused: bool
    """Whether stage II is trained."""
    linear: bool
    """Whether the base's head is linear: a head alone is trained by L-BFGS, and class means are computed."""

    @classmethod
    def of(cls, base: Classifier, split: DataSplit, config: ExtendConfig) -> Counts:
        held = len(split.dev) + len(split.test)
        old = sum(len(part.of_classes(base.space.classes)) for part in (split.dev, split.test))
        memory = 0 if split.memory is None else len(split.memory)
        classes = (len(split.new.classes), len(base.space.classes))
        linear = base.has_linear_head
        fused = needs_deltas(base, base.space.extend(split.new.classes), split, config)
        return cls(len(split.new), memory, held, old, *classes, fused, linear)


@dataclass(frozen=True)
class Speeds:
    """Seconds on this machine."""

    reading: float
    """To decode one image on one core."""
    frozen: float
    """For one image through the network."""
    training: Mapping[str, float]
    """For one image forwards and backwards through each branch; for `fc`, one iteration over one feature vector."""
    fusing: float
    """For one step of stage II."""
    cores: int = 1
    gpu: bool = False
    engine: str = "torch"
    """What ran the frozen part."""
    table_bytes: Mapping[str, int] = field(default_factory=dict)
    """What one image takes in the table of cached outputs, for each branch."""


def frozen_passes(effort: Effort, counts: Counts) -> int:
    """How many images go through the frozen network."""
    # Without views: the first head, the choice, and class means, of new images and held-out ones of the same classes.
    means = counts.new + 2 * (counts.held - counts.old_held) if counts.linear else 0
    return table_rows(effort, counts) + counts.new + counts.held + counts.old_held + means


def table_rows(effort: Effort, counts: Counts) -> int:
    """How many views of all images are cached."""
    sizes = [count for count in (counts.new, counts.memory) if count]
    views = views_per_source(effort.views, sizes, effort.exemplar_views)
    return sum(each * size for each, size in zip(views, sizes, strict=True))


def seconds_for(effort: Effort, branch: str, counts: Counts, speeds: Speeds) -> float:
    """How long an extension takes."""
    reading = speeds.reading / speeds.cores
    # Other processes decode images: on a CPU they take time from the network, on a GPU they run beside it.
    each = max(reading, speeds.frozen) if speeds.gpu else reading + speeds.frozen
    seconds = frozen_passes(effort, counts) * each
    if branch == "fc" and counts.linear:
        seconds += HEAD_EVALUATIONS * table_rows(effort, counts) * speeds.training[branch]
    else:
        epochs = effort.epochs or BRANCHOUT.stage_one.optimisation.epochs
        seconds += epochs * trained_in_epoch(effort, counts) * speeds.training[branch]
    if counts.fused:
        stage2 = BRANCHOUT.stage_two.optimisation
        images = ExtendConfig().exemplars * (counts.old_classes + counts.new_classes)
        seconds += stage2.epochs * -(-images // stage2.batch) * speeds.fusing
        seconds += BRANCHOUT.stage_two.views * images * each
    return seconds


def trained_in_epoch(effort: Effort, counts: Counts) -> int:
    """New images and exemplars that an epoch of stage I trains with."""
    if not counts.memory:
        return counts.new
    settings = BRANCHOUT.stage_one
    most = effort.batch or settings.optimisation.batch
    batch = scale_to_dataset(replace(settings.optimisation, batch=most), counts.new).batch
    pool = settings.linear_pool if counts.linear else 0.0
    drawn = batch_sizes([counts.new, counts.memory], batch, effort.exemplar_share, pool, most)[1]
    return counts.new + max(counts.new // batch, 1) * drawn
