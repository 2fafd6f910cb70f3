"""One line of a results table, and the numbers in its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
IN_TURN = {"turn_all": "all", "turn_balanced": "balanced", "turn_avg": "avg"}
"""Goals, where each half of the validation images chooses for the other."""
METRICS = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps", "alone", "parameters", *IN_TURN)
NAMES = {
    "avg_steps": "avg over steps",
    "alone": "new classes alone",
    "parameters": "params (M)",
    **{name: f"{goal} in turn" for name, goal in IN_TURN.items()},
}
"""How a column is headed where its metric's name would not do."""


@dataclass(frozen=True)
class Line:
    """One line of a table: what the paper says, what was measured, and where that is written."""

    label: str
    paper: Mapping[str, float] | None
    ours: Row | None
    path: Path | None
    kind: str = "rival"
    """Whose it is: `rival`, `fusion` (the paper's), `ours` (the default recipe), `joint`."""
    oracle: bool = False
    fold: str = ""
    """Empty in the main table; `dial` or `variant` for what would drown it."""


def columns(shown: Sequence[Line], *, of_paper: bool) -> list[str]:
    """The metrics that one side of a table has; parameters stand beside accuracies, not beside scores in turn."""
    found = [name for name in METRICS if any(cell(line, name, of_paper=of_paper) is not None for line in shown)]
    return [name for name in found if name != "parameters" or "all" in found]


def cell(line: Line, metric: str, *, of_paper: bool) -> float | None:
    """One number of a line; parameters in millions."""
    if of_paper:
        return None if line.paper is None else line.paper.get({"parameters": "parameters_millions"}.get(metric, metric))
    if line.ours is None:
        return None
    if metric == "parameters":
        count = line.ours.get("parameters")
        return None if not count else count / 1e6
    value: float | None = line.ours["metrics"].get(metric)
    return value
