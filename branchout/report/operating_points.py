"""The operating points of a report: the chart of the frontier, and the tables of what each goal reaches."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from markupsafe import Markup

from branchout.errors import BranchoutError
from branchout.goals import CHOSEN_ON, METRICS, PAPER_GOALS, PARTS_FIRST, meaning, read_as
from branchout.report.charts import Axes, Legend, Mark, Series, glyph, scatter
from branchout.report.data import Figures, OperatingPoints, ReportData
from branchout.units import count, percent, setting

IMAGES = CHOSEN_ON | {"pseudo": "new images and pseudo-exemplars"}
"""As a part of longer sentences."""
SHAPES = dict(zip(PAPER_GOALS, ("triangle", "disc", "square"), strict=True))


@dataclass(frozen=True)
class GoalTable:
    """What each goal reaches on one set of images."""

    images: str
    source: str
    """`dev`, `test` or `held-out`: where the script looks accuracies up; `held-out` does not follow the dial."""
    metrics: list[str]
    rows: list[tuple[str, int, list[float | None]]]
    """A goal, its point, and the metrics there."""


def goal_words(goal: str) -> str:
    """A goal as people read it; a point that was chosen by its position has none."""
    try:
        return f"goal {read_as(goal)}"
    except BranchoutError:
        return "set by hand"


def point_words(points: OperatingPoints) -> list[str]:
    """Each point with the goals that choose it: `balanced (b = −1.189)`."""
    goals = _goals_by_point(points)
    return [
        f"{' and '.join(goals[n])} ({setting(values)})" if n in goals else setting(values)
        for n, values in enumerate(points.settings)
    ]


def tune_command(report: ReportData, goal: str) -> str:
    return f"branchout tune {shlex.quote(report.path)} --goal {shlex.quote(goal)}"


@dataclass(frozen=True)
class GoalMark:
    """A tick of the dial."""

    point: int
    goals: list[str]
    glyph: Markup
    meaning: str
    share: float
    """How far along the dial it lies."""


def goal_marks(points: OperatingPoints) -> list[GoalMark]:
    """The ticks of the dial: each goal of the paper with the shape that it has in the chart."""
    last = max(len(points) - 1, 1)
    return [
        GoalMark(point, goals, glyph(SHAPES[goals[-1]], "goal"), "; ".join(map(meaning, goals)), point / last)
        for point, goals in sorted(_goals_by_point(points).items())
    ]


def _goals_by_point(points: OperatingPoints) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for goal, point in points.goals.items():
        found.setdefault(point, []).append(goal)
    return found


def axes_of(points: OperatingPoints) -> tuple[str, str]:
    """The two metrics to draw: base against novel, or the next ones where a part has no images."""
    measured = [name for name in PARTS_FIRST if points.figures[name][0] is not None]
    return measured[0], measured[1]


def chosen_on(points: OperatingPoints) -> str:
    return f"{points.images:,} {IMAGES[points.measured]}"


# The chart.


def frontier_chart(report: ReportData) -> tuple[Markup, list[Legend]]:
    """The drawing and its legend."""
    points, test, held_out = report.points, report.test, report.held_out
    assert points is not None
    x, y = axes_of(points)
    series = [_frontier("dev", points.figures, points, labelled=test is None)]
    legend = [Legend("dot-", "dev", f"the frontier on {chosen_on(points)}")]
    if points.dominated and points.dominated["settings"]:
        series.insert(0, _dominated(points.dominated, x, y))
        legend.append(Legend("cross", "dominated", "trained points that another is better than, on the same images"))
    before = None
    if test is not None and test.figures[x][0] is not None and test.figures[y][0] is not None:
        series.append(_frontier("test", test.figures, points, labelled=True))
        legend.append(Legend("dot-", "test", f"the same points on the {test.images:,} images of this report"))
        before = (test.figures_before or {}).get("base")
    elif test is None and held_out and all(_drawable(each, x, y) for each in held_out.goals.values()):
        marks = [
            replace(_mark(each, x, y, SHAPES[goal], goal), point=points.goals[goal])
            for goal, each in held_out.goals.items()
        ]
        series.append(Series("held-out", marks))
        legend.append(Legend("square", "held-out", f"the same goals on {held_out.images:,} held-out test images"))
        before = held_out.before.get("base")
    others = [each for each in (report.others.results if report.others else []) if _drawable(each.figures, x, y)]
    if others:
        numbers = method_numbers(report)
        marks = [
            _mark(each.figures, x, y, "diamond", f"{each.method} {each.point}", str(numbers[each.method]))
            for each in others
        ]
        series.append(Series("others", marks))
        legend.append(Legend("diamond", "others", "other methods, by number"))
    legend += [Legend(shape, "goal", f"goal {goal}: {meaning(goal)}") for goal, shape in SHAPES.items()]
    legend.append(Legend("ring", "goal", f"saved point: {goal_words(points.goal)}"))
    marks = [mark for each in series for mark in each.marks]
    before = before if x == "base" else None
    drawing = scatter(
        series,
        Axes.around([*(mark.x for mark in marks), *([] if before is None else [before])], [mark.y for mark in marks]),
        names=(f"{x} accuracy", f"{y} accuracy"),
        title=f"{x} against {y} accuracy of {count(len(points), 'operating point')}",
        description="The tables beside it have the numbers of the goals, and the dial reaches every point.",
        before=before,
        cursors=[each.name for each in series if each.name in ("dev", "test")],
    )
    return drawing, legend


def _drawable(figures: Mapping[str, float | None], x: str, y: str) -> bool:
    return figures.get(x) is not None and figures.get(y) is not None


def _mark(figures: Mapping[str, float | None], x: str, y: str, shape: str, name: str, label: str = "") -> Mark:
    across, up = figures[x], figures[y]
    assert across is not None
    assert up is not None
    return Mark(across, up, shape, label, f"{name}: {x} {percent(across)}, {y} {percent(up)}")


def _frontier(name: str, figures: Figures, points: OperatingPoints, *, labelled: bool) -> Series:
    """All points as dots on a line, with the points of goals and the saved point marked."""
    x, y = axes_of(points)
    goals = _goals_by_point(points)
    on = IMAGES[points.measured] if name == "dev" else "the images of this report"

    def mark(point: int, shape: str, label: str = "", prefix: str = "") -> Mark:
        here = {metric: values[point] for metric, values in figures.items()}
        words = ", ".join(f"{metric} {percent(value)}" for metric, value in here.items() if value is not None)
        tip = f"{prefix}{setting(points.settings[point])}, on {on}: {words}"
        return Mark(here[x] or 0.0, here[y] or 0.0, shape, label if labelled else "", tip, point)

    dots = [mark(point, "dot") for point in range(len(points))]
    marked = [mark(p, SHAPES[names[-1]], ", ".join(names), f"{', '.join(names)}: ") for p, names in goals.items()]
    ring = mark(points.saved, "ring", "" if points.saved in goals else "saved", "saved: ")
    return Series(name, [*dots, *marked, ring], joined=len(dots))


def _dominated(dominated: Mapping[str, object], x: str, y: str) -> Series:
    settings, figures = dominated["settings"], dominated["figures"]
    assert isinstance(settings, list)
    assert isinstance(figures, Mapping)
    marks = [
        Mark(figures[x][n], figures[y][n], "cross", tip=f"dominated: {setting(values)}")
        for n, values in enumerate(settings)
    ]
    return Series("dominated", marks)


# The tables.


def goal_tables(report: ReportData) -> list[GoalTable]:
    """What each goal reaches: on the images that choose, and on images that do not."""
    points, test, held_out = report.points, report.test, report.held_out
    assert points is not None
    goals = {**points.goals, points.goal: points.saved}

    def at_points(figures: Figures) -> dict[str, dict[str, float | None]]:
        return {goal: {name: figures[name][point] for name in METRICS} for goal, point in goals.items()}

    tables = [_table(f"On {chosen_on(points)}, which chose the points", "dev", at_points(points.figures), goals)]
    if test is not None:
        tables.append(_table(f"On {test.images:,} images of this report", "test", at_points(test.figures), goals))
    elif held_out is not None:
        pseudo = points.measured == "pseudo"
        # Without old images, all and avg would be accuracies on new images only.
        shown = [name for name in METRICS if METRICS[name].of_part or not pseudo]
        found: dict[str, dict[str, float | None]] = {}
        for goal in goals:
            figures = held_out.goals.get(goal) or (held_out.after if goal == points.goal else None) or {}
            found[goal] = {name: figures.get(name) if name in shown else None for name in METRICS}
        images = f"On {held_out.images:,} held-out test images"
        tables.append(_table(images, "held-out", found, goals))
    return tables


def _table(
    images: str, source: str, figures: Mapping[str, Mapping[str, float | None]], goals: Mapping[str, int]
) -> GoalTable:
    metrics = [name for name in METRICS if any(each[name] is not None for each in figures.values())]
    rows = [(goal, point, [figures[goal][name] for name in metrics]) for goal, point in goals.items()]
    return GoalTable(images, source, metrics, rows)


def method_numbers(report: ReportData) -> dict[str, int]:
    """The number under which the chart shows each other method."""
    results = report.others.results if report.others else []
    return {method: number for number, method in enumerate(dict.fromkeys(each.method for each in results), 1)}


def other_metrics(report: ReportData) -> list[str]:
    """The metrics that any result of another method has."""
    results = report.others.results if report.others else []
    return [name for name in METRICS if any(each.figures[name] is not None for each in results)]
