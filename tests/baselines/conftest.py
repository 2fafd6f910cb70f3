"""Steps that every baseline must be able to take: characters the base never saw, new looks of old ones, a second step.

The base is the one that is shipped, cut down to 12 of its characters: strong, small, and nothing has to be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CPU
from torch import nn

from branchout import api
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.glyphs import glyphs
from branchout.data.images import Gallery
from branchout.data.memory import keep
from branchout.data.samples import ArrayPixels, Samples, concatenate
from branchout.labels import LabelSpace
from branchout.method.recipes import PAPER
from branchout.method.stage1 import train_branch
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead, Head
from branchout.training.optimisation import Optimisation

KNOWN = (
    "ampersand",
    "digit five",
    "digit nine",
    "digit two",
    "latin capital letter b",
    "latin capital letter e",
    "latin capital letter q",
    "latin capital letter r",
    "latin capital letter s",
    "latin small letter b",
    "latin small letter g",
    "latin small letter u",
)
FIRST = ("digit eight", "digit three", "latin capital letter d", "latin small letter a")
SECOND = ("digit six", "latin small letter e", "question mark")
NEW_LOOK = ("ampersand", "digit two")
"""Old characters that an overlapping first step brings again, as seen in a mirror."""

NETWORK = Optimisation(epochs=6, lr=0.05, batch=32)
HEADS = Optimisation(epochs=10, batch=32, schedule="constant")

FirstStep = Callable[[Samples], Task]
NextTask = Callable[..., Task]
Branched = Callable[[Task], Classifier]
Measure = Callable[[nn.Module, Task, Samples], float]


def mirrored(samples: Samples) -> Samples:
    """The same characters in another look."""
    pixels = np.stack([samples.read(n)[:, ::-1] for n in range(len(samples))])
    return Samples.build(ArrayPixels(pixels), samples.names, [f"{name}, mirrored" for name in samples.ids])


def as_linear(head: Head) -> nn.Linear:
    """Rows of equal length and a bias. This base's features are about 0.4 long, so logits reach to about 15."""
    linear = nn.Linear(head.weight.shape[1], len(head.weight))
    linear.load_state_dict(
        {"weight": nn.functional.normalize(head.weight) * 40, "bias": torch.full((len(head.weight),), -1.0)}
    )
    return linear


@pytest.fixture(scope="session")
def drawings() -> tuple[Samples, Samples]:
    """20 training and 10 test images of every character, drawn once."""
    data = glyphs(20, 10, classes=[*KNOWN, *FIRST, *SECOND])
    tables = []
    for table in (data.train, data.val):
        pixels = np.stack([table.read(n) for n in range(len(table))])
        tables.append(Samples.build(ArrayPixels(pixels), table.names, table.ids))
    return tables[0], tables[1]


@pytest.fixture(scope="session")
def classifier() -> Classifier:
    """The base model, with a cosine head. All tests share it: a baseline must leave it as it was."""
    shipped = api.load("glyphs").classifier.cpu()
    head = CosineHead(shipped.backbone.features, len(KNOWN))
    rows = torch.from_numpy(shipped.space.index(KNOWN))
    head.load_state_dict({"weight": shipped.base_head.weight[rows]})
    return Classifier(shipped.arch, shipped.backbone, head, KNOWN, shipped.preprocessing, "glyph")


@pytest.fixture(scope="session")
def linear_classifier(classifier: Classifier) -> Classifier:
    """The same base with an ordinary linear head, as timm's networks have."""
    head = as_linear(classifier.base_head)
    return Classifier(classifier.arch, classifier.backbone, head, KNOWN, classifier.preprocessing, "glyph")


@pytest.fixture(scope="session")
def old_test(drawings: tuple[Samples, Samples]) -> Samples:
    """Test images of the base's characters."""
    return drawings[1].of_classes(KNOWN)


@pytest.fixture(scope="session")
def new_test(drawings: tuple[Samples, Samples]) -> Samples:
    """Test images of the first step's characters."""
    return drawings[1].of_classes(FIRST)


@pytest.fixture(scope="session")
def new_look_test(drawings: tuple[Samples, Samples]) -> Samples:
    """Test images of the new looks that the overlapping step brings."""
    return mirrored(drawings[1].of_classes(NEW_LOOK))


@pytest.fixture(scope="session")
def later_test(drawings: tuple[Samples, Samples]) -> Samples:
    """Test images of the second step's characters."""
    return drawings[1].of_classes(SECOND)


@pytest.fixture(scope="session")
def first_step(classifier: Classifier, drawings: tuple[Samples, Samples]) -> FirstStep:
    """Makes the task of a first step that brings these samples."""
    old = drawings[0].of_classes(KNOWN).with_origin(0)
    gallery = Gallery(classifier.preprocessing, CPU)

    def make(new: Samples) -> Task:
        new = new.with_origin(1)
        return Task(
            space=LabelSpace.of(KNOWN, new.classes),
            new=new,
            memory=keep(old, per_class=5, seed=3),
            images=gallery.images,
            kind="glyph",
            size=classifier.preprocessing.size,
            network=NETWORK,
            heads=HEADS,
            per_class=5,
            views=3,
            everything=concatenate([old, new]),
            device=CPU,
        )

    return make


@pytest.fixture(scope="session")
def task(first_step: FirstStep, drawings: tuple[Samples, Samples]) -> Task:
    """Four new characters, 20 images each; 5 exemplars of each of the 12 old ones."""
    return first_step(drawings[0].of_classes(FIRST))


@pytest.fixture(scope="session")
def overlapping_task(first_step: FirstStep, drawings: tuple[Samples, Samples]) -> Task:
    """Four new characters and a new look of two old ones."""
    return first_step(concatenate([drawings[0].of_classes(FIRST), mirrored(drawings[0].of_classes(NEW_LOOK))]))


@pytest.fixture(scope="session")
def next_task(drawings: tuple[Samples, Samples]) -> NextTask:
    """Makes the second step after a first: three more characters, and a new look of one that the first step brought."""

    def make(task: Task, names: Sequence[str] = SECOND, again: Sequence[str] = FIRST[:1]) -> Task:
        new = drawings[0].of_classes(names)
        if again:
            new = concatenate([new, mirrored(drawings[0].of_classes(again))])
        new = new.with_origin(task.step + 1)
        assert task.everything is not None
        return replace(
            task,
            space=task.space.extend(new.classes),
            new=new,
            memory=concatenate([task.memory, keep(task.new, per_class=task.per_class, seed=3)]),
            everything=concatenate([task.everything, new]),
        )

    return make


@pytest.fixture(scope="session")
def branched(classifier: Classifier) -> Branched:
    """The base with one branch for every step so far, as methods `on="features"` are given it; each is learned once."""
    grown = {classifier.space.branches: classifier}

    def grow(task: Task) -> Classifier:
        assert task.everything is not None
        for step in range(1, task.step + 1):
            space = task.space.upto(step)
            if space.branches not in grown:
                before = grown[space.branches[:-1]]
                new = task.labelled(task.everything.select(task.everything.origin == step))
                stage_one = replace(PAPER.stage_one, optimisation=NETWORK)
                learned, _ = train_branch(before, space.branches[-1], new, stage_one, views=3, device=CPU)
                grown[space.branches] = before.extended(learned)
        return grown[task.space.branches]

    return grow


@pytest.fixture(scope="session")
def linear_branched(linear_classifier: Classifier, branched: Branched) -> Branched:
    """The same branches, every head an ordinary linear one."""

    def grow(task: Task) -> Classifier:
        steps = [replace(step, head=as_linear(step.head)) for step in branched(task).steps]
        return linear_classifier.rebuilt(steps)

    return grow


@pytest.fixture(scope="session")
def accuracy_of() -> Measure:
    """Measures the share of samples that a scorer gets right."""

    def measure(scorer: nn.Module, task: Task, samples: Samples) -> float:
        answers = scores_of(scorer, task.images(samples)).argmax(1).cpu().numpy()
        return float((answers == task.labels(samples)).mean())

    return measure
