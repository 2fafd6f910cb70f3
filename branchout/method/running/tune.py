"""Choose another operating point of a saved model, from its manifest alone: no weights are read, and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from branchout.errors import no_operating_points
from branchout.method.frontier import Frontier
from branchout.model.card import describe, with_point
from branchout.model.manifest import read_manifest


def tune(folder: Path, goal: str) -> tuple[Frontier, int]:
    """Write the best point for a goal into a model folder; returns the operating points and the number of that one."""
    content, frontier = _read(folder)
    point = frontier.choose(goal)
    describe(with_point(content, point, goal), folder)
    return frontier, point


def saved_point(folder: Path) -> tuple[Frontier, int, str]:
    """The operating points of a model folder, the number of the chosen one, and its goal."""
    content, frontier = _read(folder)
    last = content["fusions"][-1]
    return frontier, last["point"], last["goal"]


def _read(folder: Path) -> tuple[dict[str, Any], Frontier]:
    _, content = read_manifest(folder)
    if not content["fusions"]:
        raise no_operating_points(folder)
    return content, Frontier.from_dict(content["fusions"][-1]["frontier"])
