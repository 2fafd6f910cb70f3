"""The built-in dataset: Unicode characters drawn in many typefaces, 32×32 grey. Nothing is downloaded.

Every class is one character, named by its Unicode name in lower case ("cyrillic capital letter zhe"): readable, unique
and fit for a folder name. The typefaces are those that matplotlib carries, so each character comes in several styles.
A sample is drawn when it is read, from its seed, split, character and number alone.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from branchout.data.datasets import Dataset
from branchout.data.samples import Image, Samples, digest
from branchout.errors import BranchoutError, unknown
from branchout.labels import Ints

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

VERSION = "1"
"""Part of every fingerprint: to be changed with anything that changes a sample's bytes."""

SIDE = 32
"""Height and width of a sample."""

CLASSES = Path(__file__).with_name("glyphs.json")
"""The classes, found by benchmarks/glyph_classes.py: shipped, so that a new version of a library never shifts them."""

SPLITS = ("train", "val")
LETTERS, SYMBOLS = "letters", "symbols"
"""The two domains. A base model of symbols has never seen a letter."""

SANS = tuple(f"DejaVuSans{width}{cut}" for width in ("", "Mono") for cut in ("", "-Bold", "-Oblique", "-BoldOblique"))
SERIF = tuple(f"DejaVuSerif{cut}" for cut in ("", "-Bold", "-Italic", "-BoldItalic")) + tuple(
    f"STIXGeneral{cut}" for cut in ("", "Bol", "Italic", "BolIta")
)
"""The two sides of a change of style. Every class is drawn in faces of both."""
SCRIPTS = (
    (0x0021, 0x024F, "latin"),
    (0x0250, 0x02AF, "phonetic"),
    (0x0370, 0x03FF, "greek"),
    (0x0400, 0x052F, "cyrillic"),
    (0x0530, 0x058F, "armenian"),
    (0x10A0, 0x10FF, "georgian"),
    (0x2010, 0x206F, "signs"),
    (0x20A0, 0x20CF, "signs"),
    (0x2100, 0x214F, "letterlike"),
    (0x2150, 0x218F, "numbers"),
    (0x2190, 0x21FF, "arrows"),
    (0x2200, 0x22FF, "mathematics"),
    (0x2300, 0x23FF, "technical"),
    (0x2460, 0x24FF, "numbers"),
    (0x2500, 0x259F, "boxes"),
    (0x25A0, 0x25FF, "shapes"),
    (0x2600, 0x27BF, "pictures"),
    (0x2800, 0x28FF, "braille"),
)
"""First and last code point of the Unicode blocks that are drawn, and what a sample's `script` says of them."""

# The dataset.


def glyphs(
    train_per_class: int = 48, val_per_class: int = 20, seed: int = 0, classes: Sequence[str] | None = None
) -> Dataset:
    """All classes, or those named; the same seed gives the same bytes, however many samples and classes are asked for.

    A sample's attributes are `domain` (letters or symbols), `script` (latin, arrows, …) and `style` (its typeface).
    """
    names = sorted(faces_of_classes() if classes is None else classes)
    if not names or len(set(names)) < len(names):
        raise BranchoutError(f"expected at least one class and each class once, found {len(names)} names: {names[:5]}")
    if min(train_per_class, val_per_class) < 1 or seed < 0:
        raise BranchoutError(
            f"expected at least one sample per class and a seed from 0 on, found train_per_class={train_per_class}, "
            f"val_per_class={val_per_class}, seed={seed}"
        )
    characters = tuple(character_of(name) for name in names)
    return Dataset(
        name="glyphs",
        train=_table(GlyphPixels("train", characters, train_per_class, seed), names),
        val=_table(GlyphPixels("val", characters, val_per_class, seed), names),
        kind="glyph",
        domains={name: domain_of(character) for name, character in zip(names, characters, strict=True)},
        base_domain=SYMBOLS,
        style_sides=(frozenset(SANS), frozenset(SERIF)),
    )


def _table(pixels: GlyphPixels, names: Sequence[str]) -> Samples:
    """One row per sample, class after class."""
    each = pixels.per_class
    styles = [pixels.face(row) for row in range(len(pixels))]
    codes = [f"{pixels.split}/U+{ord(character):04X}" for character in pixels.characters]
    return Samples.build(
        pixels,
        np.repeat(names, each),
        [f"{codes[row // each]}/{style}/{row % each}" for row, style in enumerate(styles)],
        attributes={
            "domain": np.repeat([domain_of(character) for character in pixels.characters], each),
            "script": np.repeat([script_of(character) for character in pixels.characters], each),
            "style": styles,
        },
    )


@dataclass(frozen=True)
class GlyphPixels:
    """Pixels that are drawn when they are read: `per_class` samples of one character, then of the next."""

    split: str
    characters: tuple[str, ...]
    per_class: int
    seed: int
    _stencils: dict[tuple[str, str], Picture] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Large drawings made so far: at most one of every character in every face, 1 kB each."""

    def __reduce__(self) -> tuple[type[GlyphPixels], tuple[str, tuple[str, ...], int, int]]:
        return GlyphPixels, (self.split, self.characters, self.per_class, self.seed)  # the stencils stay behind

    def __len__(self) -> int:
        return len(self.characters) * self.per_class

    @property
    def shape(self) -> tuple[int, int, int]:
        return SIDE, SIDE, 1

    def face(self, row: int) -> str:
        """The typeface of a row: a character's samples go round its faces, in an order of its own."""
        order = _face_order(self.characters[row // self.per_class], self.seed)
        return order[row % self.per_class % len(order)]

    def read(self, row: int) -> Image:
        character = self.characters[row // self.per_class]
        drawn = character, self.face(row)
        if drawn not in self._stencils:
            self._stencils[drawn] = stencil(*drawn)
        key = SPLITS.index(self.split), ord(character), row % self.per_class, self.seed
        return _print(self._stencils[drawn], np.random.default_rng(key))

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        codes = np.array([ord(character) for character in self.characters], dtype=np.int64)
        numbers = np.asarray(rows, dtype=np.int64) % self.per_class
        drawn = codes[np.asarray(rows, dtype=np.int64) // self.per_class]
        return digest("glyphs", VERSION, str(self.seed), self.split, drawn.tobytes(), numbers.tobytes())


# Classes: names, characters, faces.


@cache
def faces_of_classes() -> dict[str, tuple[str, ...]]:
    """Every class and the faces that draw it, in code point order."""
    groups = json.loads(CLASSES.read_text(encoding="utf-8"))
    drawn_in = {character: tuple(group["faces"]) for group in groups for character in group["characters"]}
    return {name_of(character): drawn_in[character] for character in sorted(drawn_in)}


def name_of(character: str) -> str:
    return unicodedata.name(character).lower()


def character_of(name: str) -> str:
    """The character that a class is drawn from."""
    known = faces_of_classes()
    if name not in known:
        raise unknown("class", name, known)
    return unicodedata.lookup(name)


def domain_of(character: str) -> str:
    return LETTERS if unicodedata.category(character).startswith("L") else SYMBOLS


def script_of(character: str) -> str:
    """The script of a letter, the kind of a symbol; digits and punctuation that stand among letters are signs."""
    script = next(script for first, last, script in SCRIPTS if first <= ord(character) <= last)
    among_letters = domain_of(character) == SYMBOLS and ord(character) < 0x2000
    return "signs" if among_letters else script


@lru_cache(maxsize=8192)
def _face_order(character: str, seed: int) -> tuple[str, ...]:
    faces = faces_of_classes()[name_of(character)]
    shuffled = np.random.default_rng((len(SPLITS), ord(character), seed)).permutation(len(faces))
    return tuple(faces[place] for place in shuffled)


# Drawing.

EM = 128
"""Size at which a typeface is drawn."""
REACH = 32
"""Longer side of a stencil. It is shrunk by 1.05 to 2.2 in a sample, which its blur prepares it for."""
MARGIN = 2
DISTORTIONS = {
    "turn": (-15, 15),  # degrees
    "slant": (-0.25, 0.25),  # to the right per row
    "size": (0.45, 0.95),  # longer side, as a share of the box; less where it would not fit
    "right": (-1, 1),  # from one edge of the box to the other
    "down": (-1, 1),
    "contrast": (0.25, 1),  # between ink and paper, as a share of all greys
    "level": (0, 1),  # where within the greys that contrast lies
    "polarity": (-1, 1),  # light on dark when positive
    "noise": (0, 30),  # standard deviation, in greys
}
LEAST, MOST = np.array(list(DISTORTIONS.values())).T
"""Every sample draws each distortion evenly between these."""


def font_file(face: str) -> Path:
    from matplotlib import get_data_path

    return Path(get_data_path(), "fonts", "ttf", f"{face}.ttf")


@cache
def _font(face: str) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(font_file(face), EM, layout_engine=ImageFont.Layout.BASIC)


def stencil(character: str, face: str) -> Picture:
    """A character as wide or as high as REACH, white on black, with a margin. Blank where the face leaves it blank."""
    from PIL import Image, ImageDraw, ImageFilter

    left, top, right, bottom = _font(face).getbbox(character)
    drawing = Image.new("L", (max(1, math.ceil(right - left)), max(1, math.ceil(bottom - top))))
    ImageDraw.Draw(drawing).text((-left, -top), character, fill=255, font=_font(face))
    drawing = drawing.crop(drawing.getbbox())
    scale = REACH / max(drawing.size)
    width, height = (max(1, round(scale * length)) for length in drawing.size)
    drawing = drawing.resize((width, height), Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC)
    framed = Image.new("L", (width + 2 * MARGIN, height + 2 * MARGIN))
    framed.paste(drawing, (MARGIN, MARGIN))
    return framed.filter(ImageFilter.GaussianBlur(0.5))


def _print(picture: Picture, random: np.random.Generator) -> Image:
    """One sample: the stencil placed at random within the box, in two greys, with noise."""
    chances = LEAST + (MOST - LEAST) * random.random(len(DISTORTIONS))
    turn, slant, size, right, down, contrast, level, polarity, noise = chances.tolist()
    ink = np.asarray(_placed(picture, math.radians(turn), slant, size, right, down), dtype=np.float32)
    paper = 255 * (1 - contrast) * level
    if polarity < 0:  # dark on light
        paper, contrast = paper + 255 * contrast, -contrast
    grey = random.standard_normal(ink.shape, dtype=np.float32)
    grey *= noise
    grey += ink * np.float32(contrast) + np.float32(paper)
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)[:, :, None]


def _placed(picture: Picture, turn: float, slant: float, size: float, right: float, down: float) -> Picture:
    """The stencil slanted, turned, sized and shifted, all of it within the box."""
    from PIL import Image

    # (x, y) of the stencil goes to scale · (a·x + b·y, c·x + d·y) of the sample, both seen from their middle.
    a, b = math.cos(turn), slant * math.cos(turn) - math.sin(turn)
    c, d = math.sin(turn), slant * math.sin(turn) + math.cos(turn)
    width, height = picture.width - 2 * MARGIN, picture.height - 2 * MARGIN
    reach_x, reach_y = (abs(a) * width + abs(b) * height) / 2, (abs(c) * width + abs(d) * height) / 2
    scale = min(size * SIDE / REACH, (SIDE / 2 - 0.5) / max(reach_x, reach_y))
    x = SIDE / 2 + right * (SIDE / 2 - scale * reach_x)
    y = SIDE / 2 + down * (SIDE / 2 - scale * reach_y)
    # PIL asks where in the stencil a pixel comes from, which is the inverse (a·d - b·c is 1).
    a, b, c, d = d / scale, -b / scale, -c / scale, a / scale
    inverse = (a, b, picture.width / 2 - a * x - b * y, c, d, picture.height / 2 - c * x - d * y)
    return picture.transform((SIDE, SIDE), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)
