"""Decoding one image from a file or from bytes of unknown origin: its pixels, or the reason why there are none."""

from __future__ import annotations

import io
import math
import os
import struct
import sys
import threading
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL import Image as Pillow

from branchout.data.samples import Image
from branchout.errors import BranchoutError, printable
from branchout.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL.ImageFile import ImageFile

MAX_PIXELS = 100_000_000
"""Larger images are refused once their header is read, before memory is set aside for them."""
LARGE = 16_000_000
"""Images with more pixels are decoded at a reduced size and one at a time, which keeps memory below 1 GB."""
SMALL_COPY = 48**2
"""About how many pixels the copy has that `measure` makes of a larger image."""
MAX_SCANNED = 2_000_000_000
"""Pixels × scans of a progressive JPEG. Ten scans are usual; thousands of empty ones take minutes to decode."""

_START = 32
"""How many bytes of a file identify its format."""

Source = str | os.PathLike[str] | bytes | BinaryIO


class Kind(StrEnum):
    """What can be wrong with an image, or with the folder it is in."""

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
    UNLABELLED = "image without a class"
    DUPLICATE = "duplicate within a class"
    CONFLICT = "same image in two classes"
    MERGED = "folders merged: one name, two Unicode forms"
    CASE = "class names that differ only in case"


class UnreadableImage(BranchoutError):  # noqa: N818 – the name says what it is
    """An image that cannot be used: `kind` says what is wrong, `detail` says it in words."""

    def __init__(self, kind: Kind, detail: str, where: str = "") -> None:
        super().__init__(f"{where or 'the image'}: {kind}" + (f" ({detail})" if detail else ""))
        self.kind = kind
        self.detail = detail
        self.where = where

    def __reduce__(self) -> tuple[type[UnreadableImage], tuple[Kind, str, str]]:
        return type(self), (self.kind, self.detail, self.where)  # to cross from a worker process


def decode(source: Source, *, max_pixels: int = MAX_PIXELS, shrink: int | None = None) -> Image:
    """The pixels, upright, with one channel (grey) or three (RGB), transparency over white.

    With `shrink` a JPEG may be decoded at a smaller size, which is faster, though with no side below `shrink`.
    """
    return _to_array(decode_picture(source, max_pixels=max_pixels, shrink=shrink))


def decode_picture(source: Source, *, max_pixels: int = MAX_PIXELS, shrink: int | None = None) -> Pillow.Image:
    """The same as a Pillow image of mode L or RGB: one that Pillow will resize need not become an array before."""
    return _read(source, max_pixels, lambda image: _picture(image, shrink))


def measure(source: Source) -> tuple[tuple[int, int, int], Image]:
    """Height, width and channels of the image, and a small copy of it.

    All of it is decoded, as cheaply as possible, to find damage.
    """
    return _read(source, MAX_PIXELS, _shape)


def image_size(source: Source) -> tuple[int, int, bool]:
    """Width, height and whether it is a JPEG, from the header alone: nothing is decoded."""
    return _read(source, sys.maxsize, lambda image: (*image.size, isinstance(image, JpegImagePlugin.JpegImageFile)))


def looks_like_image(path: Path) -> bool:
    """Whether a file starts as an image of a supported format does."""
    try:
        with open_regular(path) as file:
            _reader(file.read(_START))
    except (OSError, UnreadableImage):
        return False
    return True


Result = TypeVar("Result")
_ONE_LARGE = threading.Lock()


def _read(source: Source, max_pixels: int, use: Callable[[ImageFile], Result]) -> Result:
    where = "" if isinstance(source, bytes) or hasattr(source, "read") else printable(source)
    try:
        with _opened(source) as file:
            return use(_header(file, max_pixels))
    except UnreadableImage as error:
        raise UnreadableImage(error.kind, error.detail, where) from None
    except Exception as error:  # Pillow's readers raise all kinds of errors for broken files
        raise UnreadableImage(_kind_of(error), _reason(error), where) from error


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    elif hasattr(source, "open_image"):  # an image in an archive
        yield source.open_image()
    elif isinstance(source, str | os.PathLike):
        with open_regular(Path(source)) as file:
            yield file
    else:
        source.seek(0)
        yield source


def _header(file: BinaryIO, max_pixels: int) -> ImageFile:
    """The image, with its size known and no pixel decoded yet."""
    start = file.read(_START)
    file.seek(0)
    image = _reader(start)(file)
    count = image.width * image.height
    if not count:
        raise UnreadableImage(Kind.CORRUPT, "no pixels")
    if count > max_pixels:
        detail = f"{image.width:,} × {image.height:,} pixels; the limit is {max_pixels / 1e6:,.0f} million"
        raise UnreadableImage(Kind.TOO_LARGE, detail)
    if image.info.get("progressive"):
        place = file.tell()
        file.seek(0)
        scans = sum(part.count(b"\xff\xda") for part in iter(lambda: file.read(2**20), b""))
        file.seek(place)
        if scans * count > MAX_SCANNED:
            raise UnreadableImage(Kind.TOO_LARGE, f"a progressive JPEG of {scans:,} scans")
    return image


def _picture(image: ImageFile, shrink: int | None) -> Pillow.Image:
    factor = math.ceil(math.sqrt(image.width * image.height / LARGE))
    if shrink or factor > 1:
        image.draft(None, (shrink, shrink) if shrink else (image.width // factor, image.height // factor))
    with _ONE_LARGE if factor > 1 else nullcontext():
        image.load()
        turn = _turn(image)
        smaller = _reduced(image)
        if smaller is not image:
            image.close()  # frees its memory
    return _grey_or_rgb(smaller if turn is None else smaller.transpose(turn))


def _shape(image: ImageFile) -> tuple[tuple[int, int, int], Image]:
    width, height = image.size
    with _ONE_LARGE if width * height > LARGE else nullcontext():
        image.draft(None, (1, 1))
        image.load()
        small = _reduced(image)
        factor = math.isqrt(small.width * small.height // SMALL_COPY)
        small = _shrunk(small, factor, image.has_transparency_data) if factor > 1 else small
    turn = _turn(image)
    if turn in _SIDEWAYS:
        width, height = height, width
    copy = _to_array(_grey_or_rgb(small if turn is None else small.transpose(turn)))
    return (height, width, copy.shape[2]), copy


def _reduced(image: Pillow.Image) -> Pillow.Image:
    """The image with at most about LARGE pixels. It is reduced in strips: a whole copy would double the memory."""
    factor = math.ceil(math.sqrt(image.width * image.height / LARGE))
    if factor <= 1:
        return image
    step = factor * max(1, 4_000_000 // (image.width * factor))
    tops = range(0, image.height, step)
    strips = [
        _shrunk(image.crop((0, top, image.width, min(top + step, image.height))), factor, image.has_transparency_data)
        for top in tops
    ]
    whole = Pillow.new(strips[0].mode, (strips[0].width, sum(strip.height for strip in strips)))
    for top, strip in zip(tops, strips, strict=True):
        whole.paste(strip, (0, top // factor))
    return whole


def _shrunk(image: Pillow.Image, factor: int, transparent: bool) -> Pillow.Image:
    """An image at 1/factor of its size: averaged, or sampled where it has 16 bits, which Pillow cannot average."""
    if image.mode.startswith("I;"):
        return image.resize((-(-image.width // factor), -(-image.height // factor)), Pillow.Resampling.NEAREST)
    grey = image.mode in {"1", "L", "LA", "La"}
    if transparent:
        image = image.convert("LA" if grey else "RGBA")
    elif image.mode in {"1", "P"}:
        image = image.convert("L" if grey else "RGB")
    return image.reduce(factor)


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__


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
    """Which of Pillow's readers reads a file that starts with these bytes. Its name does not matter."""
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


def _turn(image: ImageFile) -> Pillow.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # broken EXIF data is no reason to lose the image
        return None


def _to_array(picture: Pillow.Image) -> Image:
    pixels = np.array(picture)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _grey_or_rgb(image: Pillow.Image) -> Pillow.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return Pillow.fromarray(_eight_bits(np.asarray(image)))
    if image.mode == "LAB":
        raise UnreadableImage(Kind.UNSUPPORTED, "LAB colours; convert it to RGB")
    grey = image.mode in {"1", "L", "LA", "La"}
    if image.has_transparency_data:
        opaque = Pillow.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    mode = "L" if grey else "RGB"
    return image if image.mode == mode else image.convert(mode)  # which would copy it


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Integers up to 65,535 and fractions up to 1 are scaled to 255; a larger range is scaled between its ends."""
    if values.dtype == np.uint16:
        return np.asarray(np.rint(np.arange(65_536) * (255 / 65_535)).astype(np.uint8)[values])
    top = 1.0 if values.dtype.kind == "f" else 65_535.0
    scaled = np.nan_to_num(values.astype(np.float64), copy=False, posinf=top, neginf=0)
    low, high = scaled.min(), scaled.max()
    if low < 0 or high > top:
        scaled -= low
        top = high - low
    scaled *= 255 / top
    return np.rint(scaled, out=scaled).astype(np.uint8)
