"""Rows that nobody measured: invented ones, and the paper's own numbers written as if they were ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.paper.paper_numbers import paper_label, paper_rows
from branchout.bench.methods import methods
from branchout.bench.tables import tables

PLACE = Path("toys/disjoint-40/resnet10")
METRICS = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps")


def row(method: str, point: str, **figures: float) -> dict[str, Any]:
    return {
        "dataset": "toys", "table": "disjoint-40", "point": point, "method": method, "base_classes": 8,
        "novel_classes": 2, "overlap_classes": int("overlap" in figures), "steps": 1, "base_model": 60.0,
        "hardware": "an abacus", "settings": {"exemplars": 10}, "label": method,
        "metrics": {name: figures.get(name) for name in METRICS},
    }  # fmt: skip


def write(out: Path, rows: list[tuple[str, str, dict[str, Any]]], place: Path = PLACE) -> None:
    (out / place).mkdir(parents=True, exist_ok=True)
    for method, point, content in rows:
        (out / place / f"{method}-{point}.json").write_text(json.dumps(content))


def alone(out: Path, values: dict[int, dict[str, float]]) -> None:
    """Rows of branches that learned new classes alone."""
    for count, each in values.items():
        for where, value in each.items():
            content = {**row("alone", "alone", novel=value), "base_classes": count, "novel_alone": value}
            write(out, [(f"alone-{where}", "alone", content)], Path(f"toys/base-classes-{count}/resnet10"))


def papers_own() -> dict[Path, dict[str, Any]]:
    """The paper's numbers as rows of a dataset called 'paper'."""
    found = {}
    for table in tables().values():
        for arch in table.archs:
            told = paper_rows(table.name, arch)
            for name in {*table.methods, *table.of(arch)}:
                for point in methods()[name].points():
                    figures = told.get(paper_label(table.name, name, point) or "")
                    if figures:
                        wanted = {metric: figures[metric] for metric in METRICS if metric in figures}
                        path = Path("paper") / table.experiment / arch / f"{name}-{point}.json"
                        found[path] = row(name, point, **wanted)
    return found
