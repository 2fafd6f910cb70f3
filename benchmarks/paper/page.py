"""The results as one HTML file that needs no network: every line unfolds to what made it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from benchmarks.paper.claims import Case
from benchmarks.paper.lines import NAMES, Line, Row, cell, columns
from benchmarks.paper.markdown import AGAIN, CLAIMS, FOLDS, TERMS, UNKNOWN
from benchmarks.paper.paper_numbers import misprints
from benchmarks.paper.report import Report, address, anchor
from branchout.bench.rows import number
from branchout.errors import BranchoutError
from branchout.files import check_output
from branchout.report.formatting import duration, size

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = "Branchout bench"
"""A file with this mark in its head is a page of results and may be overwritten."""
MEANING = {
    "all": "accuracy on all test images",
    "base": "accuracy on classes that the base alone knows",
    "novel": "accuracy on classes that are new",
    "overlap": "accuracy on old classes of which there are new images",
    "avg": "mean of the parts: base, novel and, where there is one, overlap",
    "incremental": "accuracy on all images, averaged over all steps with the base first",
    "avg_steps": "mean of the parts, averaged over all steps with the base first",
    "alone": "accuracy on new classes, asked about them alone",
    "parameters": "parameters after the last step, base and all, heads apart, in millions",
    "turn_all": "accuracy on all images",
    "turn_balanced": "mean of all and avg",
    "turn_avg": "mean of the parts: base, novel and, where there is one, overlap",
}
TITLES = {"avg_steps": Markup("avg<br>over steps"), "parameters": Markup("params<br>(M)")}
BOLD = ("all", "avg", "incremental", "avg_steps")
"""Columns whose best figure is set bold: one can always be best at base or novel classes alone."""
PAINTS = {
    "#1a1a1a": "--ink", "#5f6368": "--soft", "#d9d9d9": "--rule", "#ffffff": "--paper",
    "#0072b2": "--blue", "#b34a00": "--red", "#00795a": "--green", "#56a0cf": "--pale",
}  # fmt: skip
"""A figure's colours, and what they are called in a page that may be light or dark."""
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of characters may not stand in a page at all, escaped or not."""


def beside(markdown: Path) -> Path:
    """Where the HTML page is written: beside the Markdown, where no other file may be."""
    if markdown.suffix == ".html":
        raise BranchoutError(
            f"--page must name the Markdown file, and {markdown} is HTML, which is written beside it; "
            f"try: --page {markdown.with_suffix('.md')}"
        )
    page = markdown.with_suffix(".html")
    check_output(page)
    if page.exists():
        with page.open("rb") as file:
            ours = GENERATOR.encode() in file.read(1000)
        if not ours:
            raise BranchoutError(
                f"{page} already exists and is not a results page; remove it, or choose another --page"
            )
    return page


def html(report: Report, link: str, pictures: dict[str, str]) -> str:
    """The page. `link` leads from it to the results; `pictures` are the figures as SVG, by name."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: _clean(value) if isinstance(value, str) else value,
    )
    environment.filters |= {
        "accuracies": _accuracies,
        "anchor": anchor,
        "drawing": lambda name: Markup(inline(pictures[name], name)),
        "emphasis": _emphasis,
    }
    styles = [files("branchout.report") / "static" / "style.css", TEMPLATES / "results.css"]
    parts = [section.heading for section in report.sections] + [figure.heading for figure in report.figures]
    page = environment.get_template("results.html").render(
        report=report,
        generator=GENERATOR,
        style=Markup("\n".join(style.read_text(encoding="utf-8") for style in styles)),
        headings=[CLAIMS, *parts] if report.judged else parts,
        claims_heading=CLAIMS,
        terms=TERMS,
        again=AGAIN,
        folds=FOLDS,
        unknown_reason=UNKNOWN,
        misprints=list(misprints()),
        place=lambda case: _place(report, case),
        table=lambda shown, compared=True: Table.of(shown, link, compared=compared),
    )
    return page.lstrip()


def _clean(value: str) -> str:
    return type(value)(FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", value))


def _emphasis(words: str) -> Markup:
    """Bold and code as Markdown writes them."""
    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(words)))))


def _accuracies(words: str) -> Markup:
    """Text in which accuracies are written as in the paper."""
    return Markup(re.sub(r"\bAcc_(all|avg|ovlp)", r"Acc<sub>\1</sub>", str(escape(words))))


def _place(report: Report, case: Case) -> Markup:
    """A case's table or figure, with a link where the page has it."""
    known = {(section.table.name, section.arch): section.heading for section in report.sections}
    known |= {(figure.table.name, case.arch): figure.heading for figure in report.figures}
    heading = known.get((case.table, case.arch))
    where = report.where(case)
    return Markup('<a href="#{}">{}</a>').format(anchor(heading), where) if heading else escape(where)


# Tables.


@dataclass(frozen=True)
class Column:
    metric: str
    of_paper: bool
    side: str
    """More of its class: a rule is drawn before the first of our columns."""

    @property
    def title(self) -> str:
        return TITLES.get(self.metric, NAMES.get(self.metric, self.metric))

    @property
    def meaning(self) -> str:
        return MEANING[self.metric]


@dataclass(frozen=True)
class Cell:
    shown: str
    best: bool
    hover: str
    side: str


@dataclass(frozen=True)
class TableLine:
    label: str
    cells: tuple[Cell, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Two blocks of columns, the paper's and ours; lines of one kind stand together."""

    theirs: int
    ours: int
    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[TableLine, ...]], ...]

    @classmethod
    def of(cls, shown: Sequence[Line], link: str, *, compared: bool = True) -> Table:
        """`compared` sets the best of a column bold."""
        theirs, ours = columns(shown, of_paper=True), columns(shown, of_paper=False)
        heads = [Column(name, True, " paper-side") for name in theirs]
        heads += [Column(name, False, "" if place else " here") for place, name in enumerate(ours)]
        best = [_best(shown, head) if compared else None for head in heads]
        groups = tuple(
            (kind, tuple(_line(line, heads, best, link) for line in group))
            for kind, group in groupby(shown, key=lambda line: line.kind)
        )
        return cls(len(theirs), len(ours), tuple(heads), groups)


def _best(shown: Sequence[Line], column: Column) -> str | None:
    """The best figure of a column as it is shown, so that those that look the same are marked the same."""
    if column.metric not in BOLD:
        return None
    values = [cell(line, column.metric, of_paper=column.of_paper) for line in shown if not line.oracle]
    known = [value for value in values if value is not None]
    return number(max(known)) if known else None


def _line(line: Line, heads: Sequence[Column], best: Sequence[str | None], link: str) -> TableLine:
    """A line, and what it rests on."""
    cells = []
    for column, most in zip(heads, best, strict=True):
        value = number(cell(line, column.metric, of_paper=column.of_paper))
        hover = "" if column.of_paper or line.ours is None else _spread(line.ours, column.metric)
        cells.append(Cell(value, not line.oracle and value == most, hover, column.side))
    facts = () if line.ours is None or line.path is None else tuple(_facts(line.ours, line.path, link))
    return TableLine(line.label, tuple(cells), facts)


def _spread(row: Row, metric: str) -> str:
    """How far seeds lie apart, where there are several and it is known."""
    seeds, spread = row.get("seeds") or (), (row.get("std") or {}).get(metric)
    return f"± {spread:.2f} over {len(seeds)} seeds" if len(seeds) > 1 and spread is not None else ""


def _facts(row: Row, path: Path, link: str) -> Iterator[tuple[str, str]]:
    """What made a row, as terms and values; older rows lack some of them."""
    yield "file", Markup('<a href="{}">{}</a>').format(address(link, path), path.as_posix())
    if row.get("command"):
        yield "command", Markup('<code class="command">{}</code>').format(row["command"])
    if row.get("commit"):
        yield "commit", Markup("<code>{}</code>").format(row["commit"])
    versions = ", ".join(f"{name} {found}" for name, found in (row.get("versions") or {}).items())
    yield "machine", row["hardware"] + (f"; {versions}" if versions else "")
    seeds = row.get("seeds") or ()
    if seeds:
        yield ("seeds" if len(seeds) > 1 else "seed"), ", ".join(map(str, seeds))
    if _chosen(row):
        yield "chosen on dev", "; ".join(_chosen(row)).replace("-", "−")
    means = [
        f"{NAMES.get(name, name)} {value:.2f}{_plus_minus(row, name)}"
        for name, value in row["metrics"].items()
        if value is not None
    ]
    if means:
        yield ("mean and spread" if len(seeds) > 1 else "one seed, so no spread"), "; ".join(means)
    if row.get("novel_alone") is not None and "alone" not in row["metrics"]:
        yield "new classes alone", number(row["novel_alone"])
    if row.get("two_fold"):
        scores = "; ".join(f"{goal} {value:.2f}" for goal, value in row["two_fold"].items() if value is not None)
        yield "both halves in turn", f"{scores} (each half chooses for the other)"
    if row.get("parameters"):
        yield "parameters", f"{row['parameters']:,} without heads"
    if row.get("seconds"):
        yield "seconds", seconds(row)
    if row.get("peak_memory_bytes"):
        yield "memory", f"{size(row['peak_memory_bytes'])} at the most"


def _chosen(row: Row) -> list[str]:
    """The settings of the operating point, one for each seed."""
    chosen = [
        f"{sign} = {', '.join(f'{value:.3g}' for value in row[name])}"
        for name, sign in (("alpha", "α"), ("beta", "β"), ("b", "b"))
        if row.get(name)
    ]
    if row.get("shifts"):
        chosen.append(f"steps moved by {', '.join(f'{value:.3g}' for value in row['shifts'][0])} besides")
    return chosen


def _plus_minus(row: Row, metric: str) -> str:
    spread = (row.get("std") or {}).get(metric)
    return f" ± {spread:.2f}" if len(row.get("seeds") or ()) > 1 and spread is not None else ""


def seconds(row: Row) -> str:
    """How long each part took, and whether other processes used the GPU meanwhile."""
    parts = ", ".join(f"{part} {duration(value)}" for part, value in row["seconds"].items())
    return f"{parts}; measured while other processes shared the GPU" if row.get("gpu_shared") else parts


def inline(svg: str, name: str) -> str:
    """A figure as part of a page: its names are its own, and its colours are the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("xlink:href=", "href=")
    for pattern in (r'(\bid=")', r"(url\(#)", r'(\bhref="#)'):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    for paint, variable in PAINTS.items():
        svg = svg.replace(paint, f"var({variable})")
    return svg
