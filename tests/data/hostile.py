"""Images and folders as bad as they come, for tests and for the torture harness.

`images()` gives each image's bytes and what must be said of it; `write_folder` puts them into a class folder, with the
things beside them that are no files at all.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from branchout.data.decode import Kind

USABLE = None
"""What is said of an image that looks hostile and is none: it must be decoded."""


def picture(seed: int = 0, height: int = 24, width: int = 32) -> Image.Image:
    """Smooth and different for every seed."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 7 + seed, y * 9 + 3 * seed, x * 3 + y * 4], axis=-1).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def jpeg(seed: int = 0) -> bytes:
    return encoded(picture(seed), "JPEG", quality=95)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def png(width: int, height: int, pixels: bytes, *extra: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    """A PNG put together by hand: its header may promise any size, whatever pixels follow."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises any size."""
    return png(width, height, b"\0" * 1000)


def large_png(width: int, height: int) -> bytes:
    """A whole image with a palette and transparency, a few kB for tens of megapixels."""
    palette = (b"PLTE", bytes(range(6))), (b"tRNS", b"\x80")
    return png(width, height, bytes((width + 7) // 8 + 1) * height, *palette, depth=1, colour=3)


def scan_bomb(scans: int) -> bytes:
    """A progressive JPEG of 9 megapixels whose last scan is repeated."""
    data = encoded(Image.new("L", (3000, 3000), 90), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


def images() -> dict[str, tuple[bytes, Kind | None]]:
    """File name → bytes, and the problem that must be reported."""
    whole = {name: encoded(picture(), name) for name in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")}
    palette = picture().quantize(16)
    frames = [picture(seed) for seed in range(5)]
    exif = Image.Exif()
    exif[0x0112] = 60_000
    found: dict[str, tuple[bytes, Kind | None]] = {
        "zero-bytes.jpg": (b"", Kind.EMPTY),
        "text.jpg": (b"<html>404</html>", Kind.NOT_AN_IMAGE),
        "noise.png": (bytes(range(256)) * 9, Kind.NOT_AN_IMAGE),
        "phone.heic": (b"\0\0\0\x18ftypheic" + bytes(40), Kind.UNSUPPORTED),
        "start-only.png": (whole["PNG"][:8], Kind.TRUNCATED),
        "start-only.jpg": (whole["JPEG"][:3], Kind.CORRUPT),
        "bomb.png": (png_claiming(60_000, 60_000), Kind.TOO_LARGE),
        "49-megapixels-promised.png": (png_claiming(7_000, 7_000), Kind.TRUNCATED),
        "49-megapixels.png": (large_png(7_000, 7_000), USABLE),
        "99-megapixels.png": (large_png(99_000_000 // 3_000, 3_000), USABLE),
        "one-pixel-high.png": (large_png(1_000_000, 1), USABLE),
        "no-width.png": (png_claiming(0, 5), Kind.CORRUPT),
        "text-bomb.png": (png(1, 1, bytes(4), (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))), Kind.CORRUPT),
        "scan-bomb.jpg": (scan_bomb(500), Kind.TOO_LARGE),
        "absurd-exif.jpg": (encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\x01"), USABLE),
        "absurd-orientation.jpg": (encoded(picture(1), "JPEG", exif=exif), USABLE),
        "palette-transparency.png": (encoded(palette, "PNG", transparency=bytes(range(16))), USABLE),
        "cmyk.jpg": (encoded(picture(2).convert("CMYK"), "JPEG"), USABLE),
        "sixteen-bit.png": (encoded(Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)), "PNG"), USABLE),
        "animated.gif": (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), USABLE),
        "animated.webp": (encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]), USABLE),
        "animated.png": (encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), USABLE),
        "lab.tiff": (encoded(Image.new("LAB", (4, 4)), "TIFF"), Kind.UNSUPPORTED),
    }
    for format, data in whole.items():
        found[f"truncated.{format.lower()}"] = (data[: len(data) * 2 // 3], Kind.TRUNCATED)
    return found


def write_folder(folder: Path) -> dict[str, Kind | None]:
    """A class folder of all hostile images, names, links and pipes; the problem expected of each."""
    expected: dict[str, Kind | None] = {}
    for name, (data, kind) in images().items():
        put(folder / name, data)
        expected[name] = kind
    for number, name in enumerate(("n" * 240 + ".png", "\x1b[31mred\x07.png", "new\nline.png")):
        put(folder / name, encoded(picture(10 + number), "PNG"))
        expected[name] = USABLE
    os.mkfifo(folder / "pipe.jpg")
    (folder / "device.jpg").symlink_to("/dev/zero")
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "itself.jpg").symlink_to("itself.jpg")
    (folder / "around").symlink_to(folder, target_is_directory=True)
    expected |= {"pipe.jpg": Kind.NOT_AN_IMAGE, "device.jpg": Kind.NOT_AN_IMAGE}
    return expected | {"dangling.jpg": Kind.DANGLING, "itself.jpg": Kind.LOOP, "around": Kind.LOOP}
