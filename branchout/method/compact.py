"""Compaction: distil the branches of many steps into one branch, or a few (our addition; the paper keeps them all).

The base stays as it is. One new branch learns, on kept images of all classes, to give the probabilities that all the
step branches gave together and each of them gave alone; its head has the rows of all their classes (`distil.py`). Then
deltas are trained and an operating point is chosen as after any extension, with class means of its own where the head
is linear.

Symbols: the branches Φ_n1, Φ_n2, … of the model to compact → `Teacher` · the new branches → `Student` · E → `memory`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from branchout.data.images import Images, open_images
from branchout.data.samples import Samples, concatenate, find_identical
from branchout.errors import LIST_CLASSES, BranchoutError, UnreachableGoal, did_you_mean, some, whole_number
from branchout.labels import LabelSpace
from branchout.method.choose import apply_point, balanced_biases
from branchout.method.config import ExtendConfig
from branchout.method.distil import (
    Student,
    cached_views,
    common_branch_point,
    distil,
    epochs_for,
    groups_of,
    merged_steps,
)
from branchout.method.extend import Extension
from branchout.method.features import extract, logit_columns, predictions
from branchout.method.frontier import Frontier
from branchout.method.results import Measured
from branchout.method.running.engine import engine_for, use_engine
from branchout.method.split import DataSplit
from branchout.metrics import Accuracies, accuracies
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.model.classifier import Classifier, Step
from branchout.training.loop import OnProgress, seed_for, silent
from branchout.units import count


@dataclass(frozen=True)
class CompactConfig:
    """All that, with the model and the images, decides the result."""

    branches: int = 1
    """How many branches remain; consecutive steps share one."""
    epochs: int | None = None
    """None for as many as the number of images needs."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("branches", 1), ("epochs", 1), ("seed", 0)):
            value = getattr(self, name)
            if name != "epochs" or value is not None:
                object.__setattr__(self, name, whole_number(name, value, least))


@dataclass(frozen=True)
class Compacted:
    """What a compaction made, and what it cost."""

    model: Classifier
    step_points: tuple[StepPoints, ...]
    before: Accuracies | None
    """Of the model that was compacted, on the same held-out images as `measured`; None where there are too few."""
    measured: Measured | None
    losses: list[float]
    """Of every epoch."""
    seconds: float
    engine: str
    """What ran the frozen part."""
    notices: tuple[str, ...] = ()


def check_compaction(saved: SavedModel, memory: Samples, config: CompactConfig) -> list[str]:
    """Refuse what cannot be compacted; returns warnings."""
    model, steps = saved.classifier, len(saved.classifier.steps)
    if steps < 2:
        raise BranchoutError(
            f"This model has {steps or 'no'} step{'' if steps == 1 else 's'}, so there is nothing to compact. "
            "`branchout extend` adds steps; `compact` merges the branches of two or more."
        )
    if config.branches >= steps:
        raise BranchoutError(
            f"This model has {steps} step branches, and {config.branches} are asked for. Choose --branches from 1 to "
            f"{steps - 1}."
        )
    own = model.own_branches
    if own <= config.branches:
        raise BranchoutError(
            f"Compaction would save nothing: this model has {count(own, 'branch', 'branches')} in {steps} steps, and "
            f"{config.branches} would remain. Steps made with --branch fc are heads on the base's features and have "
            "no branch. Use the model as it is" + (f", or choose --branches from 1 to {own - 1}." if own > 1 else ".")
        )
    unknown = sorted(set(memory.classes) - set(model.space.classes))
    if unknown:
        raise BranchoutError(
            f"--memory has classes that the model does not know: {some(unknown)}. Rename or remove them."
            + did_you_mean(unknown, model.space.classes)
            + LIST_CLASSES
        )
    added = {name for step in model.steps for name in step.names}
    if not added & set(memory.classes):
        raise BranchoutError(
            f"--memory has no images of the {count(len(added), 'class', 'classes')} that the steps added. Compaction "
            "learns from such images: add a few of each class."
        )
    parts = (("added by steps", added), ("that only the base knows", set(model.space.branches[0]) - added))
    lost = [(which, sorted(names - set(memory.classes))) for which, names in parts]
    return [
        f"--memory has no images for {count(len(names), 'class', 'classes')} {which}, which may be forgotten and "
        f"are not measured: {some(names)}"
        for which, names in lost
        if names
    ]


class Compaction:
    """One run: split the images, distil, then fuse and choose as after an extension."""

    def __init__(
        self,
        saved: SavedModel,
        memory: Samples,
        config: CompactConfig,
        *,
        val: Samples | None = None,
        unlabelled: Samples | None = None,
        device: torch.device,
        cache: Path | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        """`unlabelled` images are distilled on too; `cache` is for decoded images."""
        self.old, self.points = saved.model().on_device(device), saved.step_points[-1]
        self.config, self.device, self.cache, self.on_progress = config, device, cache, on_progress
        self.work: Path | None = None
        """For checkpoints: set once the work folder is locked."""
        self.base = self.old.rebuilt(())
        self.where = common_branch_point(self.base, [step.where for step in self.old.steps])
        self.groups = groups_of(len(self.old.steps), config.branches)
        branches = self.old.space.branches
        merged = [dict.fromkeys(name for n in group for name in branches[n]) for group in self.groups]
        self.space = LabelSpace.of(branches[0], *merged)
        origins = self.origins(memory)
        added = origins > 0
        known = memory.select(~added) if not added.all() else None
        if val is not None:
            val = val.of_classes([*branches[0], *memory.select(added).classes])
        split = DataSplit.of(LabelSpace.of(branches[0]), memory.select(added), known, val, config.seed, "added classes")
        step_of = dict(zip(memory.rows.tolist(), origins.tolist(), strict=True))
        steps = [step_of[row] for row in split.new.rows.tolist()]
        self.split = replace(split, new=split.new.with_origin(self.new_branches(split.new, steps)))
        self.notices = list(split.notices)
        lacking = [] if val is None else sorted(set(split.new.classes) - set(val.classes))
        if lacking:
            number = count(len(lacking), "class", "classes")
            self.notices.append(f"--val has no images for {number} added by steps: {some(lacking)}")
        self.unlabelled = unlabelled and self.without_held_out(unlabelled)
        parts = (self.split.new, self.split.memory, self.unlabelled)
        self.learned = concatenate([part for part in parts if part is not None])
        self.epochs = epochs_for(len(self.learned), device) if config.epochs is None else config.epochs
        self.views = cached_views(self.epochs, device)
        self.engine = engine_for(self.base, device, len(self.learned) * (self.views or self.epochs))

    @property
    def checkpoint(self) -> Path | None:
        return self.work / "distilled.safetensors" if self.work else None

    def without_held_out(self, unlabelled: Samples) -> Samples | None:
        """Without the images that choose or measure, with a notice about them; None if none is left."""
        held = (self.split.dev, self.split.test, self.split.calibration)
        same = {n for part in held if part is not None for n, _ in find_identical(unlabelled, part)}
        if same:
            self.notices.append(
                f"identical to images that choose or measure the operating point, and so left out of --images: "
                f"{count(len(same), 'image')}, such as {unlabelled.ids[min(same)]}"
            )
        left = [n for n in range(len(unlabelled)) if n not in same]
        return unlabelled.select(np.array(left)) if left else None

    def origins(self, memory: Samples) -> np.ndarray:
        """The branch that each image belongs to: its origin where it is known, or the one with the largest logit."""
        space = self.old.space
        member = np.array([[name in names for names in space.branches] for name in memory.classes])[memory.labels]
        found = np.where((memory.origin >= 0) & (memory.origin < len(space.branches)), memory.origin, member.argmax(1))
        shared = np.flatnonzero((member.sum(1) > 1) & (memory.origin < 0))
        if len(shared):
            samples = memory.select(shared)
            columns = torch.from_numpy(logit_columns(self.old, self.features(self.old, samples)))
            columns += self.old.fused.bias.cpu()[torch.from_numpy(space.branch_of_column)]
            own = torch.from_numpy(space.class_of_column)[None] == torch.from_numpy(self.labels(samples))[:, None]
            best = columns.masked_fill(~own, -torch.inf).argmax(1).numpy()
            found[shared] = space.branch_of_column[best]
        return found

    def new_branches(self, new: Samples, steps: Sequence[int]) -> np.ndarray:
        """The new branch that each image belongs to, given its step: every branch needs some.

        One without any gets half of the images that another has of its classes, of the one that has most.
        """
        branch_of = {step: number for number, group in enumerate(self.groups, 1) for step in group}
        found = np.array([branch_of[step] for step in steps])
        numbers = range(1, len(self.groups) + 1)
        for number in numbers:
            if not (found == number).any():
                known = new.mask(self.space.branches[number])
                most = np.bincount(found[known]).argmax() if known.any() else 0
                found[np.flatnonzero(known & (found == most))[1::2]] = number
        for number in numbers:
            if not (found == number).any():
                names = sorted(self.space.branches[number])
                raise BranchoutError(
                    f"--memory has too few images for {count(len(names), 'class', 'classes')} that would share a "
                    f"branch: {some(names)}. Add images of these classes, or choose --branches 1."
                )
        return found

    def run(self) -> Compacted:
        begun = time.perf_counter()
        steps, losses = self.distil()
        small = SavedModel(self.base)
        for step in steps:
            extended = small.classifier.extended(step).to(self.device)
            model, points, measured, notice = self.choose(extended, small.step_points[-1:])
            small = small.extended(model, points, {})
        notices = (*self.notices, notice) if notice else self.notices
        apply_point(model, points)
        before = self.accuracy_before(measured)
        seconds = time.perf_counter() - begun
        return Compacted(model, small.step_points, before, measured, losses, seconds, self.engine, tuple(notices))

    def distil(self) -> tuple[list[Step], list[float]]:
        """Train the new branches; returns them with the mean loss of every epoch."""
        config, base = self.config, self.base
        teacher = self.old.rebuilt(self.old.steps).to(self.device)
        frontier = Frontier.from_dict(self.points.frontier)
        points = replace(self.points, point=frontier.choose("balanced"))
        apply_point(teacher, points)
        biases = np.array(points.biases(len(self.old.steps)))
        shared = [float(np.mean(biases[np.array(group) - 1])) for group in self.groups]
        torch.manual_seed(seed_for(config.seed, len(self.old.steps)))
        steps = merged_steps(base, self.old.steps, self.groups, self.space, self.where)
        student = Student(steps, self.space, base.fused.pooler.kind, shared)
        student.to(self.device, memory_format=base.backbone.layout(self.device))  # type: ignore[call-overload]
        parts = [step.names for step in self.old.steps]
        if student.corrections:
            parts.append(base.space.classes)
        self.engine = use_engine(teacher, self.engine, [steps[0].start])
        try:
            losses = distil(
                teacher,
                student,
                self.images(self.learned),
                steps[0].start,
                [self.space.index(names) for names in parts],
                epochs=self.epochs,
                views=self.views,
                seed=config.seed,
                device=self.device,
                checkpoint=self.checkpoint,
                on_progress=self.on_progress,
            )
        finally:
            teacher.engine = None
        return steps, losses

    def choose(
        self, model: Classifier, last: Sequence[StepPoints]
    ) -> tuple[Classifier, StepPoints, Measured | None, str]:
        """Fuse and choose after the last of these steps; a goal out of reach becomes `balanced`, with a notice.

        `last` holds the points of the step before, if there is one.
        """
        number = len(model.steps)
        space, split = self.space.upto(number), self.split
        earlier = [part for part in (split.memory, split.new.select(split.new.origin < number)) if part]
        split = replace(
            split,
            new=split.new.select(split.new.origin == number),
            memory=concatenate(earlier) if earlier else None,
            dev=split.dev.of_classes(space.classes),
            test=split.test.of_classes(space.classes),
            calibration=split.calibration and split.calibration.of_classes(space.branches[number]),
        )
        config = ExtendConfig(goal=self.points.goal, seed=self.config.seed)
        base = self.old.rebuilt(model.steps[:-1])
        for points in last:
            base.fused.set_bias(balanced_biases(points, number - 1))
        extension = Extension(
            base, split, config, space=space, device=self.device, images=self.images, on_progress=self.on_progress
        )
        trained = extension.train_deltas(model) if extension.needs_deltas() else None
        notice = ""
        try:
            model, points, measured = extension.choose_and_measure(model, trained)
        except UnreachableGoal as error:
            notice = f"The goal {config.goal!r} cannot be reached after compaction; balanced was chosen. {error}"
            model, points, measured = extension.choose_and_measure(model, trained, "balanced")
        return model, points, measured, notice

    def accuracy_before(self, measured: Measured | None) -> Accuracies | None:
        """Of the model that was compacted, on the images that `measured` was measured on."""
        if measured is None:
            return None
        both = measured.images > len(self.split.test)
        test = concatenate([self.split.dev, self.split.test]) if both else self.split.test
        return accuracies(predictions(self.old, self.features(self.old, test)), self.labels(test), self.space)

    def images(self, samples: Samples) -> Images:
        return open_images(samples, self.old.preprocessing, self.device, cache=self.cache)

    def features(self, model: Classifier, samples: Samples) -> Tensor:
        return extract(model, self.images(samples), device=self.device, on_progress=self.on_progress)[0]

    def labels(self, samples: Samples) -> np.ndarray:
        return samples.labels_in(self.space)
