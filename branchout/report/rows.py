"""Rows that were measured with other methods, to set beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from branchout.errors import BranchoutError
from branchout.labels import LabelSpace

FIGURES = ("all", "base", "novel", "overlap", "avg")


def rows_in(folder: Path, space: LabelSpace) -> dict[str, Any]:
    """All rows under a folder that were measured with as many classes and steps; `other` counts those that were not."""
    if not folder.is_dir():
        raise BranchoutError(f"there is no folder {folder}; --results is a folder of measured rows, one JSON file each")
    rows, other = [], 0
    for path in sorted(folder.rglob("*.json")):
        row = _row(path)
        if row is None:
            continue
        if _same_task(row, space):
            rows.append(_shown(row, path.relative_to(folder)))
        else:
            other += 1
    if not rows and not other:
        raise BranchoutError(
            f'{folder} holds no measured row: a JSON file with "metrics" such as {{"base": 61.5, "novel": 66.6}}, in %'
        )
    return {"rows": rows, "other": other}


def _row(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("metrics"), dict) else None


def _same_task(row: dict[str, Any], space: LabelSpace) -> bool:
    """A row that does not say how many classes it is about is taken as it is."""
    base, *steps = space.branches
    taught = sum(len(names) for names in steps)  # some count classes that the base knew among them, some do not
    ours = {
        "base_classes": [len(base)],
        "novel_classes": [taught, len(space.classes) - len(base)],
        "steps": [len(steps)],
    }
    return all(row.get(key) in (None, *values) for key, values in ours.items())


def _shown(row: dict[str, Any], path: Path) -> dict[str, Any]:
    named = [str(row[key]) for key in ("method", "recipe") if row.get(key)]
    measured = row["metrics"]
    return {
        "method": ", ".join(named) or path.stem,
        "point": str(row.get("point") or ""),
        "dataset": str(row.get("dataset") or ""),
        "file": path.as_posix(),
        **{name: _share(measured.get(name)) for name in FIGURES},
    }


def _share(value: Any) -> float | None:
    """Results are in percent."""
    return round(value / 100, 6) if isinstance(value, int | float) and not isinstance(value, bool) else None
