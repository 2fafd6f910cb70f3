"""The dial of a method with one score a class, against a search that knows nothing of columns."""

import numpy as np
import pytest

from branchout.bench.measure import _points
from branchout.labels import LabelSpace
from branchout.method.dial import dial_frontier, own_columns, predict

SPACE = LabelSpace.of([f"old {n}" for n in range(8)] + ["both a", "both b"], ["both a", "both b", "new a", "new b"])
STEPS = SPACE.extend(["old 0", "new a", "later"])


def scores(space: LabelSpace, bias: float, seed: int, per_class: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """One score a class; those of all classes that a step brings are `bias` too large."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(space.classes)), per_class)
    z = rng.normal(size=(len(labels), len(space.classes)))
    z[np.arange(len(labels)), labels] += 5
    return z + bias * brought(space), labels


def brought(space: LabelSpace) -> np.ndarray:
    """Whether any step brings a class, new or again."""
    return np.array([any(name in names for names in space.branches[1:]) for name in space.classes])


def average(answers: np.ndarray, labels: np.ndarray, space: LabelSpace) -> float:
    """Acc_avg, part by part."""
    parts: dict[tuple[int, ...], list[bool]] = {}
    for answer, label in zip(answers, labels, strict=True):
        known = tuple(d for d, names in enumerate(space.branches) if space.classes[label] in names)
        parts.setdefault(known if len(known) == 1 else (-1,), []).append(answer == label)
    return float(np.mean([np.mean(part) for part in parts.values()]))


@pytest.mark.parametrize("bias", [-9.0, 9.0])
def test_an_overlapping_class_rises_and_falls_with_the_dial(bias: float) -> None:
    dev, test = scores(SPACE, bias, 0), scores(SPACE, bias, 1)
    found = dict(_points(dev, test, SPACE, dial=True))
    (b,), grid = found["dial-avg"].setting, np.linspace(-20, 20, 201)
    on_dev, on_test = (average((z + b * brought(SPACE)).argmax(1), labels, SPACE) for z, labels in (dev, test))
    assert on_dev >= max(average((dev[0] + b * brought(SPACE)).argmax(1), dev[1], SPACE) for b in grid)
    assert found["dial-avg"].test.avg == pytest.approx(on_test)
    assert found["plain"].test.avg < 0.7 < 0.95 < on_test
    # What the copies of old columns could reach, which do not move:
    copies = dev[0][:, SPACE.class_of_column]
    reached = max(average(predict(copies, SPACE, b), dev[1], SPACE) for b in grid[::4])
    assert reached < 0.7 if bias > 0 else reached > 0.95


@pytest.mark.parametrize("space", [SPACE, STEPS], ids=["one step", "two steps"])
def test_the_curve_is_that_of_moving_the_scores_themselves(space: LabelSpace) -> None:
    z, labels = scores(space, 3.0, 2, per_class=9)
    curve = dial_frontier(own_columns(z, space), labels, space)
    assert len(curve) > 5
    for (b,), avg in zip(curve.settings, curve.accuracies["avg"], strict=True):
        assert avg == pytest.approx(average((z + b * brought(space)).argmax(1), labels, space))


def test_where_every_class_comes_again_the_dial_changes_nothing() -> None:
    space = LabelSpace.of(["a", "b"], ["b", "a"])
    z, labels = scores(space, 0.0, 3)
    curve = dial_frontier(own_columns(z, space), labels, space)
    assert curve.accuracies["all"].tolist() == [pytest.approx((z.argmax(1) == labels).mean())]
