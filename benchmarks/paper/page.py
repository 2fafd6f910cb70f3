"""The results as one HTML file that needs no network: every line unfolds to what made it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from urllib.parse import quote

from benchmarks.paper.claims import Case, Check
from benchmarks.paper.markdown import AGAIN, CLAIMS, FOLDS, TERMS, UNKNOWN
from benchmarks.paper.paper_numbers import misprints
from benchmarks.paper.report import (
    NAMES,
    Figure,
    Line,
    Report,
    Row,
    Section,
    address,
    anchor,
    cell,
    columns,
)
from branchout.bench.rows import number
from branchout.errors import BranchoutError
from branchout.files import check_output
from branchout.report.markup import command, duration, named, note, size, text

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = "Branchout bench"
"""By this mark in its head a file is known as a page of results, which may be written over."""
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
TITLES = {"avg_steps": "avg<br>over steps", "parameters": "params<br>(M)"}
PRIZED = ("all", "avg", "incremental", "avg_steps")
"""Columns whose best figure is set bold: one can always be best at base or novel classes alone."""
PAINTS = {
    "#1a1a1a": "--ink", "#5f6368": "--soft", "#d9d9d9": "--rule", "#ffffff": "--paper",
    "#0072b2": "--blue", "#b34a00": "--red", "#00795a": "--green", "#56a0cf": "--pale",
}  # fmt: skip
"""A figure's colours, and what they are called in a page that may be light or dark."""


def beside(markdown: Path) -> Path:
    """Where the page lies: by the Markdown, and checked for being free or an earlier page."""
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


def html(report: Report, link: str, pictures: Mapping[str, str]) -> str:
    """The page. `link` leads from it to the results; `pictures` are the figures as SVG, by name."""
    styles = [files("branchout.report") / "static" / "style.css", TEMPLATES / "results.css"]
    template = (TEMPLATES / "results.html").read_text(encoding="utf-8")
    sections = [_claims(report)] if report.judged else []
    sections += [_section(section, link) for section in report.sections]
    sections += [_figure(figure, link, pictures[figure.table.name]) for figure in report.figures]
    return Template(template).substitute(
        generator=GENERATOR,
        title=text(f"Results on {report.dataset}"),
        style="\n".join(style.read_text(encoding="utf-8") for style in styles),
        header=_header(report),
        contents=_contents(report),
        sections="\n".join(sections),
        footer=_footer(report),
    )


def _header(report: Report) -> str:
    return "".join(
        [
            f"<h1>Results on {named(report.dataset)}</h1>",
            '<p class="lead">The paper’s tables and figures, measured anew, with the paper’s numbers beside ours.</p>',
            "<p>Accuracies are percentages on the test half of the validation images, at operating points that the dev "
            "half chose, and means over exemplar seeds. The paper’s numbers are for ImageNet: compare differences "
            "between rows, not the rows themselves. <em>Score fusion</em> is the paper’s method with its authors’ "
            "settings; <em>Branchout’s recipe</em> is what <code>branchout extend</code> does unless told otherwise; "
            "<em>joint learning</em>, the oracle, sees at once all images that the base and the steps were given.</p>",
            "<p>Press a line’s name to see what it rests on: the file, the command, the commit, the machine, the "
            "seeds and their spread, the operating point, parameters and seconds. Bold is the best of a column among "
            "methods that are no oracles. A dash: not in the paper, or not measured here.</p>",
            f"<p>{_emphasised(TERMS)}</p><p>{_emphasised(AGAIN)}</p>",
        ]
    )


def _emphasised(words: str) -> str:
    """Bold and code as Markdown writes them."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text(words)))


def _contents(report: Report) -> str:
    headings = [CLAIMS] if report.judged else []
    headings += [section.heading for section in report.sections] + [figure.heading for figure in report.figures]
    items = [f'<li><a href="#{anchor(heading)}">{text(heading)}</a></li>' for heading in headings]
    items += [f"<li>{text(short)}: not measured yet; {command(line)}</li>" for short, line in report.absent]
    return f"<ol>{''.join(items)}</ol>"


def _footer(report: Report) -> str:
    corrected = "".join(f"<li>{text(where)}: {text(told)}</li>" for where, told in misprints())
    told = f"<p>Misprints of the paper, corrected here:</p><ul>{corrected}</ul>" if report.judged else ""
    return f"{told}<p>Made by <code>python -m benchmarks.paper</code>. This file needs no network.</p>"


def _framed(heading: str, body: Sequence[str]) -> str:
    key = anchor(heading)
    title = f'<h2 id="{key}-title">{text(heading)}</h2>'
    return f'<section id="{key}" aria-labelledby="{key}-title">{title}{"".join(body)}</section>'


# Claims.


def _claims(report: Report) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{verdict}</dt><dd><b>{count}</b></dd></div>'
        for verdict, count in report.verdicts.items()
    )
    items = []
    for check in report.claims:
        told = [
            _told(f"{_place(report, case)}: {_label(case.in_summary)}") for case in check.cases if case.held is not None
        ]
        absent = [_place(report, case) for case in check.cases if case.held is None]
        told += [_told(f"Not measured: {'; '.join(absent)}")] if absent else []
        told += [_reason(check)] if check.verdict == "does not hold" else []
        items.append(_item(check.verdict, check.claim, told))
    body = [
        f'<dl class="tiles">{tiles}</dl>',
        note("A claim holds if it does wherever the paper makes it. Score fusion stands for the paper’s method."),
        f'<ul class="claims">{"".join(items)}</ul>',
    ]
    return _framed(CLAIMS, body)


def _place(report: Report, case: Case) -> str:
    """A case's table or figure, with a link where the page has it."""
    there = {(section.table.name, section.arch): section.heading for section in report.sections}
    there |= {(figure.table.name, case.arch): figure.heading for figure in report.figures}
    heading = there.get((case.table, case.arch))
    where = text(report.where(case))
    return f'<a href="#{anchor(heading)}">{where}</a>' if heading else where


def _reason(check: Check) -> str:
    return _told(f"Likely reason: {text(check.reason or UNKNOWN)}")


def _told(sentence: str) -> str:
    return f'<p class="told">{sentence}</p>'


def _item(verdict: str, claim: str, told: Sequence[str]) -> str:
    mark = f'<span class="verdict {verdict.replace(" ", "-")}">{verdict}</span>'
    return f"<li>{mark}<div><p>{_label(claim)}</p>{''.join(told)}</div></li>"


def _cases(cases: Sequence[tuple[Check, Case]]) -> str:
    if not cases:
        return ""
    items = [
        _item(
            case.verdict,
            check.claim,
            [_told(_label(case.numbers)), _reason(check) if case.verdict == "does not hold" else ""],
        )
        for check, case in cases
    ]
    return f'<h3>What the paper claims about it</h3><ul class="claims">{"".join(items)}</ul>'


# Tables.


def _section(section: Section, link: str) -> str:
    told = text(section.facts())
    told += f" Made by {command(section.command)}." if section.listed else ""
    told += f" Not measured: {text('; '.join(section.missing))}." if section.missing else ""
    body = [f'<p class="facts-of">{told}</p>']
    if section.main:
        body.append(_table(section.main, link, section.short))
    body.append(_cases(section.cases))
    for fold, title in FOLDS.items():
        shown = section.folded(fold)
        if shown:
            body.append(_fold(title.format(count=len(shown)), _table(shown, link, section.short)))
    return _framed(section.heading, body)


def _fold(title: str, inner: str) -> str:
    return f'<details class="fold"><summary>{text(title)}</summary>{inner}</details>'


def _table(shown: Sequence[Line], link: str, caption: str, *, compared: bool = True) -> str:
    """Two blocks of columns, the paper's and ours; lines of one kind stand together."""
    theirs, ours = columns(shown, of_paper=True), columns(shown, of_paper=False)
    sides = [(name, True) for name in theirs] + [(name, False) for name in ours]
    best = {side: _best(shown, *side) if compared else None for side in sides}
    rows = "".join(
        f'<tbody class="{kind}">{"".join(_rows(line, sides, best, link) for line in group)}</tbody>'
        for kind, group in groupby(shown, key=lambda line: line.kind)
    )
    blocks = f'<th class="side" colspan="{len(theirs)}" scope="colgroup">the paper</th>' if theirs else ""
    blocks += f'<th class="side here" colspan="{len(ours)}" scope="colgroup">here</th>' if ours else ""
    heads = "".join(
        f'<th scope="col" class="number{_side(sides, place)}"><abbr title="{MEANING[name]}">'
        f"{TITLES.get(name, NAMES.get(name, name))}</abbr></th>"
        for place, (name, _) in enumerate(sides)
    )
    return (
        f'<div class="scroll"><table class="results"><caption>{text(caption)}</caption><thead>'
        f'<tr><th rowspan="2" scope="col">method</th>{blocks}</tr><tr>{heads}</tr></thead>{rows}</table></div>'
    )


def _best(shown: Sequence[Line], metric: str, of_paper: bool) -> str | None:
    """The best figure of a column as it is shown, so that those that look the same are marked the same."""
    if metric not in PRIZED:
        return None
    values = [cell(line, metric, of_paper=of_paper) for line in shown if not line.oracle]
    return number(max((value for value in values if value is not None), default=None))


def _side(sides: Sequence[tuple[str, bool]], place: int) -> str:
    """A rule stands before the first of our columns."""
    of_paper = sides[place][1]
    return " paper-side" if of_paper else " here" if place == 0 or sides[place - 1][1] else ""


def _rows(line: Line, sides: Sequence[tuple[str, bool]], best: Mapping[tuple[str, bool], str | None], link: str) -> str:
    """A line, and below it what it rests on."""
    cells = []
    for place, (metric, of_paper) in enumerate(sides):
        value = number(cell(line, metric, of_paper=of_paper))
        hover = "" if of_paper or line.ours is None else _spread(line.ours, metric)
        marked = f"<b>{value}</b>" if value != "–" and not line.oracle and value == best[metric, of_paper] else value
        told = f' title="{hover}"' if hover else ""
        cells.append(f'<td class="number{_side(sides, place)}"{told}>{marked}</td>')
    label = _label(line.label)
    if line.ours is None or line.path is None:
        return f'<tr><th scope="row"><span class="none">{label}</span></th>{"".join(cells)}</tr>'
    below = "<span>What it rests on stands in the row below.</span>"
    facts = "".join(f"<dt>{term}</dt><dd>{told}</dd>" for term, told in _facts(line.ours, line.path, link))
    return (
        f'<tr><th scope="row"><details><summary>{label}</summary>{below}</details></th>{"".join(cells)}</tr>'
        f'<tr class="more"><td colspan="{len(sides) + 1}"><dl>{facts}</dl></td></tr>'
    )


def _label(label: str) -> str:
    """Text in which accuracies are written as in the paper."""
    return re.sub(r"\bAcc_(all|avg|ovlp)", r"Acc<sub>\1</sub>", text(label))


def _spread(row: Row, metric: str) -> str:
    """How far seeds lie apart, where there are several and it is known."""
    seeds, spread = row.get("seeds") or (), (row.get("std") or {}).get(metric)
    return f"± {spread:.2f} over {len(seeds)} seeds" if len(seeds) > 1 and spread is not None else ""


def _facts(row: Row, path: Path, link: str) -> Iterator[tuple[str, str]]:
    """What made a row, as terms and markup; a row may lack what rows did not always have."""
    yield "file", f'<a href="{text(address(link, path))}">{text(path.as_posix())}</a>'
    if row.get("command"):
        yield "command", command(row["command"])
    if row.get("commit"):
        yield "commit", f"<code>{text(row['commit'])}</code>"
    versions = ", ".join(f"{name} {found}" for name, found in (row.get("versions") or {}).items())
    yield "machine", text(row["hardware"] + (f"; {versions}" if versions else ""))
    seeds = row.get("seeds") or ()
    if seeds:
        yield ("seeds" if len(seeds) > 1 else "seed"), text(", ".join(map(str, seeds)))
    chosen = [
        f"{sign} = {', '.join(f'{value:.3g}' for value in row[name])}"
        for name, sign in (("alpha", "α"), ("beta", "β"), ("b", "b"))
        if row.get(name)
    ]
    if row.get("shifts"):
        chosen.append(f"steps moved by {', '.join(f'{value:.3g}' for value in row['shifts'][0])} besides")
    if chosen:
        yield "chosen on dev", text("; ".join(chosen)).replace("-", "−")
    means = [
        f"{NAMES.get(name, name)} {value:.2f}{_plus_minus(row, name)}"
        for name, value in row["metrics"].items()
        if value is not None
    ]
    if means:
        yield ("mean and spread" if len(seeds) > 1 else "one seed, so no spread"), text("; ".join(means))
    if row.get("novel_alone") is not None and "alone" not in row["metrics"]:
        yield "new classes alone", number(row["novel_alone"])
    if row.get("two_fold"):
        told = "; ".join(f"{goal} {value:.2f}" for goal, value in row["two_fold"].items() if value is not None)
        yield "both halves in turn", f"{text(told)} (each half chooses for the other)"
    if row.get("parameters"):
        yield "parameters", f"{row['parameters']:,} without heads"
    if row.get("seconds"):
        yield "seconds", text(seconds(row))
    if row.get("peak_memory_bytes"):
        yield "memory", f"{size(row['peak_memory_bytes'])} at the most"


def _plus_minus(row: Row, metric: str) -> str:
    spread = (row.get("std") or {}).get(metric)
    return f" ± {spread:.2f}" if len(row.get("seeds") or ()) > 1 and spread is not None else ""


def seconds(row: Row) -> str:
    """How long each part took, and whether anybody else was at the machine meanwhile."""
    told = ", ".join(f"{part} {duration(value)}" for part, value in row["seconds"].items())
    if row.get("gpu_shared"):
        return f"{told}; measured while other processes shared the GPU"
    return told


# Figures.


def _figure(figure: Figure, link: str, svg: str) -> str:
    where = text(quote(figure.picture.as_posix()))
    rows = _table(figure.lines, link, figure.heading, compared=False)
    body = [
        f'<p class="facts-of">{text(figure.facts())}</p>',
        f'<figure class="drawn"><div role="img" aria-label="{text(figure.table.title)}">',
        inline(svg, figure.table.name),
        f'</div><figcaption><a href="{where}">{text(figure.picture.name)}</a></figcaption></figure>',
        _cases(figure.cases),
        _fold(f"Drawn from {len(figure.rows)} rows", rows),
    ]
    return _framed(figure.heading, body)


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
