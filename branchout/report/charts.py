"""Charts as SVG. Shapes and dashes differ as well as colours, so that a chart can be read in grey."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from branchout.units import percent

WIDTH, HEIGHT = 480, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 14, 44
LETTER, LINE = 8.2, 15
"""Width of a letter and height of a line in the largest size that the stylesheet gives to labels."""
NEAR = 22
"""How far up or down a label moves to keep clear of dots and lines."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


@dataclass(frozen=True)
class Mark:
    """One point, with a label beside it if there is one."""

    x: float
    y: float
    shape: str
    label: str = ""
    tip: str = ""
    """Shown when the pointer rests on it."""
    point: int | None = None
    """The operating point that it stands for: the script makes the mark a button that leads there."""


@dataclass(frozen=True)
class Series:
    """Points of one kind; `name` is also their class in the stylesheet."""

    name: str
    marks: Sequence[Mark]
    joined: int = 0
    """How many of the first marks a line connects."""


@dataclass(frozen=True)
class Legend:
    """One entry: a shape, the name of its series, and what it stands for."""

    shape: str
    series: str
    words: str

    @property
    def glyph(self) -> Markup:
        return glyph(self.shape, self.series)


@dataclass(frozen=True)
class Axes:
    """Maps values to coordinates. Both axes are shares between 0 and 1."""

    x: tuple[float, float]
    y: tuple[float, float]
    box: tuple[float, float, float, float] = field(default=(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM))

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> Axes:
        return cls(_range(xs), _range(ys))

    def place(self, x: float, y: float) -> tuple[float, float]:
        left, top, right, bottom = self.box
        along = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(left + along * (right - left), 1), round(bottom - up * (bottom - top), 1)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values with a margin, within 0 and 1, and never empty."""
    low, high = min(values), max(values)
    margin = max((high - low) * 0.08, 0.01)
    return max(low - margin, 0.0), min(high + margin, 1.0)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between two shares, at most `most` of them."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) < most)
    first = math.ceil(max(low, 0) / step - 1e-9)
    last = math.floor(min(high, 1) / step + 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def scatter(
    series: Sequence[Series],
    axes: Axes,
    *,
    names: tuple[str, str],
    title: str,
    description: str,
    before: float | None = None,
    cursors: Sequence[str] = (),
) -> Markup:
    """Points of several series over two accuracies. `before` is a vertical line; the script moves `cursors`."""
    _, top, _, bottom = axes.box
    parts = [_frame(axes, names)]
    # Labels keep clear of the marks that matter, of each other, and where there is room also of dots and lines.
    marks = [axes.place(mark.x, mark.y) for each in series for mark in each.marks if mark.shape not in ("dot", "cross")]
    used: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in marks]
    faint = [box for each in series for box in _along([axes.place(mark.x, mark.y) for mark in each.marks], each.joined)]
    if before is not None and axes.x[0] <= before <= axes.x[1]:
        x, _ = axes.place(before, axes.y[0])
        words = f"before: {percent(before)}"
        at, anchor = _free_place(x, (bottom - 12, top + 19), words, axes, used, faint)
        parts.append(
            f'<g class="before"><line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            f'<text x="{at[0]}" y="{at[1]}" text-anchor="{anchor}">{words}</text></g>'
        )
    for each in series:
        parts.append(f'<g class="series {each.name}">')
        if each.joined > 1:
            way = " ".join("{},{}".format(*axes.place(mark.x, mark.y)) for mark in each.marks[: each.joined])
            parts.append(f'<polyline points="{way}"/>')
        parts += [_mark(mark, axes, used, faint) for mark in each.marks]
        parts.append("</g>")
    parts += [
        f'<g class="cursor {name}" data-cursor="{name}" aria-hidden="true" visibility="hidden"><circle r="9"/>'
        '<path d="M-14 0H-5M5 0H14M0 -14V-5M0 5V14"/></g>'
        for name in cursors
    ]
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}">{"".join(parts)}</svg>'
    )


def curve(values: Sequence[float], *, title: str) -> Markup:
    """The loss from the first epoch to the last, with both ends in numbers."""
    width, height = 300, 120
    low, high = min(0.0, *values), max(*values, 1e-9)
    last = max(len(values) - 1, 1)
    places = [
        (round(8 + n / last * (width - 16), 1), round(100 - (value - low) / (high - low) * 82, 1))
        for n, value in enumerate(values)
    ]
    way = " ".join(f"{x},{y}" for x, y in places)
    (x0, y0), (x1, y1) = places[0], places[-1]
    words = f"loss {values[0]:.3f} in the first of {len(values)} epochs, {values[-1]:.3f} in the last"
    return Markup(
        f'<svg class="chart curve" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}: {words}">'
        f'<line class="axis" x1="8" x2="{width - 8}" y1="100" y2="100"/><polyline points="{way}"/>'
        f'<circle cx="{x0}" cy="{y0}" r="3"/><circle cx="{x1}" cy="{y1}" r="3"/>'
        f'<text x="{x0 - 2}" y="{y0 - 8}">{values[0]:.3f}</text>'
        f'<text x="{x1 - 2}" y="{y1 - 8}" text-anchor="end">{values[-1]:.3f}</text>'
        f'<text x="8" y="116">epoch 1</text><text x="{width - 8}" y="116" text-anchor="end">{len(values)}</text></svg>'
    )


def glyph(shape: str, series: str) -> Markup:
    """One mark, for a legend; a shape that ends with - has a line through it."""
    line = '<path class="way" d="M0 8H28"/>' if shape.endswith("-") else ""
    return Markup(
        f'<svg class="chart glyph" viewBox="0 0 28 16" width="28" height="16" aria-hidden="true">'
        f'<g class="series {series}">{line}{_shape(shape.rstrip("-"), 14, 8)}</g></svg>'
    )


def _frame(axes: Axes, names: tuple[str, str]) -> str:
    left, top, right, bottom = axes.box
    parts = []
    for value in ticks(*axes.x):
        x, _ = axes.place(value, 0)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{100 * value:.4g}</text>')
    for value in ticks(*axes.y):
        _, y = axes.place(0, value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{100 * value:.4g}</text>')
    parts.append(f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>')
    parts.append(
        f'<text class="title" x="{(left + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(names[0])}, %</text>"
    )
    parts.append(
        f'<text class="title" transform="translate(12 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(names[1])}, %</text>"
    )
    return f'<g class="frame">{"".join(parts)}</g>'


def _mark(mark: Mark, axes: Axes, used: list[Box], faint: list[Box]) -> str:
    x, y = axes.place(mark.x, mark.y)
    tip = f"<title>{escape(mark.tip)}</title>" if mark.tip else ""
    label = ""
    if mark.label:
        place, anchor = _free_place(x, (y,), mark.label, axes, used, faint)
        label = f'<text x="{place[0]}" y="{place[1]}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    point = "" if mark.point is None else f' data-point="{mark.point}"'
    return f"<g{point}>{tip}{_shape(mark.shape, x, y)}{label}</g>"


def _along(places: Sequence[tuple[float, float]], joined: int) -> list[Box]:
    """Small boxes around points, and along the line through the first ones."""
    between = [
        (x0 + (x1 - x0) * n / count, y0 + (y1 - y0) * n / count)
        for (x0, y0), (x1, y1) in itertools.pairwise(places[:joined])
        for count in [int(math.hypot(x1 - x0, y1 - y0) / 8) + 1]
        for n in range(1, count)
    ]
    return [(x - 3, y - 3, x + 3, y + 3) for x, y in [*places, *between]]


def _free_place(
    x: float, heights: Sequence[float], label: str, axes: Axes, used: list[Box], faint: list[Box]
) -> tuple[tuple[float, float], str]:
    """Where a label covers no other label and no mark: at one of the heights, or a few lines up or down."""
    left, top, right, bottom = axes.box
    width = LETTER * len(label) + 4
    places = []
    for shift, y in itertools.product((-7, 5, -22, 20, -37, 35, -52, 50, -67, 65, -82, 80), heights):
        for end in (x + 10 + width > right, x + 10 + width <= right):
            start, line = x - 10 - width if end else x + 10, y + shift
            box = (start, line - LINE * 0.8, start + width, line + LINE * 0.2)
            inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
            if inside and not any(_overlap(box, other) for other in used):
                places.append((box, (round(x - 10 if end else x + 10, 1), round(line, 1)), "end" if end else "start"))
    if not places:
        return (round(x + 10, 1), round(heights[0] - 7, 1)), "start"
    near = [each for each in places if any(abs(each[1][1] - y) <= NEAR for y in heights)]
    box, place, anchor = min(near or places, key=lambda each: sum(_overlap(each[0], other) for other in faint))
    used.append(box)
    return place, anchor


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _shape(shape: str, x: float, y: float) -> str:
    """A mark that can be distinguished without colour."""
    if shape == "dot":
        return f'<circle class="dot" cx="{x}" cy="{y}" r="2.4"/>'
    if shape == "disc":
        return f'<circle cx="{x}" cy="{y}" r="5"/>'
    if shape == "cross":
        return f'<path class="cross" d="M{x - 3} {y - 3}l6 6m0 -6l-6 6"/>'
    if shape == "ring":
        return f'<circle class="ring" cx="{x}" cy="{y}" r="9"/>'
    corners = {
        "triangle": ((0, -6), (5.6, 4.4), (-5.6, 4.4)),
        "square": ((-4.6, -4.6), (4.6, -4.6), (4.6, 4.6), (-4.6, 4.6)),
        "diamond": ((0, -6.2), (6.2, 0), (0, 6.2), (-6.2, 0)),
    }[shape]
    way = " ".join(f"{round(x + dx, 1)},{round(y + dy, 1)}" for dx, dy in corners)
    return f'<polygon points="{way}"/>'
