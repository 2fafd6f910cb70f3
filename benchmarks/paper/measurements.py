"""Measured numbers as claims are judged by: each with its spread, and with how far chance alone may move it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from branchout.bench.methods import methods
from branchout.bench.rows import number, on_another_base
from branchout.bench.tables import BY_BASE

Rows = Mapping[Path, Mapping[str, Any]]
TEST_IMAGES = {"glyphs": 10}
"""Of each class, for rows that do not tell; 25 if not given: half of what ImageNet and Tiny-ImageNet have."""


OUTDATED = "†"
"""Marks rows with a field `outdated`: what has changed in the method since they were measured."""


class Missing(Exception):  # noqa: N818 – not an error: the claim is then not measured
    """A row that a claim needs is not there."""


@dataclass(frozen=True)
class Value:
    """One measured number: a mean, its spread where seeds are several, its standard error for so many test images."""

    mean: float
    std: float | None
    error: float
    mark: str = ""
    """What its row is marked by in tables."""

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {number(self.std)}"
        return f"{number(self.mean)}{spread}{self.mark}"

    def chance(self, other: Value) -> float:
        """How large a difference has to be to say anything.

        Both see the same images, which makes the error of their difference about that of one of them.
        """
        return max(self.std or 0, other.std or 0, self.error, other.error)

    def against(self, other: Value, name: str = "") -> str:
        close = abs(self.mean - other.mean) < self.chance(other)
        remarks = "; ".join(filter(None, (name, "too close to tell" if close else "")))
        return f"{self} against {other}{f' ({remarks})' if remarks else ''}"


@dataclass(frozen=True)
class Verdict:
    """Whether something holds, whether the difference is one that chance could make, and the numbers that say so."""

    held: bool
    close: bool
    told: str


def decided(margins: Sequence[tuple[float, float]], told: str) -> Verdict:
    """By how far each comparison is won, and what chance could do to it: one that is clearly lost decides."""
    lost = any(margin <= -chance for margin, chance in margins)
    won = all(margin > chance for margin, chance in margins)
    return Verdict(all(margin > 0 for margin, _ in margins), not (lost or won), told)


@dataclass(frozen=True)
class Measurements:
    """Rows of one dataset, by who they are about."""

    dataset: str
    rows: Rows

    @cached_property
    def odd(self) -> frozenset[Path]:
        """Rows that may not be compared with those beside them."""
        return frozenset(
            on_another_base({path: row for path, row in self.rows.items() if path.parts[0] == self.dataset})
        )

    def row(self, experiment: str, method: str, point: str, arch: str) -> Mapping[str, Any]:
        path = Path(self.dataset) / experiment / arch / f"{method}-{point}.json"
        about = f"{label(method)}{'' if point == 'plain' else f', {point}'}"
        if path not in self.rows:
            raise Missing(f"no row of {about}")
        if path in self.odd:
            raise Missing(f"{about} only with another training of the base model")
        return self.rows[path]

    def value(self, metric: str, experiment: str, method: str, point: str, arch: str) -> Value:
        row = self.row(experiment, method, point, arch)
        mean = row["metrics"].get(metric)
        if mean is None:
            raise Missing(f"no {metric} in the row of {label(method)}")
        mark = f" {OUTDATED}" if row.get("outdated") else ""
        return Value(float(mean), _spread(row, metric), self.error(row, metric), mark)

    def perhaps(self, metric: str, experiment: str, method: str, point: str, arch: str) -> Value | None:
        """A number that is told beside a claim and decides nothing."""
        try:
            return self.value(metric, experiment, method, point, arch)
        except Missing:
            return None

    def error(self, row: Mapping[str, Any], metric: str) -> float:
        """The standard error of an accuracy in percent, from the number of images that it is a share of."""
        shared = row["overlap_classes"]
        classes = {"base": row["base_classes"] - shared, "novel": row["novel_classes"] - shared, "overlap": shared}
        if metric == "avg":
            parts = [(row["metrics"].get(part), count) for part, count in classes.items() if count]
            errors = [self._of_share(row, mean, count) for mean, count in parts if mean is not None]
            return math.hypot(*errors) / max(len(errors), 1)
        return self._of_share(row, row["metrics"][metric], classes.get(metric, sum(classes.values())))

    def error_alone(self, row: Mapping[str, Any]) -> float:
        """The same of new classes asked about alone, which is measured on dev and test together."""
        return self._of_share(row, row["novel_alone"], 2 * row["novel_classes"])

    def _of_share(self, row: Mapping[str, Any], percent: float, classes: int) -> float:
        known = row["base_classes"] + row["novel_classes"] - row["overlap_classes"]
        told = row.get("test_images")
        each = told / known if told else TEST_IMAGES.get(self.dataset, 25)
        return 100 * math.sqrt(percent / 100 * (1 - percent / 100) / max(classes * each, 1))


def _spread(row: Mapping[str, Any], metric: str) -> float | None:
    """The standard deviation over seeds; of accuracy over steps from its steps, before which all share one base."""
    if len(row.get("seeds") or ()) < 2:
        return None
    if metric == "incremental" and row.get("per_step"):
        means = [sum(step["all"] for step in steps) / (len(steps) + 1) for steps in row["per_step"]]
        return float(np.std(means))
    spread: float | None = (row.get("std") or {}).get(metric)
    return spread


def label(method: str) -> str:
    known = methods()
    return known[method].label if method in known else method


def alone(rows: Rows, dataset: str) -> dict[int, dict[str, float]]:
    """Accuracy on new classes alone, by the number of base classes and by what was fine-tuned."""
    found: dict[int, dict[str, float]] = {}
    for path, row in alone_rows(rows, dataset).items():
        found.setdefault(row["base_classes"], {})[tuned_from(path)] = row["novel_alone"]
    return dict(sorted(found.items()))


def tuned_from(path: Path) -> str:
    """From where the network was fine-tuned, by the name of its row."""
    return path.stem.removeprefix("alone-").removesuffix("-alone")


def alone_rows(rows: Rows, dataset: str) -> Rows:
    """The rows that the first two figures are drawn from."""
    return {
        path: row
        for path, row in rows.items()
        if path.parts[0] == dataset
        and re.fullmatch(rf"{BY_BASE}-\d+", path.parts[1])  # not of another split
        and path.parts[2] == "resnet10"
        and path.stem.endswith("-alone")
    }
