"""The part of the report about operating points: a chart, what each goal reaches, other methods beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from branchout.method.frontier import Frontier
from branchout.report import charts
from branchout.report.charts import Axes, Mark, Series
from branchout.report.markup import MINUS, command, count, named, note, percent, row, table, text

Facts = Mapping[str, Any]
Section = tuple[str, str, str]
FIGURES = ("all", "base", "novel", "overlap", "avg")
SHAPES = {"all": "triangle", "balanced": "disc", "avg": "square"}
SYMBOL = re.compile("[bαβ] = ")
"""Under a heading that has the symbols already, only the numbers are wanted."""
IMAGES = {"dev": "dev images", "held-out": "images held out", "pseudo": "new images and stand-ins"}


def operating_points(facts: Facts) -> Section:
    frontier = facts["frontier"]
    if frontier is None:
        return "points", "Operating points", ""
    what = "position of the dial" if frontier["kind"] == "dial" else "trained pair of α and β"
    body = [
        f'<p class="lead">Every point is one {what} of the same model; further right keeps more of the base, further '
        "up gains more of the new classes. Moving between them trains nothing.</p>"
    ]
    if frontier["measured"] == "pseudo":
        told = "<strong>Base accuracy on dev is that of stand-ins</strong>, made from the base’s own weights. "
        body.append(note(told + "It orders the points; it measures nothing.", "warn"))
    alone = Frontier.from_dict(frontier).single_point_reason()
    if alone:
        body.append(note(f"{text(alone[0].upper() + alone[1:])}."))
    goal = frontier["reach"][frontier["saved"]]
    tune = command(tune_command(facts, goal or "balanced"))
    body += [
        f'<div class="points">{_chart(facts)}<div>{"".join(_goal_tables(facts))}',
        f'<p id="tune" class="note"{"" if goal else " hidden"}>To move the saved model: {tune}</p></div></div>',
        _rows_table(facts["rows"]),
    ]
    return "points", "Operating points", "".join(body)


def tune_command(facts: Facts, goal: str) -> str:
    return f"branchout tune {shlex.quote(facts['path'])} --goal {shlex.quote(goal)}"


def setting(frontier: Facts, point: int) -> str:
    """Where a point lies: b, or α and β."""
    values = frontier["settings"][point]
    if len(values) == 2:
        return f"α = {values[0]:g}, β = {values[1]:g}"
    return f"b = {values[0]:+.3f}".replace("-", MINUS)


def axes_of(facts: Facts) -> tuple[str, str]:
    """The two accuracies to draw: base against novel, or what comes nearest where a part has no images."""
    figures = facts["frontier"]["figures"]
    measured = [name for name in ("base", "novel", "overlap", "all", "avg") if figures[name][0] is not None]
    return measured[0], measured[1]


# The chart.


def _chart(facts: Facts) -> str:
    frontier, test = facts["frontier"], facts["test"]
    x, y = axes_of(facts)
    series = [_frontier("dev", frontier["figures"], facts, labelled=test is None)]
    legend = [("dot-", "dev", f"the frontier on {_dev_images(frontier)}")]
    if frontier["beaten"] and frontier["beaten"]["settings"]:
        series.insert(0, _beaten(frontier["beaten"], x, y))
        legend.append(("cross", "beaten", "trained points that another beats, on the same images"))
    before = None
    if test is not None and test["figures"][x][0] is not None and test["figures"][y][0] is not None:
        series.append(_frontier("test", test["figures"], facts, labelled=True))
        legend.append(("dot-", "test", f"the same points on the {test['images']:,} images of this report"))
        before = (test["figures_before"] or {}).get("base")
    elif test is None:
        before = _set_aside(facts, series, legend)
    rows = [each for each in (facts["rows"] or {"rows": []})["rows"] if each[x] is not None and each[y] is not None]
    if rows:
        series.append(_others(rows, x, y))
        legend.append(("diamond", "others", "other methods, by number"))
    legend += [(shape, "goal", f"goal {goal}") for goal, shape in SHAPES.items()]
    legend.append(("ring", "goal", f"as saved, goal {frontier['goal']}"))
    marks = [mark for each in series for mark in each.marks]
    before = before if x == "base" else None
    drawing = charts.scatter(
        series,
        Axes.around([*(mark.x for mark in marks), *([] if before is None else [before])], [mark.y for mark in marks]),
        names=(f"{x} accuracy", f"{y} accuracy"),
        title=f"{x} against {y} accuracy of {count(len(frontier['settings']), 'operating point')}",
        description="The goals’ numbers stand in the tables beside it.",
        before=before,
        cursors=[each.name for each in series if each.name in ("dev", "test")],
    )
    listed = "".join(f"<li>{charts.glyph(shape, kind)} {text(words)}</li>" for shape, kind, words in legend)
    return f'<figure class="plot">{drawing}<figcaption><ul class="legend">{listed}</ul></figcaption></figure>'


def _frontier(name: str, figures: Facts, facts: Facts, *, labelled: bool) -> Series:
    """All points as a line of dots; goals and the saved point stand out on it."""
    frontier = facts["frontier"]
    x, y = axes_of(facts)
    saved = frontier["saved"]
    goals: dict[int, list[str]] = {}
    for goal, point in frontier["goals"].items():
        goals.setdefault(point, []).append(goal)

    def mark(point: int, shape: str, label: str = "", prefix: str = "") -> Mark:
        measured = [f"{each} {percent(values[point])}" for each, values in figures.items() if values[point] is not None]
        told = f"{prefix}{setting(frontier, point)}, on {name}: {', '.join(measured)}"
        return Mark(figures[x][point], figures[y][point], shape, label if labelled else "", told)

    dots = [mark(point, "dot") for point in range(len(frontier["settings"]))]
    wanted = [mark(p, SHAPES[names[-1]], ", ".join(names), f"{', '.join(names)}: ") for p, names in goals.items()]
    ring = mark(saved, "ring", "" if saved in goals else "as saved", "as saved: ")
    return Series(name, [*dots, *wanted, ring], joined=len(dots))


def _beaten(beaten: Facts, x: str, y: str) -> Series:
    figures = beaten["figures"]
    marks = [
        Mark(figures[x][n], figures[y][n], "cross", told=f"beaten: {setting(beaten, n)}")
        for n in range(len(beaten["settings"]))
    ]
    return Series("beaten", marks)


def _set_aside(facts: Facts, series: list[Series], legend: list[tuple[str, str, str]]) -> float | None:
    """The goals on the images that `extend` set aside, if there are such; returns base accuracy before the step."""
    measured = facts["measured"]
    x, y = axes_of(facts)
    if not measured or any(each.get(x) is None or each.get(y) is None for each in measured["goals"].values()):
        return None
    marks = [
        Mark(each[x], each[y], SHAPES[goal], told=f"{goal}: {x} {percent(each[x])}, {y} {percent(each[y])}")
        for goal, each in measured["goals"].items()
    ]
    series.append(Series("aside", marks))
    legend.append(("square", "aside", f"the same goals on {measured['images']:,} images that chose nothing"))
    before: float | None = measured["before"].get("base")
    return before


def _others(rows: Sequence[Facts], x: str, y: str) -> Series:
    numbers = _method_numbers(rows)
    marks = [
        Mark(each[x], each[y], "diamond", str(numbers[each["method"]]), f"{each['method']} {each['point']}")
        for each in rows
    ]
    return Series("others", marks)


def _dev_images(frontier: Facts) -> str:
    return f"{frontier['images']:,} {IMAGES[frontier['measured']]}"


# The tables.


def _goal_tables(facts: Facts) -> list[str]:
    """What each goal reaches, on dev and on images that chose nothing."""
    frontier, test, measured = facts["frontier"], facts["test"], facts["measured"]
    goals = {**frontier["goals"], frontier["goal"]: frontier["saved"]}
    tables = [_goal_table(f"On {_dev_images(frontier)}, which choose", frontier["figures"], goals, frontier, "dev")]
    if test is not None:
        caption = f"On {test['images']:,} images of this report"
        tables.append(_goal_table(caption, test["figures"], goals, frontier, "test"))
    elif measured:
        pseudo = frontier["measured"] == "pseudo"  # where no image is old, all and avg would mean something else
        found: dict[str, dict[int, float | None]] = {name: {} for name in FIGURES}
        for goal, point in goals.items():
            figures = measured["goals"].get(goal) or (measured["after"] if goal == frontier["goal"] else None) or {}
            for name in FIGURES:
                found[name][point] = None if pseudo and name in ("all", "avg") else figures.get(name)
        caption = f"On {measured['images']:,} {'new ' if pseudo else ''}images that chose nothing"
        tables.append(_goal_table(caption, found, goals, frontier, "aside"))
    return tables


def _goal_table(caption: str, figures: Facts, goals: Mapping[str, int], frontier: Facts, on: str) -> str:
    shown = [name for name in FIGURES if any(figures[name][point] is not None for point in goals.values())]
    rows = []
    for goal, point in goals.items():
        mark = ' <span class="saved">◂ saved</span>' if goal == frontier["goal"] else ""
        title = f'<button type="button" class="go" data-point="{point}">{text(goal)}</button>{mark}'
        cells = [("number", percent(figures[name][point])) for name in shown]
        rows.append(row([("name", title), ("number", SYMBOL.sub("", setting(frontier, point))), *cells]))
    if on != "aside":
        live = [("number", f'<span data-figure="{name}" data-on="{on}"></span>') for name in shown]
        rows.append(row([("name", "dial"), ("number", '<span data-setting=""></span>'), *live], ' class="live" hidden'))
    place = "b" if frontier["kind"] == "dial" else "α, β"
    headings = [("goal", "name"), (place, "number"), *((name, "number") for name in shown)]
    return table(headings, rows, caption=f"{text(caption)}, in %")


def _method_numbers(rows: Sequence[Facts]) -> dict[str, int]:
    return {method: number for number, method in enumerate(dict.fromkeys(each["method"] for each in rows), 1)}


def _rows_table(found: Facts | None) -> str:
    """Rows of other methods, as their files have them."""
    if not found:
        return ""
    rows, other = found["rows"], found["other"]
    verb = "is" if other == 1 else "are"
    left = f" {count(other, 'row')} of other numbers of classes or steps {verb} left out." if other else ""
    if not rows:
        return note(f"No measured row is about as many classes and steps as this model.{left}")
    numbers = _method_numbers(rows)
    shown = [name for name in FIGURES if any(each[name] is not None for each in rows)]
    lines = [
        row(
            [
                ("name", f"{numbers[each['method']]}. {named(each['method'])}"),
                ("name", named(each["point"])),
                ("name", named(each["dataset"])),
                *(("number", percent(each[name])) for name in shown),
            ]
        )
        for each in rows
    ]
    headings = [("method", "name"), ("point", "name"), ("data", "name"), *((name, "number") for name in shown)]
    caption = f"Other methods, as measured elsewhere and read from their files, in %.{left}"
    return table(headings, lines, caption=caption, sortable=True)
