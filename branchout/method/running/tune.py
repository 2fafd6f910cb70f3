"""Choose another operating point of a saved model, from its manifest alone: no weights are read, and no torch."""

from __future__ import annotations

from pathlib import Path

from branchout.errors import BranchoutError
from branchout.method.frontier import Frontier
from branchout.model.card import describe, with_point
from branchout.model.manifest import read_manifest


def tune(folder: Path, goal: str) -> tuple[Frontier, int]:
    """Write the best point for a goal into a model folder; returns the operating points and the number of that one."""
    _, content = read_manifest(folder)
    if not content["fusions"]:
        raise BranchoutError("A base model has no operating points. Extend it first")
    frontier = Frontier.from_dict(content["fusions"][-1]["frontier"])
    point = frontier.choose(goal)
    describe(with_point(content, point, goal), folder)
    return frontier, point
