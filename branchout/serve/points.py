"""The operating point a model is served at: which one is in force, and how it is changed while requests run.

Every point has a fused head of its own over the same frozen heads, and is never changed. A request takes the point that
is in force when it arrives and keeps it to the end, so turning the dial needs no lock and mixes nothing up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout.api import Model
from branchout.errors import BranchoutError
from branchout.method.frontier import Frontier
from branchout.model import checkpoint
from branchout.model.checkpoint import Deltas
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead
from branchout.report.data import GOALS, leads_to

FARTHEST = 1e4
"""A dial turned further than this says nothing more: logits are far smaller."""


class NoSuchPoint(BranchoutError):  # noqa: N818 – read as an answer
    """A point this model cannot be put to."""


@dataclass(frozen=True, eq=False)
class OperatingPoint:
    """One setting of the model, and the head that speaks at it."""

    head: FusedHead
    about: Mapping[str, Any] | None
    """What is told of it; None for a base model, which has nothing to choose."""


class Points:
    """The points of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.frontier: Frontier | None = None
        self._heads: dict[int, FusedHead] = {}
        self._files = None if model.folder is None else _checksums(model.folder)
        if model.saved.fusions:
            self.frontier = model.frontier
            chosen = model.saved.fusions[-1]
            self.current = self._point(chosen.point, chosen.goal)
        else:
            self.current = OperatingPoint(_head(model.classifier, None, []), None)

    @property
    def before(self) -> FusedHead | None:
        """The head as it was before the last step, at the point that was chosen then; None for a base model."""
        steps = len(self.model.classifier.steps)
        if not steps:
            return None
        earlier: FusedHead = self.model.saved.model(steps - 1).fused.to(self.model.device)
        return earlier

    def for_goal(self, goal: str) -> OperatingPoint:
        return self._point(self._reach().choose(goal), goal)

    def at(self, b: float) -> OperatingPoint:
        """The dial at any b, on the frontier or not."""
        frontier = self._reach()
        if frontier.kind != "dial":
            raise NoSuchPoint('this model chooses among trained points and has no dial; give a goal: {"goal": "avg"}')
        if not math.isfinite(b) or abs(b) > FARTHEST:
            raise NoSuchPoint(f"b is a number between {-FARTHEST:,.0f} and {FARTHEST:,.0f}, not {b}")
        nearest = int(np.abs(frontier.settings[:, 0] - b).argmin())
        nearest_b = float(frontier.settings[nearest, 0])
        if math.isclose(b, nearest_b, rel_tol=1e-9, abs_tol=1e-9):
            return self._point(nearest, f"b={b:g}")
        fusion = self.model.saved.fusions[-1]
        offsets = [b + shift for shift in fusion.shifts or (0.0,) * len(self.model.classifier.steps)]
        about = {
            **self._told(None, f"b={b:g}"),
            "b": b,
            "nearest": {"b": nearest_b, "accuracies": frontier.at(nearest)},
        }
        return OperatingPoint(_head(self.model.classifier, fusion.chosen_deltas(), offsets), about)

    def numbered(self, number: int) -> OperatingPoint:
        """A point of the frontier by its number, called by a goal that leads there if there is one.

        The saved point keeps the name it was saved under.
        """
        frontier = self._reach()
        if not 0 <= number < len(frontier):
            raise NoSuchPoint(f"the frontier has {len(frontier)} points, from 0 to {len(frontier) - 1}; not {number}")
        saved = self.model.saved.fusions[-1]
        if number == saved.point:
            return self._point(number, saved.goal)
        goal = leads_to(number, frontier, {goal: frontier.choose(goal) for goal in GOALS})
        if goal is None:
            goal = ", ".join(f"{name}={value:g}" for name, value in self._where(number).items())
        return self._point(number, goal)

    def save(self, point: OperatingPoint) -> OperatingPoint:
        """Write the choice into the model's folder, as `branchout tune` does, in one move."""
        folder, about = self.model.folder, point.about
        if folder is None or about is None:
            raise NoSuchPoint("this model does not lie in a folder of its own; nothing can be saved")
        if about["point"] is None:
            raise NoSuchPoint(
                f"only points of the frontier can be saved, and b={about['b']:g} is none; "
                f"the nearest has b={about['nearest']['b']!r}"
            )
        if _checksums(folder) != self._files:
            raise NoSuchPoint(f"{folder} is not the model that was opened any more; start the server again")
        kept = self.model.saved
        *earlier, last = kept.fusions
        kept = replace(kept, fusions=(*earlier, replace(last, point=about["point"], goal=about["goal"])))
        try:
            checkpoint.rewrite(kept, folder)
        except OSError as error:
            raise BranchoutError(f"the choice could not be written to {folder}: {error}") from None
        self.model.saved = kept
        return self._point(about["point"], about["goal"])

    def _reach(self) -> Frontier:
        if self.frontier is None:
            raise NoSuchPoint("a base model has no operating points; extend it first")
        return self.frontier

    def _point(self, number: int, goal: str) -> OperatingPoint:
        frontier = self._reach()
        if number not in self._heads:
            fusion = replace(self.model.saved.fusions[-1], point=number)
            offsets = fusion.offsets(len(self.model.classifier.steps))
            self._heads[number] = _head(self.model.classifier, fusion.chosen_deltas(), offsets)
        about = {**self._told(number, goal), **self._where(number), "accuracies": frontier.at(number)}
        return OperatingPoint(self._heads[number], about)

    def _where(self, number: int) -> dict[str, float]:
        frontier = self._reach()
        setting = frontier.settings[number].tolist()
        return {"b": setting[0]} if frontier.kind == "dial" else {"alpha": setting[0], "beta": setting[1]}

    def _told(self, number: int | None, goal: str) -> dict[str, Any]:
        frontier = self._reach()
        saved = self.model.saved.fusions[-1]
        return {
            "kind": frontier.kind,
            "goal": goal,
            "point": number,
            "accuracies": None,
            "images": frontier.images,
            "measured": frontier.measured,
            # Two goals may lead to one point: the folder names a goal as well, and only that choice is the saved one.
            "saved": self.model.folder is not None and (number, goal) == (saved.point, saved.goal),
        }


def _head(classifier: Classifier, deltas: Deltas | None, offsets: Sequence[float]) -> FusedHead:
    """A fused head at one point, over the classifier's own heads."""
    old = classifier.fused
    head = FusedHead(old.space, list(old.heads), old.feature_of, old.pooler.kind)  # type: ignore[arg-type]
    device = old.offsets.device
    if deltas is not None:
        head.deltas = [None if delta is None else delta.to(device, torch.float32) for delta in deltas]
    head.set_bias(offsets)
    return head.to(device)


def _checksums(folder: Path) -> Any:
    """What the folder's manifest vouches for: a model written over the one that was opened has others."""
    try:
        return json.loads((folder / checkpoint.MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise BranchoutError(f"{folder / checkpoint.MANIFEST} cannot be read: {error!r}") from None
