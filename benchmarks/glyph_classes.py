"""How the classes of the built-in dataset were found. `python -m benchmarks.glyph_classes` finds them again."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from branchout.data.glyphs import CLASSES, MARGIN, REACH, SANS, SCRIPTS, SERIF, font_file, stencil

REGULAR = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
"""The faces in which characters are compared."""
ALIKE = 0.95
"""Two characters whose drawings correlate this much are one class: Latin A and Greek Α, x and X, ô and ó."""


def find_classes() -> dict[str, tuple[str, ...]]:
    """The characters that look like none before them, and the faces that draw each: what glyphs.json holds.

    One pass in code point order: a candidate is kept unless a regular face draws it as a regular face, the same or
    another, draws a character already kept.
    """
    found = candidates()
    looks = [looks_of(character, faces) for character, faces in found.items()]
    owner = np.repeat(np.arange(len(looks)), [len(look) for look in looks])
    every = np.concatenate(looks)
    alike = every @ every.T >= ALIKE
    free = np.ones(len(every), dtype=bool)  # the drawings that no kept character resembles
    kept = {}
    for number, (character, faces) in enumerate(found.items()):
        mine = owner == number
        if free[mine].all():
            kept[character] = faces
            free &= ~alike[mine].any(axis=0)
    return kept


def candidates() -> dict[str, tuple[str, ...]]:
    """Letters, digits, punctuation and symbols that DejaVu Sans and a serif face carry, and all faces that do."""
    from matplotlib.ft2font import FT2Font

    carried = {face: FT2Font(font_file(face)).get_charmap() for face in (*SANS, *SERIF)}
    found = {}
    for code in (code for first, last, _ in SCRIPTS for code in range(first, last + 1)):
        faces = tuple(face for face in carried if code in carried[face])
        category = unicodedata.category(chr(code))
        wanted = category[0] in "LNPS" and category not in ("Lm", "Sk")  # no modifiers of another character
        if wanted and SANS[0] in faces and set(faces) & set(SERIF) and stencil(chr(code), SANS[0]).getbbox():
            found[chr(code)] = faces
    return found


def looks_of(character: str, faces: Iterable[str]) -> npt.NDArray[np.float32]:
    """One row per regular face: the blurred drawing as a vector of mean 0 and length 1. Products are correlations."""
    from PIL import Image, ImageFilter

    square = REACH + 2 * MARGIN, REACH + 2 * MARGIN
    looks = []
    for face in sorted(set(REGULAR) & set(faces)):
        picture, canvas = stencil(character, face), Image.new("L", square)
        canvas.paste(picture, ((canvas.width - picture.width) // 2, (canvas.height - picture.height) // 2))
        look = np.asarray(canvas.filter(ImageFilter.GaussianBlur(1.3)).reduce(2), dtype=np.float32).ravel()
        look -= look.mean()
        looks.append(look / np.linalg.norm(look))
    return np.stack(looks)


def _ship() -> None:
    """Write glyphs.json: characters grouped by the faces that draw them."""
    groups: dict[tuple[str, ...], str] = {}
    for character, faces in find_classes().items():
        groups[faces] = groups.get(faces, "") + character
    listed = [{"faces": faces, "characters": characters} for faces, characters in groups.items()]
    CLASSES.write_text(json.dumps(listed, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _ship()
