"""The settings of an extension. Imports neither numpy nor torch, so that a typo in an option is reported at once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

from branchout.errors import BranchoutError, shortened, unknown, whole_number
from branchout.goals import POOLERS, check_goal
from branchout.method.recipes import Recipe, recipe_named


@dataclass(frozen=True)
class ExtendConfig:
    """All that, with the images and the base, decides the result. An unknown recipe, goal or pooler is an error; the
    branch is checked against the network later."""

    recipe: str = "branchout"
    branch: str | None = None
    """Where the network is cloned from: `last`, a stage, a module, or `fc` for a new head alone. None is `last`, unless
    a plan for limited time chooses another."""
    goal: str = "balanced"
    fuse: bool = False
    """Train deltas even if at most a tenth of the new classes is known already. The paper's recipes always do."""
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
    memory_limit: float | None = None
    """Gigabytes that cached outputs, decoded images and stage II's grid may each take; None decides by the device."""

    @property
    def where(self) -> str:
        """The branch that is trained where no plan chooses another."""
        return self.branch or "last"

    @property
    def replays(self) -> bool:
        """Whether stage I trains with exemplars, as our recipe does. Only then can a plan change what is trained."""
        return recipe_named(self.recipe).stage_one.replay

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_limit is None else int(self.memory_limit * 1e9)

    def as_dict(self) -> dict[str, Any]:
        """For work folders and histories. `memory_limit` is left out when it is not set: older files do not have it."""
        found = asdict(self)
        return found if self.memory_limit else {key: value for key, value in found.items() if key != "memory_limit"}

    def full_recipe(self, epochs: int | None = None, batch: int | None = None) -> Recipe:
        """The recipe with these settings. `epochs`, used if none are set, and `batch`, the largest one, come from the
        plan; recipes without replay ignore both."""
        recipe = recipe_named(self.recipe)
        stage_one, usual = recipe.stage_one, recipe.stage_one.optimisation
        changed = replace(usual, epochs=self.epochs or (epochs if stage_one.replay else None) or usual.epochs)
        if batch is not None and batch < usual.batch and stage_one.replay:
            changed = replace(changed, batch=batch, lr=usual.lr * batch / usual.batch)
        return replace(recipe, stage_one=replace(stage_one, optimisation=changed))

    def __post_init__(self) -> None:
        for name in ("recipe", "branch", "pooler"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "recipe"):
                raise BranchoutError(f"{name} must be a name, found {shortened(value)}")
        if not isinstance(self.fuse, bool):
            raise BranchoutError(f"fuse must be True or False, found {shortened(self.fuse)}")
        recipe_named(self.recipe)
        check_goal(self.goal)
        for name, least in (("exemplars", 1), ("epochs", 1), ("views", 0), ("seed", 0)):
            value = getattr(self, name)
            if name not in ("epochs", "views") or value is not None:
                object.__setattr__(self, name, whole_number(name, value, least))
        for name, what, example in (
            ("minutes", "The minutes must be a number", "--minutes 25"),
            ("memory_limit", "The memory limit must be gigabytes", "--memory-limit 2"),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(getattr(self, name), what, example))
        if self.minutes is not None and not self.replays:
            raise BranchoutError(
                f"The recipe {self.recipe!r} always trains the same, so --minutes has no effect; leave it out"
            )
        if self.pooler not in (None, *POOLERS):
            raise unknown("pooler", str(self.pooler), POOLERS)


def _positive(value: object, what: str, example: str) -> float:
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf:
            return float(value)  # numpy's numbers cannot be saved as JSON
    except OverflowError:  # a whole number with hundreds of digits
        pass
    raise BranchoutError(f"{what} above 0, found {shortened(value)}. Try: {example}")
