"""The settings of an experiment, apart from its data, and how two sets of settings are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from branchout.data.datasets import Dataset
from branchout.data.draw_scenario import TrainedBase, draw_scenario
from branchout.data.scenarios import Scenario
from branchout.method.recipes import PAPER
from branchout.training.optimisation import Optimisation
from branchout.training.pretrain import FAST


@dataclass(frozen=True)
class Plan:
    """All settings of an experiment that do not depend on the method."""

    scenario: str
    base: int | None
    novel: int
    overlap: int = 0
    steps: int = 1
    split: int = 1
    """Seed of the class split, and of the base's training. With `faithful`, 1993 gives an order of the literature."""
    kept: int | None = None
    """Use only so many of the base classes; the new classes stay the same."""
    exemplars: int = 10
    """Exemplars kept of each class."""
    total: int | None = None
    """Exemplars in total instead, shared evenly by all classes so far."""
    arch: str = "resnet10"
    width: int | None = None
    size: int = 64
    pretraining: Optimisation = FAST
    fusion_epochs: int | None = None
    """Epochs of the paper's stage II, if not the recipe's."""
    network: Optimisation = PAPER.stage_one.optimisation
    """How methods that train a whole network train it in one step."""
    epochs: int | None = None
    """Epochs of stage I, if not the recipe's."""
    model: str | None = None
    """A saved model that is the base: `glyphs`, which is in the package, or a folder. With `kept` only its classes are
    used, and a base is trained on some of them."""
    weights: str | None = None
    """Digest of that model's weights."""
    augmentation: str | None = None
    """The name of an augmentation for all training but stage I of Branchout's recipe, if not the default for the kind
    of image."""
    last_relu: bool = True
    """Whether the network ends in a ReLU, so that no feature is negative."""
    faithful: bool = False
    """Shuffle classes as published; train methods that have one by their authors' recipe, each from its own base."""
    memory: str = "random"
    """How exemplars are chosen: `random`, the same for every method, or `herding` on each method's own features."""

    def draw(
        self, dataset: Dataset, *, features: np.ndarray | None = None, given: TrainedBase | None = None
    ) -> Scenario:
        """The classes and images of its scenario; a clustered one needs `features` of all training images."""
        return draw_scenario(
            self.scenario,
            dataset,
            base=self.base,
            novel=self.novel,
            overlap=self.overlap,
            steps=self.steps,
            seed=self.split,
            features=features,
            given=given,
            published_order=self.faithful,
        )


def flat(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Settings within settings under one name each, such as `network.epochs`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {within + name: value}
    return found


def difference(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The first setting of a file that differs from the one asked for, in words; empty if all agree."""
    for name, value in flat(json.loads(json.dumps(asked))).items():
        if recorded.get(name) != value:
            return f"{name} = {recorded.get(name)}, and this run has {value}"
    return ""
