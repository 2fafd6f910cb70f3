"""The operating points of a served model: the current one, and how it is changed while requests run.

Each point has its own fused head over the same frozen heads and is never changed. A request uses the point that is
current when it arrives, so no lock is needed when the point changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.api import Model
from branchout.errors import BranchoutError, no_operating_points
from branchout.goals import PAPER_GOALS
from branchout.method.frontier import Frontier
from branchout.model import checkpoint
from branchout.model.checkpoint import Deltas, SavedModel
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead
from branchout.model.manifest import MANIFEST, read_manifest
from branchout.report.data import goal_for

LARGEST_B = 1e4
"""The largest b: logits are far smaller."""


@dataclass(frozen=True, eq=False)
class OperatingPoint:
    """One setting of the model, and the fused head for it."""

    head: FusedHead
    fields: Mapping[str, Any] | None
    """Goal, number and accuracies; None for a base model, which has no operating points."""
    is_saved: Callable[[OperatingPoint], bool]

    @property
    def about(self) -> dict[str, Any] | None:
        """The description of the point, as JSON. `saved` is looked up each time: the folder may have changed."""
        return None if self.fields is None else {**self.fields, "saved": self.is_saved(self)}


class OperatingPoints:
    """The operating points of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.frontier: Frontier | None = None
        self._heads: dict[int, FusedHead] = {}
        self._files = None if model.folder is None else read_manifest(model.folder)[0].files
        self._stamp = None if model.folder is None else _stamp(model.folder)
        self._same_model = model.folder is not None
        if model.saved.step_points:
            self.frontier = model.frontier
            chosen = model.saved.step_points[-1]
            self.current = self._point(chosen.point, chosen.goal)
        else:
            self.current = OperatingPoint(_head(model.classifier, None, []), None, self._is_saved)

    @property
    def before(self) -> FusedHead | None:
        """The head before the last step, at the point that was chosen then; None for a base model."""
        steps = len(self.model.classifier.steps)
        if not steps:
            return None
        earlier: FusedHead = self.model.saved.model(steps - 1).fused.to(self.model.device)
        return earlier

    def for_goal(self, goal: str) -> OperatingPoint:
        return self._point(self._frontier().choose(goal), goal)

    def at(self, b: float) -> OperatingPoint:
        """Any b, on the frontier or not."""
        frontier = self._frontier()
        if frontier.kind != "dial":
            raise BranchoutError('This model has a grid of trained points and no dial. Give a goal: {"goal": "avg"}.')
        if not math.isfinite(b) or abs(b) > LARGEST_B:
            raise BranchoutError(f"b must be a number between {-LARGEST_B:,.0f} and {LARGEST_B:,.0f}, not {b}.")
        nearest = int(np.abs(frontier.settings[:, 0] - b).argmin())
        nearest_b = float(frontier.settings[nearest, 0])
        if math.isclose(b, nearest_b, rel_tol=1e-9, abs_tol=1e-9):
            return self._point(nearest, f"b={b:g}")
        points = self.model.saved.step_points[-1]
        biases = [b + offset for offset in points.offsets or (0.0,) * len(self.model.classifier.steps)]
        about = {
            **self._common(None, f"b={b:g}"),
            "b": b,
            "nearest": {"b": nearest_b, "accuracies": frontier.at(nearest)},
        }
        return OperatingPoint(_head(self.model.classifier, points.chosen_deltas(), biases), about, self._is_saved)

    def numbered(self, number: int) -> OperatingPoint:
        """A point of the frontier by its number. Its goal is the saved one, or else one that leads to this point."""
        frontier = self._frontier()
        if not 0 <= number < len(frontier):
            raise BranchoutError(f"The frontier has points 0 to {len(frontier) - 1}; {number} does not exist.")
        saved = self.model.saved.step_points[-1]
        if number == saved.point:
            return self._point(number, saved.goal)
        goal = goal_for(number, frontier, {goal: frontier.choose(goal) for goal in PAPER_GOALS})
        if goal is None:
            goal = ", ".join(f"{name}={value:g}" for name, value in self._setting(number).items())
        return self._point(number, goal)

    def save(self, point: OperatingPoint) -> OperatingPoint:
        """Write the choice to the model's folder, as `branchout tune` does."""
        folder, about = self.model.folder, point.about
        if folder is None or about is None:
            raise BranchoutError("This model has no folder, so nothing can be saved.")
        if about["point"] is None:
            raise BranchoutError(
                f"Only points of the frontier can be saved, and b={about['b']:g} is none. "
                f"The nearest has b={about['nearest']['b']!r}."
            )
        if read_manifest(folder)[0].files != self._files:
            raise BranchoutError(f"{folder} now holds another model than the one being served. Restart the server.")
        kept = self._with_choice(about["point"], about["goal"])
        try:
            checkpoint.rewrite(kept, folder)
        except OSError as error:
            raise BranchoutError(f"The choice could not be written to {folder}: {error}") from None
        self.model.saved = kept
        self._stamp = _stamp(folder)
        return self._point(about["point"], about["goal"])

    @property
    def folder_changed(self) -> bool:
        """Whether the model's folder holds another model by now."""
        return self.model.folder is not None and not self._same_model

    def refresh(self) -> None:
        """Read the saved choice again if the folder's manifest has changed, as after `branchout tune`."""
        folder = self.model.folder
        if folder is None or (stamp := _stamp(folder)) == self._stamp:
            return
        self._stamp = stamp
        try:
            manifest, _ = read_manifest(folder)
            self._same_model = manifest.files == self._files
        except BranchoutError:
            self._same_model = False
        if self._same_model and self.frontier is not None:
            chosen = manifest.fusions[-1]
            self.model.saved = self._with_choice(chosen.point, chosen.goal)

    def _with_choice(self, point: int, goal: str) -> SavedModel:
        saved = self.model.saved
        *earlier, last = saved.step_points
        return replace(saved, step_points=(*earlier, replace(last, point=point, goal=goal)))

    def _is_saved(self, point: OperatingPoint) -> bool:
        """Whether the folder names this very choice. Two goals may lead to one point: the goal counts too."""
        self.refresh()
        if point.fields is None or not self._same_model:
            return False
        saved = self.model.saved.step_points[-1]
        return (point.fields["point"], point.fields["goal"]) == (saved.point, saved.goal)

    def _frontier(self) -> Frontier:
        if self.frontier is None:
            raise no_operating_points(self.model.folder)
        return self.frontier

    def _point(self, number: int, goal: str) -> OperatingPoint:
        frontier = self._frontier()
        if number not in self._heads:
            points = replace(self.model.saved.step_points[-1], point=number)
            biases = points.biases(len(self.model.classifier.steps))
            self._heads[number] = _head(self.model.classifier, points.chosen_deltas(), biases)
        about = {**self._common(number, goal), **self._setting(number), "accuracies": frontier.at(number)}
        return OperatingPoint(self._heads[number], about, self._is_saved)

    def _setting(self, number: int) -> dict[str, float]:
        frontier = self._frontier()
        setting = frontier.settings[number].tolist()
        return {"b": setting[0]} if frontier.kind == "dial" else {"alpha": setting[0], "beta": setting[1]}

    def _common(self, number: int | None, goal: str) -> dict[str, Any]:
        frontier = self._frontier()
        return {
            "kind": frontier.kind,
            "goal": goal,
            "point": number,
            "accuracies": None,
            "images": frontier.images,
            "measured": frontier.chosen_on,
        }


def _head(classifier: Classifier, deltas: Deltas | None, biases: Sequence[float]) -> FusedHead:
    """The fused head of one point, over the classifier's own heads."""
    old = classifier.fused
    corrections = [step.correction for step in classifier.steps]
    head = FusedHead(old.space, list(old.heads), old.feature_of, old.pooler.kind, old.class_means, corrections)  # type: ignore[arg-type]
    device = old.bias.device
    if deltas is not None:
        head.deltas = [None if delta is None else delta.to(device, torch.float32) for delta in deltas]
    head.set_bias(biases)
    return head.to(device)


def _stamp(folder: Path) -> tuple[int, ...] | None:
    """Changes whenever the manifest is replaced."""
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
