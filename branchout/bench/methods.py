"""The methods of the tables: score fusion in its variants, and every baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from branchout.baselines.registry import baselines
from branchout.baselines.task import Baseline
from branchout.errors import BranchoutError
from branchout.goals import PAPER_GOALS
from branchout.method.recipes import RECIPES, recipe_named
from branchout.training.optimisation import settings_dict


@dataclass(frozen=True)
class Method:
    """One way to learn new classes, by its name in `branchout bench`."""

    name: str
    label: str
    recipe: str | None = None
    """Of score fusion: how stages I and II are trained."""
    branch: str = "last"
    pooler: str = "max"
    fuse: bool = False
    """Learn deltas even where the recipe would not."""
    baseline: Baseline | None = None

    @property
    def result_name(self) -> str:
        """Its name in rows, where the recipe is a field of its own."""
        return self.name.removesuffix(f"-{self.recipe}") if self.recipe else self.name

    def seeds(self, asked: Sequence[int], steps: int, *, every: bool = False) -> tuple[int, ...]:
        """The exemplar seeds it is run with: unless `every` is asked for, one where each trains a whole network or many
        branches."""
        network = self.baseline is not None and self.baseline.on == "network"
        branches = steps > 1 and self.recipe is not None and recipe_named(self.recipe).stage_one.replay
        return tuple(asked[:1]) if (network or branches) and not every else tuple(asked)

    @property
    def stage_one_per_seed(self) -> bool:
        """Whether the paper's stage I is trained for each seed; older rows have one for all."""
        if self.baseline is not None:
            return self.baseline.on == "features"
        return self.points() != ("alone",) and self.name != "stage-one-dial" and self.recipe in ("paper", "reference")

    def settings(self) -> dict[str, Any]:
        """The settings in a row, beside the plan's."""
        ours = self.baseline is None
        return {
            "recipe": settings_dict(recipe_named(self.recipe)) if self.recipe else None,
            "branch": self.branch if ours else None,
            "pooler": self.pooler if ours else None,
            **({"fuse": True} if self.fuse else {}),  # older rows do not name it
        }

    def points(self) -> tuple[str, ...]:
        """The operating points it is measured at, one row each."""
        if self.name.startswith("alone-"):
            return ("alone",)
        if self.baseline is None:
            return PAPER_GOALS
        return ("plain", *(f"dial-{goal}" for goal in PAPER_GOALS)) if self.baseline.dial else ("plain",)


WITHOUT_EXEMPLARS = {
    "score-fusion-branchout", "score-fusion-average-branchout", "stage-one-dial",
    "pretrained", "confidence-routing", "logitcat-average", "logitcat-max", "fa-wa", "finetune", "lwf", "joint",
}  # fmt: skip
"""Methods that can be run with --exemplars 0."""

OURS = (
    Method("score-fusion-branchout", "Branchout's recipe, the dial", "branchout"),
    Method("score-fusion-deltas-branchout", "Branchout's recipe with deltas, the dial", "branchout", fuse=True),
    Method(
        "score-fusion-average-branchout", "Branchout's recipe, average pooling, the dial", "branchout", pooler="average"
    ),
    *(
        Method(f"score-fusion{suffix}-{recipe}", f"score fusion{told}, recipe {recipe}", recipe, branch, pooler)
        for recipe in ("reference", "paper")
        for suffix, told, branch, pooler in (
            ("", "", "last", "max"),
            ("-average", " with average pooling", "last", "average"),
            ("-fc", " fc-only", "fc", "max"),
            ("-layer3", " layer3,4", "layer3", "max"),
            ("-conv2", " layer4 (conv2 only)", "layer4.0.conv2", "max"),
        )
    ),
    Method("stage-one-dial", "the paper's stage I, nothing fused, the dial", "paper"),
    *(
        Method(f"alone-{where}", f"new classes alone, {told}", "paper", where)
        for where, told in (
            ("fc", "features as they are"),
            ("layer4", "fine-tuned from layer4"),
            ("layer3", "fine-tuned from layer3"),
            ("layer2", "fine-tuned from layer2"),
            ("layer1", "fine-tuned from layer1"),
            ("stem", "fine-tuned throughout"),
        )
    ),
)


RENAMED = {"slca": "classifier-alignment", "slca-all": "classifier-alignment-all"}
"""Methods that had another name, under which older rows are kept."""


@cache
def methods() -> dict[str, Method]:
    """All methods, score fusion first."""
    others = (Method(each.name, each.label, baseline=each) for each in baselines().values())
    return {method.name: method for method in (*OURS, *others)}


def method_named(name: str) -> Method:
    """By its name, or by the recipe alone: `branchout`, `reference`, `paper`."""
    name = f"score-fusion-{name}" if name in RECIPES else RENAMED.get(name, name)
    if name not in methods():
        near = get_close_matches(name.lower(), methods(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise BranchoutError(f"no method is called {name!r}{hint} All are named by: branchout bench --list")
    return methods()[name]
