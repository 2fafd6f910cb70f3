"""What was wrong with the files of a folder: collected while it is read, summarised for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from branchout.data.decode import Kind
from branchout.errors import printable

UNNAMED = frozenset({Kind.HIDDEN, Kind.COMPANION})
"""Kinds that are counted without naming the files: nobody meant them to be training images."""


@dataclass(frozen=True)
class Problem:
    kind: Kind
    path: str
    """Relative to the folder scanned, with forward slashes."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.detail})" if self.detail else self.path


@dataclass
class Problems:
    """Each file or folder that has a problem, and which. Their names are safe to print."""

    items: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.items)

    def add(self, kind: Kind, path: str, detail: str = "") -> None:
        self.items.append(Problem(kind, printable(path), printable(detail)))

    def of(self, kind: Kind) -> list[Problem]:
        return [problem for problem in self.items if problem.kind == kind]

    @property
    def counts(self) -> dict[Kind, int]:
        found = Counter(problem.kind for problem in self.items)
        return {kind: found[kind] for kind in Kind if found[kind]}

    def summary(self, examples: int = 3) -> list[str]:
        """One line per kind, such as `5 truncated: dog/a.jpg, dog/b.jpg, dog/c.jpg, …`."""
        lines = []
        for kind, count in self.counts.items():
            named = [] if kind in UNNAMED else [str(problem) for problem in self.of(kind)[:examples]]
            more = ", …" if named and count > examples else ""
            lines.append(f"{count:,} {kind}" + (": " + ", ".join(named) + more if named else ""))
        return lines
