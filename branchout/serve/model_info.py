"""A model told as plain data: what it knows, how it came to be, what it can be tuned to."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from branchout import __version__
from branchout.api import Model
from branchout.labels import OVERLAP


def model_facts(model: Model) -> dict[str, Any]:
    classifier = model.classifier
    history = model.saved.history
    folder = model.folder
    return {
        "name": folder.name if folder is not None else str(history[0].get("base", "model") if history else "model"),
        "version": __version__,
        "kind": classifier.kind,
        "architecture": classifier.arch,
        "classes": class_facts(model),
        "steps": [
            {"step": number, "branch": step.where, "classes": len(step.names)}
            for number, step in enumerate(classifier.steps, 1)
        ],
        "pooler": classifier.fused.pooler.kind,
        "parameters": classifier.parameter_counts(),
        "bytes": None if folder is None else sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "preprocessing": classifier.preprocessing.to_dict(),
        "history": [dict(event) for event in history],
        "frontier": model.frontier.to_dict() if model.saved.fusions else None,
    }


def class_facts(model: Model) -> list[dict[str, Any]]:
    """Every class and the branch that knows it; a class that several know is an overlap."""
    space = model.classifier.space
    known = {name: [] for name in space.classes}  # type: dict[str, list[str]]
    for number, names in enumerate(space.branches):
        for name in names:
            known[name].append("base" if number == 0 else f"step {number}")
    newest = set(space.classes) - set(space.upto(len(space.branches) - 2).classes) if len(space.branches) > 1 else set()
    return [
        {
            "class": name,
            "split": "overlap" if split == OVERLAP else known[name][0],
            "branches": known[name],
            "new": name in newest,
        }
        for name, split in zip(space.classes, space.split_of_class.tolist(), strict=True)
    ]


def matching(classes: Sequence[Mapping[str, Any]], search: str) -> list[Mapping[str, Any]]:
    """The classes whose name has `search` in it, whatever the case; those that begin with it first."""
    wanted = _folded(search)
    found = [each for each in classes if wanted in _folded(each["class"])]
    return sorted(found, key=lambda each: not _folded(each["class"]).startswith(wanted))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()


def finite(value: Any) -> Any:
    """The same data with null for what JSON has no word for: a loss that was not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
