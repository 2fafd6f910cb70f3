"""What the pages of results show: the paper and the measurement side by side, from rows and the paper's numbers alone.

`markdown.py` and `page.py` write it down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from benchmarks.paper.claims import Case, Check, checks
from benchmarks.paper.lines import IN_TURN, Line, Row
from benchmarks.paper.measurements import OUTDATED, alone_rows
from benchmarks.paper.paper_numbers import BEST, network, paper_label, paper_number, paper_rows
from branchout.bench.methods import Method, methods
from branchout.bench.rows import check_figures, number, on_another_base
from branchout.bench.tables import BY_BASE, Table, figures, networks_of, tables
from branchout.errors import BranchoutError
from branchout.files import read_json

FIGURES = {
    "fig-base-classes": "Figure 2, left",
    "fig-finetune-depth": "Figure 2, right",
    "fig-design-space": "Figure 5",
}
"""Where the paper has what each figure shows."""
KINDS = ("rival", "fusion", "ours", "joint")
"""In which order they stand in a table."""
VERDICTS = ("holds", "does not hold", "too close to tell", "holds so far", "not measured")
OTHER_BASE = "‡"
"""Marks rows that rest on another training of the base than most of their folder."""
SAID_OF_IT = f" {OTHER_BASE} Measured with another training of the base model."


@dataclass(frozen=True)
class Section:
    """One table with one network."""

    dataset: str
    table: Table
    arch: str
    number: str
    """As the paper counts its tables; empty for what it has not."""
    lines: tuple[Line, ...]
    cases: tuple[tuple[Check, Case], ...] = ()
    """What the paper claims about it."""

    @property
    def listed(self) -> bool:
        """Whether it is a table of ours to run, and not just rows that lie there."""
        return bool(self.table.methods)

    @property
    def short(self) -> str:
        if self.listed and not self.number:
            return f"As Table {_numbered(self.table, self.arch)}, with {network(self.arch)}"
        return f"{f'Table {self.number}' if self.number else self.table.name}, {network(self.arch)}"

    @property
    def heading(self) -> str:
        return f"{self.short}: {self.table.title}"

    @property
    def measured(self) -> list[Row]:
        return [line.ours for line in self.lines if line.ours is not None]

    @property
    def main(self) -> list[Line]:
        return [line for line in self.lines if not line.fold]

    def folded(self, fold: str) -> list[Line]:
        """What stands below the main table; `two-fold` are the same rows once more, with other numbers of theirs."""
        if fold == "two-fold":
            first = [line for line in self.lines if line.ours and line.ours["point"] in ("all", "dial-all")]
            return [_in_turn(line) for line in first if line.ours and line.ours.get("two_fold")]
        return [line for line in self.lines if line.fold == fold]

    @property
    def missing(self) -> list[str]:
        """Who takes part in the table and has no row."""
        there = {
            line.path.stem.rsplit(f"-{line.ours['point']}", 1)[0] for line in self.lines if line.path and line.ours
        }
        return [methods()[name].label for name in self.table.of(self.arch) if name not in there]

    @property
    def command(self) -> str:
        """What measures all of it, where it is a table of ours to run."""
        network = f" --arch {self.arch}" if len(networks_of(self.table, self.dataset)) > 1 else ""
        return f"branchout bench {self.table.name}{network} --data {'glyphs' if self.dataset == 'glyphs' else 'DIR'}"

    def facts(self) -> str:
        """How large it is, and what it was measured with."""
        about = self.measured[0]
        size = f"{about['base_classes']} + {about['novel_classes']} classes"
        if about["overlap_classes"]:
            size += f", {about['overlap_classes']} of them old ones"
        if about["steps"] > 1:
            size += f" in {about['steps']} steps"
        size += "".join(f", {kept}" for kept in sorted({_kept(row) for row in self.measured}) if kept)
        bases = ", ".join(sorted({number(row.get("base_model")) for row in self.measured}))
        hardware = ", ".join(sorted({row["hardware"] for row in self.measured}))
        outdated = sorted({row["outdated"] for row in self.measured if row.get("outdated")})
        marked = f" {OUTDATED} To be measured again, because since then: {'; '.join(outdated)}." if outdated else ""
        if any(OTHER_BASE in line.label for line in self.lines):
            marked += SAID_OF_IT
        if self.listed and not self.number:
            marked = f" The paper has no numbers for this network.{marked}"
        return f"{size}; base model {bases} on its own classes. Measured on {hardware}.{marked}"


@dataclass(frozen=True)
class Figure:
    """One figure of the paper, drawn anew, with the rows it was drawn from."""

    table: Table
    picture: Path
    rows: Mapping[Path, Row]
    cases: tuple[tuple[Check, Case], ...]

    @property
    def heading(self) -> str:
        return f"{FIGURES[self.table.name]}: {self.table.title}"

    @property
    def lines(self) -> list[Line]:
        """Its rows; of branches that learned new classes alone, that one number."""
        odd = on_another_base(self.rows)
        found = []
        for path, row in sorted(self.rows.items(), key=lambda each: each[1]["base_classes"]):
            label, shown = row["label"], row
            if row["point"] == "alone":
                label, shown = f"{label}, {row['base_classes']} base classes", {**row, "metrics": _alone(row)}
            elif row["point"] != "plain":
                label = f"{label}: {BEST[row['point'].removeprefix('dial-')]}"
            found.append(Line(f"{label} {OTHER_BASE}" if path in odd else label, None, shown, path))
        return found

    def facts(self) -> str:
        bases = {(row["base_classes"], row["base_model"]) for row in self.rows.values()}
        told = ", ".join(f"{number(share)} ({count} classes)" for count, share in sorted(bases))
        return f"Base models on their own classes: {told}.{SAID_OF_IT if on_another_base(self.rows) else ''}"


@dataclass(frozen=True)
class Report:
    """All that both pages say."""

    dataset: str
    sections: tuple[Section, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Check, ...]
    absent: tuple[tuple[str, str], ...]
    """Tables that have no row yet, with the commands that make them."""

    @property
    def verdicts(self) -> dict[str, int]:
        """How many claims met which end."""
        every = [check.verdict for check in self.claims]
        return {verdict: every.count(verdict) for verdict in VERDICTS if verdict in every}

    @property
    def judged(self) -> bool:
        """Whether there is a row that any claim is about."""
        return set(self.verdicts) != {"not measured"}

    def where(self, case: Case) -> str:
        """The place of a case in words."""
        if case.table in FIGURES:
            return FIGURES[case.table]
        return f"Table {paper_number(case.table, case.arch)}, {network(case.arch)}"


def read(out: Path) -> dict[Path, Row]:
    """All rows of tables under a results folder, by their path in it."""
    found: dict[Path, Row] = {}
    for path in sorted(out.rglob("*.json")):
        place = path.relative_to(out)
        try:
            row = read_json(path)
            if isinstance(row, dict) and "table" in row and "metrics" in row:
                check_figures(row)
                found[place] = row
            elif len(place.parts) == 4:  # where rows are: dataset, table, network
                raise ValueError("it has no table or no metrics")
        except (BranchoutError, ValueError) as error:
            raise BranchoutError(f"{path} cannot be read as a row ({error}); delete it and run it again") from None
    return found


def report(out: Path, dataset: str, pictures: Sequence[Path] = ()) -> Report:
    """Everything there is to say about the rows of a dataset."""
    rows = read(out)
    if not any(path.parts[0] == dataset for path in rows):
        there = sorted({path.parts[0] for path in rows})
        raise BranchoutError(
            f"{out} holds no rows of {dataset!r}; there are: {', '.join(there) or 'none'}. "
            "Make some with: branchout bench disjoint-40 --data DIR"
        )
    judged = tuple(checks(dataset, rows))
    every = [
        Section(
            dataset,
            table,
            arch,
            paper_number(table.name, arch),
            tuple(lines(table, arch, dataset, rows)),
            cases_of(judged, table, arch),
        )
        for table in tables().values()
        for arch in networks_of(table, dataset)
    ]
    every.sort(key=lambda section: (_order(_numbered(section.table, section.arch)), section.arch))
    shown = [section for section in every if section.measured]
    told = {line.path for section in shown for line in section.lines}
    return Report(
        dataset,
        (*shown, *_others(dataset, {path: row for path, row in rows.items() if path not in told})),
        tuple(
            Figure(
                figures()[picture.stem],
                picture,
                _drawn(figures()[picture.stem], dataset, rows),
                cases_of(judged, figures()[picture.stem], "resnet10"),
            )
            for picture in pictures
        ),
        judged,
        tuple((section.short, section.command) for section in every if shown and not section.measured),
    )


def _numbered(table: Table, arch: str) -> str:
    """The paper's number of a table, or for a network that the paper has not, of its first network's."""
    return paper_number(table.name, arch) or paper_number(table.name, table.archs[0])


def _order(name: str) -> tuple[int, str]:
    return (int(name.rstrip("ab")), name) if name else (99, "")


def cases_of(judged: Sequence[Check], table: Table, arch: str) -> tuple[tuple[Check, Case], ...]:
    return tuple(
        (check, case) for check in judged for case in check.cases if (case.table, case.arch) == (table.name, arch)
    )


# Our side.


def lines(table: Table, arch: str, dataset: str, rows: Mapping[Path, Row]) -> Iterator[Line]:
    """The lines of a table, in the order of its methods: what the paper has, and what was measured."""
    numbers = dict(paper_rows(table.name, arch))
    folder = Path(dataset) / table.experiment / arch
    odd = on_another_base({path: row for path, row in rows.items() if path.parent == folder})
    found = []
    for name in table.of(arch):
        for point in methods()[name].points():
            path = folder / f"{name}-{point}.json"
            label = paper_label(table.name, name, point)
            told = numbers.pop(label, None) if label else None
            row = rows.get(path)
            if row is not None or told is not None:
                line = _line(methods()[name], point, label, told, row, path if row is not None else None)
                found.append(replace(line, label=f"{line.label} {OTHER_BASE}") if path in odd else line)
    # What the paper has and our table has not stands with the methods that it is compared with.
    yield from (Line(label, told, None, None) for label, told in numbers.items())
    yield from sorted(found, key=lambda line: KINDS.index(line.kind))


def _line(
    method: Method,
    point: str,
    label: str | None,
    told: Mapping[str, float] | None,
    row: Row | None,
    path: Path | None,
) -> Line:
    joint = method.name == "joint"
    kind = "joint" if joint else "rival" if method.baseline else "ours"
    if method.recipe in ("reference", "paper"):
        kind = "fusion"
    fold = ""
    if point.startswith("dial-"):
        fold = "" if joint else "dial"
        label = f"{method.label} with the dial: {BEST[point.removeprefix('dial-')]}"
    elif label is None:
        fold = "" if method.name == "score-fusion-branchout" else "variant"
        label = f"{method.label}: {BEST.get(point, point)}"
    if row is not None and row.get("outdated"):
        label = f"{label} {OUTDATED}"
    return Line(label, told, row, path, kind, method.baseline is not None and method.baseline.oracle, fold)


def _in_turn(line: Line) -> Line:
    """A method's scores when each half of the validation images chooses for the other, at all its goals."""
    assert line.ours is not None
    label = line.label.replace(f": {BEST['all']}", "").replace(f" {BEST['all']}", "")
    scores = {name: line.ours["two_fold"].get(goal) for name, goal in IN_TURN.items()}
    return replace(line, label=label, paper=None, ours={**line.ours, "metrics": scores})


def _others(dataset: str, rows: Mapping[Path, Row]) -> Iterator[Section]:
    """Rows that no table of the paper has."""
    found: dict[tuple[str, str], list[Line]] = {}
    for path, row in rows.items():
        if path.parts[0] != dataset or path in alone_rows(rows, dataset):  # those are shown as figures
            continue
        method = methods().get(path.stem.removesuffix(f"-{row['point']}"))
        label = f"{row['label']}: {BEST.get(row['point'], row['point'])}"
        line = Line(label, None, row, path)
        if method is not None:
            plain = row["label"] if row["point"] == "plain" else None
            line = _line(method, row["point"], plain, None, row, path)
        if line.fold == "variant":
            line = Line(line.label, None, row, path, line.kind, line.oracle)  # here nothing stands before it
        found.setdefault((path.parts[1], path.parts[2]), []).append(line)
    for (experiment, arch), shown in found.items():
        split = re.search(r"-split(\d+)$", experiment)
        title = f"other classes drawn (split {split[1]})" if split else "what no table of the paper has"
        shown.sort(key=_by_point)
        yield Section(dataset, Table(experiment, title, experiment, (arch,), ()), arch, "", tuple(shown))


def _by_point(line: Line) -> tuple[str, int]:
    assert line.ours is not None
    point = line.ours["point"].removeprefix("dial-")
    return str(line.ours["label"]), [*BEST].index(point) if point in BEST else -1


def _drawn(figure: Table, dataset: str, rows: Mapping[Path, Row]) -> Mapping[Path, Row]:
    """The rows that a figure is drawn from."""
    if figure.experiment == BY_BASE:
        return alone_rows(rows, dataset)
    folder = Path(dataset) / figure.experiment / "resnet10"
    names = [f"{name}-{point}.json" for name in figure.methods for point in ("plain", "all")]
    names += [f"joint-dial-{goal}.json" for goal in BEST]
    return {folder / name: rows[folder / name] for name in names if folder / name in rows}


def _alone(row: Row) -> dict[str, float]:
    return {"alone": row["novel_alone"]}


# Numbers and places in words.


def _kept(row: Row) -> str:
    """How many exemplars a row was made with, as far as it says."""
    settings = row.get("settings") or {}
    if settings.get("total"):
        return f"{settings['total']} exemplars in total"
    return f"{settings['exemplars']} exemplars a class" if "exemplars" in settings else ""


def address(link: str, path: Path) -> str:
    """Where a row's file lies, seen from the page."""
    return quote(f"{link}/{path.as_posix()}")


def anchor(heading: str) -> str:
    """How a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
