"""Measured rows: their values, their spread over seeds, and the variance that the number of test images leaves."""

from __future__ import annotations

import statistics
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from branchout.bench.rows import check_figures, on_another_base
from branchout.errors import BranchoutError
from branchout.files import read_json

TEST_IMAGES = {"glyphs": 10}
"""Test images of each class where a row does not say; 25 for other datasets (half of Tiny-ImageNet's 50)."""
NAMES = {"avg_steps": "avg over steps", "alone": "new classes alone", "parameters": "params (M)"}
"""Column headings that differ from the metric's name."""
GOALS = ("all", "balanced", "avg")


@dataclass(frozen=True)
class Row:
    """One file of results/."""

    path: Path
    """Below the results folder."""
    data: Mapping[str, Any]
    other_base: bool = False
    """Measured with another training of the base than most rows of its folder."""

    def value(self, metric: str) -> float | None:
        """A mean over seeds in percent; parameters in millions."""
        if metric == "parameters":
            count = self.data.get("parameters")
            return count / 1e6 if count else None
        if metric == "alone":
            return self._number(self.data.get("novel_alone"))
        return self._metric(self.data["metrics"], metric)

    @classmethod
    def _metric(cls, figures: Mapping[str, Any], metric: str) -> float | None:
        if metric != "balanced":
            return cls._number(figures.get(metric))
        both = [figures.get(part) for part in ("all", "avg")]
        return None if both[0] is None or both[1] is None else (both[0] + both[1]) / 2

    @staticmethod
    def _number(value: object) -> float | None:
        return float(value) if isinstance(value, int | float) else None

    @property
    def label(self) -> str:
        """What tables call it; rows of photos differ by their settings, which are in the file's name."""
        if self.data.get("scenario") == "photos":
            return self.path.stem.replace("-", " ")
        return str(self.data.get("label") or self.data["method"])

    def by_seed(self, metric: str) -> dict[int, float]:
        """The value of each seed; their mean as that of the first one where all seeds share one stage I."""
        values = self._of_seeds(metric)
        if self.data.get("stage1_per_seed") is False and values:
            return {next(iter(values)): statistics.fmean(values.values())}
        return values

    def _of_seeds(self, metric: str) -> dict[int, float]:
        """Over many steps each seed's mean, with the base as the first step."""
        seeds, steps = self.data.get("seeds") or (), self.data.get("per_step")
        if metric in ("incremental", "avg_steps"):
            if not steps:
                return {}
            part = {"incremental": "all", "avg_steps": "avg"}[metric]
            means = [statistics.fmean([self.data["base_model"], *(step[part] for step in each)]) for each in steps]
            return dict(zip(seeds, means, strict=True))
        values = {
            seed: self._metric(figures, metric)
            for seed, figures in zip(seeds, self.data.get("per_seed") or (), strict=False)
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def spread(self, metric: str) -> float | None:
        """The standard deviation over seeds, dividing by n − 1; None for one seed."""
        values = self.by_seed(metric).values()
        return statistics.stdev(values) if len(values) > 1 else None

    def image_variance(self, metric: str) -> float:
        """The variance of an accuracy in squared percent, if test images are drawn independently."""
        if metric == "alone":  # measured on dev and test images together
            return self._of_share(self.data["novel_alone"], 2 * self.images()["novel"])
        return sum(
            weight**2 * self._of_share(self.data["metrics"][part], self.images()[part])
            for part, weight in self.weights(metric).items()
        )

    @staticmethod
    def _of_share(percent: float, images: float) -> float:
        return percent * (100 - percent) / max(images, 1)

    def images(self) -> dict[str, float]:
        """Test images of each part."""
        shared = self.data.get("overlap_classes") or 0
        classes = {"base": self.data["base_classes"] - shared, "novel": self.data["novel_classes"] - shared}
        classes = {part: count for part, count in {**classes, "overlap": shared}.items() if count}
        told = self.data.get("test_images")
        if told and self.data.get("scenario") == "photos":  # classes have different numbers of test images
            figures = self.data["metrics"]
            share = (figures["all"] - figures["base"]) / (figures["novel"] - figures["base"])
            return {"base": told * (1 - share), "novel": told * share}
        each = told / sum(classes.values()) if told else TEST_IMAGES.get(self.data["dataset"], 25)
        return {part: count * each for part, count in classes.items()}

    def weights(self, metric: str) -> dict[str, float]:
        """An accuracy as a weighted sum of those of its parts; over many steps avg counts every step the same."""
        known = self.data["metrics"]
        images = {part: count for part, count in self.images().items() if known.get(part) is not None}
        steps = self.data.get("steps") or 1
        if metric in images:
            return {metric: 1.0}
        every = {part: count / sum(images.values()) for part, count in images.items()}
        counted = {part: steps if part == "novel" else 1 for part in images}
        mean = {part: count / sum(counted.values()) for part, count in counted.items()}
        if metric == "balanced":
            return {part: (every[part] + mean[part]) / 2 for part in images}
        return mean if metric in ("avg", "avg_steps") else every

    def right(self) -> dict[str, npt.NDArray[np.float64]]:
        """For each image of each part the share of seeds that predict it correctly, where the row says so."""
        found = {}
        for part, seeds in (self.data.get("correct") or {}).items():
            bits = [np.frombuffer(b64decode(text.split(":")[1]), np.uint8) for text in seeds]
            count = int(seeds[0].split(":")[0])
            found[part] = np.mean([np.unpackbits(each, count=count) for each in bits], axis=0)
        return found

    @property
    def old(self) -> str | None:
        """Why the row should be measured again, if it should."""
        return self.data.get("superseded") or self.data.get("outdated")

    @property
    def marks(self) -> str:
        return (" †" if self.old else "") + (" ‡" if self.other_base else "")


Rows = Mapping[Path, Row]


def read(results: Path) -> dict[Path, Row]:
    """All rows below a folder, by their path in it."""
    found: dict[Path, Mapping[str, Any]] = {}
    for path in sorted(results.rglob("*.json")):
        place = path.relative_to(results)
        try:
            data = read_json(path)
            if isinstance(data, dict) and "metrics" in data and "dataset" in data:
                check_figures(data)
                found[place] = data
            elif len(place.parts) == 4:  # where rows are: dataset, table, network
                raise ValueError("it has no dataset or no metrics")
        except (BranchoutError, ValueError) as error:
            raise BranchoutError(f"{path} cannot be read as a row ({error}); delete it and run it again") from None
    odd = set(on_another_base({path: data for path, data in found.items() if len(path.parts) == 4}))
    return {path: Row(path, data, path in odd) for path, data in found.items()}


def row_of(rows: Rows, dataset: str, experiment: str, arch: str, name: str) -> Row | None:
    return rows.get(Path(dataset, experiment, arch, f"{name}.json"))
