"""Encoded images in files or archives, and the check that decodes each of them once."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL.Image import Image as Pillow

from branchout.data.decode import Kind, UnreadableImage, decode, decode_picture, measure
from branchout.data.near_duplicates import image_hash
from branchout.data.problems import Problems
from branchout.data.samples import Hashes, Image, Samples, content_hash, digest
from branchout.files import open_regular
from branchout.labels import Ints
from branchout.progress import Event, OnProgress, silent

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
COMPANION_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".toml", ".ini", ".db"}
    | {".html", ".htm", ".log", ".pdf", ".xlsx", ".py", ".ipynb", ".npy", ".npz", ".pkl", ".mat", ".pt", ".pth"}
    | {".zip", ".gz", ".xz", ".tar", ".md5", ".sha256", ".mp4", ".mov", ".avi"}
)


@dataclass(frozen=True)
class Member:
    """An image in a shard, to be opened as a file is."""

    shard: Path
    name: str
    start: int
    size: int

    def __fspath__(self) -> str:
        return f"{self.shard}/{self.name}"

    def absolute(self) -> Member:
        return replace(self, shard=self.shard.absolute())

    def open_image(self) -> BinaryIO:
        with open_regular(self.shard) as file:
            file.seek(self.start)
            return io.BytesIO(file.read(self.size))


ImageFile = Path | Member
"""What `decode` opens: a file, or an image in a shard."""


@dataclass(frozen=True)
class FilePixels:
    """Pixels that stay encoded in files until they are read."""

    root: Path
    paths: npt.NDArray[np.bytes_]
    """Relative to the root, with forward slashes, as the file system encodes them."""
    spans: Ints | None = None
    """Where each image begins in its file and how many bytes it has (n × 2), for archives that hold many."""
    shapes: npt.NDArray[np.int32] | None = None
    """Height, width and channels of every image, where they were verified."""

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int] | None:
        if self.shapes is None or not len(self) or (self.shapes != self.shapes[0]).any():
            return None
        height, width, channels = self.shapes[0].tolist()
        return height, width, channels

    def file(self, row: int) -> ImageFile:
        path = self.root / os.fsdecode(self.paths[row])
        if self.spans is None:
            return path
        start, size = self.spans[row].tolist()
        return Member(path, f"image at byte {start:,}", start, size)

    def open(self, row: int) -> BinaryIO:
        """The encoded image. A file that is no regular one is an OSError."""
        file = self.file(row)
        return file.open_image() if isinstance(file, Member) else open_regular(file)

    def read(self, row: int) -> Image:
        return decode(self.file(row))

    def picture(self, row: int) -> Pillow:
        return decode_picture(self.file(row))

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        stamp = lru_cache(64)(lambda path: self._stamp(path, portable))  # an archive has many rows
        spans = b"" if self.spans is None else self.spans[rows].tobytes()
        return digest(*(stamp(bytes(path)) for path in self.paths[rows]), *([spans] if spans else []))

    def _stamp(self, path: bytes, portable: bool) -> bytes:
        try:
            status = (self.root / os.fsdecode(path)).stat()
            here = "" if portable else f"\0{status.st_mtime_ns}\0{status.st_ino}"
            return path + f"\0{status.st_size}{here}".encode()
        except OSError:
            return path + b"\0missing"


def verified(
    samples: Samples, problems: Problems, on_progress: OnProgress = silent, work: str = "Checking images"
) -> Samples:
    """The images that can be decoded, measured and hashed; of identical images in one class only the first."""
    assert isinstance(samples.pixels, FilePixels)
    pixels, count = samples.pixels, len(samples)
    shapes = np.zeros((count, 3), dtype=np.int32)
    content = np.zeros(count, dtype=np.uint64)
    hashes = np.zeros((count, 2), dtype=np.uint64)
    good = np.zeros(count, dtype=bool)

    def measure_one(row: int) -> UnreadableImage | None:
        try:
            with pixels.open(row) as file:
                shapes[row], copy = measure(file)
                file.seek(0)
                content[row] = content_hash(file)
            hashes[row] = image_hash(copy)
            good[row] = True
        except OSError as error:
            return UnreadableImage(Kind.UNREADABLE, error.strerror or str(error))
        except UnreadableImage as error:
            foreign = error.kind in {Kind.NOT_AN_IMAGE, Kind.EMPTY}
            if foreign and Path(samples.ids[row]).suffix.lower() in COMPANION_SUFFIXES:
                return UnreadableImage(Kind.COMPANION, "")
            return error
        return None

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # more wait for Python's lock
        for start in range(0, count, 1024):  # in parts, so that an interrupt need not wait for all
            part = range(start, min(start + 1024, count))
            for row, error in zip(part, pool.map(measure_one, part), strict=True):
                if error is not None:
                    problems.add(error.kind, samples.ids[row], error.detail)
                if (row + 1) % 50 == 0 or row + 1 == count:
                    on_progress(Event(work, row + 1, count))
    good &= ~copies(samples, content, problems)
    measured = replace(samples, pixels=replace(pixels, shapes=shapes), content=content, image_hash=hashes)
    return _only(measured, good)


def copies(samples: Samples, content: Hashes, problems: Problems) -> npt.NDArray[np.bool_]:
    """Images whose class has the same one before. One that is in two classes stays in both: it is not ours to judge."""
    copies = np.zeros(len(samples), dtype=bool)
    _, inverse, counts = np.unique(content, return_inverse=True, return_counts=True)
    seen: dict[int, dict[int, int]] = {}
    for row in np.flatnonzero((counts[inverse] > 1) & (content != 0)).tolist():
        same, label = seen.setdefault(int(content[row]), {}), int(samples.labels[row])
        if label in same:
            problems.add(Kind.DUPLICATE, samples.ids[row], f"same as {samples.ids[same[label]]}")
            copies[row] = True
            continue
        if same:
            problems.add(Kind.CONFLICT, samples.ids[row], f"same as {samples.ids[next(iter(same.values()))]}")
        same[label] = row
    return copies


def named_as_images(samples: Samples, problems: Problems) -> Samples:
    """The files whose names say that they are images: nothing is opened."""
    named = np.array([str(name).lower().endswith(IMAGE_SUFFIXES) for name in samples.ids], dtype=bool)
    for row in np.flatnonzero(~named).tolist():
        problems.add(Kind.COMPANION, samples.ids[row])
    return _only(samples, named)


def _only(samples: Samples, which: npt.NDArray[np.bool_]) -> Samples:
    """Some samples of a whole table, which then has no other pixels."""
    assert isinstance(samples.pixels, FilePixels)
    if which.all():
        return samples
    pixels, kept = samples.pixels, samples.select(which)
    spans = None if pixels.spans is None else pixels.spans[which]
    shapes = None if pixels.shapes is None else pixels.shapes[which]
    pixels = replace(pixels, paths=pixels.paths[which], spans=spans, shapes=shapes)
    return replace(kept, pixels=pixels, rows=np.arange(len(kept)))
