"""The dial's curve against brute force over b, and the offsets of steps."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import SPACES, scores
from hypothesis import given
from hypothesis import strategies as st

from branchout.labels import LabelSpace
from branchout.method.dial import balanced_without_old, dial_frontier, newest_bias, predict, step_offsets, with_bias
from branchout.method.frontier import Frontier
from branchout.method.recipes import TIE
from branchout.metrics import accuracies


def brute_predict(columns: np.ndarray, space: LabelSpace, biases: list[float], pooler: str) -> np.ndarray:
    answers = []
    for row in columns:
        per_class: dict[str, list[float]] = {}
        column = 0
        for d, names in enumerate(space.branches):
            for name in names:
                per_class.setdefault(name, []).append(row[column] + biases[d])
                column += 1
        pooled = [max(per_class[n]) if pooler == "max" else np.mean(per_class[n]) for n in space.classes]
        answers.append(int(np.argmax(pooled)))
    return np.array(answers)


@pytest.mark.parametrize("pooler", ["max", "average"])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
@given(seed=st.integers(0, 50))
def test_the_curve_equals_brute_force_over_b(space: LabelSpace, pooler: str, seed: int) -> None:
    columns, labels = scores(space, seed)
    frontier = dial_frontier(columns, labels, space, pooler)
    b_values = frontier.settings[:, 0]
    assert (np.diff(b_values) > 0).all()
    # Every point of the curve says what is measured there …
    for point, b in enumerate(b_values):
        biases = [0.0] + [b] * (len(space.branches) - 1)
        real = accuracies(brute_predict(columns, space, biases, pooler), labels, space)
        assert frontier.at(point) == pytest.approx(
            {"all": real.all, "base": real.base, "novel": real.novel, "overlap": real.overlap, "avg": real.avg}
        )
    # … and no value of b anywhere gives accuracies that are not on the curve.
    on_curve = {tuple(np.round(row, 9)) for row in np.nan_to_num(np.stack(list(frontier.accuracies.values()), 1))}
    for b in np.linspace(-15, 15, 61):
        real = accuracies(predict(columns, space, float(b), pooler), labels, space)
        row = [real.all, real.base or 0, real.novel or 0, real.overlap or 0, real.avg]
        assert tuple(np.round(row, 9)) in on_curve


@given(seed=st.integers(0, 20), at=st.floats(-8, 8))
def test_a_value_of_b_can_be_a_point_of_the_curve(seed: int, at: float) -> None:
    space = SPACES["three steps"]
    columns, labels = scores(space, seed)
    plain, curve = dial_frontier(columns, labels, space), dial_frontier(columns, labels, space, at=at)
    (point,) = np.flatnonzero(curve.settings[:, 0] == at)
    assert (np.diff(curve.settings[:, 0]) > 0).all()
    assert np.array_equal(np.delete(curve.settings, point), np.delete(plain.settings, point))
    assert curve.at(point)["all"] == pytest.approx(accuracies(predict(columns, space, at), labels, space).all)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
@pytest.mark.parametrize("pooler", ["max", "average"])
def test_predict_against_a_loop(space: LabelSpace, pooler: str) -> None:
    columns, _ = scores(space, 3)
    biases = [0.3 * t for t in range(1, len(space.branches))]
    assert (predict(columns, space, biases, pooler) == brute_predict(columns, space, [0.0, *biases], pooler)).all()


@given(st.integers(0, 20))
def test_step_offsets_never_lose_to_the_shared_dial(seed: int) -> None:
    space = SPACES["three steps"]
    columns, labels = scores(space, seed)
    shared = dial_frontier(columns, labels, space)
    best = shared.score("balanced")[shared.choose("balanced")]
    own = accuracies(predict(columns, space, step_offsets(columns, labels, space).tolist()), labels, space)
    assert own.balanced >= best - 1e-9


def test_step_offsets_undo_what_was_added_to_each_step() -> None:
    space = LabelSpace.of("abcd", "ef", "gh", "ij")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(space.classes)), 30)
    columns = rng.normal(size=(len(labels), space.columns)) + 6 * (labels[:, None] == space.class_of_column)
    louder = with_bias(columns, space, [2.0, 7.0, 12.0])
    one = dial_frontier(louder, labels, space)
    assert one.score("balanced").max() < 0.9  # no single number puts all of them right
    answers = predict(louder, space, step_offsets(louder, labels, space).tolist())
    assert accuracies(answers, labels, space).all > 0.98


def test_a_step_without_images_is_not_silenced() -> None:
    space = LabelSpace.of("abcd", "ef", "gh")
    columns, labels = scores(space, 3)
    kept = ~np.isin(labels, space.index(space.branches[1]))
    shared = dial_frontier(columns[kept], labels[kept], space)
    offsets = step_offsets(columns[kept], labels[kept], space)
    assert offsets[0] == shared.settings[shared.choose("balanced"), 0]


def test_with_one_step_there_is_the_dial_alone() -> None:
    space = SPACES["disjoint"]
    assert step_offsets(*scores(space, 1), space).tolist() == [0.0]


def test_without_old_images_new_ones_without_their_class_place_the_dial() -> None:
    space = LabelSpace.of(["a", "b"], ["c", "d", "e"])
    columns = np.array([[3.0, 1.0, 9.0, 1.0, 0.0], [0.0, 4.0, 2.0, 8.0, 1.0], [5.0, 0.0, 0.0, 1.0, 7.0]])
    labels = np.array([2, 3, 4])
    enough = np.quantile([3 - 9, 4 - 8, 5 - 7], 0.95)  # nearly all are given to a new class
    assert balanced_without_old(columns, labels, space) == pytest.approx(enough)
    assert balanced_without_old(columns, np.array([0, 1, 0]), space) is None  # none of the new classes
    two = LabelSpace.of(["a", "b"], ["c", "d"])
    weak = np.array([[6.0, 1.0, 4.0, -1.0], [0.0, 5.0, 0.0, 7.0]])
    assert balanced_without_old(weak, np.array([2, 3]), two) == pytest.approx(np.quantile([6 - 4, 5 - 7], 0.95))
    alike = np.array([[6.0, 1.0, 4.0, 3.5], [0.0, 5.0, 4.5, 4.6], [6.0, 1.0, 1.0, 0.9]])  # the other class is as near
    gaps, needs = [6 - 3.5, 5 - 4.5, 6 - 0.9], [6 - 4, 5 - 4.6, 6 - 1]
    found = balanced_without_old(alike, np.array([2, 3, 2]), two)
    assert found == pytest.approx(np.median(gaps)) != pytest.approx(np.quantile(needs, 0.95))
    alone = LabelSpace.of(["a", "b"], ["c"])
    assert balanced_without_old(columns[:, :3], np.array([2, 2, 2]), alone) is None
    curve = dial_frontier(columns, labels, space)
    placed = Frontier.from_dict(replace(curve, balanced_at=2.0).to_dict())
    assert placed.choose("balanced") == np.abs(curve.settings[:, 0] - 2.0).argmin()
    assert placed.choose("all") == curve.choose("all")


@pytest.mark.parametrize("earlier", [-2.0, 0.0, 1.5])
@given(seed=st.integers(0, 30))
def test_no_other_bias_of_the_newest_step_is_better(earlier: float, seed: int) -> None:
    """Classes count alike, whichever step they came with."""
    space = LabelSpace.of("abc", "de", "f")
    columns, labels = scores(space, seed, images=60)

    def score(b: float) -> float:
        right = predict(columns, space, [earlier, b]) == labels
        base, first, second = (right[np.isin(labels, space.index(names))].mean() for names in space.branches)
        new = (2 * first + second) / 3
        return float(((base + new) / 2 + (base + 2 * new) / 3) / 2)

    best = max(score(b) for b in np.linspace(-20, 20, 81))
    assert score(newest_bias(columns, labels, space, [earlier])) >= best - TIE - 1e-9


def test_the_newest_step_is_placed_in_the_middle_of_what_is_equally_good() -> None:
    space = LabelSpace.of("ab", "c", "d")
    columns = np.array([[9.0, 0.0, 0.0, 3.0], [0.0, 7.0, 0.0, 3.0], [0.0, 0.0, 8.0, 3.0], [0.0, 0.0, 1.0, 3.0]])
    labels = np.arange(4)
    # The last image needs b > 1 + e - 3, the others allow b < 7 - 3 and b < 8 + e - 3, with e the first step's bias.
    assert newest_bias(columns, labels, space, [0.0]) == pytest.approx((-2 + 4) / 2)
    assert newest_bias(columns, labels, space, [-2.0]) == pytest.approx((-3 + 3) / 2)  # b > 0 - 3: base logits are 0


def test_a_newest_step_without_images_gets_the_bias_of_the_step_before() -> None:
    space = LabelSpace.of("abc", "de", "f")
    columns, labels = scores(space, 2, images=60)
    kept = ~np.isin(labels, space.index(space.branches[-1]))
    assert newest_bias(columns[kept], labels[kept], space, [-1.25]) == -1.25
