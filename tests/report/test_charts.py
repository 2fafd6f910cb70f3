"""Drawings: ticks that are round, marks that are on the paper."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchout.report.charts import Axes, Mark, Series, curve, glyph, scatter, ticks

shares = st.floats(0, 1, allow_nan=False)


@given(shares, shares)
def test_ticks_are_few_round_and_inside(one: float, other: float) -> None:
    low, high = Axes.around([one, other], [0]).x
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 and 0 <= value <= 1 for value in found)
    assert len({f"{100 * value:.4g}" for value in found}) == len(found)  # no two read the same


@given(st.lists(st.tuples(shares, shares), min_size=1, max_size=8))
def test_marks_lie_within_the_axes(points: list[tuple[float, float]]) -> None:
    axes = Axes.around([x for x, _ in points], [y for _, y in points])
    left, top, right, bottom = axes.box
    for x, y in points:
        across, down = axes.place(x, y)
        assert left <= across <= right
        assert top <= down <= bottom


@given(st.lists(shares, min_size=1, max_size=8))
def test_no_axis_goes_beyond_what_an_accuracy_can_be(values: list[float]) -> None:
    axes = Axes.around(values, values)
    assert 0 <= axes.y[0] <= min(values)
    assert max(values) <= axes.y[1] <= 1
    assert axes.y[1] > axes.y[0]


def test_better_is_further_right_and_further_up() -> None:
    axes = Axes.around([0.2, 0.8], [0.1, 0.5])
    assert axes.place(0.8, 0.3)[0] > axes.place(0.2, 0.3)[0]
    assert axes.place(0.5, 0.5)[1] < axes.place(0.5, 0.1)[1]


def test_a_chart_is_sound_svg_that_says_what_it_shows() -> None:
    marks = [Mark(0.5, 0.6, "dot", tip="a & b"), Mark(0.7, 0.4, "ring", "as <saved>")]
    drawn = scatter(
        [Series("dev", marks, joined=2), Series("others", [Mark(0.6, 0.5, "diamond", "1")])],
        Axes.around([0.5, 0.7], [0.4, 0.6]),
        names=("base accuracy", "novel accuracy"),
        title="base against novel",
        description="Two points.",
        before=0.68,
    )
    tree = ElementTree.fromstring(drawn)
    assert tree.attrib["aria-label"] == "base against novel. Two points."
    assert "as <saved>" in [text.text for text in tree.iter("text")]
    assert "before: 68.0" in [text.text for text in tree.iter("text")]
    assert [title.text for title in tree.iter("title")] == ["a & b"]
    assert len(tree.findall(".//polyline")) == 1


@given(st.lists(st.tuples(st.floats(0.3, 0.8), st.floats(0.3, 0.8)), min_size=2, max_size=4))
def test_labels_cover_neither_each_other_nor_marks(points: list[tuple[float, float]]) -> None:
    """Also where goals lie on one spot, as avg and balanced often do."""
    names = ["all", "balanced", "avg", "saved"]
    marks = [Mark(x, y, "disc", name) for (x, y), name in zip(points, names, strict=False)]
    axes = Axes.around([0.2, 0.9], [0.2, 0.9])
    drawn = scatter([Series("dev", marks)], axes, names=("x", "y"), title="", description="", before=0.6)
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(start|end)">([a-z][^<]*)<', drawn)
    assert len(found) == len(points) + 1  # and that of the line
    boxes = []
    for x, y, anchor, words in found:
        width = 7.5 * len(words)  # a letter of the larger size that a phone has
        left = float(x) - (width if anchor == "end" else 0)
        boxes.append((left, float(y) - 11, left + width, float(y) + 3))
    discs = [(x - 5, y - 5, x + 5, y + 5) for x, y in (axes.place(mark.x, mark.y) for mark in marks)]
    for number, one in enumerate(boxes):
        for other in [*boxes[:number], *discs]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


def test_the_label_of_the_line_covers_no_dots_where_there_is_room_beside_it() -> None:
    """Dots in a column to the right of the line: the label moves to its left."""
    marks = [Mark(0.62, 0.3 + n / 100, "dot") for n in range(30)]
    drawn = scatter(
        [Series("dev", marks, joined=30)],
        Axes.around([0.2, 0.9], [0.3, 0.7]),
        names=("x", "y"),
        title="",
        description="",
        before=0.6,
    )
    assert re.search(r'text-anchor="end">before: 60.0<', drawn)


@pytest.mark.parametrize("losses", [[0.7], [2.0, 1.0, 0.5], [0.0, 0.0]])
def test_a_curve_tells_both_ends(losses: list[float]) -> None:
    drawn = curve(losses, title="step 1")
    ElementTree.fromstring(drawn)
    assert f"loss {losses[0]:.3f} in the first of {len(losses)} epochs, {losses[-1]:.3f} in the last" in drawn


def test_legends_have_a_shape_for_every_kind() -> None:
    for shape in ("dot-", "disc", "ring", "triangle", "square", "diamond", "cross"):
        ElementTree.fromstring(glyph(shape, "dev"))
