"""Counts on labelled images at one operating point: per class, per part, and for pairs of confused classes.

The page's script counts in the same way at every other point, from the same answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from branchout.labels import Bools, Ints
from branchout.report.data import ReportData
from branchout.report.gallery import KINDS, members


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Images that were right before the last step and are wrong now, and those that were wrong and are right."""

    images: int
    lost: int
    gained: int

    @property
    def change(self) -> int:
        return self.gained - self.lost

    @property
    def noise(self) -> bool:
        """Whether as large a change would be common by chance: McNemar's test with continuity correction, 5%."""
        return max(abs(self.change) - 1, 0) ** 2 < 3.84 * (self.lost + self.gained)


@dataclass(frozen=True, kw_only=True)
class ClassCounts(Changed):
    """One class with images."""

    number: int
    before: int | None
    """Images that were right before the last step; None for a class that was not known then."""
    after: int
    by_branch: list[int]
    """Of an overlapping class: right answers by the branch whose logit was the highest."""


@dataclass(frozen=True, kw_only=True)
class PartCounts(Changed):
    """One part (base, a step, the overlap) with images."""

    number: int
    right: int
    wrong: dict[int, int]
    """Wrong answers by the part of the answered class."""


@dataclass(frozen=True)
class PairCounts:
    """Images of one class that are answered with another."""

    label: int
    answer: int
    images: int
    were_right: int
    """Those of them that were right before the last step."""


@dataclass(frozen=True, kw_only=True)
class OldImages(Changed):
    """Images of classes that were known before the last step and do not overlap: what can be forgotten."""

    before: int
    after: int


@dataclass(frozen=True)
class Counts:
    """All counts of one operating point."""

    answers: list[int]
    classes: list[ClassCounts]
    """Largest losses first, then classes that were not known before, lowest accuracy first."""
    parts: list[PartCounts]
    to_later: list[PairCounts]
    """Images answered with a class that a later branch added; the most frequent pair first."""
    to_earlier: list[PairCounts]
    old: OldImages
    galleries: dict[str, list[int]]
    """The images that belong to each gallery."""


def counts_at(report: ReportData, point: int) -> Counts:
    test = report.test
    assert test is not None
    labels, answers = np.array(test.labels), test.answers.at(point)
    were_right, part = np.array(test.were_right), np.array(report.part_of_class)
    right, overlap = answers == labels, len(report.parts) - 1
    old = (labels < test.known) & (part[labels] != overlap)
    pairs = _pairs(report, labels, answers, were_right)
    return Counts(
        answers=answers.tolist(),
        classes=_classes(report, labels, right, test.branches.at(point)),
        parts=_parts(part[labels], part[answers], right, were_right),
        to_later=pairs[1],
        to_earlier=pairs[-1],
        old=OldImages(
            before=int(were_right[old].sum()), after=int(right[old].sum()), **_changed(old, right, were_right)
        ),
        galleries={kind: np.flatnonzero(members(kind, answers, labels, were_right)).tolist() for kind in KINDS},
    )


def _changed(chosen: Bools, right: Bools, were_right: Bools) -> dict[str, int]:
    lost, gained = chosen & were_right & ~right, chosen & ~were_right & right
    return {"images": int(chosen.sum()), "lost": int(lost.sum()), "gained": int(gained.sum())}


def _classes(report: ReportData, labels: Ints, right: Bools, branches: Ints) -> list[ClassCounts]:
    test = report.test
    assert test is not None
    were_right, size = np.array(test.were_right), len(report.classes)

    def counted(chosen: Bools) -> list[int]:
        found: list[int] = np.bincount(labels[chosen], minlength=size).tolist()
        return found

    images, before, after = counted(np.ones_like(right)), counted(were_right), counted(right)
    lost, gained = counted(were_right & ~right), counted(~were_right & right)
    by = [counted(right & (branches == d)) for d in range(len(report.branches))]
    rows = [
        ClassCounts(
            number=n,
            images=images[n],
            before=before[n] if test.before is not None and n < test.known else None,
            after=after[n],
            lost=lost[n],
            gained=gained[n],
            by_branch=[each[n] for each in by] if report.part_of_class[n] == len(report.parts) - 1 else [],
        )
        for n in range(size)
        if images[n]
    ]
    return sorted(rows, key=lambda r: (r.before is None, r.after / r.images if r.before is None else r.change))


def _parts(of: Ints, answered: Ints, right: Bools, were_right: Bools) -> list[PartCounts]:
    present = sorted({*of.tolist(), *answered.tolist()})
    return [
        PartCounts(
            number=n,
            right=int((right & (of == n)).sum()),
            wrong={other: int((~right & (of == n) & (answered == other)).sum()) for other in present},
            **_changed(of == n, right, were_right),
        )
        for n in sorted(set(of.tolist()))
    ]


def _pairs(report: ReportData, labels: Ints, answers: Ints, were_right: Bools) -> dict[int, list[PairCounts]]:
    """Pairs by the direction of the mistake: 1 to a class of a later branch, -1 to one of an earlier branch."""
    first = np.array(report.first_branch)
    direction = np.sign(first[answers] - first[labels])
    found: dict[int, list[PairCounts]] = {}
    for sign in (1, -1):
        images = np.flatnonzero(direction == sign)
        pairs = list(zip(labels[images].tolist(), answers[images].tolist(), strict=True))
        earlier = Counter(pair for pair, was in zip(pairs, were_right[images].tolist(), strict=True) if was)
        rows = [PairCounts(*pair, count, earlier[pair]) for pair, count in Counter(pairs).items()]
        names = report.classes
        found[sign] = sorted(rows, key=lambda row: (-row.images, names[row.label], names[row.answer]))
    return found
