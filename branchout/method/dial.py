"""The dial: one number b, added to the logits of all new branches, and its exact curve of accuracies (our addition).

The paper trains a model for every (α, β); we move one trained model by b. As b grows, an image changes its prediction
at a few values of b only. These are computed and sorted, so that the curve is exact and nothing is searched.

Symbols: z_a → `columns`, logits before dial and pooler (images × columns) · b → `Frontier.settings` · Y_a → `classes`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from branchout.labels import Bools, Floats, Ints, LabelSpace
from branchout.method.frontier import Frontier
from branchout.method.recipes import TIE
from branchout.metrics import from_counts, part_of_class, weighted_by_class


def dial_frontier(
    columns: Floats,
    labels: Ints,
    space: LabelSpace,
    pooler: str = "max",
    *,
    moving: Bools | None = None,
    balanced_by: str = "mean",
    by_class: bool = False,
    at: float | None = None,
) -> Frontier:
    """All accuracies that any b can reach, from logits of validation images before the dial (images × columns).

    Between two neighbouring edges, the values of b where an image becomes right or wrong, accuracies are constant;
    each point of the result lies in the middle of such an interval. `moving` says which columns b is added to: by
    default those of all new branches. `by_class` has goals weigh classes instead of images. With `at`, the point of its
    interval lies there instead of in the middle.
    """
    part = part_of_class(space)[labels]
    parts = len(space.branches) + 1
    changes, predicted = prediction_changes(columns, space, pooler, moving=moving)
    right = predicted == labels[:, None]
    gained = np.diff(right.astype(np.int64), axis=1)
    # One event for each image and value of b where it becomes right (+1) or wrong (-1), sorted by b.
    of_change, of_image = np.nonzero((np.isfinite(changes) & (gained != 0)).T)
    b = changes[of_image, of_change]
    order = np.argsort(b, kind="stable")
    b, of_image, of_change = b[order], of_image[order], of_change[order]
    gains = np.zeros((len(b), parts), dtype=np.int64)
    gains[np.arange(len(b)), part[of_image]] = gained[of_image, of_change]
    last_of_equal = np.append(np.diff(b) > 0, True)[: len(b)]
    edges = b[last_of_equal]
    first = np.bincount(part[right[:, 0]], minlength=parts)
    correct = np.concatenate([first[None], first + np.cumsum(gains, 0)[last_of_equal]])
    total = np.bincount(part, minlength=parts)
    weighted = weighted_by_class(correct, total, space) if by_class else None
    settings = _midpoints(edges)[:, None]
    if at is not None:
        settings[np.searchsorted(edges, at), 0] = at
    return Frontier("dial", settings, from_counts(correct, total), len(labels), balanced_by, weighted=weighted)


def _midpoints(edges: Floats) -> Floats:
    """A value of b before the first edge, between each two, and after the last."""
    if not len(edges):
        return np.zeros(1)
    return np.concatenate([[edges[0] - 1], (edges[:-1] + edges[1:]) / 2, [edges[-1] + 1]])


def prediction_changes(
    columns: Floats, space: LabelSpace, pooler: str = "max", *, moving: Bools | None = None
) -> tuple[Floats, Ints]:
    """Where each image changes its prediction as b grows, and to which class, from logits before the dial.

    Returns values of b in rising order (images × changes; infinite where an image changes no more) and class numbers
    (images × changes + 1): the prediction before the first change, after it, and so on.
    """
    columns = np.asarray(columns, dtype=np.float64)
    moving = space.branch_of_column > 0 if moving is None else moving
    intercept, answer, slope = _lines(columns, space, pooler, moving)
    rows = np.arange(len(columns))
    current = np.isfinite(intercept).argmax(1)  # for b → -∞ the flattest line is on top
    changes, answers = [], [answer[rows, current]]
    while True:
        # Where each steeper line overtakes the current one; the nearest crossing is the next change.
        with np.errstate(divide="ignore", invalid="ignore"):
            run = slope[None, :] - slope[current][:, None]
            crossing = (intercept[rows, current][:, None] - intercept) / run
        crossing = np.where((run > 0) & np.isfinite(intercept), crossing, np.inf)
        following = crossing.argmin(1)
        at = crossing[rows, following]
        changing = np.isfinite(at)
        if not changing.any():
            break
        current = np.where(changing, following, current)
        changes.append(at)
        answers.append(answer[rows, current])
    return np.stack(changes, 1) if changes else np.empty((len(columns), 0)), np.stack(answers, 1)


def _lines(columns: Floats, space: LabelSpace, pooler: str, moving: Bools) -> tuple[Floats, Ints, Floats]:
    """Logits as lines in b: per image and slope the highest intercept and its class; slopes ascending.

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
        best = of_slope[_largest(scores, of_slope)]
        intercept[:, n] = scores[np.arange(len(columns)), best]
        answer[:, n] = owner[best]
    return intercept, answer, slope


BLOCK = 1 << 17
"""Numbers that are copied at a time: a megabyte, which a core's cache holds."""


def _largest(scores: Floats, some: Ints) -> Ints:
    """`scores[:, some].argmax(1)` in blocks of images: that copy is stored by columns, whose rows are slow to read."""
    rows = max(1, BLOCK // max(len(some), 1))
    found = [scores[n : n + rows].take(some, axis=1).argmax(1) for n in range(0, len(scores), rows)]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def predict(columns: Floats, space: LabelSpace, biases: float | Sequence[float] = 0.0, pooler: str = "max") -> Ints:
    """Class numbers from logits before the dial, with the dial at one b, or one bias for each step."""
    steps = len(space.branches) - 1
    z = with_bias(columns, space, [biases] * steps if isinstance(biases, int | float) else biases)
    order = np.argsort(space.class_of_column, kind="stable")
    starts = np.searchsorted(space.class_of_column[order], np.arange(len(space.classes)))
    if pooler == "max":
        pooled = np.maximum.reduceat(z[:, order], starts, axis=1)
    else:
        pooled = np.add.reduceat(z[:, order], starts, axis=1) / np.bincount(space.class_of_column)
    answer: Ints = pooled.argmax(1)
    return answer


ROUNDS = 3
"""Of coordinate ascent over the steps, at most."""


def step_offsets(
    columns: Floats,
    labels: Ints,
    space: LabelSpace,
    pooler: str = "max",
    *,
    by_class: bool = False,
) -> Floats:
    """An offset for each step's branch, to which the dial is then added; 0 where there is one step.

    Each branch was trained so that its logits exceed those of all earlier branches on its own images, so logits grow
    from step to step. Coordinate ascent of the balanced score, each coordinate solved exactly; of equally good offsets
    the one nearest to the shared dial's. A step without validation images keeps the shared dial's.
    """
    steps = len(space.branches) - 1
    if steps < 2:
        return np.zeros(steps)
    shared = dial_frontier(columns, labels, space, pooler, by_class=by_class)
    start = shared.settings[shared.choose("balanced"), 0]
    offsets = np.full(steps, start)
    seen = [step for step in range(1, steps + 1) if np.isin(space.index(space.branches[step]), labels).any()]
    for _ in range(ROUNDS):
        before = offsets.copy()
        for step in seen:
            others = offsets.copy()
            others[step - 1] = 0.0
            moving = space.branch_of_column == step
            moved = with_bias(columns, space, others)
            curve = dial_frontier(moved, labels, space, pooler, moving=moving, by_class=by_class)
            score = curve.score("balanced")
            best = curve.settings[score >= np.nanmax(score) - (TIE if by_class else 1e-12), 0]
            offsets[step - 1] = best[np.abs(best - start).argmin()]
        if np.array_equal(before, offsets):
            break
    return offsets


def newest_bias(
    columns: Floats, labels: Ints, space: LabelSpace, earlier_biases: Sequence[float], pooler: str = "max"
) -> float:
    """The balanced b of the newest step alone, beside earlier steps that keep their biases.

    An earlier step was trained on the kept images of its classes, so its logits on them are larger than on other
    images. They cannot tell which bias that step should have; they only show how many of its images the newest step
    takes. Of equally good values it is the one nearest to the middle of their range: the smallest would cost the newest
    step most, which has the fewest held-out images. Without any image of its classes, the best score would be that of
    assigning none to it, so it gets the bias of the step before.
    """
    if not np.isin(labels, space.index(space.branches[-1])).any():
        return float(earlier_biases[-1])
    newest = space.branch_of_column == len(space.branches) - 1
    moved = with_bias(columns, space, [*earlier_biases, 0.0])
    curve = dial_frontier(moved, labels, space, pooler, moving=newest, by_class=True)
    score = curve.score("balanced")
    equal = curve.settings[score >= np.nanmax(score) - TIE, 0]
    return float(equal[np.abs(equal - (equal[0] + equal[-1]) / 2).argmin()])


MAX_FALSE_POSITIVE_RATE, MAX_TRUE_POSITIVE_RATE = 0.5, 0.95
"""Chosen on features of one network, with subsets of 8 to 101 new classes and kept images of old ones. Fewer false
positives than half cost new classes more than they save old ones where new classes are many."""


def balanced_without_old(columns: Floats, labels: Ints, space: LabelSpace) -> float | None:
    """A balanced b from held-out images of the newest step alone, where there are no old images.

    With the column of its own class removed, such an image stands for one of no new class; b assigns at most half of
    these to a new class (false positives). Images of old classes lie further away, so fewer of them are. With few new
    classes this limit would be too high, so b also assigns at most 95% of the images to a new class when their own
    column is included (true positives). None if there is one new class, no image, or no finite limit.
    """
    newest = space.branch_of_column == len(space.branches) - 1
    own = space.class_of_column[None] == labels[:, None]
    known = own[:, newest].any(1)
    if newest.sum() < 2 or not known.any():
        return None
    new, without_own = columns[known][:, newest], np.where(own, -np.inf, columns)[known]
    others, earlier = without_own[:, newest].max(1), without_own[:, ~newest].max(1)
    limits = (
        np.quantile(earlier - others, MAX_FALSE_POSITIVE_RATE),
        np.quantile(earlier - new.max(1), MAX_TRUE_POSITIVE_RATE),
    )
    return float(min(limits)) if np.isfinite(limits).all() else None


def own_columns(scores: Floats, space: LabelSpace) -> Floats:
    """Columns for the dial from one score a class, as a method without branches gives them.

    A class that a step has brought, new or again, moves as a whole with the column of its last step; its other columns
    are -∞. Otherwise its unmoved copy would win the maximum, and the dial could raise the class but not lower it.
    """
    columns: Floats = scores[:, space.class_of_column].astype(np.float64)
    last = dict(zip(space.class_of_column.tolist(), range(space.columns), strict=True))
    columns[:, np.setdiff1d(np.arange(space.columns), list(last.values()))] = -np.inf
    return columns


def with_bias(columns: Floats, space: LabelSpace, biases: Sequence[float] | Floats) -> Floats:
    """Logits with a bias added to the columns of each step's branch."""
    moved: Floats = np.asarray(columns, dtype=np.float64) + np.array([0.0, *biases])[space.branch_of_column]
    return moved
