"""The lines of the pages: one for each method and operating point, with the files of its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.claims import is_rival
from benchmarks.paper.paper_numbers import network, paper_label, paper_number, paper_rows
from benchmarks.paper.rows import GOALS, Row, Rows, row_of
from branchout.baselines.registry import baselines
from branchout.bench.methods import methods
from branchout.bench.tables import Table, networks_of, tables

MEASURED = ("all", "base", "novel", "overlap", "avg", "balanced", "incremental", "avg_steps")
DATASETS = {"tiny-imagenet-200": "Tiny-ImageNet", "glyphs": "Characters"}
VARIANT = re.compile(r"(?P<table>.+)-(?P<option>split|exemplars)(?P<number>\d+)")
"""The name of an experiment that is a table's with other classes, or with other numbers of exemplars."""


@dataclass(frozen=True)
class Line:
    """One method at one operating point: its row, the rows of the same dial, and the paper's numbers."""

    label: str
    row: Row | None
    dial: Mapping[str, Row]
    """By goal: the rows in which a method without a dial of its own is given one."""
    paper: Mapping[str, float]

    def rows(self) -> Iterator[Row]:
        yield from ([self.row] if self.row else [])
        yield from self.dial.values()


@dataclass(frozen=True)
class Section:
    """One table with one network on one dataset."""

    dataset: str
    table: Table
    arch: str
    lines: tuple[Line, ...]
    missing: tuple[str, ...]

    @property
    def number(self) -> str:
        return _numbered(self.table, self.arch)

    @property
    def page(self) -> str:
        """The page it is on; variants of a table have one of their own."""
        return page_of(self.table, self.arch) + ("-variants" if VARIANT.fullmatch(self.table.experiment) else "")

    @property
    def heading(self) -> str:
        varied = VARIANT.fullmatch(self.table.experiment)
        told = {"split": "other classes (split {})", "exemplars": "{} exemplars"}
        other = f", {told[varied['option']].format(varied['number'])}" if varied else ""
        return f"{DATASETS.get(self.dataset, self.dataset)}, {network(self.arch)}{other}"

    @property
    def about(self) -> Row:
        """A row, for what all of them have in common: on the usual base if one is; joint training has none."""
        return min(self._rows(), key=lambda row: (row.other_base, row.data.get("base_model") is None))

    def _rows(self) -> Iterator[Row]:
        for line in self.lines:
            yield from line.rows()

    @property
    def command(self) -> str:
        data = "glyphs" if self.dataset == "glyphs" else "DIR"
        varied = VARIANT.fullmatch(self.table.experiment)
        option = f" --{varied['option']} {varied['number']}" if varied else ""
        seeds = " --all-seeds" if any("--all-seeds" in row.data.get("command", "") for row in self._rows()) else ""
        return f"branchout bench {self.table.name} --arch {self.arch} --data {data}{option}{seeds}"

    def facts(self) -> str:
        """How large it is and what it was measured on."""
        data = self.about.data
        parts = [f"{data['base_classes']} + {data['novel_classes']} classes"]
        if data["overlap_classes"]:
            parts[0] += f", {data['overlap_classes']} of them old ones"
        if data["steps"] > 1:
            parts[0] += f" in {data['steps']} steps"
        settings = data.get("settings") or {}
        if settings.get("exemplars") is not None:
            parts.append(f"{settings['exemplars']} exemplars of each class")
        return ", ".join(parts)


def _numbered(table: Table, arch: str) -> str:
    """The paper's number of a table; for a network that the paper does not have, that of its first network."""
    known = tables().get(table.name, table)
    return paper_number(known.name, arch) or paper_number(known.name, known.archs[0])


def sections(dataset: str, rows: Rows) -> list[Section]:
    """Every table that has rows, in the paper's order; its variants follow it."""
    known = [(table, arch) for table in tables().values() for arch in networks_of(table, dataset)]
    found = [_section(dataset, table, arch, rows) for table, arch in (*known, *_variants(dataset, rows))]
    found = [section for section in found if any(True for line in section.lines for _ in line.rows())]
    return sorted(found, key=lambda each: (_order(each.number), _varied(each.table), each.arch))


def _varied(table: Table) -> tuple[str, int]:
    """What is varied, and its number; a table itself comes first."""
    told = VARIANT.fullmatch(table.experiment)
    return (told["option"], int(told["number"])) if told else ("", 0)


def _variants(dataset: str, rows: Rows) -> Iterator[tuple[Table, str]]:
    """Tables that were also run with other classes or exemplars, with the methods of all tables that share rows."""
    places = {path.parts[1:3] for path in rows if path.parts[0] == dataset and len(path.parts) == 4}
    for experiment, arch in sorted(places):
        told = VARIANT.fullmatch(experiment)
        if told and told["table"] in tables():
            shared = [table for table in tables().values() if table.experiment == told["table"]]
            names = dict.fromkeys(name for table in shared for name in table.methods)
            yield Table(told["table"], "", experiment, (arch,), tuple(names)), arch


def _order(number: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", number)), number


def _section(dataset: str, table: Table, arch: str, rows: Rows) -> Section:
    # The paper's numbers are of ImageNet and are shown once.
    varied = VARIANT.fullmatch(table.experiment)
    once = dataset == "tiny-imagenet-200" and not varied
    told = dict(paper_rows(table.name, arch)) if once else {}
    found, missing = [], []
    for name in table.methods_for(arch):
        method = methods()[name]
        if method.recipe == "paper":  # those are in the table of all rows
            continue
        points = ("plain",) if method.baseline else GOALS
        of = {point: row_of(rows, dataset, table.experiment, arch, f"{name}-{point}") for point in points}
        dial = {goal: row_of(rows, dataset, table.experiment, arch, f"{name}-dial-{goal}") for goal in GOALS}
        if not any(of.values()):
            missing.append(method.label)
        for point in points:
            label = paper_label(table.name, name, point)
            figures = told.pop(label, {}) if label else {}
            row = of[point]
            if row or figures:
                shown = row.data["label"] if row else method.label
                given = {goal: each for goal, each in dial.items() if each and method.baseline}
                found.append(Line(shown if point == "plain" else f"{shown}: best {point}", row, given, figures))
    found.sort(key=_kind)
    return Section(dataset, table, arch, tuple(found), () if varied else tuple(missing))


def _kind(line: Line) -> int:
    """Ours first, then the paper's, then others, then what sees all images."""
    data = line.row.data if line.row else {}
    if data.get("recipe"):
        return 0 if data["recipe"] == "branchout" else 1
    name = line.row.path.stem.removesuffix("-plain") if line.row else ""
    return 2 if not name or is_rival(name) else 3


# The first screen.


@dataclass(frozen=True)
class Scenario:
    """A line of the first screen: who is compared in one scenario, by the balanced accuracy."""

    name: str
    page: str
    ours: Row
    reference: Row | None
    rival: Row | None
    """The best of all other methods that see no more images, with the same dial where they can have it."""
    joint: Row | None
    rival_marks: str = ""
    """Of the rival's rows, with the dial and without: one that is to be measured again might be better then."""
    others: int = 0
    """How many other methods are measured."""
    whole_network: bool = True
    """Whether one of them trains the whole network."""


FLOWERS = Path("imagenet-flowers")
OF_PHOTOS = ("default", "blocks.5", "fc", "no-memory", "two-steps", "five-steps")
"""Ways to extend a strong base with Branchout; the other rows beside them are other methods."""
SCENARIOS = (
    ("180 + 20 classes", "disjoint-40/resnet10"),
    ("180 + 20, ResNet18", "disjoint-40/resnet18"),
    ("180 + 20, ResNet50", "disjoint-40/resnet50"),
    ("160 + 40", "disjoint-200/resnet10"),
    ("141 objects + 20 animals", "branch-depth/resnet10"),
    ("100 + 10 × 10", "multistep/resnet10"),
    ("100 + 10 × 10, ResNet18", "multistep/resnet18"),
    ("180 + 15 new, 5 old in a new style", "overlap-style/resnet10"),
    ("180 + 15 new, 5 old, halves at random", "overlap-random-shuffled/resnet10"),
    ("180 + 15 new, 5 old, halves by cluster", "overlap-random-clustered/resnet10"),
    ("180 + 20 old, halves by cluster", "overlap-full/resnet10"),
)
NOT_SHOWN = (
    ("180 + 20, vision transformer", "disjoint-40/vit_tiny"),
    ("180 + 20, split 2", "disjoint-40-split2/resnet10"),
    ("180 + 20, split 3", "disjoint-40-split3/resnet10"),
    ("180 + 20, no exemplars", "disjoint-40-exemplars0/resnet10"),
    ("180 + 20, 5 exemplars", "disjoint-40-exemplars5/resnet10"),
    ("180 + 20, 20 exemplars", "disjoint-40-exemplars20/resnet10"),
    ("141 objects + 15 animals, 5 old, halves at random", "overlap-domain-shuffled/resnet10"),
    ("141 objects + 15 animals, 5 old, halves by cluster", "overlap-domain-clustered/resnet10"),
    ("180 + 20 old, halves by cluster, ResNet18", "overlap-full/resnet18"),
)
"""Scenarios of Tiny-ImageNet that have no line on the first screen; the page of margins has them."""
CHARACTERS = (
    ("800 + 40 characters", "disjoint-40/resnet10"),
    ("800 + 40 characters, no exemplars", "disjoint-40-exemplars0/resnet10"),
    ("800 + 40 characters, 5 exemplars", "disjoint-40-exemplars5/resnet10"),
    ("800 + 40 characters, 20 exemplars", "disjoint-40-exemplars20/resnet10"),
    ("800 + 200 characters", "disjoint-200/resnet10"),
    ("893 + 40 characters of another domain", "branch-depth/resnet10"),
    ("500 + 10 × 50 characters", "multistep/resnet10"),
    ("800 + 35 new, 5 old characters in a new style", "overlap-style/resnet10"),
    ("800 + 35 new, 5 old characters, halves at random", "overlap-random-shuffled/resnet10"),
    ("800 + 35 new, 5 old characters, halves by cluster", "overlap-random-clustered/resnet10"),
    ("893 + 35 new, 5 old characters of another domain, halves at random", "overlap-domain-shuffled/resnet10"),
    ("893 + 35 new, 5 old characters of another domain, halves by cluster", "overlap-domain-clustered/resnet10"),
    ("800 + 40 old characters, halves by cluster", "overlap-full/resnet10"),
)
"""Those of the built-in characters."""


def scenarios(rows: Rows) -> list[Scenario]:
    """The twelve lines, as far as they are measured; the strong base first."""
    found = []
    measured = [row for name in ("default", "default-cpu") if (row := rows.get(FLOWERS / f"{name}.json"))]
    if measured:
        default = min(measured, key=lambda row: bool(row.marks))  # the first that is not to be measured again
        others = [row for path, row in rows.items() if path.parent == FLOWERS and row.data["method"] not in OF_PHOTOS]
        rival = best(others)
        marks = rival.marks if rival else ""
        found.append(
            Scenario("1,000 ImageNet classes + 102 flowers", "photos", default, None, rival, None, marks, len(others))
        )
    return found + _measured(rows, "tiny-imagenet-200", SCENARIOS)


def scenarios_not_shown(rows: Rows) -> dict[str, list[Scenario]]:
    """By dataset."""
    return {name: _measured(rows, name, of) for name, of in (("tiny-imagenet-200", NOT_SHOWN), ("glyphs", CHARACTERS))}


def _measured(rows: Rows, dataset: str, named: Sequence[tuple[str, str]]) -> list[Scenario]:
    """Scenarios as far as they are measured."""
    found = []
    for name, place in named:
        folder = Path(dataset, place)
        ours, reference, joint = (
            rows.get(folder / f"{file}.json")
            for file in ("score-fusion-branchout-balanced", "score-fusion-reference-balanced", "joint-dial-balanced")
        )
        others = [
            row
            for path, row in rows.items()
            if path.parent == folder
            and row.data["point"] in ("plain", "dial-balanced")
            and is_rival(path.stem.removesuffix(f"-{row.data['point']}"))
            and row.data["method"] != "pretrained"
        ]
        if ours:
            varied = VARIANT.fullmatch(folder.parts[1])
            own = varied["table"] if varied else folder.parts[1]
            table = next(table for table in tables().values() if table.experiment == own == table.name)
            page = page_of(table, folder.name) + ("-variants" if varied else "")
            rival = best(others)
            marks = "".join(row.marks for row in others if rival and row.data["method"] == rival.data["method"])
            names = {row.path.stem.removesuffix(f"-{row.data['point']}") for row in others}
            whole = any(baselines()[name].on == "network" for name in names)
            found.append(Scenario(name, page, ours, reference, rival, joint, marks, len(names), whole))
    return found


def best(others: list[Row]) -> Row | None:
    known = [row for row in others if row.value("balanced") is not None]
    return max(known, key=lambda row: row.value("balanced") or 0.0) if known else None


def page_of(table: Table, arch: str) -> str:
    return f"table-{re.sub('[ab]', '', _numbered(table, arch))}"
