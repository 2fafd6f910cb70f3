"""The last part of an extension: class means, the choice of an operating point, and its accuracies.

Symbols: b or (α, β) → a point of the `Frontier` · μ_c, Σ → `ClassMeans` · Acc → `Measured`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from branchout.data import memory as memory_rules
from branchout.data.samples import Samples, concatenate
from branchout.method.choose import (
    HeldOutFeatures,
    apply_point,
    balanced_biases,
    choose_point,
    cross_fit,
    measure_goals,
)
from branchout.method.class_means import choose_share, class_means
from branchout.method.features import predictions
from branchout.method.frontier import Frontier
from branchout.method.recipes import MEANS_IMAGES, MEANS_SHARE, Recipe
from branchout.method.results import Measured
from branchout.method.split import DataSplit
from branchout.method.stage2 import TrainedDeltas
from branchout.method.step_data import StepImages
from branchout.metrics import Accuracies, accuracies
from branchout.model.checkpoint import StepPoints
from branchout.model.class_means import ClassMeans
from branchout.model.classifier import Classifier
from branchout.training import processes

Chosen = tuple[Classifier, StepPoints, Measured | None]
"""A model, its operating point and its accuracies there."""


@dataclass(frozen=True)
class StepChoice:
    """How the model of a step, once it is trained, gets its operating point."""

    data: StepImages
    recipe: Recipe
    goal: str
    dev_ended_training: bool
    """Whether dev images also chose the end of training."""
    earlier_biases: Sequence[float]
    """Those of the base's steps at its point for `balanced`."""

    @property
    def base(self) -> Classifier:
        return self.data.base

    @property
    def split(self) -> DataSplit:
        return self.data.split

    def choose_and_measure(self, model: Classifier, trained: TrainedDeltas | None) -> Chosen:
        """The model, with class means where they help, its operating point, and its accuracies there."""
        halves = self.halves(model)
        mixed = self.choose_with_class_means(model, trained, halves) if self.can_use_class_means() else None
        if mixed is not None:
            return mixed
        points, frontier = self.choose(model, trained, halves)
        return model, points, self.measure(model, trained, halves, points, frontier)

    def choose_with_class_means(
        self, model: Classifier, trained: TrainedDeltas | None, halves: Sequence[HeldOutFeatures]
    ) -> Chosen | None:
        """The same with class means; None where they do not help.

        The point for `balanced` is found without class means and stays. Images that were held out choose and measure
        first. Then they are added to the means: with a handful of images of each class, a fifth more counts.
        """
        balanced, _ = self.choose(model, trained, halves, goal="balanced")
        apply_point(model, balanced)
        biases = balanced_biases(balanced, len(model.steps))
        seen = [self.features_of_new(model, part) for part in (self.split.new, self.split.memory) if part is not None]
        means = class_means(model, *_joined(seen), biases)
        share = 0.0 if means is None else self.weight_of_class_means(model, means)
        if means is None or not share:
            return None
        mixed = self.with_means(model, means.at(share))
        points, frontier = self.choose(mixed, trained, halves, biases)
        measured = self.measure(mixed, trained, halves, points, frontier)
        if self.split.held_out_images:
            seen += [self.features_of_new(model, part) for part in self.split.held_out_images]
            means = class_means(model, *_joined(seen), biases) or means
        return self.with_means(model, means.at(share)), points, measured

    def can_use_class_means(self) -> bool:
        """Whether class means are tried: the head is linear, exemplars are replayed, and every class of earlier steps
        has images. Not where overlapping classes are averaged: the mean over branches would change the logit of a class
        although the largest new logit stays."""
        known = {*self.split.new.classes, *(() if self.split.memory is None else self.split.memory.classes)}
        averaged = self.base.fused.pooler.kind == "average" and len(self.data.space.overlap) > 0
        linear = self.base.has_linear_head and self.recipe.stage_one.replay
        return linear and not averaged and set(self.classes_of_earlier_steps()) <= known

    def classes_of_earlier_steps(self) -> list[str]:
        return [name for step in self.base.steps for name in step.names]

    def with_means(self, model: Classifier, means: ClassMeans) -> Classifier:
        made = self.base.extended(replace(model.steps[-1], class_means=means)).to(self.data.device)
        made.engine = self.base.engine
        return made

    def features_of_new(self, model: Classifier, samples: Samples) -> tuple[Tensor, Tensor]:
        """Features and labels of the images of new classes, of this step and of earlier ones; some of each class."""
        samples = samples.of_classes([*self.split.new.classes, *self.classes_of_earlier_steps()])
        if not len(samples):
            return torch.empty(0), torch.empty(0)
        some = memory_rules.keep(samples, per_class=MEANS_IMAGES, seed=self.data.config.seed)
        return self.features_and_labels(model, some)

    def weight_of_class_means(self, model: Classifier, means: ClassMeans) -> float:
        """How much the class means count. The test half has no say where dev images also ended the training."""
        both = self.split.held_out_images and not self.dev_ended_training
        held = concatenate([self.split.dev, self.split.test]) if both else self.split.dev
        held = held.of_classes(self.split.new.classes)
        if not len(held):
            return MEANS_SHARE
        return processes.from_main(choose_share(means, model, *self.features_and_labels(model, held)))

    def features_and_labels(self, model: Classifier, samples: Samples) -> tuple[Tensor, Tensor]:
        return self.data.features(model, samples)[0], self.data.on_device(samples)

    @property
    def halves_cross(self) -> bool:
        """Whether both halves choose, and each is measured at the point that the other half chooses."""
        return self.split.halves_cross and self.recipe.dial

    def halves(self, model: Classifier) -> list[HeldOutFeatures]:
        """The images that choose: dev images, and test images where both do."""
        test = self.split.test
        return [self.dev(model), *([self.features_and_numbers(model, test)] if self.halves_cross else [])]

    def features_and_numbers(self, model: Classifier, samples: Samples) -> HeldOutFeatures:
        """The same with labels as a numpy array."""
        return self.data.features(model, samples)[0], self.data.labels(samples)

    def choose(
        self,
        model: Classifier,
        trained: TrainedDeltas | None,
        halves: Sequence[HeldOutFeatures],
        biases: list[float] | None = None,
        goal: str | None = None,
    ) -> tuple[StepPoints, Frontier]:
        """The operating point. With `biases`, those of all steps at the balanced point are known."""
        return choose_point(
            model,
            trained,
            torch.cat([features for features, _ in halves]),
            np.concatenate([labels for _, labels in halves]),
            recipe=self.recipe,
            goal=goal or self.goal,
            chosen_on=self.split.chosen_on,
            held_new=self.held_new(model) if self.only_new_images_choose() else None,
            earlier_biases=biases[:-1] if biases else self.kept_biases(trained),
            newest=biases[-1] if biases else None,
        )

    def kept_biases(self, trained: TrainedDeltas | None) -> Sequence[float] | None:
        """The biases that earlier steps keep: kept images trained those steps, so their logits on them are too large.
        Deltas change all logits; biases are then found anew, unless only new images can place them."""
        keeps = self.base.steps and self.split.chosen_on != "dev" and (trained is None or self.only_new_images_choose())
        return self.earlier_biases if keeps else None

    def measure(
        self,
        model: Classifier,
        trained: TrainedDeltas | None,
        halves: Sequence[HeldOutFeatures],
        points: StepPoints,
        frontier: Frontier,
    ) -> Measured | None:
        """Accuracies before and after, on the test images, or on both halves; only on the test half if the dev half
        also chose the end of training."""
        test, second_only = self.split.test, self.dev_ended_training
        if not len(test):
            return None
        if not self.halves_cross:
            return measure_goals(model, *self.features_and_numbers(model, test), points, frontier, self.before(test))
        before = self.before(test if second_only else concatenate([self.split.dev, test]))
        earlier = self.kept_biases(trained)
        dev, other = halves
        return cross_fit(model, (dev, other), points, frontier, before, second_only=second_only, earlier_biases=earlier)

    def only_new_images_choose(self) -> bool:
        """Whether held-out images of the new classes alone choose: the head is linear, and there are no old images."""
        return self.split.chosen_on == "pseudo" and self.base.has_linear_head

    def held_new(self, model: Classifier) -> HeldOutFeatures:
        """Held-out images of the new classes."""
        held = concatenate([part for part in (self.split.dev, self.split.calibration) if part])
        held = held.of_classes(self.split.new.classes)
        return self.features_and_numbers(model, held)

    def dev(self, model: Classifier) -> HeldOutFeatures:
        """Features and labels of the dev images, with pseudo-exemplars of the old classes if most have no images."""
        features, labels = self.features_and_numbers(model, self.split.dev)
        if self.split.chosen_on != "pseudo":
            return features, labels
        # With another seed than stage II's: what trained must not choose.
        made = self.data.pseudo(model, self.data.config.seed + 1, self.data.on_device(self.split.dev))
        return torch.cat([made.features, features]), np.concatenate([made.labels.cpu().numpy(), labels])

    def before(self, samples: Samples) -> Accuracies | None:
        """Accuracies of the base on the images of its own classes; None where there are none."""
        old = samples.of_classes(self.base.space.classes)
        if not len(old):
            return None
        features, labels = self.features_and_numbers(self.base, old)
        return accuracies(predictions(self.base, features), labels, self.data.space)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Features and labels of several parts; those without images are left out."""
    found = [part for part in parts if len(part[1])]
    return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])
