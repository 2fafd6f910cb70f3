"""The paper and the measurement side by side, from the rows under `results/` and the paper's numbers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from branchout.bench.claims import checks
from branchout.bench.contenders import contenders
from branchout.bench.tables import BY_BASE, Table, figures, tables
from branchout.errors import BranchoutError

Row = Mapping[str, Any]
METRICS = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps")
BEST = {"all": "best-Acc_all", "balanced": "best-balanced", "avg": "best-Acc_avg"}
VARIANTS = {"": "score fusion", "-fc": "score fusion fc-only"}
DEPTHS = {"-layer3": "layer3,4", "": "layer4", "-conv2": "layer4 (conv2 only)"}


@dataclass(frozen=True)
class Line:
    """One line of a table: what the paper says, what was measured, and where that is written."""

    label: str
    paper: Mapping[str, float] | None
    ours: Row | None
    path: Path | None


def read(out: Path) -> dict[Path, Row]:
    """All rows of tables under a results folder, by their path in it."""
    found: dict[Path, Row] = {}
    for path in sorted(out.rglob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BranchoutError(
                f"{path} cannot be read as a row ({error}); delete it and run its table again"
            ) from None
        if isinstance(row, dict) and "table" in row and "metrics" in row:
            found[path.relative_to(out)] = row
    return found


@cache
def paper() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((files("branchout.bench") / "paper.json").read_text(encoding="utf-8"))
    return numbers


def paper_rows(table: str, arch: str) -> Mapping[str, Mapping[str, float]]:
    """The paper's rows of a table for one network, empty where it has none."""
    for name in (f"{table}-{arch}", table):
        entry = paper().get(name)
        if entry is not None and entry["backbone"] == arch:
            rows: Mapping[str, Mapping[str, float]] = entry["rows"]
            return rows
    return {}


def paper_label(table: str, contender: str, point: str) -> str | None:
    """How the paper calls a row of ours; None if it has no such row."""
    known = contenders()[contender]
    if known.baseline is not None:
        return known.label if point == "plain" else None
    if known.recipe != "reference" or point not in BEST:
        return None
    middle = contender.removeprefix("score-fusion").removesuffix("-reference")
    if table == "branch-depth":
        return f"{DEPTHS[middle]}: score fusion {BEST[point]}" if middle in DEPTHS else None
    return f"{VARIANTS[middle]} {BEST[point]}" if middle in VARIANTS else None


def lines(table: Table, arch: str, dataset: str, rows: Mapping[Path, Row]) -> Iterator[Line]:
    """The lines of a table: in the order of its contenders, every operating point one line."""
    numbers = dict(paper_rows(table.name, arch))
    folder = Path(dataset) / table.experiment / arch
    for name in table.contenders:
        contender = contenders()[name]
        for point in contender.points():
            path = folder / f"{name}-{point}.json"
            label = paper_label(table.name, name, point)
            told = numbers.pop(label, None) if label else None
            row = rows.get(path)
            if row is not None or told is not None or point in ("plain", *BEST):
                shown = label or f"{contender.label}{'' if point == 'plain' else f', {point}'}"
                yield Line(shown, told, row, path if row is not None else None)
    for label, told in numbers.items():
        yield Line(label, told, None, None)


def markdown(out: Path, dataset: str, link: str = "../results", pictures: Sequence[Path] = ()) -> str:
    """The page: each table with the paper's columns and ours. `link` leads from the page to the results."""
    rows = read(out)
    if not any(path.parts[0] == dataset for path in rows):
        there = sorted({path.parts[0] for path in rows})
        raise BranchoutError(
            f"{out} holds no rows of {dataset!r}; there are: {', '.join(there) or 'none'}. "
            "Make some with: branchout bench disjoint-40 --data DIR"
        )
    parts = [
        f"# Results on {dataset}",
        "Every number of ours comes from the file linked in its line, which also holds the command, commit, settings "
        "and hardware that made it. Accuracies are percentages on the test half, chosen on the dev half, and means "
        "over the seeds named there. The paper's numbers are for ImageNet; differences between rows are what to "
        "compare, not the rows themselves. – : not in the paper, or not measured here.",
    ]
    told: set[Path] = set()
    for table in tables().values():
        for arch in table.archs:
            shown = list(lines(table, arch, dataset, rows))
            if any(line.ours is not None for line in shown):
                parts += _table(table, arch, shown, link)
                told |= {line.path for line in shown if line.path is not None}
    others: dict[tuple[str, str], list[Line]] = {}
    for path, row in rows.items():
        at, experiment, arch = path.parts[:3]
        if at == dataset and path not in told and not experiment.startswith(BY_BASE):  # those are shown as figures
            others.setdefault((experiment, arch), []).append(Line(f"{row['label']}, {row['point']}", None, row, path))
    for (experiment, arch), shown in others.items():
        title = "other classes drawn" if "-split" in experiment else "what no table of the paper has"
        parts += _table(Table(experiment, title, experiment, (arch,), ()), arch, shown, link)
    for picture in pictures:
        figure = figures()[picture.stem]
        parts += [f"## {figure.name}: {figure.title}", f"![{figure.title}]({picture.as_posix()})"]
    parts += ["## What the paper claims, and whether it holds here", _claims(dataset, rows)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table, arch: str, shown: list[Line], link: str) -> list[str]:
    measured = [line.ours for line in shown if line.ours is not None]
    about = measured[0]
    columns = [
        name
        for name in METRICS
        if any(line.paper is not None and name in line.paper for line in shown)
        or any(row["metrics"].get(name) is not None for row in measured)
    ]
    size = f"{about['base_classes']} + {about['novel_classes']} classes"
    if about["overlap_classes"]:
        size += f", {about['overlap_classes']} of them old ones"
    if about["steps"] > 1:
        size += f" in {about['steps']} steps"
    heading = ["", *(f"paper {name}" for name in columns), *columns, "file"]
    body = [heading, ["---", *["---:"] * (2 * len(columns)), "---"]]
    for line in shown:
        told = [_number(line.paper.get(name)) if line.paper else "–" for name in columns]
        ours = [_number(line.ours["metrics"].get(name)) if line.ours else "–" for name in columns]
        where = f"[{line.ours['point']}]({link}/{line.path.as_posix()})" if line.ours and line.path else "–"
        body.append([line.label.replace("|", "\\|"), *told, *ours, where])
    hardware = ", ".join(sorted({row["hardware"] for row in measured}))
    bases = ", ".join(sorted({_number(row["base_model"]) for row in measured}))
    return [
        f"## {table.name}, {arch}: {table.title}",
        f"{size}; base model {bases} on its own classes. Measured on {hardware}.",
        "\n".join(f"| {' | '.join(cells)} |" for cells in body),
    ]


def _claims(dataset: str, rows: Mapping[Path, Row]) -> str:
    body = [["claim", "", "numbers"], ["---", "---", "---"]]
    body += [[check.claim, check.verdict, check.numbers or "–"] for check in checks(dataset, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
