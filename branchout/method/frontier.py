"""Operating points, and how one is chosen (paper, section 5.1: a grid search on validation images, by metric).

Symbols: (α, β) or b → `Frontier.settings` · Acc_all, Acc_avg and the accuracy of each part → `Frontier.accuracies`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from branchout.errors import UnreachableGoal
from branchout.goals import CHOSEN_ON, GOALS, METRICS, check_goal
from branchout.labels import Floats, Ints, LabelSpace
from branchout.method.recipes import BEATEN_BY, TIE
from branchout.metrics import from_counts, images_of_parts, part_of_class
from branchout.units import count


@dataclass(frozen=True)
class Frontier:
    """Operating points and their accuracies on the images that choose among them."""

    kind: str
    """`dial`: every point is a value of b. `grid`: every point is a trained (α, β)."""
    settings: Floats
    """(points, 1): b; or (points, 2): α, β."""
    accuracies: Mapping[str, Floats]
    """Each metric for every point; NaN where its part has no images."""
    images: int
    """How many images the accuracies were measured on."""
    balanced_by: str = "mean"
    """How the goal `balanced` combines Acc_all and Acc_avg: `mean` (paper) or `product` (reference)."""
    chosen_on: str = "dev"
    """What the images are: a key of `goals.CHOSEN_ON`."""
    weighted: Mapping[str, Floats] | None = None
    """What `all` and `avg` are chosen by where images are few and unevenly spread: see `metrics.weighted_by_class`."""
    balanced_at: float | None = None
    """The b of the goal `balanced`, where it is not the best point of the curve: see `choose.dial_curve`."""

    def __len__(self) -> int:
        return len(self.settings)

    def __str__(self) -> str:
        """A table of the points that the goals choose, in %."""
        measured = [name for name in METRICS if not np.isnan(self.accuracies[name]).all()]
        names = ("α", "β") if self.kind == "grid" else ("b",)
        lines = ["".join(f"{word:>10}" for word in ("goal", *names, *measured))]
        for goal in self.possible_goals():
            point = self.choose(goal)
            values = [f"{value:.2f}" for value in self.settings[point]]
            values += [f"{100 * self.accuracies[name][point]:.1f}" for name in measured]
            lines.append("".join(f"{word:>10}" for word in (goal, *values)))
        images = f"{self.images:,} {CHOSEN_ON[self.chosen_on]}"
        return "\n".join([f"{count(len(self), 'operating point')}, accuracy in % on {images}", *lines])

    def score(self, goal: str) -> Floats:
        """What a goal maximises, for every point."""
        by_metric = {**self.accuracies, **(self.weighted or {})}
        if goal == "balanced":
            acc_all, acc_avg = by_metric["all"], by_metric["avg"]
            return (acc_all + acc_avg) / 2 if self.balanced_by == "mean" else acc_all * acc_avg
        self._check_measured(goal)
        return by_metric[goal]

    def _check_measured(self, metric: str) -> None:
        if np.isnan(self.accuracies[metric]).all():
            raise UnreachableGoal(
                f"No validation images measure {metric!r} accuracy. Choose one of {', '.join(self.possible_goals())}."
            )

    def choose(self, goal: str) -> int:
        """The best point for a goal, such as `balanced`, or for a condition, such as `novel>=0.80` or `novel>=80%`.

        Under a condition it is the point with the best Acc_all among those that meet it. Where goals are `weighted`,
        points that differ by less than `TIE` are equal, and of these the one with the smallest b is chosen: few images
        cannot tell them apart, and it changes the fewest old predictions. A point that another beats by `BEATEN_BY` in
        a part, without losing in any, is not chosen: where new classes are few, much of their accuracy is less than
        `TIE`.
        """
        condition = check_goal(goal)
        if goal == "balanced" and self.balanced_at is not None:
            return int(np.abs(self.settings[:, 0] - self.balanced_at).argmin())
        score = self.score(goal) if condition is None else self._all_where(*condition)
        if self.weighted is not None and condition is None:
            equal = np.flatnonzero(score >= np.nanmax(score) - TIE)
            unbeaten = equal[[not self._beaten(int(n)) for n in equal]]
            equal = unbeaten if len(unbeaten) else equal
            return int(equal[np.argmin(self.settings[equal, 0])])
        best = np.flatnonzero(score >= np.nanmax(score) - 1e-12)
        return int(best[np.argmax(self.accuracies["all"][best])])

    def choose_or_fall_back(self, goal: str) -> int:
        """The point for a goal. If no point reaches its minimum, the best one of its metric; if no image measures the
        metric, the point for `balanced`."""
        condition = check_goal(goal)
        metric = goal if condition is None else condition[0]
        if metric not in self.possible_goals():
            return self.choose("balanced")
        reached = condition is None or (self.accuracies[metric] >= condition[1] - 1e-12).any()
        return self.choose(goal if reached else metric)

    def possible_goals(self) -> list[str]:
        """The named goals that these images can measure."""
        return [goal for goal in GOALS if goal == "balanced" or not np.isnan(self.accuracies[goal]).all()]

    def _all_where(self, metric: str, minimum: float) -> Floats:
        """Acc_all of the points that reach a minimum of another metric, as it was measured; -inf elsewhere."""
        self._check_measured(metric)
        found = self.accuracies[metric]
        met = found >= minimum - 1e-12
        if not met.any():
            highest = np.nanmax(found)
            raise UnreachableGoal(
                f"{metric} ≥ {minimum:.1%} cannot be reached: the highest {metric} accuracy on the validation images "
                f"is {highest:.1%}. Try: --goal '{metric}>={np.floor(highest * 100) / 100:.2f}'"
            )
        return np.where(met, self.accuracies["all"], -np.inf)

    def single_point_reason(self) -> str:
        """A sentence that explains why a model has one operating point; empty where there are more."""
        if len(self) > 1:
            return ""
        of = "new images and pseudo-exemplars" if self.chosen_on == "pseudo" else "validation images"
        return (
            f"There is only one operating point: on the {self.images:,} {of} no other is better for any part, old or "
            "new. Every goal chooses it. More validation images may give more points."
        )

    def at(self, point: int) -> dict[str, float | None]:
        """The accuracies of one point."""
        return {name: None if np.isnan(v[point]) else float(v[point]) for name, v in self.accuracies.items()}

    def pareto(self) -> Ints:
        """The points that no other beats in one part without losing in another; of equal points the first."""
        parts, keep = self._parts, []
        for n, row in enumerate(parts):
            no_worse = (parts >= row).all(1)
            better = no_worse & (parts > row).any(1)
            equal = no_worse & ~better
            if not better.any() and not equal[:n].any():
                keep.append(n)
        return np.array(keep, dtype=np.int64)

    @cached_property
    def _parts(self) -> Floats:
        """The accuracies that are measured, without Acc_all (points × metrics)."""
        # After several steps Acc_avg counts each of them separately, which `novel` does not.
        compared = [self.accuracies[name] for name in METRICS if name != "all"]
        return np.stack([each for each in compared if not np.isnan(each).all()], 1)

    def _beaten(self, point: int) -> bool:
        """Whether another point is better by `BEATEN_BY` in a part and worse in none."""
        row = self._parts[point]
        return bool(((self._parts >= row).all(1) & (self._parts >= row + BEATEN_BY - 1e-12).any(1)).any())

    def select(self, points: Ints) -> Frontier:
        accuracies = {name: values[points] for name, values in self.accuracies.items()}
        weighted = None if self.weighted is None else {name: values[points] for name, values in self.weighted.items()}
        return replace(self, settings=self.settings[points], accuracies=accuracies, weighted=weighted)

    def to_dict(self) -> dict[str, Any]:
        kept = {
            "kind": self.kind,
            "settings": self.settings.tolist(),
            "figures": {n: [None if np.isnan(x) else x for x in v.tolist()] for n, v in self.accuracies.items()},
            "images": self.images,
            "balanced_by": self.balanced_by,
            "measured": self.chosen_on,
        }
        if self.weighted is not None:
            kept["judged"] = {name: values.tolist() for name, values in self.weighted.items()}
        if self.balanced_at is not None:
            kept["balanced_at"] = self.balanced_at
        return kept

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Frontier:
        accuracies = {
            n: np.array([np.nan if x is None else x for x in v], dtype=np.float64) for n, v in values["figures"].items()
        }
        settings = np.array(values["settings"], dtype=np.float64).reshape(len(values["settings"]), -1)
        weighted = values.get("judged")
        if weighted is not None:
            weighted = {name: np.array(each, dtype=np.float64) for name, each in weighted.items()}
        return cls(
            values["kind"],
            settings,
            accuracies,
            values["images"],
            values["balanced_by"],
            values["measured"],
            weighted,
            values.get("balanced_at"),
        )


def check_measurable(goal: str, space: LabelSpace, classes: Sequence[str]) -> None:
    """Refuse a goal that no image can measure; `classes` are those of the images that choose."""
    condition = check_goal(goal)
    metric = goal if condition is None else condition[0]
    images = images_of_parts(space.index(classes), space)
    if images.get(metric, 1):
        return
    measured = METRICS[metric].meaning.removeprefix("accuracy on ")
    reason = f"no validation image that chooses the operating point is of {measured}"
    if not images_of_parts(np.arange(len(space.classes)), space)[metric]:
        reason = f"there are no {measured}"
    raise UnreachableGoal(
        f"The goal {goal!r} cannot be used: {reason}. "
        f"Choose one of {', '.join(name for name in GOALS if images.get(name, 1))}."
    )


def grid_frontier(
    predicted: Ints, labels: Ints, space: LabelSpace, grid: Sequence[tuple[float, float]], balanced_by: str
) -> Frontier:
    """The operating points of a trained α×β grid, from its predictions on validation images (points × images)."""
    part = part_of_class(space)[labels]
    parts = len(space.branches) + 1
    correct = np.stack([np.bincount(part[row == labels], minlength=parts) for row in predicted])
    accuracies = from_counts(correct, np.bincount(part, minlength=parts))
    return Frontier("grid", np.array(grid, dtype=np.float64), accuracies, len(labels), balanced_by)
