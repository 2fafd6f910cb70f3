"""A contact sheet: a few images of every class under its name, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from branchout.data.glyphs import font_file
from branchout.data.samples import Image, Samples
from branchout.errors import BranchoutError
from branchout.files import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PICTURE, GAP, CAPTION, COLUMNS = 64, 4, 20, 4
INK, PAPER = (40, 40, 40), (255, 255, 255)


def contact_sheet(samples: Samples, path: Path, *, classes: int = 60, each: int = 5) -> int:
    """Draw `each` images of up to `classes` classes, evenly spread over all; returns how many classes are shown."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    shown = np.unique(np.linspace(0, len(samples.classes) - 1, min(classes, len(samples.classes))).round().astype(int))
    columns = min(COLUMNS, len(shown))
    width = each * (PICTURE + GAP) + 4 * GAP
    height = CAPTION + PICTURE + 3 * GAP
    sheet = Pillow.new("RGB", (columns * width + 2 * GAP, -(-len(shown) // columns) * height + 2 * GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(font_file("DejaVuSans"), 13)
    for cell, label in enumerate(shown):
        left = 2 * GAP + (cell % columns) * width
        top = 2 * GAP + (cell // columns) * height
        pen.text((left, top), _fitted(samples.classes[label], font, width - 3 * GAP), INK, font)
        members = np.flatnonzero(samples.labels == label)
        for place, index in enumerate(members[np.linspace(0, len(members) - 1, min(each, len(members))).astype(int)]):
            sheet.paste(_thumbnail(samples.read(int(index))), (left + place * (PICTURE + GAP), top + CAPTION))
    format = Pillow.registered_extensions().get(path.suffix.lower())
    try:
        with atomic_write(path) as partial:
            sheet.save(partial, format or "")
    except (ValueError, KeyError):  # an unknown format, or one that Pillow only reads
        raise BranchoutError(f"{path}: images cannot be written in this format. Try: --sheet sheet.png") from None
    return len(shown)


def _thumbnail(image: Image) -> Picture:
    """The middle square of an image, in colour, at the sheet's size."""
    from PIL import Image as Pillow

    picture = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).convert("RGB")
    side = min(picture.size)
    left, top = ((full - side) // 2 for full in picture.size)
    small = side < PICTURE  # small drawings look truer with hard pixels
    how = Pillow.Resampling.NEAREST if small else Pillow.Resampling.LANCZOS
    return picture.crop((left, top, left + side, top + side)).resize((PICTURE, PICTURE), how)


def _fitted(text: str, font: object, width: float) -> str:
    """The text, cut with an ellipsis where it would run into the next column."""
    length = font.getlength  # type: ignore[attr-defined]
    text = " ".join(text.split())  # a folder's name may hold a line break
    if length(text) <= width:
        return text
    while text and length(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
