"""What an extension returns: the new model, its operating points, and their accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from branchout.metrics import Accuracies
from branchout.model.checkpoint import StepPoints
from branchout.model.classifier import Classifier


@dataclass(frozen=True)
class GoalResult:
    """The operating point of a goal, and its accuracies on the test images."""

    point: int
    test: Accuracies


@dataclass(frozen=True)
class Measured:
    """Accuracies on the held-out test images."""

    images: int
    before: Accuracies | None
    """Of the base, on the images of its own classes; None where there are none."""
    after: Accuracies
    goals: dict[str, GoalResult]
    parts: Mapping[str, int]
    """How many images each accuracy counts."""

    def to_dict(self) -> dict[str, Any]:
        """As the history of a saved model keeps it."""
        return {
            "images": self.images,
            "after": asdict(self.after),
            "before": {} if self.before is None else asdict(self.before),
            "goals": {goal: {"point": each.point, **asdict(each.test)} for goal, each in self.goals.items()},
        }


@dataclass(frozen=True)
class Extended:
    """What an extension made."""

    model: Classifier
    points: StepPoints
    measured: Measured | None
    """None where there are too few images to measure with."""
    losses: list[float]
    seconds: dict[str, float]
    engine: str = "torch"
    """What ran the frozen part: the plan's engine, or torch where that could not be used."""
