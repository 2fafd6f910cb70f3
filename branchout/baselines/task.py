"""What every baseline is, and its input: one step of an experiment.

A baseline is one function, `learn(before, task) -> scorer`. `before` is the base model at the first step and the
baseline's own result of the step before at later ones. A scorer is a module that turns a batch of images into one score
per class, in the order of `task.space.classes`; what a baseline needs in its next step is an attribute of its scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples
from branchout.labels import Ints, LabelSpace
from branchout.method.new_branch import Labelled
from branchout.method.recipes import BRANCHOUT, PAPER
from branchout.model.classifier import Classifier
from branchout.model.staged import Backbone
from branchout.training.loop import OnProgress, best_device, silent
from branchout.training.optimisation import Optimisation
from branchout.training.pretrain import FAST


@dataclass(frozen=True)
class Task:
    """One step with the same images, exemplars, schedule and augmentation for every method, score fusion included."""

    space: LabelSpace
    """After this step. Labels are its class numbers; those of earlier classes stay what they were."""
    new: Samples
    """All new images; their origin is the number of this step."""
    memory: Samples
    """Exemplars of every earlier class, each with its origin: 0 for the base, t for step t."""
    images: Callable[[Samples], Images]
    """Opens samples as images on the device."""
    kind: str
    size: int
    preprocessing: Preprocessing | None = None
    """How images are normalised, for methods that augment them further."""
    network: Optimisation = PAPER.stage_one.optimisation
    """How a network is trained in one step: as our stage I."""
    pretraining: Optimisation = FAST
    """How the base was trained, which is how an oracle is."""
    heads: Optimisation = PAPER.stage_two.optimisation
    """How a head on cached features is trained: as our stage II."""
    per_class: int = 10
    """Exemplars kept of each class; heads on cached features see as many images of each new class."""
    after: int | None = None
    """Exemplars of each class once this step is over, where a memory of fixed size leaves fewer than `per_class`."""
    views: int = 10
    """Number of augmented views whose features are cached."""
    everything: Samples | None = None
    """All training images of all steps so far: for oracles, and for variants named as such."""
    from_scratch: Callable[[Samples], Classifier] | None = None
    """Trains a network as the base was trained, or reads one that was trained on the same images from disk."""
    untrained: Callable[[], Backbone] | None = None
    """A new network of the experiment's shape, for methods that train their own base."""
    features: Callable[[Classifier, Samples, int, int], Tensor] | None = None
    """Features by model, samples, number of views and seed; methods share them."""
    augmented: str | None = None
    """The name of an augmentation for all training, if not the default for the kind of image."""
    seed: int = 0
    device: torch.device = field(default_factory=best_device)
    on_progress: OnProgress = silent

    @property
    def step(self) -> int:
        return len(self.space.branches) - 1

    @property
    def augmentation(self) -> Augmentation:
        """Of images that train a network: as in stage I of Branchout's recipe."""
        found = augment.for_kind(self.kind, self.size, few=True, named=self.augmented)
        return replace(found, hue=min(found.hue, BRANCHOUT.stage_one.most_hue))

    @property
    def head_augmentation(self) -> Augmentation:
        """Of images whose cached features train a head: as in stage II."""
        return augment.for_kind(self.kind, self.size, named=self.augmented)

    def labels(self, samples: Samples) -> Ints:
        """Class numbers of `space`."""
        return samples.labels_in(self.space)

    def labelled(self, samples: Samples) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples))


Learn = Callable[[Any, Task], nn.Module]


@dataclass(frozen=True)
class Published:
    """A method as its authors train it."""

    first: Callable[[Task], nn.Module]
    """Trains its base from scratch: the task of step 0 has the base's images as new ones, and no exemplars."""
    learn: Learn


@dataclass(frozen=True)
class Baseline:
    """A method of the tables: its names, what it builds on and where it applies."""

    name: str
    label: str
    """Its name in the paper's tables, or in the literature."""
    learn: Learn
    on: str
    """What `before` is. `features`: our base with one branch for each step so far, learned by the paper's stage I
    (given anew at every step). `network` or `base`: the base model, then the method's own result of the step before."""
    dial: bool = True
    """Its scores are logits of one scale, so the dial may move those of new classes."""
    oracle: bool = False
    """Sees all training images of all classes."""
    anew: bool = False
    """Starts from scratch at every step: only the last step is run, no base is trained, and `memory` is empty. Of
    `before` only the shape counts."""
    seeded: bool = True
    """Its result depends on the exemplar seed."""
    note: str = ""
    """Where it does not apply, and why."""
    published: Published | None = None
    """How it is trained with `--faithful`; None: as always, on the shared base."""


def on_base(name: str, label: str, learn: Callable[..., nn.Module], note: str = "") -> tuple[Baseline, Baseline]:
    """A method on the frozen base that knows its classes by exemplars, and its variant that sees all their images."""
    everything = partial(learn, everything=True)
    return (
        Baseline(name, f"{label}, exemplars", learn, on="base", note=note),
        Baseline(f"{name}-all", f"{label}, all base images", everything, on="base", oracle=True, note=note),
    )
