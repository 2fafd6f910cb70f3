"""Results of other methods, read from their JSON files, to show beside a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from branchout.errors import BranchoutError
from branchout.goals import METRICS
from branchout.labels import LabelSpace

Row = dict[str, object]


@dataclass(frozen=True)
class OtherResult:
    """One result of another method; accuracies are shares."""

    method: str
    point: str
    dataset: str
    file: str
    figures: dict[str, float | None]


@dataclass(frozen=True)
class OtherResults:
    results: list[OtherResult]
    left_out: int
    """How many results were measured with another number of classes or steps."""


def read_results(folder: Path, space: LabelSpace) -> OtherResults:
    """All results in a folder that were measured with as many classes and steps as the model."""
    if not folder.is_dir():
        raise BranchoutError(f"Folder {folder} does not exist; --results is a folder of JSON files, one per result")
    results, left_out = [], 0
    for path in sorted(folder.rglob("*.json")):
        row = _read(path)
        if row is None:
            continue
        if _same_task(row, space):
            results.append(_result(row, path.relative_to(folder)))
        else:
            left_out += 1
    if not results and not left_out:
        raise BranchoutError(
            f'{folder} contains no results. A result is a JSON file with "metrics", in percent: '
            '{"metrics": {"base": 61.5, "novel": 66.6}}'
        )
    return OtherResults(results, left_out)


def _read(path: Path) -> Row | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("metrics"), dict) else None


def _same_task(row: Row, space: LabelSpace) -> bool:
    """Whether the numbers of classes and steps are the model's; a number that is missing is not compared."""
    base, *steps = space.branches
    added = sum(len(names) for names in steps)  # some results count overlapping classes as novel, some do not
    ours = {
        "base_classes": [len(base)],
        "novel_classes": [added, len(space.classes) - len(base)],
        "steps": [len(steps)],
    }
    return all(row.get(key) in (None, *values) for key, values in ours.items())


def _result(row: Row, path: Path) -> OtherResult:
    names = [str(row[key]) for key in ("method", "recipe") if row.get(key)]
    metrics = row["metrics"]
    assert isinstance(metrics, dict)
    return OtherResult(
        method=", ".join(names) or path.stem,
        point=str(row.get("point") or ""),
        dataset=str(row.get("dataset") or ""),
        file=path.as_posix(),
        figures={name: _share(metrics.get(name)) for name in METRICS},
    )


def _share(value: object) -> float | None:
    """Results are in percent."""
    return round(value / 100, 6) if isinstance(value, int | float) and not isinstance(value, bool) else None
