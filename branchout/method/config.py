"""The settings of an extension. It imports neither numpy nor torch: a wrong word is answered at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from branchout.errors import BranchoutError, unknown
from branchout.goals import check_goal
from branchout.method.recipes import Recipe, recipe_named

POOLERS = ("max", "average")
"""Those of `model.heads`, which imports torch."""


@dataclass(frozen=True)
class ExtendConfig:
    """All that, with the images and the base, decides the result. Unknown names are refused when it is made."""

    recipe: str = "branchout"
    branch: str = "last"
    """Where the network is cloned from: `last`, a stage, a module, or `fc` for a new head alone."""
    goal: str = "balanced"
    fuse: bool = False
    """Learn deltas even when no classes overlap (the paper's recipes always do)."""
    exemplars: int = 10
    """How many images of each class stage II sees in an epoch."""
    epochs: int | None = None
    """Stage I epochs, if not the recipe's."""
    views: int | None = None
    """Augmented views whose trunk output is cached in stage I; None decides by the device."""
    seed: int = 0
    pooler: str | None = None
    """`max` or `average`; None is the model's own, which its first step sets."""
    minutes: float | None = None
    """How long the extension may take: see `method.running.plan`."""

    def full_recipe(self, epochs: int | None = None) -> Recipe:
        """The recipe with these epochs, or with `epochs` where ours is used and none are set."""
        recipe = recipe_named(self.recipe)
        epochs = self.epochs or (epochs if recipe.stage_one.replay else None)
        if epochs is None:
            return recipe
        optimisation = replace(recipe.stage_one.optimisation, epochs=epochs)
        return replace(recipe, stage_one=replace(recipe.stage_one, optimisation=optimisation))

    def __post_init__(self) -> None:
        recipe_named(self.recipe)
        check_goal(self.goal)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise BranchoutError(f"The minutes must be a number above 0, found {self.minutes:g}. Try: --minutes 25")
        if self.pooler not in (None, *POOLERS):
            raise unknown("pooler", str(self.pooler), POOLERS)
