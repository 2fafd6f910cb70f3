"""Pictures to look at: which images were forgotten or won, and small copies that travel inside a page."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt

from branchout.data.samples import Image
from branchout.report.answers_along import Along

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SIDE = 128
"""Longest side of a small copy in pixels."""
DRAWING = 64
"""Pictures up to this size are kept to the pixel."""


def forgotten(answers: Ints, labels: Ints, before: Ints, known: Bools) -> Bools:
    """Right before and wrong now. `before` is what the earlier model said, `known` whether it knew the class."""
    lost: Bools = known & (before == labels) & (answers != labels)
    return lost


def won(answers: Ints, labels: Ints, before: Ints, known: Bools) -> Bools:
    """Right now, and wrong or of an unknown class before."""
    gained: Bools = (answers == labels) & ~(known & (before == labels))
    return gained


def spread(members: Ints, labels: Ints) -> Ints:
    """The members in an order that begins with one of each class, then a second of each, and so on."""
    turn = np.zeros(len(members), dtype=np.int64)
    seen: dict[int, int] = {}
    for place, label in enumerate(labels[members].tolist()):
        turn[place] = seen[label] = seen.get(label, -1) + 1
    return members[np.argsort(turn, kind="stable")]


def picked(kind: str, along: Along, points: int, saved: int, tested: tuple[Ints, Ints, Bools], most: int) -> list[int]:
    """Images worth a small copy: first those of the gallery at the saved point, then those of points ever further away.

    `tested` holds labels, earlier answers and which classes were known. At most three galleries full.
    """
    labels, before, known = tested
    rule = {"forgotten": forgotten, "won": won}[kind]
    found: dict[int, None] = {}
    for point in sorted(range(points), key=lambda p: (abs(p - saved), p)):
        members = np.flatnonzero(rule(along.at(point), labels, before, known))
        # What an earlier model already knew says more than what it could not know; it comes first.
        old, new = members[known[members]], members[~known[members]]
        room = max(most // 2, most - len(new))
        mixed = [
            *spread(old, labels)[:room].tolist(),
            *spread(new, labels).tolist(),
            *spread(old, labels)[room:].tolist(),
        ]
        for image in mixed[:most]:
            found[image] = None
        if len(found) >= 3 * most:
            break
    return list(found)[: 3 * most]


def thumbnail(picture: Image) -> str:
    """A small copy as a data URI: JPEG, or PNG for drawings of few pixels."""
    from PIL import Image as Pillow

    copy = Pillow.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture)
    small = max(copy.size) <= DRAWING
    if not small:
        copy.thumbnail((SIDE, SIDE), Pillow.Resampling.LANCZOS)
    file = io.BytesIO()
    if small:
        copy.save(file, "PNG", optimize=True)
    else:
        copy.save(file, "JPEG", quality=72, optimize=True)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
