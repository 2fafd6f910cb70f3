"""One picture, from a file or from bytes that nobody vouches for, to pixels; or a precise reason why not."""

from __future__ import annotations

import io
import os
import struct
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL import Image as Pillow

from branchout.data.samples import Image
from branchout.errors import BranchoutError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL.ImageFile import ImageFile

MAX_PIXELS = 100_000_000
"""Larger pictures are refused once their header is read, before memory is set aside for them."""

_START = 32
"""How many bytes of a file tell its format."""

Source = str | os.PathLike[str] | bytes | BinaryIO


class Kind(StrEnum):
    """What can be wrong with a picture, or with the folder it lies in."""

    EMPTY = "empty file"
    NOT_AN_IMAGE = "not an image"
    COMPANION = "other file (text, tables and the like)"
    UNSUPPORTED = "image of an unsupported format"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    TOO_LARGE = "too large"
    UNREADABLE = "not readable"
    DANGLING = "dangling link"
    LOOP = "link to a folder that contains it"
    HIDDEN = "hidden"
    STRAY = "image outside any class folder"
    DUPLICATE = "duplicate within a class"
    CONFLICT = "same picture in two classes"
    MERGED = "folders merged: one name, two Unicode forms"
    CASE = "class names that differ only in case"


class UnreadableImage(BranchoutError):  # noqa: N818 – it is read as a verdict on a picture
    """A picture that cannot be used: `kind` says how it is broken, `detail` says it in words."""

    def __init__(self, kind: Kind, detail: str, where: str = "") -> None:
        super().__init__(f"{where or 'the image'}: {kind}" + (f" ({detail})" if detail else ""))
        self.kind = kind
        self.detail = detail
        self.where = where

    def __reduce__(self) -> tuple[type[UnreadableImage], tuple[Kind, str, str]]:
        return type(self), (self.kind, self.detail, self.where)  # to cross from a worker process


def decode(source: Source, *, max_pixels: int = MAX_PIXELS, shrink: int | None = None) -> Image:
    """The pixels, upright, with one channel (grey) or three (RGB), transparency over white.

    With `shrink`, a JPEG may come out smaller, which is faster, though never with a side below `shrink`, unless the
    picture itself has one.
    """
    return _read(source, max_pixels, shrink)[0]


def measure(source: Source, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int, int]:
    """Height, width and channels as `decode` gives them. All of the picture is decoded, as cheaply as can be."""
    pixels, (height, width) = _read(source, max_pixels, shrink=1)
    return height, width, pixels.shape[2]


def image_size(source: Source) -> tuple[int, int, bool]:
    """Width, height and whether it is a JPEG, from the header alone: nothing is decoded."""
    try:
        with _opened(source) as file:
            start = file.read(_START)
            file.seek(0)
            picture = _reader(start)(file)
            return *picture.size, isinstance(picture, JpegImagePlugin.JpegImageFile)
    except UnreadableImage:
        raise
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to.
        raise UnreadableImage(_kind_of(error), str(error) or type(error).__name__) from error


def looks_like_image(path: Path) -> bool:
    """Whether a file starts as an image of a supported format does."""
    try:
        with path.open("rb") as file:
            _reader(file.read(_START))
    except (OSError, UnreadableImage):
        return False
    return True


def _read(source: Source, max_pixels: int, shrink: int | None) -> tuple[Image, tuple[int, int]]:
    """The pixels, and the height and width that they have when nothing is shrunk."""
    where = "" if isinstance(source, bytes) or hasattr(source, "read") else printable(source)
    try:
        with _opened(source) as file:
            start = file.read(_START)
            file.seek(0)
            picture = _reader(start)(file)
            width, height = picture.size
            if not width * height:
                raise UnreadableImage(Kind.CORRUPT, "no pixels")
            if width * height > max_pixels:
                detail = f"{width:,} × {height:,} pixels; the limit is {max_pixels / 1e6:,.0f} million"
                raise UnreadableImage(Kind.TOO_LARGE, detail)
            if shrink and isinstance(picture, JpegImagePlugin.JpegImageFile):
                picture.draft(None, (shrink, shrink))
            picture.load()
            turn = _turn(picture)
            pixels = _to_array(picture if turn is None else picture.transpose(turn))
            return pixels, (width, height) if turn in _SIDEWAYS else (height, width)
    except UnreadableImage as error:
        raise UnreadableImage(error.kind, error.detail, where) from None
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to.
        raise UnreadableImage(_kind_of(error), str(error) or type(error).__name__, where) from error


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            yield file
    else:
        source.seek(0)
        yield source


def _kind_of(error: Exception) -> Kind:
    if isinstance(error, OSError) and error.errno is not None:
        return Kind.UNREADABLE
    if isinstance(error, Pillow.DecompressionBombError | MemoryError):
        return Kind.TOO_LARGE
    cut = isinstance(error.__cause__ or error, EOFError | struct.error) or "truncated" in str(error).lower()
    return Kind.TRUNCATED if cut else Kind.CORRUPT


# Recognition. The readers are called directly: Image.open would try more formats than are wanted here, and it warns
# or raises by a process-wide pixel limit instead of ours.

_BMP_HEADERS = {12, 16, 40, 52, 56, 64, 108, 124}
_HEIF_BRANDS = {b"heic", b"heix", b"mif1", b"msf1", b"avif"}


def _reader(start: bytes) -> Callable[[BinaryIO], ImageFile]:
    """Who reads a file that starts like this. Its name does not matter."""
    if not start:
        raise UnreadableImage(Kind.EMPTY, "")
    if start.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if start.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if start.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return TiffImagePlugin.TiffImageFile
    if start.startswith(b"BM") and int.from_bytes(start[14:18], "little") in _BMP_HEADERS:
        return BmpImagePlugin.BmpImageFile
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return _read_webp
    if start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS:
        raise UnreadableImage(Kind.UNSUPPORTED, "HEIC or AVIF; convert it to JPEG or PNG")
    raise UnreadableImage(Kind.NOT_AN_IMAGE, "")


def _read_webp(file: BinaryIO) -> ImageFile:
    size = 8 + int.from_bytes(file.read(8)[4:], "little")
    length = file.seek(0, os.SEEK_END)
    if length < size:  # the reader fails on these too, and does not say why
        raise UnreadableImage(Kind.TRUNCATED, f"{length:,} of {size:,} bytes")
    file.seek(0)
    return WebPImagePlugin.WebPImageFile(file)


# Orientation and colour.

_T = Pillow.Transpose
_TURNS = {
    2: _T.FLIP_LEFT_RIGHT,
    3: _T.ROTATE_180,
    4: _T.FLIP_TOP_BOTTOM,
    5: _T.TRANSPOSE,
    6: _T.ROTATE_270,
    7: _T.TRANSVERSE,
    8: _T.ROTATE_90,
}
_SIDEWAYS = {_T.TRANSPOSE, _T.ROTATE_270, _T.TRANSVERSE, _T.ROTATE_90}
_ORIENTATION = 0x0112


def _turn(picture: ImageFile) -> Pillow.Transpose | None:
    try:
        return _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # a camera's broken note is no reason to lose the picture
        return None


def _to_array(picture: Pillow.Image) -> Image:
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _eight_bits(np.asarray(picture))[:, :, None]
    if picture.mode == "LAB":
        raise UnreadableImage(Kind.UNSUPPORTED, "LAB colours; convert it to RGB")
    grey = picture.mode in {"1", "L", "LA", "La"}
    if picture.has_transparency_data:
        opaque = Pillow.new("RGBA", picture.size, "white")
        opaque.alpha_composite(picture.convert("RGBA"))
        picture = opaque
    pixels = np.array(picture.convert("L" if grey else "RGB"))
    return pixels[:, :, None] if grey else pixels


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Integers count up to 65,535 and fractions up to 1; what goes beyond that is stretched between its ends."""
    top = 1.0 if values.dtype.kind == "f" else 65_535.0
    scaled = np.nan_to_num(values.astype(np.float64), posinf=top, neginf=0)
    low, high = scaled.min(), scaled.max()
    if low < 0 or high > top:
        scaled, top = scaled - low, high - low
    return np.rint(scaled * (255 / top)).astype(np.uint8)
