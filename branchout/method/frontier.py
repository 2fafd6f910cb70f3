"""The dial and the operating points: what can be reached, what to pick, and why.

Turning the dial adds one number b to every column of every new branch before pooling. As b grows, each image changes
its answer at a few values of b only, and those can be computed: the whole curve of accuracies follows from sorting
them, exactly and without training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.metrics import GOALS, METRICS, Accuracies, accuracies, from_counts, part_of_class

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CONDITION = re.compile(rf"^\s*({'|'.join(METRICS)})\s*>=\s*([0-9.]+)\s*(%?)\s*$")
UNCLEAR = 10
"""A number up to 1 is a share, one from here on is in per cent; between the two it could be a slip of either."""


@dataclass(frozen=True)
class Frontier:
    """Operating points and their accuracies on dev images."""

    kind: str
    """`dial`: every point is a value of b. `grid`: every point is a trained (α, β)."""
    settings: Floats
    """(points, 1): b; or (points, 2): α, β."""
    figures: Mapping[str, Floats]
    """Accuracies on dev for each point, NaN where a part has no images."""
    images: int
    """How many dev images they were measured on."""
    balanced_by: str = "mean"
    measured: str = "dev"
    """Where the figures come from: `dev` images, images `held-out` from training, or `pseudo` exemplars."""

    def __len__(self) -> int:
        return len(self.settings)

    def score(self, goal: str) -> Floats:
        """The figure that a plain goal maximises, for every point."""
        if goal != "balanced":
            return self.figures[goal]
        return combine(self.figures["all"], self.figures["avg"], self.balanced_by)

    def choose(self, goal: str) -> int:
        """The best point for a goal: `all`, `avg`, `balanced`, `novel`, … or a condition: `novel>=0.80`, `novel>=80%`.

        Under a condition it is the point with the best Acc_all among those that meet it.
        """
        condition = self.check_goal(goal)
        if condition:
            metric, wanted = condition
            figures = self._measured(metric)
            met = figures >= wanted - 1e-12
            if not met.any():
                raise BranchoutError(
                    f"{metric} ≥ {wanted:.1%} cannot be reached; the highest {metric} accuracy on the dev images is "
                    f"{np.nanmax(figures):.1%}. Try: --goal '{metric}>={np.floor(np.nanmax(figures) * 100) / 100:.2f}'"
                )
            score = np.where(met, self.figures["all"], -np.inf)
        else:
            score = self.score(goal) if goal == "balanced" else self._measured(goal)
        best = np.flatnonzero(score >= np.nanmax(score) - 1e-12)
        return int(best[np.argmax(self.figures["all"][best])])

    @staticmethod
    def check_goal(goal: str) -> tuple[str, float] | None:
        """The metric and the least share of a condition, None for a plain goal; anything else is an error."""
        condition = CONDITION.match(goal)
        if condition:
            metric, number, percent = condition.groups()
            return metric, _share(number, percent)
        if goal not in GOALS:
            raise BranchoutError(
                f"no goal is called {goal!r}; known are: {', '.join(GOALS)}, or a condition such as 'novel>=0.80'"
            )
        return None

    def single_point_reason(self) -> str:
        """A sentence for whoever looks for the dial of a model with one operating point; empty where there are more."""
        if len(self) > 1:
            return ""
        return (
            f"there is one operating point only: on the {self.images:,} images that choose, no other is better for any "
            "part, old or new. So every goal leads to it, and there is no dial to turn. More validation images may "
            "show others"
        )

    def _measured(self, metric: str) -> Floats:
        figures = self.figures[metric]
        if np.isnan(figures).all():
            raise BranchoutError(f"there are no dev images that measure '{metric}' accuracy")
        return figures

    def at(self, point: int) -> dict[str, float | None]:
        """The dev accuracies of one point."""
        return {name: None if np.isnan(v[point]) else float(v[point]) for name, v in self.figures.items()}

    def pareto(self) -> Ints:
        """Points that no other point beats in one part without losing in another; of equal points the first."""
        # With several steps Acc_avg counts each of them, which `novel` over all does not tell.
        compared = [self.figures[m] for m in ("base", "novel", "overlap", "avg")]
        parts = np.stack([figures for figures in compared if not np.isnan(figures).all()], 1)
        keep = []
        for n, row in enumerate(parts):
            no_worse = (parts >= row).all(1)
            better = no_worse & (parts > row).any(1)
            twin = no_worse & ~better
            if not better.any() and not twin[:n].any():
                keep.append(n)
        return np.array(keep, dtype=np.int64)

    def select(self, points: Ints) -> Frontier:
        return Frontier(
            self.kind,
            self.settings[points],
            {name: values[points] for name, values in self.figures.items()},
            self.images,
            self.balanced_by,
            self.measured,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "settings": self.settings.tolist(),
            "figures": {n: [None if np.isnan(x) else x for x in v.tolist()] for n, v in self.figures.items()},
            "images": self.images,
            "balanced_by": self.balanced_by,
            "measured": self.measured,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Frontier:
        figures = {
            n: np.array([np.nan if x is None else x for x in v], dtype=np.float64) for n, v in values["figures"].items()
        }
        settings = np.array(values["settings"], dtype=np.float64).reshape(len(values["settings"]), -1)
        return cls(values["kind"], settings, figures, values["images"], values["balanced_by"], values["measured"])


def combine(all_: Floats, avg: Floats, by: str) -> Floats:
    """What best-balanced maximises: the mean of Acc_all and Acc_avg (paper) or their product (reference)."""
    return (all_ + avg) / 2 if by == "mean" else all_ * avg


def _share(number: str, percent: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise BranchoutError(f"{number!r} is not a number; write a share such as 0.80") from None
    if not percent and 1 < value < UNCLEAR:
        raise BranchoutError(
            f"what is {number}? Up to 1 a number is a share, from {UNCLEAR} on it is in per cent; "
            f"write a share such as 0.80, or {number}% if you mean that"
        )
    value = value / 100 if percent or value > 1 else value
    if value > 1:
        raise BranchoutError(f"an accuracy cannot be {value:.0%}; write a share such as 0.80")
    return value


def read_as(goal: str) -> str:
    """A goal as it was understood: a condition's number in per cent, whichever way it was written."""
    condition = Frontier.check_goal(goal)
    return goal if condition is None else f"{condition[0]} ≥ {100 * condition[1]:.6g}%"


# The dial.


def dial_frontier(
    columns: Floats,
    labels: Ints,
    space: LabelSpace,
    pooler: str = "max",
    *,
    moving: Bools | None = None,
    balanced_by: str = "mean",
    measured: str = "dev",
) -> Frontier:
    """The exact curve of accuracies over b, from scores of dev images before the dial (images × columns).

    Between two neighbouring points of the result no image becomes right or wrong; each is a value of b in the middle
    of such a stretch. `moving` says which columns the dial moves: by default all of the new branches.
    """
    columns = np.asarray(columns, dtype=np.float64)
    moving = space.branch_of_column > 0 if moving is None else moving
    part = part_of_class(space)[labels]
    parts = len(space.branches) + 1
    total = np.bincount(part, minlength=parts)

    turns, answers = stretches(columns, space, pooler, moving=moving)
    right = answers == labels[:, None]
    counts = [np.bincount(part[right[:, 0]], minlength=parts)]
    events_b, events_part, events_change = [], [], []
    for n in range(turns.shape[1]):
        change = right[:, n + 1].astype(int) - right[:, n]
        moved = np.isfinite(turns[:, n]) & (change != 0)
        events_b.append(turns[moved, n])
        events_part.append(part[moved])
        events_change.append(change[moved])

    b = np.concatenate([*events_b, []])
    order = np.argsort(b, kind="stable")
    steps = np.zeros((len(b), parts), dtype=np.int64)
    steps[np.arange(len(b)), np.concatenate([*events_part, []]).astype(int)[order]] = np.concatenate(
        [*events_change, []]
    ).astype(int)[order]
    b = b[order]
    last_of_equal = np.append(np.diff(b) > 0, True)[: len(b)]
    counts_after = counts[0] + np.cumsum(steps, 0)[last_of_equal]
    edges = b[last_of_equal]
    points = (
        np.concatenate([[edges[0] - 1], (edges[:-1] + edges[1:]) / 2, [edges[-1] + 1]]) if len(edges) else np.zeros(1)
    )
    figures = from_counts(np.concatenate([counts[0][None], counts_after]), total)
    return Frontier("dial", points[:, None], figures, len(labels), balanced_by, measured)


def stretches(
    columns: Floats, space: LabelSpace, pooler: str = "max", *, moving: Bools | None = None
) -> tuple[Floats, Ints]:
    """Where each image changes its answer as b grows, and to what, from scores before the dial (images × columns).

    Returns values of b in rising order (images × changes, infinite where an image changes no more) and class numbers
    (images × changes + 1): the answer before the first change, after it, and so on.
    """
    columns = np.asarray(columns, dtype=np.float64)
    moving = space.branch_of_column > 0 if moving is None else moving
    intercept, answer, slope = _lines(columns, space, pooler, moving)
    rows = np.arange(len(columns))
    current = np.zeros(len(columns), dtype=np.int64)  # far to the left the flattest line is on top
    turns, answers = [], [answer[rows, current]]
    while True:
        # Where each steeper line overtakes the current one; the nearest crossing is the next change of answer.
        with np.errstate(divide="ignore", invalid="ignore"):
            run = slope[None, :] - slope[current][:, None]
            crossing = (intercept[rows, current][:, None] - intercept) / run
        crossing = np.where((run > 0) & np.isfinite(intercept), crossing, np.inf)
        following = crossing.argmin(1)
        at = crossing[rows, following]
        live = np.isfinite(at)
        if not live.any():
            break
        current = np.where(live, following, current)
        turns.append(at)
        answers.append(answer[rows, current])
    return np.stack(turns, 1) if turns else np.empty((len(columns), 0)), np.stack(answers, 1)


def _lines(columns: Floats, space: LabelSpace, pooler: str, moving: Bools) -> tuple[Floats, Ints, Floats]:
    """Scores as lines in b: per image and slope the highest intercept and its class; slopes ascending.

    With the max pooler every column is its own line, flat or rising; with the mean a class's line rises by the share
    of its columns that move.
    """
    if pooler == "max":
        scores, owner, rise = columns, space.class_of_column, moving.astype(np.float64)
    else:
        count = np.bincount(space.class_of_column)
        member = np.zeros((space.columns, len(space.classes)))
        member[np.arange(space.columns), space.class_of_column] = 1 / count[space.class_of_column]
        scores, owner, rise = columns @ member, np.arange(len(space.classes)), moving @ member
    slope = np.unique(rise.round(12))
    intercept = np.full((len(columns), len(slope)), -np.inf)
    answer = np.zeros((len(columns), len(slope)), dtype=np.int64)
    for n, value in enumerate(slope):
        of_slope = np.flatnonzero(np.isclose(rise, value))
        best = scores[:, of_slope].argmax(1)
        intercept[:, n] = scores[np.arange(len(columns)), of_slope[best]]
        answer[:, n] = owner[of_slope[best]]
    return intercept, answer, slope


def predict(columns: Floats, space: LabelSpace, offsets: float | Sequence[float] = 0.0, pooler: str = "max") -> Ints:
    """Class numbers for scores before the dial, with the dial at one b, or one offset per step."""
    steps = len(space.branches) - 1
    values = np.array([0.0, *([offsets] * steps if isinstance(offsets, (int, float)) else offsets)])
    shifted = np.asarray(columns, dtype=np.float64) + values[space.branch_of_column]
    order = np.argsort(space.class_of_column, kind="stable")
    starts = np.searchsorted(space.class_of_column[order], np.arange(len(space.classes)))
    if pooler == "max":
        pooled = np.maximum.reduceat(shifted[:, order], starts, axis=1)
    else:
        pooled = np.add.reduceat(shifted[:, order], starts, axis=1) / np.bincount(space.class_of_column)
    answer: Ints = pooled.argmax(1)
    return answer


def step_shifts(columns: Floats, labels: Ints, space: LabelSpace, pooler: str = "max", rounds: int = 3) -> Floats:
    """What each step's branch is moved by before the dial moves all of them; 0 where there is one step.

    Each branch learned to be heard above those before it, so every step is louder than the last. Coordinate ascent of
    the balanced score on dev, each coordinate solved exactly; of equally good numbers the one nearest to the shared
    dial's. A step without images keeps that one: nothing says what silencing it would cost.
    """
    steps = len(space.branches) - 1
    if steps < 2:
        return np.zeros(steps)
    shared = dial_frontier(columns, labels, space, pooler)
    start = shared.settings[shared.choose("balanced"), 0]
    shifts = np.full(steps, start)
    seen = [step for step in range(1, steps + 1) if np.isin(space.index(space.branches[step]), labels).any()]
    for _ in range(rounds):
        before = shifts.copy()
        for step in seen:
            held = np.concatenate([[0.0], shifts])
            held[step] = 0.0
            curve = dial_frontier(
                columns + held[space.branch_of_column], labels, space, pooler, moving=space.branch_of_column == step
            )
            score = curve.score("balanced")
            best = curve.settings[score >= np.nanmax(score) - 1e-12, 0]
            shifts[step - 1] = best[np.abs(best - start).argmin()]
        if np.array_equal(before, shifts):
            break
    return shifts


def shifted(columns: Floats, space: LabelSpace, shifts: Sequence[float] | Floats) -> Floats:
    """Scores with each step's branch moved by its own number."""
    moved: Floats = np.asarray(columns, dtype=np.float64) + np.array([0.0, *shifts])[space.branch_of_column]
    return moved


# The grid.


def grid_frontier(
    predicted: Ints, labels: Ints, space: LabelSpace, grid: Sequence[tuple[float, float]], balanced_by: str
) -> Frontier:
    """Operating points of a trained grid from its answers on dev images (points × images)."""
    part = part_of_class(space)[labels]
    parts = len(space.branches) + 1
    correct = np.stack([np.bincount(part[row == labels], minlength=parts) for row in predicted])
    figures = from_counts(correct, np.bincount(part, minlength=parts))
    return Frontier("grid", np.array(grid, dtype=np.float64), figures, len(labels), balanced_by)


# Honest scores.


@dataclass(frozen=True)
class Scored:
    """A goal's point, chosen on some images and measured on others."""

    goal: str
    setting: tuple[float, ...]
    test: Accuracies
    """Chosen on dev, measured on test."""
    two_fold: float
    """What the goal is about (Acc_all, Acc_avg, or their mean): choose on dev, score on test; swap; average."""
    spread: float
    """Half the difference between the two folds."""
    shifts: tuple[float, ...] = ()
    """What each step's branch is moved by besides, where there are several steps."""


def score_dial(
    dev: tuple[Floats, Ints], test: tuple[Floats, Ints], space: LabelSpace, goals: Sequence[str], pooler: str = "max"
) -> dict[str, Scored]:
    """Choose b on each half, and the steps' own shifts where there are several; measure on the other half."""
    halves = (dev, test)
    chosen: dict[str, list[float]] = {goal: [] for goal in goals}
    measured: dict[str, list[Accuracies]] = {goal: [] for goal in goals}
    moved: list[tuple[float, ...]] = []
    for here, there in (halves, halves[::-1]):
        shifts = step_shifts(here[0], here[1], space, pooler)
        moved.append(tuple(shifts.tolist()) if len(shifts) > 1 else ())
        frontier = dial_frontier(shifted(here[0], space, shifts), here[1], space, pooler)
        for goal in goals:
            b = float(frontier.settings[frontier.choose(goal), 0])
            chosen[goal].append(b)
            answers = predict(there[0], space, (shifts + b).tolist(), pooler)
            measured[goal].append(accuracies(answers, there[1], space))
    return {goal: replace(_scored(goal, (chosen[goal][0],), measured[goal]), shifts=moved[0]) for goal in goals}


def score_grid(
    dev: tuple[Ints, Ints],
    test: tuple[Ints, Ints],
    space: LabelSpace,
    grid: Sequence[tuple[float, float]],
    goal: str,
    balanced_by: str,
) -> Scored:
    """Choose (α, β) on each half and measure on the other; `dev` and `test` hold answers (points × images), labels."""
    halves = (dev, test)
    chosen, measured = [], []
    for here, there in (halves, halves[::-1]):
        point = grid_frontier(here[0], here[1], space, grid, balanced_by).choose(goal)
        chosen.append(grid[point])
        measured.append(accuracies(there[0][point], there[1], space))
    return _scored(goal, chosen[0], measured)


def _scored(goal: str, setting: tuple[float, ...], folds: Sequence[Accuracies]) -> Scored:
    metric = goal if goal in GOALS else "all"
    values = [getattr(fold, metric) for fold in folds]
    return Scored(goal, setting, folds[0], float(np.mean(values)), float(abs(values[0] - values[1]) / 2))
