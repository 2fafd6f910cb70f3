"""Images to show: those that were forgotten or gained, and thumbnails that are embedded in a page."""

from __future__ import annotations

import base64
import io

import numpy as np

from branchout.data.samples import Image
from branchout.labels import Bools, Ints
from branchout.report.answers_by_point import PointValues

KINDS = ("forgotten", "gained")
SIDE = 128
"""Longest side of a thumbnail in pixels."""
SMALL = 64
"""Images up to this size are kept as they are, in PNG."""


def members(kind: str, answers: Ints, labels: Ints, were_right: Bools) -> Bools:
    """Forgotten: right before and wrong now. Gained: right now, and wrong before or of a class not known then."""
    found: Bools = were_right & (answers != labels) if kind == "forgotten" else ~were_right & (answers == labels)
    return found


def spread(images: Ints, labels: Ints) -> Ints:
    """The images in an order that begins with one of each class, then a second of each, and so on."""
    rank = np.zeros(len(images), dtype=np.int64)
    seen: dict[int, int] = {}
    for place, label in enumerate(labels[images].tolist()):
        rank[place] = seen[label] = seen.get(label, -1) + 1
    return images[np.argsort(rank, kind="stable")]


def select(
    kind: str, answers: PointValues, points: int, saved: int, labels: Ints, were_right: Bools, known: Bools, most: int
) -> list[int]:
    """Images to make thumbnails of: those of the gallery at the saved point, then of points further and further away.

    `known` says whose class was known before the last step. At most three galleries full.
    """
    found: dict[int, None] = {}
    for point in sorted(range(points), key=lambda p: (abs(p - saved), p)):
        images = np.flatnonzero(members(kind, answers.at(point), labels, were_right))
        # Images of classes that were known before say more than those of classes that could not be known.
        old, new = spread(images[known[images]], labels), spread(images[~known[images]], labels)
        room = max(most // 2, most - len(new))
        found |= dict.fromkeys([*old[:room].tolist(), *new.tolist(), *old[room:].tolist()][:most])
        if len(found) >= 3 * most:
            break
    return list(found)[: 3 * most]


def thumbnail(image: Image) -> str:
    """A small copy as a data URI."""
    kind, data = small_copy(image)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def small_copy(image: Image) -> tuple[str, bytes]:
    """The media type and the bytes of a small copy: JPEG, or PNG for images of few pixels."""
    from PIL import Image as Pillow

    copy = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    kind, quality = ("png", {}) if max(copy.size) <= SMALL else ("jpeg", {"quality": 72})
    copy.thumbnail((SIDE, SIDE), Pillow.Resampling.LANCZOS)  # never enlarges
    file = io.BytesIO()
    copy.save(file, kind, optimize=True, **quality)
    return f"image/{kind}", file.getvalue()
