"""The HTML of a report: one file that needs no network, and the same sections for the served page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from branchout import units
from branchout.errors import BranchoutError
from branchout.files import check_output
from branchout.goals import CHOSEN_ON, METRICS, PARTS_FIRST
from branchout.report import charts, operating_points
from branchout.report.counts import Counts, counts_at
from branchout.report.data import ReportData
from branchout.report.headline import compared, headline
from branchout.report.labelled_results import LabelledResults

GENERATOR = "Branchout report"
"""This mark in the head identifies a file as a report, which may be overwritten."""
LIVE_BYTES = 2_000_000
"""Larger answers of images stay out of the file: its dial then changes the accuracies only."""
MOST_CLASSES = 2000
"""Rows of the table of classes; of more classes only those with the largest losses are shown."""
MOST_PAIRS = 20
PIECES = ("title", "figures", "contents", "sections", "dial")
"""Templates that make up a report."""
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and surrogates are invalid in HTML, escaped or not."""


def render(report: ReportData) -> str:
    """The report as one HTML file."""
    script = report_script()
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
            json=Markup(
                json.dumps(_without_drawn(context), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
            ),
        )
    )


def parts(report: ReportData) -> dict[str, Any]:
    """The pieces of the served page: PIECES as HTML, and the script's `data`."""
    context = _context(report, None)
    pieces = {name: _environment().get_template(f"{name}.html").render(context) for name in PIECES}
    return {**pieces, "data": context["data"]}


def static_file(name: str) -> str:
    """A file of `static/`, which the report file and the served page share."""
    return (files("branchout.report") / "static" / name).read_text(encoding="utf-8")


def report_script() -> str:
    """The script of a report."""
    return "\n".join(static_file(name) for name in ("base.js", "images.js", "report.js"))


def rendered(template: str, **context: object) -> str:
    """A page of the server from one of the templates."""
    return _environment().get_template(template).render(context)


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
        "change": units.change,
        "compared": compared,
        "count": units.count,
        "curve": charts.curve,
        "date": units.date,
        "goal_words": operating_points.goal_words,
        "measured_on": CHOSEN_ON,
        "metrics": METRICS,
        "number_columns": lambda titles: [(title, "number") for title in titles],
        "parts_first": PARTS_FIRST,
        "percent": units.percent,
        "setting": units.setting,
    }
    environment.filters |= {
        "duration": units.duration,
        "grouped": lambda number: f"{number:,}",
        "parameters": units.parameters,
        "safe_html": Markup,
        "signed": units.signed,
        "size": units.size,
    }
    return environment


def _clean(value: object) -> object:
    return value if isinstance(value, Markup) else FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _context(report: ReportData, most: int | None) -> dict[str, Any]:
    """What the templates read; above `most` bytes of answers only accuracies follow the dial."""
    points, test = report.points, report.test
    point = points.saved if points else 0
    counts = counts_at(report, point) if test else None
    context: dict[str, Any] = {
        "report": report,
        "points": points,
        "test": test,
        "point": point,
        "counts": counts,
        "headline": headline(report, counts),
        "sections": _sections(report),
        "data": _script_data(report, most),
        "most_classes": MOST_CLASSES,
        "most_pairs": MOST_PAIRS,
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
            "goal_marks": operating_points.goal_marks(points),
            "tune": operating_points.tune_command(report, goal or "balanced"),
            "method_numbers": operating_points.method_numbers(report),
            "other_metrics": operating_points.other_metrics(report),
        }
    if test is not None and test.before is not None:
        assert counts is not None
        context["shown"] = _shown(test, counts)
        # What was not known before the last step cannot be forgotten.
        of = {"gained": report.part_of_class, "forgotten": report.part_of_class[: test.known]}
        context["gallery_parts"] = {kind: sorted(set(numbers)) for kind, numbers in of.items()}
    return context


def _sections(report: ReportData) -> list[Section]:
    """The chart first, then images, then tables, then how the model was made."""
    test = report.test
    sections = []
    if report.points is not None:
        sections.append(Section("points", "Operating points", "points.html"))
    if test is not None:
        if test.before is not None:  # a base model has no earlier model to compare with
            sections += [
                Section("forgotten", "Forgotten", "gallery.html", "forgotten"),
                Section("gained", "Gained", "gallery.html", "gained"),
            ]
        sections.append(Section("per-class", "Accuracy per class", "classes.html"))
        if test.before is not None:
            sections.append(Section("confusion", "Confusion between old and new classes", "confusion.html"))
        if any(report.part_of_class[label] == len(report.branches) for label in set(test.labels)):
            sections.append(Section("overlap", "Overlapping classes: which branch answers", "overlap.html"))
    sections.append(Section("added", "What was added", "steps.html"))
    if any(branch.losses for branch in report.branches):
        sections.append(Section("training", "Training", "training.html"))
    return [*sections, Section("sizes", "Sizes and times", "sizes.html")]


def _shown(test: LabelledResults, counts: Counts) -> dict[str, list[int]]:
    """The images of each gallery."""
    return {
        kind: [image for image in images if image in set(counts.galleries[kind])][: test.gallery]
        for kind, images in test.galleries.items()
    }


# What the script looks up.


def _script_data(report: ReportData, most: int | None) -> dict[str, Any]:
    """What the page's script looks up: accuracies at every point, every image's answers, and thumbnails."""
    points, test = report.points, report.test
    data: dict[str, Any] = {}
    if points is not None:
        data = {
            "kind": points.kind,
            "points": [units.setting(values) for values in points.settings],
            "words": operating_points.point_words(points),
            "numbers": points.numbers,
            "saved": points.saved,
            "tune": [goal and operating_points.tune_command(report, goal) for goal in points.goal_for],
            "metrics": PARTS_FIRST,
            "dev": points.figures,
            "test": test.figures if test else None,
        }
    if test is None:
        return data
    images = {
        "labels": test.labels,
        "before": test.before,
        "answers": {key: value.tolist() for key, value in vars(test.answers).items()},
        "branches": {key: value.tolist() for key, value in vars(test.branches).items()},
    }
    if most is not None and len(json.dumps(images, separators=(",", ":"))) > most:
        return data
    return {
        **data,
        **images,
        "known": test.known,
        "classes": report.classes,
        "parts": report.parts,
        "partOf": report.part_of_class,
        "firstBranch": report.first_branch,
        "branchNames": [branch.name for branch in report.branches],
        "mostPairs": MOST_PAIRS,
        "gallery": test.gallery,
        "galleries": test.galleries,
        "thumbnails": {image: asdict(each) for image, each in test.thumbnails.items()},
    }


def _without_drawn(context: dict[str, Any]) -> dict[str, Any]:
    """The script's data without the thumbnails that are in the page already."""
    data: dict[str, Any] = context["data"]
    if "thumbnails" not in data:
        return data
    drawn = {image for images in context.get("shown", {}).values() for image in images}
    kept = {
        image: {key: value for key, value in each.items() if key != "src" or image not in drawn}
        for image, each in data["thumbnails"].items()
    }
    return {**data, "thumbnails": kept}
