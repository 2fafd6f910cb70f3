"""What the top of a report says: one sentence, and the accuracies with the images that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from branchout.goals import METRICS
from branchout.report.counts import Counts, OldImages, PartCounts
from branchout.report.data import ReportData
from branchout.units import change, count, percent


@dataclass(frozen=True)
class Headline:
    source: str
    """`test`, `base model`, `held-out` or `chosen on`."""
    after: Mapping[str, float | None]
    before: Mapping[str, float | None]
    knows: str
    """What the model knows now, or that it was compacted, after its name: `knows 40 more classes`."""
    old: OldImages | None
    """Counts of labelled images; None without them."""
    parts: Mapping[str, PartCounts]
    """Counts of the parts that can change: base and overlap."""
    worse: str
    """Earlier steps whose classes got worse, as the end of a sentence; empty if none did."""
    unmeasured: list[str]
    """Metrics that the labelled images could not measure, of parts that have classes."""


def compared(before: float | None, after: float | None) -> str:
    """The second half of `it answers 94.8% right, …`."""
    if before is None:
        return ""
    points = change(before, after)
    if points == "±0":
        return ", the same as before"
    return f", {points[1:]} points {'higher' if points[0] == '+' else 'lower'} than before"


def headline(report: ReportData, counts: Counts | None) -> Headline:
    source, after, before = _accuracies(report)
    last = report.branches[-1]
    if report.compaction:
        _, was, now = report.compaction[0]
        knows = f"was compacted from {was} step branches to {now}"
    elif len(report.branches) == 1:
        knows = f"knows {count(len(last.new), 'class', 'classes')}"
    elif last.new:
        knows = f"knows {count(len(last.new), 'more class', 'more classes')}"
    else:
        knows = f"has new images of {count(len(last.known), 'class', 'classes')} it knew"
    old = counts.old if counts and counts.old.images and report.test and report.test.figures_before else None
    names = {0: "base", len(report.parts) - 1: "overlap"}
    parts = {names[part.number]: part for part in (counts.parts if counts and old else ()) if part.number in names}
    worse = _worse(report) if old is None else _lost(report, counts)
    return Headline(source, after, before, knows, old, parts, worse, _unmeasured(report))


def _lost(report: ReportData, counts: Counts | None) -> str:
    """Of labelled images. The script of the page says the same at other operating points."""
    return "".join(
        f"; step {part.number} lost {-part.change:,} of {count(part.images, 'image')}"
        for part in (counts.parts if counts else ())
        if 0 < part.number < len(report.branches) - 1 and part.change < 0
    )


def _worse(report: ReportData) -> str:
    """By the accuracies on held-out images."""
    held_out = report.held_out
    if report.test is not None or held_out is None or not held_out.before or not held_out.after:
        return ""
    steps = [cast("Sequence[float | None]", found.get("steps", ())) for found in (held_out.before, held_out.after)]
    return "".join(
        f"; of the classes of step {number} {percent(now)}%{compared(was, now)}"
        for number, (was, now) in enumerate(zip(*steps, strict=True), 1)
        if was is not None and now is not None and change(was, now)[0] == "−"
    )


def _accuracies(report: ReportData) -> tuple[str, Mapping[str, float | None], Mapping[str, float | None]]:
    points, test, held_out = report.points, report.test, report.held_out
    if test is not None:
        point = points.saved if points else 0
        return "test", {name: values[point] for name, values in test.figures.items()}, test.figures_before or {}
    if points is None:
        return "base model", {}, {}
    # Without old images, these metrics would be measured on pseudo-exemplars or on new images only.
    hidden = ("base", *(name for name in METRICS if not METRICS[name].of_part)) if points.measured == "pseudo" else ()
    if held_out is not None and held_out.after:
        found, before, source = held_out.after, held_out.before, "held-out"
    else:
        found, before, source = {name: values[points.saved] for name, values in points.figures.items()}, {}, "chosen on"
    return source, {name: None if name in hidden else found.get(name) for name in METRICS}, before


def _unmeasured(report: ReportData) -> list[str]:
    if report.test is None:
        return []
    steps = len(report.branches) - 1
    parts = {"base": [0], "novel": range(1, steps + 1), "overlap": [steps + 1]}
    return [
        name
        for name, numbers in parts.items()
        if report.test.figures[name][0] is None and any(part in numbers for part in report.part_of_class)
    ]
