"""The HTML of a report: one file that needs no network, and the same sections for the served page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from branchout.errors import BranchoutError
from branchout.files import check_output
from branchout.metrics import MEASURED_ON, METRICS
from branchout.report import charts, formatting, operating_points
from branchout.report.answers_by_point import count_at
from branchout.report.data import ReportData
from branchout.report.gallery import KINDS, members
from branchout.report.labelled_results import LabelledResults, Pair, accuracy_at

GENERATOR = "Branchout report"
"""This mark in the head identifies a file as a report, which may be overwritten."""
LIVE_BYTES = 2_000_000
"""Larger counts per class and image stay out of the file: its dial then changes the accuracies only."""
MOST_CLASSES = 2000
"""Rows of the table of classes; of more classes only those with the largest losses are shown."""
MOST_PAIRS = 20
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and surrogates are invalid in HTML, escaped or not."""


def render(report: ReportData) -> str:
    """The report as one HTML file."""
    script = static_file("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    context = _context(report, LIVE_BYTES)
    return (
        _environment()
        .get_template("report.html")
        .render(
            context,
            generator=GENERATOR,
            # The browser runs exactly this script and no other.
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            style=Markup(static_file("style.css")),
            script=Markup(script),
            json=Markup(json.dumps(context["data"], ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")),
        )
    )


def parts(report: ReportData) -> dict[str, Any]:
    """The pieces of the served page: `header`, `contents`, `sections` and `dial` as HTML, and the script's `data`."""
    context = _context(report, None)
    pieces = {
        name: _environment().get_template(f"{name}.html").render(context)
        for name in ("header", "contents", "sections", "dial")
    }
    return {**pieces, "data": context["data"]}


def static_file(name: str) -> str:
    """The stylesheet `style.css` or the script `script.js`, which the report file and the served page share."""
    return (files("branchout.report") / "static" / name).read_text(encoding="utf-8")


def served_page() -> str:
    """The page that `branchout serve` answers at /; it loads /style.css and /script.js."""
    return _environment().get_template("served.html").render()


def default_path(folder: Path) -> Path:
    """Where the report of a saved model is written by default: v2/ → v2-report.html."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-report.html")


def check_report(out: Path) -> Path:
    """The path of a report, checked before any work: it must be writable, and free or an earlier report."""
    if out.is_dir():
        raise BranchoutError(f"{out} is a folder, and a report is one file. Try: --out {out / 'report.html'}")
    check_output(out, such_as="report.html")
    if out.exists():
        with out.open("rb") as file:
            is_report = GENERATOR.encode() in file.read(1000)
        if not is_report:
            raise BranchoutError(f"{out} already exists and is not a report. Choose another --out, or delete it")
    return out


# What the templates use.


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    template: str
    kind: str = ""


@dataclass(frozen=True)
class Headline:
    """The accuracies at the top of the page, and which images they come from."""

    source: str
    """`test`, `base model`, `held-out` or `chosen on`."""
    after: Mapping[str, float | None]
    before: Mapping[str, float | None]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("branchout.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_clean,
    )
    environment.globals |= {
        name: getattr(formatting, name) for name in ("change", "count", "date", "percent", "setting")
    }
    environment.globals |= {
        "accuracy_at": accuracy_at,
        "count_at": count_at,
        "curve": charts.curve,
        "measured_on": MEASURED_ON,
        "metrics": METRICS,
        "number_columns": lambda titles: [(title, "number") for title in titles],
        "pairs_at": _pairs_at,
    }
    environment.filters |= {name: getattr(formatting, name) for name in ("duration", "parameters", "size")}
    environment.filters["grouped"] = lambda number: f"{number:,}"
    return environment


def _clean(value: object) -> object:
    return value if isinstance(value, Markup) else FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _context(report: ReportData, most: int | None) -> dict[str, Any]:
    """What the templates read; above `most` bytes of counts only accuracies follow the dial."""
    points, test = report.points, report.test
    point = points.saved if points else 0
    context: dict[str, Any] = {
        "report": report,
        "points": points,
        "test": test,
        "point": point,
        "headline": _headline(report),
        "sections": _sections(report),
        "data": _script_data(report, most),
        "most_classes": MOST_CLASSES,
        "most_pairs": MOST_PAIRS,
        "missing_parts": _parts_without_images(report),
        "fusion_bytes": sum(size for name, size in report.files.items() if name.startswith("fusion")),
        "branch_titles": [f"by {branch.name}" for branch in report.branches],
    }
    if points is not None:
        chart, legend = operating_points.frontier_chart(report)
        goal = points.goal_for[points.saved]
        context |= {
            "chart": chart,
            "legend": legend,
            "goal_tables": operating_points.goal_tables(report),
            "tune": operating_points.tune_command(report, goal or "balanced"),
            "method_numbers": operating_points.method_numbers(report),
            "other_metrics": operating_points.other_metrics(report),
        }
    if test is not None and test.before is not None:
        context["shown"] = {kind: _shown(test, kind, point) for kind in KINDS}
        context["answers"] = test.answers.at(point).tolist()
        # What was not known before the last step cannot be forgotten.
        parts = {"gained": report.part_of_class, "forgotten": report.part_of_class[: test.known]}
        context["gallery_parts"] = {kind: sorted(set(numbers)) for kind, numbers in parts.items()}
    return context


def _pairs_at(pairs: Sequence[Pair], point: int) -> list[tuple[int, int, int, int]]:
    """Label, answer, images and images that were right before, at a point; the most frequent first."""
    found = [(p.label, p.answer, count_at(p.images, point), count_at(p.were_right, point)) for p in pairs]
    return sorted((row for row in found if row[2]), key=lambda row: -row[2])


def _sections(report: ReportData) -> list[Section]:
    test = report.test
    sections = [Section("added", "What was added", "steps.html")]
    if report.points is not None:
        sections.append(Section("points", "Operating points", "points.html"))
    if test is not None:
        sections.append(Section("per-class", "Accuracy per class", "classes.html"))
        if test.before is not None:  # a base model has no earlier model to compare with
            sections += [
                Section("confusion", "Confusion between old and new classes", "confusion.html"),
                Section("forgotten", "Forgotten", "gallery.html", "forgotten"),
                Section("gained", "Gained", "gallery.html", "gained"),
            ]
        if any(each.by_branch for each in test.classes):
            sections.append(Section("overlap", "Overlapping classes: which branch answers", "overlap.html"))
    if any(branch.losses for branch in report.branches):
        sections.append(Section("training", "Training", "training.html"))
    return [*sections, Section("sizes", "Sizes and times", "sizes.html")]


def _headline(report: ReportData) -> Headline:
    points, test, held_out = report.points, report.test, report.held_out
    if test is not None:
        point = points.saved if points else 0
        after = {name: values[point] for name, values in test.figures.items()}
        return Headline("test", after, test.figures_before or {})
    if points is None:
        return Headline("base model", {}, {})
    # Without old images, these metrics would be measured on pseudo-exemplars or on new images only.
    unmeasured = ("base", "all", "avg") if points.measured == "pseudo" else ()
    if held_out is not None and held_out.after:
        found, before, source = held_out.after, held_out.before, "held-out"
    else:
        found, before, source = {name: values[points.saved] for name, values in points.figures.items()}, {}, "chosen on"
    return Headline(source, {name: None if name in unmeasured else found.get(name) for name in METRICS}, before)


def _parts_without_images(report: ReportData) -> list[str]:
    """Metrics that the labelled images could not measure, of parts that have classes."""
    if report.test is None:
        return []
    steps = len(report.branches) - 1
    numbers = {"base": [0], "novel": range(1, steps + 1), "overlap": [steps + 1]}
    return [
        name
        for name, of in numbers.items()
        if report.test.figures[name][0] is None and any(part in of for part in report.part_of_class)
    ]


def _shown(test: LabelledResults, kind: str, point: int) -> list[int]:
    """The images of a gallery at a point."""
    here = members(kind, test.answers.at(point), np.array(test.labels), np.array(test.were_right))
    return [image for image in test.galleries[kind].images if here[image]][: test.gallery]


# What the script looks up.


def _script_data(report: ReportData, most: int | None) -> dict[str, Any]:
    """What the page's script looks up: accuracies and counts at every point, and thumbnails.

    The served page (`most` is None) also has every image's answers, for its view of one class.
    """
    points, test = report.points, report.test
    data: dict[str, Any] = {}
    if points is not None:
        data = {
            "kind": points.kind,
            "points": [formatting.setting(values) for values in points.settings],
            "numbers": points.numbers,
            "saved": points.saved,
            "tune": [goal and operating_points.tune_command(report, goal) for goal in points.goal_for],
            "axes": operating_points.axes_of(points),
            "dev": points.figures,
            "test": test.figures if test else None,
        }
    if test is None:
        return data
    if most is None:
        answers = {key: value.tolist() for key, value in vars(test.answers).items()}
        data |= {"labels": test.labels, "known": test.known, "before": test.before, "answers": answers}
        data["classes"] = report.classes
    if points is None or test.before is None:
        return data
    counts = _counts(report, test)
    if most is not None and len(json.dumps(counts, separators=(",", ":"))) > most:
        return data
    drawn = {image for kind in KINDS for image in _shown(test, kind, points.saved)}  # these are in the page already
    thumbnails = {image: asdict(each) for image, each in test.thumbnails.items() if image not in drawn}
    return {**data, "counts": counts, "classes": report.classes, "thumbnails": thumbnails}


def _counts(report: ReportData, test: LabelledResults) -> dict[str, Any]:
    assert test.before is not None
    changes: dict[int, list[int]] = {image: [0, int(test.answers.first[image])] for image in test.thumbnails}
    for image, point, value in zip(test.answers.image, test.answers.point, test.answers.value, strict=True):
        if image in changes:
            changes[int(image)] += [int(point), int(value)]
    return {
        "classes": {each.number: asdict(each) for each in test.classes},
        "parts": {each.number: asdict(each) for each in test.parts},
        "pairs": {
            key: [[each.label, each.answer, each.images, each.were_right] for each in pairs]
            for key, pairs in (("to_later", test.to_later), ("to_earlier", test.to_earlier))
        },
        "mostPairs": MOST_PAIRS,
        "galleries": {kind: asdict(gallery) for kind, gallery in test.galleries.items()},
        "gallery": test.gallery,
        "images": {
            image: {
                "label": test.labels[image],
                "part": report.part_of_class[test.labels[image]],
                "before": test.before[image],
                "wasRight": test.were_right[image],
                "answer": answer,
            }
            for image, answer in changes.items()
        },
    }
