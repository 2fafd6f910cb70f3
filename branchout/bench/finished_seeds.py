"""The exemplar seeds that a stopped run has finished: kept in a file beside the rows, and not measured again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from branchout.bench.measure import Measured
from branchout.bench.rows import packed, unpacked
from branchout.data.samples import digest
from branchout.errors import BranchoutError
from branchout.evaluate.two_fold import Scored
from branchout.files import read_json, write_json
from branchout.metrics import Accuracies

UNUSABLE = (BranchoutError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file raises, or one of an earlier format."""


def write(
    path: Path, about: Mapping[str, Any], finished: Mapping[int, Measured], unfinished: Measured | None = None
) -> None:
    """Write finished seeds, and the steps so far of one that is not finished, which are for readers only.

    `about` is all that the seeds depend on; `read` compares it.
    """
    content = {
        "about": about,
        "finished": {str(seed): as_json(measured) for seed, measured in finished.items()},
        "unfinished": None if unfinished is None else as_json(unfinished),
    }
    write_json(path, {**content, "checksum": _checksum(content)})


def read(path: Path, about: Mapping[str, Any]) -> dict[int, Measured]:
    """The finished seeds of a file that agrees with `about`; none if it does not, or cannot be read."""
    if about["commit"].endswith("-dirty"):  # it does not say which code that is
        return {}
    try:
        content = read_json(path)
        intact = content.pop("checksum") == _checksum(content)
        if not intact or content["about"] != json.loads(json.dumps(about)):
            return {}
        return {int(seed): from_json(saved) for seed, saved in content["finished"].items()}
    except UNUSABLE:
        return {}


def as_json(measured: Measured) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(asdict(measured), default=packed))
    return saved


def from_json(saved: Mapping[str, Any]) -> Measured:
    points = {point: [_scored(each) for each in steps] for point, steps in saved["points"].items()}
    first = None if saved["first"] is None else _scored(saved["first"])
    return Measured(**{**saved, "points": points, "first": first})


def _scored(saved: Mapping[str, Any]) -> Scored:
    halves = {half: Accuracies(**{**saved[half], "steps": tuple(saved[half]["steps"])}) for half in ("test", "both")}
    settings = {name: tuple(saved[name]) for name in ("setting", "offsets")}
    return Scored(**{**saved, **halves, **settings, "right": unpacked(saved["right"])})


def _checksum(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True))
