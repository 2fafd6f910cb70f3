"""Everything a report shows, as typed plain data; `to_dict` gives it as JSON-able data.

Accuracies are shares between 0 and 1, None where there are no images. Classes are indices into `classes`, operating
points are positions on the dial (from favouring old classes to favouring new ones), images are indices into the labels
of `test`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout import __version__
from branchout.data.samples import Samples
from branchout.errors import BranchoutError, printable
from branchout.evaluate.compare import part_names
from branchout.goals import PAPER_GOALS, check_goal
from branchout.method.frontier import Frontier
from branchout.metrics import part_of_class
from branchout.model.card import compaction_rows
from branchout.model.checkpoint import SavedModel
from branchout.report.answers_by_point import point_order
from branchout.report.labelled_results import LabelledResults, first_branch, labelled_results
from branchout.report.other_methods import OtherResults
from branchout.training.loop import OnProgress, best_device, silent

Figures = Mapping[str, list[float | None]]
"""For each metric its value at every operating point."""


@dataclass(frozen=True)
class Branch:
    """The base, or one step."""

    name: str
    new: list[str]
    """Classes that no earlier branch knows."""
    known: list[str]
    """Classes that an earlier branch knows too."""
    where: str | None
    """The part of the network that was cloned; None for the base."""
    event: Mapping[str, Any]
    """What the model's history records: when, from how many images, with which settings."""
    losses: list[float]
    """Mean loss of each epoch."""
    seconds: dict[str, float]
    compaction: list[tuple[str, str, str]]
    """What `compact` changed, before and after; empty if it did not make the branch."""


@dataclass(frozen=True)
class OperatingPoints:
    """The frontier of the last step, in the order of the dial."""

    kind: str
    """`dial` or `grid`."""
    settings: list[list[float]]
    """b, or α and β, of each point."""
    figures: Figures
    """Accuracies on the validation images that points are chosen on."""
    images: int
    measured: str
    """Which images these are: a key of `goals.CHOSEN_ON`."""
    numbers: list[int]
    """Each point's index in the saved frontier."""
    saved: int
    goal: str
    goals: dict[str, int]
    """The point that each goal of the paper chooses."""
    goal_for: list[str | None]
    """For each point a goal of `branchout tune` that chooses it."""
    dominated: Mapping[str, Any] | None
    """Of a grid: settings and figures of points that another point is better than."""
    single_point_reason: str

    def __len__(self) -> int:
        return len(self.settings)


@dataclass(frozen=True)
class HeldOut:
    """What `extend` or `compact` measured on images that it did not train with."""

    images: int
    before: Mapping[str, float | None]
    """Of the model that was extended or compacted."""
    after: Mapping[str, float | None] | None
    """At the saved point; None where that point was not measured."""
    goals: dict[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows."""

    name: str
    path: str
    """The model as one would type it."""
    command: str
    """What to type to see results on labelled images."""
    made: str
    version: str
    classes: list[str]
    part_of_class: list[int]
    parts: list[str]
    """base, step 1, …, overlap."""
    first_branch: list[int]
    """For each class the branch that first knew it."""
    branches: list[Branch]
    arch: dict[str, str | int]
    size: int
    channels: int
    pooler: str
    parameters: dict[str, int]
    files: dict[str, int]
    """Bytes of each file of weights."""
    points: OperatingPoints | None
    """None for a base model."""
    held_out: HeldOut | None
    others: OtherResults | None
    test: LabelledResults | None

    @property
    def compaction(self) -> list[tuple[str, str, str]]:
        """What `compact` changed, before and after; empty if another command made the model."""
        return self.branches[-1].compaction

    @property
    def command_that_made_it(self) -> str:
        return "compact" if self.compaction else "extend"

    def with_saved_point(self, saved: SavedModel) -> ReportData:
        """The same report after the operating point was changed."""
        return replace(self, points=_operating_points(saved), held_out=_held_out(saved))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_plain)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in items}


def collect(
    saved: SavedModel,
    samples: Samples | None = None,
    *,
    path: str = "MODEL",
    made: str = "",
    folder: Path | None = None,
    others: OtherResults | None = None,
    gallery: int = 60,
    device: torch.device | None = None,
    cache: Path | None = None,
    on_progress: OnProgress = silent,
) -> ReportData:
    """Collect what the model records about itself and, with labelled images, its results on them.

    `path` is the model as one would type it, `folder` its folder, `gallery` how many images a gallery shows.
    """
    model = saved.classifier
    points, branches = _operating_points(saved), _branches(saved)
    test = None
    if samples is not None:
        position, count = (points.saved, len(points)) if points else (0, 1)
        test = labelled_results(
            saved,
            samples,
            position,
            count,
            gallery=gallery,
            device=device or best_device(),
            cache=cache,
            on_progress=on_progress,
        )
        if branches[-1].compaction:  # these are not of the model that was compacted, which the folder does not hold
            test = replace(test, figures_before=None)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    return ReportData(
        name=Path(path).name or path,
        path=path,
        command=f"branchout report {shlex.quote(path)} TEST/",
        made=made,
        version=__version__,
        classes=[printable(name) for name in model.space.classes],
        part_of_class=part_of_class(model.space).tolist(),
        parts=part_names(model.space),
        first_branch=first_branch(model.space).tolist(),
        branches=branches,
        arch={key: value for key, value in model.arch.items() if isinstance(value, str | int)},
        size=model.preprocessing.size,
        channels=model.preprocessing.channels,
        pooler=model.fused.pooler.kind,
        parameters=saved.model().parameter_counts(),
        files={file.name: file.stat().st_size for file in files},
        points=points,
        held_out=_held_out(saved),
        others=others,
        test=test,
    )


def _branches(saved: SavedModel) -> list[Branch]:
    branches = []
    seen: set[str] = set()
    for number, names in enumerate(saved.classifier.space.branches):
        event = saved.history[number] if number < len(saved.history) else {}
        seconds = event.get("seconds") or {}
        branches.append(
            Branch(
                name=part_names(saved.classifier.space)[number],
                new=[printable(name) for name in names if name not in seen],
                known=[printable(name) for name in names if name in seen],
                where=saved.classifier.steps[number - 1].where if number else None,
                event={key: value for key, value in event.items() if key not in ("measured", "losses", "seconds")},
                losses=list(event.get("losses", ())),
                seconds=dict(seconds) if isinstance(seconds, Mapping) else {"training": seconds},
                compaction=compaction_rows(event),
            )
        )
        seen.update(names)
    return branches


def _operating_points(saved: SavedModel) -> OperatingPoints | None:
    if not saved.step_points:
        return None
    points = saved.step_points[-1]
    frontier = Frontier.from_dict(points.frontier)
    order = point_order(frontier)
    frontier = frontier.select(order)
    goals = {goal: frontier.choose(goal) for goal in PAPER_GOALS}
    position = int(np.flatnonzero(order == points.point)[0])
    named = {points.goal: position, **goals} if _is_goal(points.goal) else goals
    plain = frontier.to_dict()
    return OperatingPoints(
        kind=frontier.kind,
        settings=plain["settings"],
        figures=plain["figures"],
        images=frontier.images,
        measured=frontier.chosen_on,
        numbers=order.tolist(),
        saved=position,
        goal=points.goal,
        goals=goals,
        goal_for=[goal_for(point, frontier, named) for point in range(len(frontier))],
        dominated=points.frontier.get("beaten"),
        single_point_reason=frontier.single_point_reason(),
    )


def _is_goal(goal: str) -> bool:
    """Whether `branchout tune` accepts it; a point chosen by its position on the dial is named `b=…`."""
    try:
        check_goal(goal)
    except BranchoutError:
        return False
    return True


def goal_for(point: int, frontier: Frontier, goals: Mapping[str, int]) -> str | None:
    """A goal of `branchout tune` that chooses this point: one of `goals`, or a minimum such as `novel>=0.8125`."""
    for goal, chosen in goals.items():
        if chosen == point:
            return goal
    for metric in ("novel", "base", "overlap", "avg"):
        value = frontier.accuracies[metric][point]
        if not np.isnan(value):
            goal = f"{metric}>={np.floor(value * 1e4) / 1e4:.4f}"
            if frontier.choose(goal) == point:
                return goal
    return None


def _held_out(saved: SavedModel) -> HeldOut | None:
    if not saved.step_points or len(saved.history) <= len(saved.step_points):
        return None
    event, points = saved.history[len(saved.step_points)], saved.step_points[-1]
    found = event.get("measured")
    if not found:
        return None
    here = [figures for figures in found["goals"].values() if figures["point"] == points.point]
    same_goal = event.get("goal") == points.goal
    after = found["after"] if same_goal else here[0] if here else None
    before = found["before"]  # of the base of the step
    if event.get("what") == "compact":
        before = (event.get("before") or {}) if same_goal else {}
    return HeldOut(found["images"], before, after, found["goals"])
