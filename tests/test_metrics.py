"""The metrics against the paper's printed tables and against slow, obvious versions."""

import json
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchout import metrics
from branchout.errors import BranchoutError
from branchout.goals import COMBINED, GOALS, METRICS, PAPER_GOALS
from branchout.labels import LabelSpace

TABLES = json.loads((files("benchmarks.paper") / "paper.json").read_text())
ROWS = [
    pytest.param(row, id=f"{table}/{name}")
    for table, content in TABLES.items()
    if not table.startswith("_")
    for name, row in content["rows"].items()
    if "avg" in row
]


@pytest.mark.parametrize("row", ROWS)
def test_paper_average_is_the_mean_of_its_parts(row: dict[str, float]) -> None:
    # Counts that stand for the row's accuracies: one part of 10,000 images each, so that they are exact to 0.01.
    parts = [row["base"], row.get("novel"), row.get("overlap")]
    total = np.array([0 if part is None else 10_000 for part in parts])
    correct = np.array([0 if part is None else round(part * 100) for part in parts])
    assert metrics.from_counts(correct, total)["avg"] * 100 == pytest.approx(row["avg"], abs=0.011)


def test_there_are_rows_to_check() -> None:
    assert len(ROWS) > 90


def test_full_overlap_weights_760_to_40() -> None:
    row = TABLES["overlap-full-resnet10"]["rows"]["pre-trained model"]
    total = np.array([760, 0, 40]) * 50
    correct = np.array([row["base"] * 380, 0, row["overlap"] * 20]).round().astype(int)
    assert metrics.from_counts(correct, total)["all"] * 100 == pytest.approx(row["all"], abs=0.011)


NAMES = [f"class {n}" for n in range(9)]


@st.composite
def predictions(draw: st.DrawFn) -> tuple[LabelSpace, np.ndarray, np.ndarray]:
    branches = draw(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), min_size=1, max_size=4))
    space = LabelSpace.of(*branches)
    labels = st.lists(st.integers(0, len(space.classes) - 1), min_size=1, max_size=60)
    actual = np.array(draw(labels))
    return space, np.array([draw(st.integers(0, len(space.classes) - 1)) for _ in actual]), actual


def share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


@given(predictions())
def test_against_the_definitions_written_out(case: tuple[LabelSpace, np.ndarray, np.ndarray]) -> None:
    space, predicted, actual = case
    pairs = [(space.classes[p], space.classes[a]) for p, a in zip(predicted, actual, strict=True)]
    knows = {name: [d for d, names in enumerate(space.branches) if name in names] for name in space.classes}

    def accuracy(owners: list[int] | None) -> float | None:
        return share([p == a for p, a in pairs if (len(knows[a]) > 1 if owners is None else knows[a] == owners)])

    got = metrics.accuracies(predicted, actual, space)
    assert got.all == pytest.approx(share([p == a for p, a in pairs]))
    assert got.base == accuracy([0])
    assert got.steps == tuple(accuracy([t]) for t in range(1, len(space.branches)))
    assert got.overlap == accuracy(None)
    assert got.novel == share([p == a for p, a in pairs if len(knows[a]) == 1 and knows[a] != [0]])
    parts = [part for part in (got.base, *got.steps, got.overlap) if part is not None]
    assert got.avg == pytest.approx(sum(parts) / len(parts))
    assert got.balanced == pytest.approx((got.all + got.avg) / 2)


@given(predictions())
def test_per_class_and_confusion_add_up(case: tuple[LabelSpace, np.ndarray, np.ndarray]) -> None:
    space, predicted, actual = case
    each = metrics.per_class(predicted, actual, space)
    counts = np.bincount(actual, minlength=len(space.classes))
    right = sum((each[name] or 0) * n for name, n in zip(space.classes, counts, strict=True))
    assert right == pytest.approx(metrics.accuracies(predicted, actual, space).all * len(actual))
    table = metrics.confusion_between_parts(predicted, actual, space)
    assert table.sum() == len(actual)
    part = metrics.part_of_class(space)
    taken = (part[actual] == 0) & (part[predicted] == len(space.branches))
    assert table[0, -1] == taken.sum()


def test_steps_are_averaged_with_the_base_step() -> None:
    space = LabelSpace.of(["a", "b"], ["c"])
    base = metrics.accuracies(np.array([0, 0]), np.array([0, 1]), space.upto(0))
    after = metrics.accuracies(np.array([0, 0, 2, 2]), np.array([0, 1, 2, 2]), space)
    assert metrics.incremental([base, after]) == pytest.approx((0.5 + 0.75) / 2)
    assert metrics.average_over_steps([base, after]) == pytest.approx((0.5 + 0.75) / 2)
    assert after.avg == pytest.approx((0.5 + 1.0) / 2)


def test_where_images_are_few_classes_count_alike_whichever_step_they_came_with() -> None:
    space = LabelSpace.of("abcd", "efg", "h")
    correct, total = np.array([[6, 3, 5, 0], [8, 6, 0, 0]]), np.array([8, 6, 5, 0])
    found = metrics.weighted_by_class(correct, total, space)
    new = np.array([(3 * 0.5 + 1) / 4, 3 / 4])
    assert found["avg"] == pytest.approx((np.array([0.75, 1.0]) + 2 * new) / 3)
    assert found["all"] == pytest.approx((4 * np.array([0.75, 1.0]) + 4 * new) / 8)
    one = LabelSpace.of("abcd", "efg")  # with one step nothing is weighed: to the bit
    each = correct[:, [0, 1]] / total[[0, 1]]
    assert (metrics.weighted_by_class(correct[:, [0, 1, 3]], total[[0, 1, 3]], one)["avg"] == each.mean(-1)).all()


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(BranchoutError, match="no images"):
        metrics.accuracies(np.array([], dtype=int), np.array([], dtype=int), LabelSpace.of(["a"]))


def test_every_metric_and_goal_is_listed_once_with_its_wording() -> None:
    measured = metrics.from_counts(np.array([1, 1, 1]), np.array([2, 2, 2]))
    assert set(METRICS) == set(measured)  # what is computed is what is listed
    assert sorted(GOALS) == sorted([*METRICS, *COMBINED])
    assert set(PAPER_GOALS) <= set(GOALS)
    assert all(metric.meaning for metric in METRICS.values())
