"""The audit of the chart of the first screen: each mark stands where the number of its row is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.paper.audit import LINK, Audit, mean, tables_of
from benchmarks.paper.audit_screen import who

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = ("#0072b2", "#00795a", "#b34a00", "#5f6368")
"""Of Branchout, the paper's recipe, the best other method and joint training."""


def check(audit: Audit) -> None:
    page = audit.docs / "figures" / "overview.svg"
    scale, marks = read(page)
    ((_, _, lines),) = tables_of(audit.docs / "results.md")
    sides = zip(*(who(audit, LINK.findall(line[0])[0][0]) for line in lines), strict=True)
    for colour, paths in zip(COLOURS, sides, strict=True):
        expected = [mean(audit.rows[path], "balanced") or 0.0 for path in paths if path]
        found = [value_at(scale, x) for x in marks.get(colour, ())]
        near = len(found) == len(expected) and all(abs(a - b) < 0.01 for a, b in zip(found, expected, strict=True))
        audit.same(f"{page.name}, {colour}", "" if near else str(found), "" if near else str(expected))


def read(chart: Path) -> tuple[list[tuple[float, float]], dict[str, list[float]]]:
    """Where the numbers of the horizontal axis stand, and the places of each colour's marks, from top to bottom."""
    groups = list(ElementTree.parse(chart).iter(f"{SVG}g"))
    ticks = [group for group in groups if group.get("id", "").startswith("xtick_")]
    scale = [
        (float(next(tick.iter(f"{SVG}use")).get("x", "")), float(next(tick.iter(f"{SVG}text")).text or ""))
        for tick in ticks
    ]
    marks: dict[str, list[float]] = {}
    for group in groups:
        for mark in group.findall(f"{SVG}use") if group.get("clip-path") else ():
            colour = mark.get("style", "").removeprefix("fill: ")
            marks.setdefault(colour, []).append(float(mark.get("x", "")))
    return scale, marks


def value_at(scale: list[tuple[float, float]], x: float) -> float:
    (at, value), (at_2, value_2) = next(pair for pair in pairwise(scale) if x <= pair[1][0] or pair[1] == scale[-1])
    return value + (x - at) / (at_2 - at) * (value_2 - value)
