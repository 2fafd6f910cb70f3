"""The results as Markdown, to be read where the code is: what the paper has first, and the rest folded below it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from benchmarks.paper.claims import Case, Check
from benchmarks.paper.lines import NAMES, Line, cell, columns
from benchmarks.paper.paper_numbers import misprints
from benchmarks.paper.report import Figure, Report, Section, address, anchor
from branchout.bench.rows import number

FOLDS = {
    "dial": "The same dial for everyone: {count} rows in which the other methods are given it too",
    "variant": "Variants of score fusion that the paper's table has not: {count} rows",
    "two-fold": "Each half of the validation images chooses for the other: {count} methods that have operating points",
}
UNKNOWN = "no reason is known yet."
INTRODUCTION = (
    "Every number of ours comes from the file linked in its line, which also holds the command, commit, settings and "
    "hardware that made it. Accuracies are percentages on the test half of the validation images, at operating points "
    "chosen on the dev half, and means over the exemplar seeds named in the file. The paper's numbers are for "
    "ImageNet, so compare differences between rows, not the rows themselves. *Score fusion* is the paper's method with "
    "its authors' settings (recipe `reference`), *Branchout's recipe* is the default of `branchout extend`; joint "
    "training sees at once all images that the base and the steps were given. – : not in the paper, or not measured "
    "here."
)
TERMS = (
    "**all**: every test image counts the same. **base**, **novel**, **overlap**: images of classes that only the base "
    "knows, that only steps know, that both know. **avg**: the mean of these parts, over many steps of the base and of "
    "each step. **balanced**: the mean of all and avg. **incremental**, **avg over steps**: all and avg, averaged over "
    "the steps with the base first. **The dial**: one number that dev chooses; over many steps one more for each step. "
    "**params**: millions after the last step, base and all, heads apart, stored vectors included. "
    "**±**: the standard deviation over exemplar seeds (dividing by their number), with one base; "
    "another training of the base may move a row further. **Too close to tell**: a difference below that spread, or "
    "below one standard error for so many test images."
)
AGAIN = (
    "A row that is there is not made again: to measure it anew, delete its file, or give its command `--out` and a new "
    "folder. Where samples were split by clustering, `scenario.json` beside the rows is the split; copy it along. A "
    "base model is trained anew where the cache has none, and is then not the same to the last bit."
)


def markdown(report: Report, link: str = "../results", page: str | None = None) -> str:
    """The page. `link` leads from it to the results, `page` to the same as HTML."""
    parts = [f"# Results on {plain(report.dataset)}", INTRODUCTION, TERMS, AGAIN]
    if page:
        parts.append(
            f"The same on [one page]({quote(page)}) to open in a browser: there each line unfolds to its spread, "
            "settings, seconds, commit and command."
        )
    headings = [section.heading for section in report.sections] + [figure.heading for figure in report.figures]
    contents = [f"- [{plain(each)}](#{anchor(each)})" for each in ([CLAIMS] if report.judged else []) + headings]
    contents += [f"- {plain(short)}: not measured yet; `{command}`" for short, command in report.absent]
    parts += ["## Contents", "\n".join(contents)]
    if report.judged:
        parts += [f"## {CLAIMS}", *_summary(report)]
    for section in report.sections:
        parts += _section(section, link)
    for figure in report.figures:
        parts += _figure(figure, link)
    if report.judged:
        corrected = "\n".join(f"- {plain(where)}: {plain(told)}" for where, told in misprints())
        parts += ["## Misprints of the paper, corrected here", corrected]
    return "\n\n".join(parts) + "\n"


CLAIMS = "What the paper claims, and whether it holds here"


def plain(words: str) -> str:
    """Text that is nothing but text."""
    return re.sub(r"([\\|<>\[\]*`])", r"\\\1", words)


def _summary(report: Report) -> list[str]:
    told = ", ".join(f"{verdict}: {count}" for verdict, count in report.verdicts.items())
    body = [["claim", "", "numbers"], ["---", "---", "---"]]
    for check in report.claims:
        numbers = [f"{report.where(case)}: {plain(case.in_summary)}" for case in check.cases if case.held is not None]
        absent = [report.where(case) for case in check.cases if case.held is None]
        numbers += [f"Not measured: {'; '.join(absent)}"] if absent else []
        body.append([plain(check.claim), f"**{check.verdict}**", "<br>".join([*numbers, *_reason(check)])])
    return [f"{len(report.claims)} claims; {told}. A claim holds if it does wherever the paper makes it.", _rows(body)]


def _reason(check: Check) -> list[str]:
    if check.verdict != "does not hold":
        return []
    return [f"Likely reason: {plain(check.reason or UNKNOWN)}"]


def _cases(cases: Sequence[tuple[Check, Case]]) -> list[str]:
    """The claims about one table, as a list."""
    told = []
    for check, case in cases:
        verdict = f"**{case.verdict[0].upper()}{case.verdict[1:]}**"
        why = f" Likely reason: {plain(check.reason or UNKNOWN)}" if case.verdict == "does not hold" else ""
        told.append(f"- {plain(check.claim)} {verdict}: {plain(case.numbers)}.{why}")
    return ["What the paper claims about it:", "\n".join(told)] if told else []


def _section(section: Section, link: str) -> list[str]:
    told = plain(section.facts())
    if section.listed:
        told += f" Made by `{section.command}`."
    if section.missing:
        told += f" Not measured: {plain('; '.join(section.missing))}."
    parts = [f"## {plain(section.heading)}", told]
    if section.main:
        parts.append(_table(section.main, link))
    parts += _cases(section.cases)
    for fold, title in FOLDS.items():
        shown = section.folded(fold)
        if shown:
            summary = f"<details>\n<summary>{title.format(count=len(shown))}</summary>"
            parts += [summary, _table(shown, link), "</details>"]
    return parts


def _table(shown: Sequence[Line], link: str) -> str:
    theirs, ours = columns(shown, of_paper=True), columns(shown, of_paper=False)
    heading = ["", *(f"paper {NAMES.get(name, name)}" for name in theirs), *(NAMES.get(name, name) for name in ours)]
    body = [[*heading, "file"], ["---", *["---:"] * (len(theirs) + len(ours)), "---"]]
    for line in shown:
        told = [number(cell(line, name, of_paper=True)) for name in theirs]
        told += [number(cell(line, name, of_paper=False)) for name in ours]
        where = f"[{line.ours['point']}]({address(link, line.path)})" if line.ours and line.path else "–"
        body.append([plain(line.label), *told, where])
    return _rows(body)


def _figure(figure: Figure, link: str) -> list[str]:
    picture = f'<img src="{quote(figure.picture.as_posix())}" alt="{figure.table.title}" width="640">'
    return [
        f"## {plain(figure.heading)}",
        plain(figure.facts()),
        picture,
        *_cases(figure.cases),
        f"<details>\n<summary>Drawn from {len(figure.rows)} rows</summary>",
        _table(figure.lines, link),
        "</details>",
    ]


def _rows(body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)
