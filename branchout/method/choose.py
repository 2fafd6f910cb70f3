"""Choose an operating point on the dev images and measure it on the test images (paper, section 5.1, "Learning").

Symbols: (α, β) or b → a point of the `Frontier` · W_dd' at that point → `Fusion.deltas` · Acc → `Measured`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from branchout.method.dial import dial_frontier, shifted, step_shifts
from branchout.method.features import logit_columns, predictions
from branchout.method.frontier import Frontier, Ints, grid_frontier
from branchout.method.recipes import Recipe
from branchout.method.stage2 import Fused, grid_answers
from branchout.metrics import PAPER_GOALS, Accuracies, accuracies
from branchout.model.checkpoint import Deltas, Fusion
from branchout.model.classifier import Classifier


def choose(
    model: Classifier,
    fused: Fused | None,
    features: Tensor,
    labels: Ints,
    *,
    recipe: Recipe,
    goal: str,
    measured: str = "dev",
) -> tuple[Fusion, Frontier]:
    """The frontier on dev images, given by features (N, feature vectors, k) and labels, and the goal's point on it.

    `measured` says what these images are: a key of `metrics.MEASURED_ON`.
    """
    if recipe.dial or fused is None:
        deltas = [] if fused is None else [_on_cpu(fused.at(0, 0))]
        model.fused.deltas = list(deltas[0]) if deltas else [None] * len(model.fused.heads)
        curve, shifts = dial_curve(model, features, labels, recipe.balanced, measured)
        points = curve.select(curve.pareto())  # no goal would choose another
        return Fusion(points.to_dict(), deltas, points.choose(goal), goal, shifts), points
    answers = grid_answers(model, features, fused, 0).cpu().numpy()
    whole = grid_frontier(answers, labels, model.space, fused.grid, recipe.balanced)
    kept = whole.pareto()
    points = replace(whole.select(kept), measured=measured)
    deltas = [_on_cpu(fused.at(0, int(n))) for n in kept]
    # Shown in charts only: no goal would choose them, so their deltas are not kept.
    beaten = whole.select(np.setdiff1d(np.arange(len(whole)), kept)).to_dict()
    return Fusion(points.to_dict() | {"beaten": beaten}, deltas, points.choose(goal), goal), points


def dial_curve(
    model: Classifier, features: Tensor, labels: Ints, balanced_by: str, measured: str
) -> tuple[Frontier, tuple[float, ...]]:
    """The dial's exact curve, and the offset of each step's branch where there are several."""
    columns, pooler = logit_columns(model, features), model.fused.pooler.kind
    shifts: tuple[float, ...] = ()
    if len(model.steps) > 1:
        shifts = tuple(step_shifts(columns, labels, model.space, pooler).tolist())
        columns = shifted(columns, model.space, shifts)
    curve = dial_frontier(columns, labels, model.space, pooler, balanced_by=balanced_by, measured=measured)
    return curve, shifts


def apply_fusion(model: Classifier, fusion: Fusion) -> None:
    """Set a model's deltas and dial to the chosen point of a fusion."""
    deltas = fusion.chosen_deltas()
    model.fused.deltas = [None] * len(model.fused.heads) if deltas is None else list(deltas)
    model.fused.set_bias(fusion.offsets(len(model.steps)))


def _on_cpu(deltas: list[Tensor]) -> Deltas:
    return [delta.cpu().contiguous() for delta in deltas]


@dataclass(frozen=True)
class GoalResult:
    """The operating point of a goal, and its accuracies on the test images."""

    point: int
    test: Accuracies


@dataclass(frozen=True)
class Measured:
    """Accuracies on the held-out test images."""

    images: int
    before: Accuracies | None
    """Of the base, on the images of its own classes; None where there are none."""
    after: Accuracies
    goals: dict[str, GoalResult]

    def to_dict(self) -> dict[str, Any]:
        """As the history of a saved model keeps it."""
        return {
            "images": self.images,
            "after": asdict(self.after),
            "before": {} if self.before is None else asdict(self.before),
            "goals": {goal: {"point": each.point, **asdict(each.test)} for goal, each in self.goals.items()},
        }


def measure(
    model: Classifier, features: Tensor, labels: Ints, fusion: Fusion, frontier: Frontier, before: Accuracies | None
) -> Measured:
    """Accuracies on test images at the chosen point, and at the point of each of the paper's goals."""

    def at(point: int) -> Accuracies:
        apply_fusion(model, replace(fusion, point=point))
        return accuracies(predictions(model, features), labels, model.space)

    goals = {goal: frontier.choose(goal) for goal in PAPER_GOALS}
    results = {goal: GoalResult(point, at(point)) for goal, point in goals.items()}
    return Measured(len(labels), before, at(fusion.point), results)
