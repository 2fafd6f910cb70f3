"""The facts behind a report, as plain data that any page can draw.

    name, path, command             what the page is about, and what to type for more
    made, version                   when, and by which Branchout
    classes, part_of_class, parts   names, and for each class its part: the base, step 1, …, the overlap
    first_branch                    for each class the branch that first knew it
    branches                        for the base and each step: what made it, when, its classes, losses, seconds
    about, sizes                    architecture, input, pooler; parameters and bytes on disk
    frontier                        operating points in the order of the dial, their numbers in the model, accuracies on
                                    dev, the saved one, goals; of a grid also the points that others beat
    measured                        before → after on the images that `extend` set aside, where it applies
    rows                            rows of other methods, if any
    test                            all that labelled images show, or None

Accuracies are shares between 0 and 1, None where there are no images. Classes are numbers into `classes`, points
numbers into `frontier`, images numbers into the lists of `test`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchout import __version__
from branchout.data.samples import Samples
from branchout.errors import BranchoutError, printable
from branchout.method.frontier import Frontier
from branchout.metrics import part_of_class
from branchout.model.checkpoint import SavedModel
from branchout.report.answers_along import in_order
from branchout.report.test_results import findings, first_branch
from branchout.training.loop import Report, best_device, silent

GOALS = ("all", "balanced", "avg")


def gather(
    kept: SavedModel,
    samples: Samples | None = None,
    *,
    path: str = "MODEL",
    made: str = "",
    folder: Path | None = None,
    rows: Mapping[str, Any] | None = None,
    gallery: int = 60,
    device: torch.device | None = None,
    cache: Path | None = None,
    report: Report = silent,
) -> dict[str, Any]:
    """All facts about a model; with labelled images also what it gained and lost on them.

    `path` is the model as one would type it, `folder` where it lies, `gallery` how many pictures to show of a kind.
    """
    space = kept.classifier.space
    facts: dict[str, Any] = {
        "name": Path(path).name or path,
        "path": path,
        "command": f"branchout report {shlex.quote(path)} TEST/",
        "made": made,
        "version": __version__,
        "classes": [printable(each) for each in space.classes],
        "part_of_class": part_of_class(space).tolist(),
        "parts": [*(_branch(d) for d in range(len(space.branches))), "overlap"],
        "first_branch": first_branch(space).tolist(),
        "branches": _branches(kept),
        "about": _about(kept),
        "sizes": _sizes(kept, folder),
        **standing(kept),
        "rows": rows,
        "test": None,
    }
    if samples is not None:
        facts["test"] = findings(
            kept,
            samples,
            facts["frontier"],
            gallery=gallery,
            device=device or best_device(),
            cache=cache,
            report=report,
        )
    return facts


def standing(kept: SavedModel) -> dict[str, Any]:
    """The facts that change when the dial is saved elsewhere; all others stay."""
    return {"frontier": _frontier(kept), "measured": _measured(kept)}


# What the model itself holds.


def _branch(number: int) -> str:
    return "base" if number == 0 else f"step {number}"


def _branches(kept: SavedModel) -> list[dict[str, Any]]:
    """The base and every step: what was added, when, from what."""
    told = []
    seen: set[str] = set()
    for number, names in enumerate(kept.classifier.space.branches):
        event = kept.history[number] if number < len(kept.history) else {}
        told.append(
            {
                "name": _branch(number),
                "new": [printable(name) for name in names if name not in seen],
                "known": [printable(name) for name in names if name in seen],
                "where": kept.classifier.steps[number - 1].where if number else None,
                "event": {key: value for key, value in event.items() if key not in ("measured", "losses", "seconds")},
                "losses": list(event.get("losses", ())),
                "seconds": event.get("seconds"),
            }
        )
        seen.update(names)
    return told


def _about(kept: SavedModel) -> dict[str, Any]:
    model = kept.classifier
    arch = {key: value for key, value in model.arch.items() if isinstance(value, str | int)}
    return {"arch": arch, "size": model.preprocessing.size, "channels": model.preprocessing.channels,
            "kind": model.kind, "pooler": model.fused.pooler.kind}  # fmt: skip


def _sizes(kept: SavedModel, folder: Path | None) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    return {
        "parameters": kept.model().parameter_counts(),
        "files": {file.name: file.stat().st_size for file in files},
    }


def _frontier(kept: SavedModel) -> dict[str, Any] | None:
    """Operating points in the order of the dial, and for each the goal that leads there."""
    if not kept.fusions:
        return None
    fusion = kept.fusions[-1]
    found = Frontier.from_dict(fusion.frontier)
    order = in_order(found)
    found = found.select(order)
    goals = {goal: found.choose(goal) for goal in GOALS}
    saved = int(np.flatnonzero(order == fusion.point)[0])
    named = {fusion.goal: saved, **goals} if _is_goal(fusion.goal) else goals
    reach = [leads_to(point, found, named) for point in range(len(found))]
    return {
        **found.to_dict(),
        "numbers": order.tolist(),
        "beaten": fusion.frontier.get("beaten"),
        "saved": saved,
        "goal": fusion.goal,
        "goals": goals,
        "reach": reach,
    }


def _is_goal(goal: str) -> bool:
    """A point chosen by its place on the dial has no goal that `branchout tune` would know."""
    try:
        Frontier.check_goal(goal)
    except BranchoutError:
        return False
    return True


def leads_to(point: int, frontier: Frontier, goals: Mapping[str, int]) -> str | None:
    """A goal for `branchout tune` that chooses this very point."""
    for goal, chosen in goals.items():
        if chosen == point:
            return goal
    for metric in ("novel", "base", "overlap", "avg"):
        value = frontier.figures[metric][point]
        if not np.isnan(value):
            goal = f"{metric}>={np.floor(value * 1e4) / 1e4:.4f}"
            if frontier.choose(goal) == point:
                return goal
    return None


def _measured(kept: SavedModel) -> dict[str, Any] | None:
    """What `extend` measured on images it had set aside; `after` only if the dial still stands where it stood."""
    if not kept.fusions or len(kept.history) <= len(kept.fusions):
        return None
    event, fusion = kept.history[len(kept.fusions)], kept.fusions[-1]
    found = event.get("measured")
    if not found:
        return None
    order = {point: place for place, point in enumerate(in_order(Frontier.from_dict(fusion.frontier)).tolist())}
    goals = {goal: {**figures, "point": order[figures["point"]]} for goal, figures in found["goals"].items()}
    here = [figures for figures in found["goals"].values() if figures["point"] == fusion.point]
    after = found["after"] if event.get("goal") == fusion.goal else here[0] if here else None
    return {"images": found["images"], "before": found["before"], "after": after, "goals": goals}
