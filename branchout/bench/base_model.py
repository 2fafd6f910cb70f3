"""A saved base model to start an experiment from: the one in the package, or a folder given with --base.

No base is trained then. The model decides which classes are base classes and which of their images it has seen; only
the new classes are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from branchout.bench.plan import Plan
from branchout.data.datasets import Dataset
from branchout.data.draw_scenario import TrainedBase, draw_scenario
from branchout.data.scenarios import FROM_GIVEN, Scenario
from branchout.errors import BranchoutError
from branchout.method.features import weights_digest
from branchout.model import checkpoint
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.model.manifest import is_saved_model
from branchout.training.optimisation import Optimisation, optimisation_in

SHIPPED = "glyphs"
"""The name of the model in the package."""
MADE_FOR: dict[str, Any] = {"name": "overlap-style", "base": 800, "novel": 40, "overlap": 5, "seed": 0}
"""The scenario whose base it is. It has seen the five shared characters in sans-serif typefaces only."""


@dataclass(frozen=True)
class SavedBase:
    """A saved base model and how it was trained."""

    place: str
    kept: SavedModel

    @cached_property
    def classifier(self) -> Classifier:
        return self.kept.model()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.classifier.space.classes

    @cached_property
    def weights(self) -> str:
        """Identifies it, wherever it is stored."""
        return weights_digest(self.classifier)

    @property
    def optimisation(self) -> Optimisation | None:
        """How it was trained, where its manifest tells."""
        return optimisation_in(self.kept.history[0]) if self.kept.history else None

    def start(self, plan: Plan) -> Plan:
        """The plan with this model as its base: the network, its input size and its schedule are the model's."""
        arch = self.classifier.arch
        return replace(
            plan,
            base=len(self.classes),
            arch=arch["name"],
            width=arch.get("width"),
            size=self.classifier.preprocessing.size,
            pretraining=self.optimisation or plan.pretraining,
            model=self.place,
            weights=self.weights,
        )

    def stands_for(self, plan: Plan, dataset: Dataset) -> bool:
        """Whether it replaces the base that the plan would train: same network, schedule, classes."""
        if plan.scenario not in FROM_GIVEN and not self._made_for(plan):
            return False
        same = replace(self.start(plan), model=plan.model, weights=plan.weights) == plan
        return same and set(self.classes) <= set(dataset.train.classes)

    def _made_for(self, plan: Plan) -> bool:
        """Whether this is the first split of the scenario that the shipped model was made for."""
        asked = {"name": plan.scenario, "base": plan.base, "novel": plan.novel, "overlap": plan.overlap}
        return self.place == SHIPPED and plan.split == 1 and {**MADE_FOR, **asked} == MADE_FOR

    def scenario(self, plan: Plan, dataset: Dataset) -> Scenario:
        """New classes drawn for this base, or the very split that the shipped one was made for."""
        sides = {}
        if self.place == SHIPPED and set(self.classes) <= set(dataset.train.classes):
            sizes = {name: value for name, value in MADE_FOR.items() if name != "name"}
            made = draw_scenario(MADE_FOR["name"], dataset, **sizes) if dataset.style_sides else None
            if made is None or made.branches[0] != self.classes:
                raise BranchoutError(
                    f"the base model '{SHIPPED}' was trained on other images than those of '{dataset.name}'; "
                    "use it with --data glyphs"
                )
            if self._made_for(plan):
                return made
            sides = dict(made.sides)
        return plan.draw(dataset, given=TrainedBase(self.classes, sides))


def open_base(place: str) -> SavedBase:
    """Open a saved base model: a folder, or `glyphs`."""
    if place == SHIPPED and not is_saved_model(Path(place)):
        with as_file(files("branchout") / "assets" / "glyphs-base") as folder:
            return SavedBase(place, checkpoint.load(folder))
    kept = checkpoint.load(Path(place))
    if kept.classifier.steps:
        raise BranchoutError(
            f"{place} was already extended ({len(kept.classifier.steps)} steps), and an experiment starts from a base "
            "model; give the model it was extended from"
        )
    return SavedBase(str(Path(place).absolute()), kept)
