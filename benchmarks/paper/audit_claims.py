"""The audit of the claims: every comparison, the verdicts that follow from them, and the worst cases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper import audit as auditing
from benchmarks.paper.audit import LINK, Audit, Row, mean, rounded, shown, tables_of, with_sign

DATASETS = {"Tiny-ImageNet": "tiny-imagenet-200", "Characters": "glyphs"}
EXPERIMENTS = {
    "1": "disjoint-40", "2": "multistep", "3": "disjoint-40", "4": "branch-depth", "5": "overlap-style",
    "6": "overlap-full", "7": "disjoint-40", "8": "disjoint-40", "9": "disjoint-200",
    "10a": "overlap-random-shuffled", "10b": "overlap-random-clustered", "11a": "overlap-domain-shuffled",
    "11b": "overlap-domain-clustered",
}  # fmt: skip
TABLE_1 = ("finetune", "lwf", "icarl", "bic", "wa", "der")
LATER = ("5", "6", "9", "10a", "10b", "11a", "11b")
FUSION, FC = "score-fusion-reference", "score-fusion-fc-reference"
RANK = ("does not hold", "too close to tell", "not measured", "holds")


@dataclass(frozen=True)
class Claim:
    """What is compared with what, and where; networks by table."""

    text: str
    places: tuple[str, ...]
    ours: str
    """A file's stem; POINT is the metric's operating point."""
    theirs: tuple[str, ...]
    metrics: tuple[str, ...] = ("all", "avg")
    lead: float = 0.0


def at(*tables: str) -> tuple[str, ...]:
    networks = {"7": "ResNet18", "8": "ResNet50"}
    return tuple(f"Table {table}, {networks.get(table, 'ResNet10')}" for table in tables)


ONE = (*at("1"), "Table 1, ResNet18")
CLAIMS = (
    Claim("Best-Acc_all is within one point of joint training", (*ONE, *at(*LATER)), FUSION, ("joint",), ("all",), -1),
    Claim("Best-Acc_avg is above joint training", (*ONE, *at("8", *LATER)), FUSION, ("joint",), ("avg",)),
    Claim("Score fusion is ten points above the best compared method", ONE, FUSION, TABLE_1, ("all",), 10),
    Claim("Score fusion is above every compared method", ONE, FUSION, TABLE_1),
    Claim("Score fusion with ResNet10 is above the others with ResNet18", ONE[1:], FUSION, TABLE_1),
    Claim("Fc-only is above every compared method", ONE, FC, TABLE_1),
    Claim(
        "Over many steps score fusion is above BiC and PODNet", ("Table 2, ResNet18",), FUSION, ("bic", "podnet"),
        ("incremental",),
    ),
    Claim("Fine-tuned heads are above retrained ones", at("3"), "logitcat-ft-plain", ("logitcat-rt", "featcat-rt")),
    Claim(
        "Score fusion is above every other method of its table",
        at("3", "7", "8", *(table for table in LATER if table != "10a")), FUSION, ("PAPER",),
    ),
    Claim(
        "A deeper branch helps when the domain changes", at("4"), "score-fusion-layer3-reference-balanced",
        ("score-fusion-reference-balanced",), ("novel",),
    ),
    Claim(
        "Max pooling is above average pooling on overlapping classes", at("5", "10a", "10b", "11a", "11b"),
        "logitcat-max-plain", ("logitcat-average",), ("overlap",),
    ),
)  # fmt: skip
GRID = "A higher α or a lower β raises novel accuracy"
GAP = "The gap between frozen and fine-tuned features shrinks with more base classes"
DEPTH = "Fine-tuning beyond the last block helps less with more base classes"
COUNTS = {"tiny-imagenet-200": (20, 180), "glyphs": (40, 800)}
Line = Mapping[str, str]


def check(audit: Audit) -> None:
    page = audit.docs / "results" / "cases.md"
    found: dict[str, list[Line]] = {
        title: [dict(zip(heading, line, strict=True)) for line in lines] for title, heading, lines in tables_of(page)
    }
    audit.same(page.name, str(list(found)), str([*(claim.text for claim in CLAIMS), GRID, GAP, DEPTH]))
    for claim in CLAIMS:
        for name, dataset in DATASETS.items():
            networks = ("ResNet10",) if dataset == "glyphs" else ("ResNet10", "ResNet18", "ResNet50")
            places = [place for place in claim.places if place.split(", ")[1] in networks]
            lines = [line for line in found[claim.text] if line["where"].startswith(name)]
            asked = [(f"{name}, {place}", metric) for place in places for metric in claim.metrics]
            measured = [(line["where"], line["metric"]) for line in lines if line["metric"] != "–"]
            absent = {line["where"] for line in lines if line["metric"] == "–"}
            wanted = [pair for pair in asked if pair[0] not in absent]
            audit.same(f"{page.name}, {claim.text}", str(sorted(measured)), str(sorted(wanted)))
            for line in lines:
                pair(audit, page, claim, line, dataset)
    for text in (GRID, GAP, DEPTH):
        for line in found[text]:
            dataset = DATASETS[line["where"].split(",")[0]]
            (grid if text == GRID else alone)(audit, page, line, dataset, text)
    summary(audit, found)


def files(audit: Audit, page: Path, cell: str) -> list[Path]:
    return [audit.file_of(page, target) for _, target in LINK.findall(cell)]


def pair(audit: Audit, page: Path, claim: Claim, line: Line, dataset: str) -> None:
    """A line with two rows: which rows, their numbers, the margin."""
    if line["metric"] == "–":
        return
    where = f"{page.name}, {claim.text}, {line['where']}"
    _, number, network = line["where"].replace("Table ", "").split(", ")
    metric = line["metric"]
    arch = network.lower()
    folder = Path(dataset, EXPERIMENTS[number], arch)
    point = "all" if metric == "incremental" else metric
    ours = claim.ours if claim.ours.rsplit("-", 1)[1] in ("plain", "balanced") else f"{claim.ours}-{point}"
    mine = folder / f"{ours}.json"
    if "with ResNet18" in claim.text:
        mine = Path(dataset, EXPERIMENTS[number], "resnet10", f"{ours}.json")
    theirs = [folder / f"{name if name.endswith('balanced') else f'{name}-plain'}.json" for name in claim.theirs]
    if claim.theirs == TABLE_1 and arch == "resnet18":
        theirs = [path for path in theirs if path.stem != "der-plain"]
    if claim.theirs == ("PAPER",):
        theirs = compared(audit, folder)
    best = max(theirs, key=lambda path: mean(audit.rows[path], metric) or 0)
    for cell, path in ((line["first"], mine), (line["second"], best)):
        row = audit.rows[path]
        audit.same(where, str(files(audit, page, cell)), str([path]))
        text = f"{shown(row, metric)}{audit.marks(path)} ({row['label']})"
        audit.same(where, LINK.sub(r"\1", cell).replace("\\", ""), text)
    outcome(audit, where, line, *auditing.compared(audit.rows[mine], audit.rows[best], metric, claim.lead))


def compared(audit: Audit, folder: Path) -> list[Path]:
    """Methods of the paper's table that are neither score fusion nor oracles."""
    _, experiment, arch = folder.parts
    entry = audit.paper.get(f"{experiment}-{arch}") or audit.paper[experiment]
    names = [name for name in entry["rows"] if "score fusion" not in name and "oracle" not in name]
    found = [
        path for path, row in audit.rows.items()
        if path.parent == folder and row["point"] == "plain" and row["label"] in names
    ]  # fmt: skip
    audit.same(f"methods of {folder}", str(sorted(audit.rows[path]["label"] for path in found)), str(sorted(names)))
    return found


def of_images(margin: float, rows: Sequence[Row], metric: str) -> tuple[float, float, float]:
    """A margin that rests on several rows of one seed, and its 95% interval."""
    variance = sum(auditing.variance_of_images(row, metric) for row in rows) / 2
    if len(rows) == 2 and rows[0] is not rows[1]:
        variance = auditing.variance_of_difference(rows[0], rows[1], metric)
    return margin, *auditing.limits(margin, [0.0], variance)


def outcome(audit: Audit, where: str, line: Line, margin: float, low: float, high: float) -> None:
    audit.same(where, line["margin to the claim"], with_sign(margin))
    audit.same(where, line["95% interval"], f"{with_sign(low)} to {with_sign(high)}")
    audit.same(where, line["verdict"], auditing.verdict_of(low, high))


def grid(audit: Audit, page: Path, line: Line, dataset: str, text: str) -> None:
    """The mean over one setting at both ends of the other."""
    path = Path(dataset, "disjoint-40", "resnet10", f"{FUSION}-all.json")
    row, values = audit.rows[path], []
    audit.same(f"{page.name}, {text}", line["where"].split(", ", 1)[1], "Figure 5")
    for cell in (line["first"], line["second"]):
        audit.same(f"{page.name}, {text}", str(files(audit, page, cell)), str([path]))
        sign, end = re.findall(r"\((.) = (\d)\)", cell)[0]
        key = {"α": "alpha", "β": "beta"}[sign]
        points = [each["novel"] for each in row["curve"] if round(each[key], 3) == float(end)]
        values.append(sum(points) / len(points))
        expected = f"{rounded(round(values[-1], 6))}{audit.marks(path)} ({sign} = {end})"
        audit.same(f"{page.name}, {text}", LINK.sub(r"\1", cell), expected)
    outcome(audit, f"{page.name}, {text}", line, *of_images(values[0] - values[1], (row, row), "novel"))


def alone(audit: Audit, page: Path, line: Line, dataset: str, text: str) -> None:
    """New classes alone, with the fewest base classes and with the most."""
    where = f"{page.name}, {text}, {line['where']}"
    sides = []
    audit.same(where, line["where"].split(", ", 1)[1], "Figure 2, left" if text == GAP else "Figure 2, right")
    for count in COUNTS[dataset]:
        folder = Path(dataset, f"base-classes-{count}", "resnet10")
        names = ("stem",) if text == GAP else ("layer3", "layer2", "layer1", "stem")
        more = [folder / f"alone-{name}-alone.json" for name in names]
        less = folder / f"alone-{'fc' if text == GAP else 'layer4'}-alone.json"
        sides.append((max(more, key=lambda path: audit.rows[path]["novel_alone"]), less))
    cells = (line["first"], line["second"])
    gain = "−" in LINK.sub(r"\1", cells[0])
    wanted = sides if gain else [(path,) for path in sides[0]]
    rows, values = [], []
    for cell, paths in zip(cells, wanted, strict=True):
        audit.same(where, str(files(audit, page, cell)), str(list(paths)))
        found = [audit.rows[path] for path in paths]
        told = " − ".join(
            rounded(row["novel_alone"]) + audit.marks(path) for row, path in zip(found, paths, strict=True)
        )
        audit.same(where, LINK.sub(r"\1", cell), told if gain else f"{told} ({found[0]['label']})")
        values.append(found[0]["novel_alone"] - (found[1]["novel_alone"] if gain else 0))
        rows += found
    outcome(audit, where, line, *of_images(values[0] - values[1], rows, "alone"))


def summary(audit: Audit, cases: Mapping[str, list[Line]]) -> None:
    """The claims follow from their cases; the first screen counts them."""
    page = audit.docs / "results" / "claims.md"
    for title, heading, lines in tables_of(page):
        verdicts = []
        for cells in lines:
            line = dict(zip(heading, cells, strict=True))
            of = [each for each in cases[line["claim"].replace("\\", "")] if each["where"].startswith(title)]
            verdicts.append(RANK[min(rank(each) for each in of)])
            where = f"{page.name}, {line['claim']}"
            audit.same(where, line["verdict"], f"**{verdicts[-1]}**")
            measured = [each for each in of if each["metric"] != "–"]
            lowest = min((rank(each), margin_of(each)) for each in measured) if measured else None
            fitting = [
                each
                for each in measured
                if (rank(each), margin_of(each)) == lowest and same_case(audit, page, line, each)
            ]
            audit.same(f"{where}, worst case", str(bool(fitting)), str(bool(measured)))
        if title == "Tiny-ImageNet":
            counts = [verdicts.count(each) for each in ("holds", "does not hold", "too close to tell")]
            told = "Of the paper's [{} claims](results/claims.md), {} hold on Tiny-ImageNet, {} do not, and {} are"
            told = told.format(len(verdicts), *counts)
            first = (audit.docs / "results.md").read_text(encoding="utf-8")
            audit.same("results.md, last sentence", str(told in first), "True")


def rank(case: Line) -> int:
    return RANK.index(case["verdict"].split(" (")[0])


def margin_of(case: Line) -> float:
    return float(case["margin to the claim"].replace("−", "-"))


def same_case(audit: Audit, page: Path, line: Line, case: Line) -> bool:
    """Whether a claim's worst case is a certain line of the cases."""
    sides = case["first"] + case["second"]
    return (
        (line["margin to the claim"], line["95% interval"]) == (case["margin to the claim"], case["95% interval"])
        and line["worst case"].startswith(f"{case['where'].split(', ', 1)[1]}: {case['metric']} [")
        and files(audit, page, line["worst case"]) == files(audit, page, sides)
        and [text for text, _ in LINK.findall(line["worst case"])] == [text for text, _ in LINK.findall(sides)]
    )
