"""Rows that nobody measured: invented ones, and the paper's own numbers written as if they were ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.paper.paper_numbers import paper_label, paper_rows
from benchmarks.paper.rows import Row
from branchout.bench.methods import methods
from branchout.bench.tables import tables

ROOT = Path(__file__).parents[3]
METRICS = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps")


def data(method: str, point: str, **figures: float) -> dict[str, Any]:
    return {
        "dataset": "paper", "table": "disjoint-40", "point": point, "method": method, "base_classes": 8,
        "novel_classes": 2, "overlap_classes": int("overlap" in figures), "steps": 1, "base_model": 60.0,
        "hardware": "an abacus", "settings": {"exemplars": 10}, "label": method, "arch": "resnet10",
        "metrics": {name: figures.get(name) for name in METRICS},
    }  # fmt: skip


def row(path: str, **changes: Any) -> Row:
    """A row with figures, or with other fields, by its place below results/."""
    figures = {name: value for name, value in changes.items() if name in METRICS}
    fields = {name: value for name, value in changes.items() if name not in METRICS}
    method, _, point = Path(path).stem.rpartition("-")
    return Row(Path(path), {**data(method, point, **figures), **fields})


def papers_own() -> dict[Path, Row]:
    """The paper's numbers as rows of a dataset called 'paper'."""
    found = {}
    for table in tables().values():
        for arch in table.archs:
            told = paper_rows(table.name, arch)
            for name in {*table.methods, *table.methods_for(arch)}:
                for point in methods()[name].points():
                    figures = told.get(paper_label(table.name, name, point) or "")
                    if figures:
                        wanted = {metric: figures[metric] for metric in METRICS if metric in figures}
                        path = Path("paper") / table.experiment / arch / f"{name}-{point}.json"
                        found[path] = Row(path, data(name, point, **wanted))
    return found
