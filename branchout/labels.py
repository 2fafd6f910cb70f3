"""Class names ↔ columns of logits: which branch has which column, and which classes several branches share.

Every branch d has one column per class of its own label set Y_d; the columns of all branches stand side by side, the
base first. A class that several branches share has several columns and one entry in the list of all classes Y_a. This
is the only place with label arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from branchout.errors import BranchoutError, unknown

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

OVERLAP = -1
"""The split of a class that more than one branch knows; other splits are the branch's own number, base = 0."""


@dataclass(frozen=True)
class LabelSpace:
    """The classes of the base (branch 0) and of every step (branch t), in column order."""

    branches: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.branches:
            raise BranchoutError("A label space needs at least the classes of the base.")
        for number, names in enumerate(self.branches):
            if not names:
                raise BranchoutError(f"{branch_name(number)} has no classes.")
            repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
            if repeated:
                raise BranchoutError(f"{branch_name(number)} has the same class twice: {', '.join(repeated[:5])}")

    @classmethod
    def of(cls, *branches: Iterable[str]) -> LabelSpace:
        return cls(tuple(tuple(names) for names in branches))

    def extend(self, names: Iterable[str]) -> LabelSpace:
        """The label space after one more step with the classes `names`, new or already known."""
        return LabelSpace((*self.branches, tuple(names)))

    def upto(self, step: int) -> LabelSpace:
        """The label space as it was after `step` steps."""
        return LabelSpace(self.branches[: step + 1])

    # Classes (Y_a).

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """All distinct classes, in the order in which they were learned."""
        return tuple(dict.fromkeys(name for names in self.branches for name in names))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}

    def index(self, names: Sequence[str]) -> Ints:
        """Class numbers of `names`."""
        missing = [name for name in dict.fromkeys(names) if name not in self._index]
        if missing:
            raise unknown("class", missing[0], self.classes)
        return np.array([self._index[name] for name in names], dtype=np.int64)

    @cached_property
    def split_of_class(self) -> Ints:
        """For each class the branch that alone knows it, or OVERLAP where several do."""
        owners: dict[str, int] = {}
        for branch, names in enumerate(self.branches):
            for name in names:
                owners[name] = OVERLAP if name in owners else branch
        return np.array([owners[name] for name in self.classes], dtype=np.int64)

    @property
    def overlap(self) -> tuple[str, ...]:
        """The classes that several branches know."""
        return tuple(name for name, split in zip(self.classes, self.split_of_class, strict=True) if split == OVERLAP)

    # Columns (Σ|Y_d|).

    @property
    def columns(self) -> int:
        return sum(len(names) for names in self.branches)

    def slice_of(self, branch: int) -> slice:
        """The columns that `branch` owns."""
        start = sum(len(names) for names in self.branches[:branch])
        return slice(start, start + len(self.branches[branch]))

    @cached_property
    def branch_of_column(self) -> Ints:
        return np.repeat(np.arange(len(self.branches)), [len(names) for names in self.branches])

    @cached_property
    def class_of_column(self) -> Ints:
        return np.concatenate([self.index(names) for names in self.branches])


def unique_names(names: Sequence[str], suffixes: Iterable[object], key: Callable[[str], str] = str) -> tuple[str, ...]:
    """Class names that differ: those of which there are several get their suffix in brackets, `crane (n02012849)`.

    Two names are the same if `key` gives the same for both.
    """
    count = Counter(map(key, names))
    return tuple(
        name if count[key(name)] == 1 else f"{name} ({suffix})" for name, suffix in zip(names, suffixes, strict=True)
    )


def almost_known(names: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """New names that differ from a known one only in case, spaces, hyphens or other marks, each with that one."""

    def simple(name: str) -> str:
        return "".join(letter for letter in name.casefold() if letter.isalnum())

    old = {simple(name): name for name in known if simple(name)}
    return [(name, old[simple(name)]) for name in names if simple(name) in old and name not in known]


def branch_name(number: int) -> str:
    """The name of a branch in messages and tables."""
    return "the base" if number == 0 else f"step {number}"
