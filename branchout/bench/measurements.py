"""Measured numbers as claims are judged by: each with its spread, and with how far chance alone may move it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchout.bench.contenders import contenders

Rows = Mapping[Path, Mapping[str, Any]]
TEST_IMAGES = {"glyphs": 10}
"""Of each class, for rows that do not tell; 25 if not given: half of what ImageNet and Tiny-ImageNet have."""


class Missing(Exception):  # noqa: N818 – not an error: the claim is then not measured
    """A row that a claim needs is not there."""


@dataclass(frozen=True)
class Value:
    """One measured number: a mean, its spread where seeds are several, its standard error for so many test images."""

    mean: float
    std: float | None
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ± {self.std:.1f}"

    def chance(self, other: Value) -> float:
        """How large a difference has to be to say anything.

        Both see the same images, which makes the error of their difference about that of one of them.
        """
        return max(self.std or 0, other.std or 0, self.error, other.error)

    def against(self, other: Value) -> str:
        close = abs(self.mean - other.mean) < self.chance(other)
        return f"{self} against {other}{' (too close to tell)' if close else ''}"


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

    def row(self, experiment: str, contender: str, point: str, arch: str) -> Mapping[str, Any]:
        path = Path(self.dataset) / experiment / arch / f"{contender}-{point}.json"
        if path not in self.rows:
            raise Missing(f"no row of {label(contender)}{'' if point == 'plain' else f', {point}'}")
        return self.rows[path]

    def value(self, metric: str, experiment: str, contender: str, point: str, arch: str) -> Value:
        row = self.row(experiment, contender, point, arch)
        mean = row["metrics"].get(metric)
        if mean is None:
            raise Missing(f"no {metric} in the row of {label(contender)}")
        several = len(row.get("seeds") or ()) > 1
        return Value(float(mean), (row.get("std") or {}).get(metric) if several else None, self.error(row, metric))

    def perhaps(self, metric: str, experiment: str, contender: str, point: str, arch: str) -> Value | None:
        """A number that is told beside a claim and decides nothing."""
        try:
            return self.value(metric, experiment, contender, point, arch)
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


def label(contender: str) -> str:
    known = contenders()
    return known[contender].label if contender in known else contender
