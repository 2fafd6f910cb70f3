"""What `GET /model` and `GET /classes` return about a model."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict

from branchout import __version__
from branchout.api import Model
from branchout.labels import OVERLAP
from branchout.serve.responses import finite
from branchout.serve.schema import Class, ModelInfo, Step


def model_info(model: Model) -> ModelInfo:
    classifier = model.classifier
    history = model.saved.history
    folder = model.folder
    return ModelInfo(
        name=folder.name if folder is not None else str(history[0].get("base", "model") if history else "model"),
        version=__version__,
        kind=classifier.kind,
        architecture=dict(classifier.arch),
        classes=classes_of(model),
        steps=[
            Step(step=number, branch=step.where, classes=len(step.names))
            for number, step in enumerate(classifier.steps, 1)
        ],
        pooler=classifier.fused.pooler.kind,
        parameters=classifier.parameter_counts(),
        bytes=None if folder is None else sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        preprocessing=asdict(classifier.preprocessing),
        history=finite(list(history)),
        frontier=finite(model.frontier.to_dict()) if model.saved.step_points else None,
    )


def classes_of(model: Model) -> list[Class]:
    """Every class and the branches that know it; a class of several branches is an overlap."""
    space = model.classifier.space
    branches: dict[str, list[str]] = {name: [] for name in space.classes}
    for number, names in enumerate(space.branches):
        for name in names:
            branches[name].append(branch_name(number))
    newest = set(space.classes) - set(space.upto(len(space.branches) - 2).classes) if len(space.branches) > 1 else set()
    return [
        Class(
            **{"class": name},
            split="overlap" if split == OVERLAP else branches[name][0],
            branches=branches[name],
            new=name in newest,
        )
        for name, split in zip(space.classes, space.split_of_class.tolist(), strict=True)
    ]


def branch_name(number: int) -> str:
    return "base" if number == 0 else f"step {number}"


def matching(classes: Sequence[Class], search: str) -> list[Class]:
    """The classes whose name contains `search`, ignoring case; those that begin with it first."""
    wanted = _folded(search)
    found = [each for each in classes if wanted in _folded(each.name)]
    return sorted(found, key=lambda each: not _folded(each.name).startswith(wanted))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()
