"""Charts as SVG. Shapes and dashes differ as well as colours, so that a chart can be read in grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from branchout.report.formatting import percent

WIDTH, HEIGHT = 480, 340
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 44


@dataclass(frozen=True)
class Mark:
    """One point, with a label beside it if there is one."""

    x: float
    y: float
    shape: str
    label: str = ""
    tip: str = ""
    """Shown when the pointer rests on it."""


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
    left, top, right, bottom = axes.box
    parts = [_frame(axes, names)]
    if before is not None and axes.x[0] <= before <= axes.x[1]:
        x, _ = axes.place(before, axes.y[0])
        end = x > (left + right) / 2
        parts.append(
            f'<g class="before"><line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            f'<text x="{x + (-5 if end else 5)}" y="{bottom - 7}" text-anchor="{"end" if end else "start"}">'
            f"before: {percent(before)}</text></g>"
        )
    used: list[tuple[float, float, float]] = []
    for each in series:
        parts.append(f'<g class="series {each.name}">')
        if each.joined > 1:
            way = " ".join("{},{}".format(*axes.place(mark.x, mark.y)) for mark in each.marks[: each.joined])
            parts.append(f'<polyline points="{way}"/>')
        parts += [_mark(mark, axes, used) for mark in each.marks]
        parts.append("</g>")
    parts += [
        f'<g class="cursor {name}" data-cursor="{name}" visibility="hidden"><circle r="9"/>'
        '<path d="M-14 0H-5M5 0H14M0 -14V-5M0 5V14"/></g>'
        for name in cursors
    ]
    scale = " ".join(f"{value:.6g}" for value in (*axes.x, *axes.y, *axes.box))
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-scale="{scale}" '
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


def _mark(mark: Mark, axes: Axes, used: list[tuple[float, float, float]]) -> str:
    x, y = axes.place(mark.x, mark.y)
    tip = f"<title>{escape(mark.tip)}</title>" if mark.tip else ""
    label = ""
    if mark.label:
        place, anchor = _free_place(x, y, 7.0 * len(mark.label), axes, used)
        label = f'<text x="{place[0]}" y="{place[1]}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    return f"<g>{tip}{_shape(mark.shape, x, y)}{label}</g>"


def _free_place(
    x: float, y: float, width: float, axes: Axes, used: list[tuple[float, float, float]]
) -> tuple[tuple[float, float], str]:
    """Where a label overlaps no other: beside its mark, or a line further up or down."""
    _, top, right, _ = axes.box
    end = x + 9 + width > right
    start = x - 9 - width if end else x + 9
    line = y - 8  # above a frontier is free space
    for shift in (-8, 4, -21, 17, -34, 30):
        line = y + shift
        apart = all(abs(line - other) >= 12 or start + width < a or b < start for a, b, other in used)
        if apart and line >= top:
            break
    used.append((start, start + width, line))
    return (round(x - 9 if end else x + 9, 1), round(line, 1)), "end" if end else "start"


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
