"""Goals and the points they choose."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import SPACES, scores
from hypothesis import given
from hypothesis import strategies as st

from branchout.errors import BranchoutError
from branchout.goals import check_goal, read_as
from branchout.labels import LabelSpace
from branchout.method.dial import dial_frontier
from branchout.method.frontier import Frontier, grid_frontier


@given(st.integers(0, 30), st.sampled_from(["all", "avg", "balanced", "novel", "base"]))
def test_a_goal_takes_the_best_point(seed: int, goal: str) -> None:
    space = SPACES["some overlap"]
    frontier = dial_frontier(*scores(space, seed), space)
    assert frontier.score(goal)[frontier.choose(goal)] == pytest.approx(np.nanmax(frontier.score(goal)))


def test_a_condition_takes_the_best_overall_accuracy_that_meets_it() -> None:
    figures = {
        "all": np.array([0.6, 0.7, 0.65]),
        "base": np.array([0.9, 0.8, 0.6]),
        "novel": np.array([0.1, 0.5, 0.8]),
        "overlap": np.full(3, np.nan),
        "avg": np.array([0.5, 0.65, 0.7]),
    }
    frontier = Frontier("dial", np.array([[-1.0], [0.0], [1.0]]), figures, 100)
    assert frontier.choose("novel>=0.4") == 1
    assert frontier.choose("novel >= 60%") == 2
    assert frontier.choose("novel>=60") == 2
    assert frontier.choose("base>=0.85") == 0
    with pytest.raises(BranchoutError, match=r"highest novel accuracy .* 80\.0%.*novel>=0\.80"):
        frontier.choose("novel>=0.9")
    with pytest.raises(
        BranchoutError, match=r"No validation images measure 'overlap'.*all, avg, balanced, novel, base\."
    ):
        frontier.choose("overlap")
    with pytest.raises(BranchoutError, match="all, avg, balanced"):
        frontier.choose("best")
    with pytest.raises(BranchoutError, match="cannot be 500%"):
        frontier.choose("novel>=500")
    assert Frontier.from_dict(frontier.to_dict()).choose("novel>=0.4") == 1


def test_printed_it_is_a_table_of_goals() -> None:
    figures = {name: np.array([0.6, 0.7, 0.65]) for name in ("all", "base", "novel", "avg")}
    figures |= {"overlap": np.full(3, np.nan), "novel": np.array([0.1, 0.5, 0.8])}
    frontier = Frontier("dial", np.array([[-1.0], [0.0], [1.25]]), figures, 100)
    first, heading, *lines = str(frontier).splitlines()
    assert first.startswith("3 operating points")
    assert heading.split() == ["goal", "b", "all", "base", "novel", "avg"]
    assert [line.split()[0] for line in lines] == frontier.possible_goals()
    assert lines[frontier.possible_goals().index("novel")].split() == ["novel", "1.25", "65.0", "65.0", "80.0", "65.0"]


@pytest.mark.parametrize(
    ("goal", "understood"),
    [
        ("novel>=0.8", "novel ≥ 80%"),
        ("novel >= 80", "novel ≥ 80%"),
        ("novel>=80 %", "novel ≥ 80%"),
        ("base>=1", "base ≥ 100%"),
        ("base>=1%", "base ≥ 1%"),
        ("avg>=10", "avg ≥ 10%"),
        ("avg>=2.5%", "avg ≥ 2.5%"),
        ("balanced", "balanced"),
    ],
)
def test_it_can_be_told_how_a_goal_was_read(goal: str, understood: str) -> None:
    assert read_as(goal) == understood


@pytest.mark.parametrize("written", ["novell>=0.8", "novel=0.8", "NOVEL >= 0.8", "Novel > 0.8", "novl≥0.8"])
def test_a_condition_with_a_slip_is_answered_with_the_condition(written: str) -> None:
    with pytest.raises(BranchoutError, match=r"novel>=0\.8'"):
        check_goal(written)


def test_the_opposite_of_a_condition_is_not_suggested() -> None:
    with pytest.raises(BranchoutError) as raised:
        check_goal("novel<=0.3")
    assert "novel>=0.3" not in str(raised.value)


@pytest.mark.parametrize("number", ["2", "1.5", "8.0", "9.99"])
def test_a_number_that_may_be_a_slip_is_not_guessed(number: str) -> None:
    with pytest.raises(BranchoutError, match=f"{number} is neither.*0.80, or {number}%"):
        check_goal(f"novel>={number}")


def test_one_point_alone_is_explained() -> None:
    space = SPACES["disjoint"]
    columns = np.zeros((4, space.columns))
    columns[:, 0] = 9.0
    alone = dial_frontier(columns, np.zeros(4, dtype=np.int64), space)
    alone = alone.select(alone.pareto())  # the dial can only lose
    assert len(alone) == 1
    assert "only one operating point: on the 4 validation images" in alone.single_point_reason()
    pseudo = replace(alone, chosen_on="pseudo")
    assert "on the 4 new images and pseudo-exemplars" in pseudo.single_point_reason()
    several = Frontier("dial", np.array([[0.0], [1.0]]), {"all": np.array([0.5, 0.6])}, 4)
    assert several.single_point_reason() == ""


@given(st.integers(0, 30))
def test_pareto_points_are_exactly_the_undominated_ones(seed: int) -> None:
    space = SPACES["some overlap"]
    columns, labels = scores(space, seed)
    rng = np.random.default_rng(seed)
    grid = [(a / 5, b / 5) for a in range(6) for b in range(6)]
    predicted = np.where(rng.random((36, 40)) < rng.random((36, 1)), labels, columns.argmax(1) % len(space.classes))
    frontier = grid_frontier(predicted, labels, space, grid, "mean")
    rows = [tuple(frontier.at(n)[m] for m in ("base", "novel", "overlap")) for n in range(36)]
    kept = set(frontier.pareto().tolist())
    for n, row in enumerate(rows):
        beaten = any(all(x >= y for x, y in zip(o, row, strict=True)) and o != row for o in rows)
        assert (n in kept) == (not beaten and row not in rows[:n])


def test_balanced_by_product_differs_from_the_mean() -> None:
    figures = {m: np.array([0.9, 0.64]) for m in ("base", "novel", "overlap")}
    figures |= {"all": np.array([0.9, 0.64]), "avg": np.array([0.4, 0.64])}
    assert Frontier("grid", np.zeros((2, 2)), figures, 1, "mean").choose("balanced") == 0
    assert Frontier("grid", np.zeros((2, 2)), figures, 1, "product").choose("balanced") == 1


def test_goals_weigh_classes_where_images_are_few() -> None:
    """20 old classes with 12 images beside 2 new ones with 40: images would let the new classes outvote the old."""
    space = LabelSpace.of([f"old {n}" for n in range(20)], ["new 0", "new 1"])
    rng = np.random.default_rng(3)
    labels = np.concatenate([np.arange(12), 20 + rng.integers(0, 2, 40)])
    columns = rng.normal(size=(52, 22)) * 2
    columns[np.arange(52), labels] += 2
    curve = dial_frontier(columns, labels, space, by_class=True)
    base, novel = curve.accuracies["base"], curve.accuracies["novel"]
    assert curve.score("all") == pytest.approx((20 * base + 2 * novel) / 22)
    assert curve.score("avg") == pytest.approx((base + novel) / 2)
    assert curve.score("balanced") == pytest.approx((curve.score("all") + curve.score("avg")) / 2)
    chosen = curve.choose("balanced")
    equal = np.flatnonzero(curve.score("balanced") >= curve.score("balanced").max() - 0.002)
    parts = np.stack([base, novel], 1)
    beaten = [(parts >= row).all(1) & (parts >= row + 0.01).any(1) for row in parts[equal]]
    assert chosen == equal[[not each.any() for each in beaten]][0]  # the smallest b of those that cannot be told apart
    plain = dial_frontier(columns, labels, space)
    assert plain.choose("all") != curve.choose("all")
    reachable = float(curve.accuracies["avg"].max())  # a condition is on the accuracies as shown
    met = curve.choose(f"avg>={np.floor(reachable * 1e4) / 1e4:.4f}")
    assert curve.accuracies["avg"][met] == pytest.approx(reachable, abs=1e-4)
    back = Frontier.from_dict(curve.select(curve.pareto()).to_dict())
    assert back.score("balanced") == pytest.approx(curve.score("balanced")[curve.pareto()])


@pytest.mark.parametrize(("novel_before", "chosen"), [(0.7, 2), (0.79, 2), (0.795, 1)])
def test_of_equal_points_the_cautious_one_is_chosen_unless_another_clearly_beats_it(
    novel_before: float, chosen: int
) -> None:
    """Beside 1,000 old classes, a tenth of the accuracy on ten new ones is less than `TIE`: they count as equal."""
    base, novel = np.array([0.75, 0.7, 0.7]), np.array([0.5, novel_before, 0.8])
    by_class = {"all": (100 * base + novel) / 101, "avg": (base + novel) / 2}
    figures = {"base": base, "novel": novel, "overlap": np.full(3, np.nan), **by_class}
    frontier = Frontier("dial", np.array([[-1.0], [0.0], [1.0]]), figures, 30, weighted=by_class)
    assert frontier.choose("all") == 0
    assert replace(frontier, weighted={**by_class, "all": np.array([0.6, 0.7, 0.701])}).choose("all") == chosen


def test_one_image_of_an_overlapping_class_has_no_third_of_the_say() -> None:
    space = LabelSpace.of(["a", "b", "c"], ["c", "d"])
    labels = np.array([0] * 12 + [2] + [3] * 12)
    columns, _ = scores(space, 5, len(labels))
    curve = dial_frontier(columns, labels, space, by_class=True)
    assert curve.score("avg") == pytest.approx((curve.accuracies["base"] + curve.accuracies["novel"]) / 2)


def test_a_few_images_of_new_classes_still_have_their_half() -> None:
    space = LabelSpace.of(["a", "b", "c"], ["d", "e"])
    labels = np.array([0, 1, 2] * 10 + [3, 4])
    columns, _ = scores(space, 6, len(labels))
    curve = dial_frontier(columns, labels, space, by_class=True)
    assert curve.score("avg") == pytest.approx((curve.accuracies["base"] + curve.accuracies["novel"]) / 2)
