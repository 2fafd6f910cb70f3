"""What measuring a method gives, before it is written as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from branchout.method.frontier import Frontier
from branchout.method.two_fold import Scored
from branchout.metrics import Accuracies


@dataclass
class Measured:
    """For each operating point, exemplar seed and step the setting that was chosen and its accuracies."""

    points: dict[str, list[list[Scored]]]
    seconds: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    """All parameters after the last step, without heads."""
    extra: dict[str, float] = field(default_factory=dict)
    both: list[list[Accuracies]] = field(default_factory=list)
    """For each seed and step the accuracies on dev and test together, where nothing was chosen on dev."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """All operating points of the first seed after the last step, measured on test: settings, all, base, novel, avg."""


def curve(frontier: Frontier, names: Sequence[str], most: int = 60) -> list[dict[str, float]]:
    """The points of a frontier; of very many, some at even distances."""
    chosen = np.unique(np.linspace(0, len(frontier) - 1, min(most, len(frontier))).round().astype(int))
    shown = {name: frontier.figures[name] for name in ("all", "base", "novel", "avg")}
    return [
        dict(zip(names, frontier.settings[n].tolist(), strict=True))
        | {name: round(100 * float(values[n]), 3) for name, values in shown.items() if values[n] >= 0}
        for n in chosen
    ]
