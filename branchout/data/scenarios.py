"""Scenarios (paper, section 5.1): which classes and which samples the base and each step are given.

A scenario contains no images: class names and, where the samples of a class are divided, one digit per sample. It
applies to any copy of the dataset, and is one JSON file, so that others can use the same split. `draw_scenario` makes
them.

- `disjoint`, `disjoint-domain`: base classes and other, novel classes, the latter from another domain;
- `steps`: base classes, then T steps of n classes each;
- `overlap-{random,domain}-{shuffled,clustered}`: some novel classes are base classes too. *Every* class is halved, at
  random or by K-Means, and the base uses first halves, the step second halves;
- `overlap-style`: overlapping classes look different on the two sides: two sibling classes merged into one, or one
  class in two sets of styles;
- `overlap-full`: all novel classes are base classes; halved by K-Means as in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from branchout.data.datasets import Dataset
from branchout.data.samples import UNASSIGNED, Samples, concatenate, digest
from branchout.errors import BranchoutError, explain_invalid, unknown
from branchout.files import read_json, write_json
from branchout.labels import Ints, LabelSpace, branch_name

NAMES = (
    "disjoint",
    "disjoint-domain",
    "steps",
    "overlap-random-shuffled",
    "overlap-random-clustered",
    "overlap-domain-shuffled",
    "overlap-domain-clustered",
    "overlap-style",
    "overlap-full",
)
CLUSTERED = ("overlap-random-clustered", "overlap-domain-clustered", "overlap-full")
FROM_GIVEN = ("disjoint", "steps")
"""Those that can start from any trained base: the new classes are others than its own."""
FORMAT = "branchout-scenario-1"


@dataclass(frozen=True)
class Scenario:
    """Which classes and samples each branch is given, and which validation images choose (dev) or report (test)."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    name: str
    dataset: str
    seed: int
    branches: tuple[tuple[str, ...], ...]
    """Class names of the base and of every step."""
    dev_or_test: Mapping[str, str]
    """Dataset class → a digit per validation sample in the order of their ids: 0 is dev, 1 is test."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """Dataset class → the class it has become part of."""
    sides: Mapping[str, str] = field(default_factory=dict)
    """Dataset class → a digit per training sample in the order of their ids: 0 goes to the base, 1 to a step."""
    samples: str = ""
    """A digest of the sample ids the digits refer to."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Of a clustered scenario: how the network was trained whose features decided, if that is known."""

    @property
    def space(self) -> LabelSpace:
        return LabelSpace(self.branches)

    # Applying the plan to the dataset's samples.

    def train(self, dataset: Dataset) -> Samples:
        """The training samples in use, each with its origin and, if merged, its new class name."""
        self._check(dataset)
        side = digits(dataset.train, self.sides)
        merged = dataset.train.rename(self.merged)
        given = []
        for origin, classes in enumerate(self.branches):
            of_branch = np.isin(merged.labels, [i for i, name in enumerate(merged.classes) if name in set(classes)])
            on_side = (side == -1) | (side == (0 if origin == 0 else 1))
            given.append(merged.select(of_branch & on_side).with_origin(origin))
        return concatenate(given)

    def dev(self, dataset: Dataset, step: int | None = None) -> Samples:
        """Validation images to choose with, of the classes known after `step` steps (all of them by default)."""
        return self._half(dataset, 0, step)

    def test(self, dataset: Dataset, step: int | None = None) -> Samples:
        """Validation images to report on, never those of `dev`."""
        return self._half(dataset, 1, step)

    def _half(self, dataset: Dataset, digit: int, step: int | None) -> Samples:
        self._check(dataset)
        half = dataset.val.select(digits(dataset.val, self.dev_or_test) == digit).rename(self.merged)
        space = self.space if step is None else self.space.upto(step)
        return half.of_classes(space.classes).with_origin(UNASSIGNED)

    def _check(self, dataset: Dataset) -> None:
        found = sample_digest(dataset, self.dev_or_test)
        if found != self.samples:
            raise BranchoutError(
                f"this scenario was made from other samples: it names {len(self.dev_or_test)} classes of "
                f"'{self.dataset}', and the samples of those classes in '{dataset.name}' are not the same. "
                "Use the dataset it was made from, with the same number of samples per class, or draw it again."
            )

    # The file.

    def save(self, path: Path) -> None:
        plan = {"format": FORMAT, **asdict(self)}
        if not self.network:
            del plan["network"]
        write_json(path, plan)

    @classmethod
    def load(cls, path: Path) -> Scenario:
        """Read and check a file; the error for a wrong one names the file and the field."""
        from pydantic import TypeAdapter, ValidationError

        if not path.exists():
            raise BranchoutError(f"no scenario file {path}; make one with: branchout scenario NAME DATA --out {path}")
        plan = read_json(path)
        if not isinstance(plan, dict) or plan.pop("format", None) != FORMAT:
            raise BranchoutError(f'{path} is not a scenario file: expected "format": "{FORMAT}"')
        try:
            return TypeAdapter(cls).validate_json(json.dumps(plan), strict=True)
        except (ValidationError, BranchoutError) as error:
            reason = explain_invalid(error) if isinstance(error, ValidationError) else error
            raise BranchoutError(f"{path} is not a valid scenario: {reason}") from None

    def __post_init__(self) -> None:
        """Check what types cannot express."""
        if self.name not in NAMES:
            raise unknown("scenario", self.name, NAMES)
        divided = [*self.sides.items(), *self.dev_or_test.items()]
        wrong = [name for name, text in divided if not set(text) <= {"0", "1"}]
        if wrong:
            raise BranchoutError(f"the digits of class {wrong[0]!r} are not all 0 or 1")
        of_dataset = {*self.dev_or_test}
        absent = {*self.space.classes} - {self.merged.get(name, name) for name in of_dataset}
        absent |= {*self.merged, *self.sides} - of_dataset
        if absent:
            raise BranchoutError(f"dev_or_test does not list class {min(absent)!r}")

    def __str__(self) -> str:
        parts = " + ".join(f"{len(names)}" for names in self.branches)
        shared = self.space.overlap
        return f"{self.name} on {self.dataset}: {parts} classes" + (f", {len(shared)} of them shared" if shared else "")


# Digits are in the order of the sample ids, so that they mean the same samples in whatever order a folder is read.


def digits(samples: Samples, written: Mapping[str, str]) -> Ints:
    """The digit of every sample; -1 for samples of classes that have none."""
    out = np.full(len(samples), -1, dtype=np.int64)
    by_label = members_in_id_order(samples)
    for name, text in written.items():
        if name in by_label:
            if len(text) != len(by_label[name]):
                raise BranchoutError(f"{len(text)} digits for the {len(by_label[name])} samples of class {name!r}")
            out[by_label[name]] = np.frombuffer(text.encode(), dtype=np.uint8) - ord("0")
    return out


def sample_digest(dataset: Dataset, classes: Mapping[str, str]) -> str:
    """Identifies the training and validation samples of these classes, wherever they lie."""
    parts: list[str] = []
    for table in (dataset.train, dataset.val):
        members = members_in_id_order(table)
        parts += [digest(name, *table.ids[members[name]].tolist()) for name in sorted(classes) if name in members]
    return digest(*parts)


def members_in_id_order(samples: Samples) -> dict[str, Ints]:
    """Every class's positions, sorted by id; one sort for all classes."""
    order = np.argsort(samples.ids, kind="stable")  # np.lexsort of such texts ends the process with numpy 2.0
    order = order[np.argsort(samples.labels[order], kind="stable")]
    ends = np.cumsum(np.bincount(samples.labels, minlength=len(samples.classes)))[:-1]
    return dict(zip(samples.classes, np.split(order, ends), strict=True))


def describe(scenario: Scenario, dataset: Dataset) -> list[tuple[str, int, int]]:
    """Rows of (split, classes, images) for a table a person reads."""
    train = scenario.train(dataset)
    known = len(scenario.space.classes)
    return [
        *((branch_name(n), len(names), int((train.origin == n).sum())) for n, names in enumerate(scenario.branches)),
        ("dev", known, len(scenario.dev(dataset))),
        ("test", known, len(scenario.test(dataset))),
    ]
