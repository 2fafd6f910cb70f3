"""Choose an operating point on the dev images and measure it on the test images (paper, section 5.1, "Learning").

Symbols: (α, β) or b → a point of the `Frontier` · W_dd' at that point → `StepPoints.deltas` · Acc → `Measured`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from branchout.goals import PAPER_GOALS
from branchout.labels import Floats, Ints
from branchout.method.dial import balanced_without_old, dial_frontier, newest_bias, predict, step_offsets, with_bias
from branchout.method.features import logit_columns, predictions
from branchout.method.frontier import Frontier, grid_frontier
from branchout.method.recipes import Recipe
from branchout.method.results import GoalResult, Measured
from branchout.method.stage2 import TrainedDeltas, grid_predictions
from branchout.metrics import Accuracies, accuracies, images_of_parts
from branchout.model.checkpoint import Deltas, StepPoints
from branchout.model.classifier import Classifier

HeldOutFeatures = tuple[Tensor, Ints]
"""Features (N, feature vectors, k) and labels of some held-out images."""


def choose_point(
    model: Classifier,
    trained: TrainedDeltas | None,
    features: Tensor,
    labels: Ints,
    *,
    recipe: Recipe,
    goal: str,
    chosen_on: str = "dev",
    held_new: HeldOutFeatures | None = None,
    earlier_biases: Sequence[float] | None = None,
    newest: float | None = None,
) -> tuple[StepPoints, Frontier]:
    """The frontier on dev images, given by features (N, feature vectors, k) and labels, and the goal's point on it.

    `chosen_on` says what these images are: a key of `goals.CHOSEN_ON`. Validation images that were given, `dev`, count
    as they are; of others the goal weighs classes instead of images: see `metrics.weighted_by_class`. With
    `earlier_biases` the branches of earlier steps keep these, and the goal `balanced` places the newest one beside
    them, or it is `newest`. Where the images cannot judge that goal, `held_new` has held-out images of the newest
    classes, which place it (`dial.balanced_without_old`).
    """
    if not recipe.dial and trained is not None:
        return _point_of_grid(model, trained, features, labels, recipe, goal, chosen_on)
    by_class = chosen_on != "dev"
    deltas = [] if trained is None else [_on_cpu(trained.at(0, 0))]
    model.fused.deltas = list(deltas[0]) if deltas else [None] * len(model.fused.heads)
    columns = logit_columns(model, features)
    b = newest
    if b is None and held_new is not None:
        z = with_bias(logit_columns(model, held_new[0]), model.space, [*(earlier_biases or ()), 0.0])
        b = balanced_without_old(z, held_new[1], model.space)
    curve, offsets = dial_curve(model, columns, labels, recipe.balanced, by_class, earlier_biases, b)
    curve = replace(curve, chosen_on=chosen_on)
    goals = curve.possible_goals() if by_class or curve.balanced_at is not None else []
    chosen = [curve.choose(each) for each in goals]
    points = curve.select(np.union1d(curve.pareto(), np.array(chosen, dtype=np.int64)))  # no goal needs another
    return StepPoints(points.to_dict(), deltas, points.choose(goal), goal, offsets), points


def _point_of_grid(
    model: Classifier,
    trained: TrainedDeltas,
    features: Tensor,
    labels: Ints,
    recipe: Recipe,
    goal: str,
    chosen_on: str,
) -> tuple[StepPoints, Frontier]:
    """The same for a recipe whose points are those of the α×β grid."""
    answers = grid_predictions(model, features, trained).cpu().numpy()
    whole = grid_frontier(answers, labels, model.space, trained.grid, recipe.balanced)
    kept = whole.pareto()
    points = replace(whole.select(kept), chosen_on=chosen_on)
    deltas = [_on_cpu(trained.at(0, int(n))) for n in kept]
    # Shown in charts only: no goal would choose them, so their deltas are not kept.
    beaten = whole.select(np.setdiff1d(np.arange(len(whole)), kept)).to_dict()
    return StepPoints(points.to_dict() | {"beaten": beaten}, deltas, points.choose(goal), goal), points


def dial_curve(
    model: Classifier,
    columns: Floats,
    labels: Ints,
    balanced_by: str,
    by_class: bool,
    earlier_biases: Sequence[float] | None = None,
    b: float | None = None,
) -> tuple[Frontier, tuple[float, ...]]:
    """The dial's exact curve, and the offset of each step's branch where there are several.

    With `earlier_biases`, earlier steps keep these at the point for `balanced`. The newest step has `b` there; if that
    is None, `dial.newest_bias` chooses it.
    """
    space, pooler = model.space, model.fused.pooler.kind
    offsets: tuple[float, ...] = ()
    if len(model.steps) > 1 and earlier_biases is not None:
        b = newest_bias(columns, labels, space, earlier_biases, pooler) if b is None else b
        offsets = (*(each - b for each in earlier_biases), 0.0)
    elif len(model.steps) > 1:
        offsets = tuple(step_offsets(columns, labels, space, pooler, by_class=by_class).tolist())
    columns = with_bias(columns, space, offsets) if offsets else columns
    at = None if earlier_biases is None else b
    curve = dial_frontier(columns, labels, space, pooler, balanced_by=balanced_by, by_class=by_class, at=at)
    return replace(curve, balanced_at=b), offsets


def balanced_biases(points: StepPoints, steps: int) -> list[float]:
    """What a model adds to each step's logits at the point for `balanced`, whichever point is chosen."""
    point = Frontier.from_dict(points.frontier).choose("balanced")
    return [float(np.float32(each)) for each in replace(points, point=point).biases(steps)]


def apply_point(model: Classifier, points: StepPoints) -> None:
    """Set a model's deltas and dial to the chosen point of a step."""
    deltas = points.chosen_deltas()
    model.fused.deltas = [None] * len(model.fused.heads) if deltas is None else list(deltas)
    model.fused.set_bias(points.biases(len(model.steps)))


def _on_cpu(deltas: list[Tensor]) -> Deltas:
    return [delta.cpu().contiguous() for delta in deltas]


def measure_goals(
    model: Classifier, features: Tensor, labels: Ints, points: StepPoints, frontier: Frontier, before: Accuracies | None
) -> Measured:
    """Accuracies on test images at the chosen point, and at the point of each of the paper's goals."""

    def at(point: int) -> Accuracies:
        apply_point(model, replace(points, point=point))
        return accuracies(predictions(model, features), labels, model.space)

    goals = {goal: frontier.choose(goal) for goal in PAPER_GOALS}
    results = {goal: GoalResult(point, at(point)) for goal, point in goals.items()}
    return Measured(len(labels), before, at(points.point), results, images_of_parts(labels, model.space))


def cross_fit(
    model: Classifier,
    halves: tuple[HeldOutFeatures, HeldOutFeatures],
    points: StepPoints,
    frontier: Frontier,
    before: Accuracies | None,
    *,
    second_only: bool = False,
    earlier_biases: Sequence[float] | None = None,
) -> Measured:
    """Accuracies of held-out images that also chose: each half is measured at the point that the other one chooses.

    With `second_only` the first half measures nothing, because training was ended with it. `earlier_biases` as in
    `choose_point`.
    """
    space, pooler = model.space, model.fused.pooler.kind
    goals = list(dict.fromkeys([*PAPER_GOALS, points.goal]))
    predicted: dict[str, list[Ints]] = {goal: [] for goal in goals}
    columns = [logit_columns(model, features) for features, _ in halves]
    directions = ((0, 1),) if second_only else ((1, 0), (0, 1))
    by_class = frontier.weighted is not None
    for here, there in directions:
        curve, offsets = dial_curve(
            model, columns[here], halves[here][1], frontier.balanced_by, by_class, earlier_biases
        )
        offset_of_step = np.array(offsets or [0.0] * len(model.steps))
        for goal in goals:
            b = curve.settings[curve.choose_or_fall_back(goal), 0]
            predicted[goal].append(predict(columns[there], space, (offset_of_step + b).tolist(), pooler))
    labels = np.concatenate([halves[there][1] for _, there in directions])
    found = {goal: accuracies(np.concatenate(parts), labels, space) for goal, parts in predicted.items()}
    results = {goal: GoalResult(frontier.choose(goal), found[goal]) for goal in PAPER_GOALS}
    return Measured(len(labels), before, found[points.goal], results, images_of_parts(labels, space))
