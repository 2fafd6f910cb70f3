"""The sample table: one row per image, with its pixels' source, class name, origin and attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from branchout.errors import BranchoutError
from branchout.labels import Ints, LabelSpace

if TYPE_CHECKING:
    from branchout.data.preprocess import Picture

Image = npt.NDArray[np.uint8]
"""One decoded image: height × width × channels, one channel (grey) or three (RGB)."""
Strings = npt.NDArray[np.str_]
Hashes = npt.NDArray[np.uint64]
ImageHashes = npt.NDArray[np.uint64]
"""One row of two numbers per image: see `near_duplicates`."""

TEXT: npt.DTypeLike = np.dtypes.StringDType()
"""The type of ids and names: each text takes its own length, where numpy's other type takes four times the longest."""

UNASSIGNED = -1
"""Origin of a sample that no scenario has assigned yet. Otherwise 0 is the base and t is step t."""


class Pixels(Protocol):
    """Where the pixels of a table are: numbered rows that can be read."""

    def __len__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels when all rows share them, else None."""

    def read(self, row: int) -> Image:
        """One row, decoded."""

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        """A short text that changes when the pixels of these rows may have changed.

        A `portable` one is the same for every copy of the data, on any machine; it may miss a change that leaves the
        sizes of the files as they were.
        """


def picture_of(pixels: Pixels, row: int) -> Picture:
    """A row as Pillow decoded it, where it comes from a file, or else as an array."""
    read: Callable[[int], Picture] = getattr(pixels, "picture", pixels.read)
    return read(row)


@dataclass(frozen=True)
class ArrayPixels:
    """Pixels that are already decoded: one array, in memory or memory-mapped."""

    images: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.uint8:
            raise BranchoutError(
                f"expected images as a uint8 array of shape (number, height, width, channels), "
                f"found {self.images.dtype} of shape {self.images.shape}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.images.shape
        return height, width, channels

    def read(self, row: int) -> Image:
        image: Image = self.images[row]
        return image

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        return digest(str(self.shape), *(self.images[row].tobytes() for row in rows))


@dataclass(frozen=True)
class JoinedPixels:
    """Several sources end to end."""

    parts: tuple[Pixels, ...]

    @property
    def starts(self) -> Ints:
        return np.cumsum([0, *(len(part) for part in self.parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def shape(self) -> tuple[int, int, int] | None:
        shapes = {part.shape for part in self.parts}
        return shapes.pop() if len(shapes) == 1 else None

    def locate(self, rows: Ints) -> tuple[Ints, Ints]:
        """The part of each row, and its row in that part."""
        part_of = np.searchsorted(self.starts, rows, side="right") - 1
        return part_of, rows - self.starts[part_of]

    def read(self, row: int) -> Image:
        part, inner = self.locate(np.array([row]))
        return self.parts[int(part[0])].read(int(inner[0]))

    def picture(self, row: int) -> Picture:
        part, inner = self.locate(np.array([row]))
        return picture_of(self.parts[int(part[0])], int(inner[0]))

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        part_of, inner = self.locate(rows)
        of_parts = (part.fingerprint(inner[part_of == n], portable=portable) for n, part in enumerate(self.parts))
        return digest(*of_parts, part_of.tobytes())  # each part knows its own order, not how they alternate


@dataclass(frozen=True)
class Samples:
    """A table: row i is one image. Tables are never changed in place; every method returns a new one."""

    pixels: Pixels
    rows: Ints
    """Where in `pixels` each sample is."""
    classes: tuple[str, ...]
    """The class names that `labels` refers to, sorted; each has at least one sample."""
    labels: Ints
    ids: Strings
    """A name for every sample that is the same on every machine: a relative path, a character and a typeface."""
    origin: Ints
    attributes: Mapping[str, Strings] = field(default_factory=dict)
    """What else is known of each sample, such as `domain` and `style`."""
    content: Hashes | None = None
    """A hash of each file's bytes, where the files were read: identical files have the same. See `find_identical`."""
    image_hash: ImageHashes | None = None
    """A perceptual hash of each image of a folder, where the files were decoded. See `near_duplicates`."""

    @classmethod
    def build(
        cls,
        pixels: Pixels,
        names: Sequence[str] | Strings,
        ids: Sequence[str] | Strings,
        *,
        rows: Ints | None = None,
        attributes: Mapping[str, Sequence[str] | Strings] | None = None,
    ) -> Samples:
        classes, labels = np.unique(np.asarray(names, dtype=TEXT), return_inverse=True)
        return cls(
            pixels=pixels,
            rows=np.arange(len(labels)) if rows is None else rows,
            classes=tuple(str(name) for name in classes),
            labels=labels.astype(np.int64),
            ids=np.asarray(ids, dtype=TEXT),
            origin=np.full(len(labels), UNASSIGNED, dtype=np.int64),
            attributes={key: np.asarray(values, dtype=TEXT) for key, values in (attributes or {}).items()},
        )

    def __post_init__(self) -> None:
        columns = [self.rows, self.labels, self.ids, self.origin, self.content, self.image_hash]
        lengths = {len(column) for column in [*columns, *self.attributes.values()] if column is not None}
        if len(lengths) != 1:
            raise BranchoutError(f"the columns of a sample table differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> Strings:
        """The class name of every sample."""
        return np.asarray(self.classes, dtype=TEXT)[self.labels]

    def mask(self, names: Collection[str]) -> npt.NDArray[np.bool_]:
        """Which samples are of the classes named."""
        wanted = set(names)
        return np.array([name in wanted for name in self.classes], dtype=bool)[self.labels]

    def counts(self) -> dict[str, int]:
        """How many samples each class has."""
        return dict(zip(self.classes, np.bincount(self.labels, minlength=len(self.classes)).tolist(), strict=True))

    def read(self, index: int) -> Image:
        return self.pixels.read(int(self.rows[index]))

    def picture(self, index: int) -> Picture:
        """The same for a network, which Pillow resizes it for: as few copies as possible."""
        return picture_of(self.pixels, int(self.rows[index]))

    def fingerprint(self, *, portable: bool = False) -> str:
        """Changes when the pixels, the order or the labels change; a `portable` one is that of every copy."""
        pixels = self.pixels.fingerprint(self.rows, portable=portable)
        return digest(pixels, "\n".join(self.classes), self.labels.tobytes())

    # New tables from old ones.

    def select(self, which: npt.NDArray[np.bool_] | Ints) -> Samples:
        """The samples at a mask or a list of positions; classes left without samples are dropped."""
        kept, relabelled = np.unique(self.labels[which], return_inverse=True)
        return Samples(
            pixels=self.pixels,
            rows=self.rows[which],
            classes=tuple(self.classes[label] for label in kept),
            labels=relabelled.astype(np.int64),
            ids=self.ids[which],
            origin=self.origin[which],
            attributes={key: values[which] for key, values in self.attributes.items()},
            content=None if self.content is None else self.content[which],
            image_hash=None if self.image_hash is None else self.image_hash[which],
        )

    def of_classes(self, names: Sequence[str]) -> Samples:
        """The samples of the classes named, in table order."""
        return self.select(self.mask(names))

    def labels_in(self, space: LabelSpace) -> Ints:
        """The class number of every sample in a label space."""
        return space.index(self.classes)[self.labels]

    def rename(self, new_names: Mapping[str, str]) -> Samples:
        """Other names for some classes; two classes given one name become one class."""
        renamed = np.array([new_names.get(name, name) for name in self.classes], dtype=np.str_)
        classes, merged = np.unique(renamed, return_inverse=True)
        return replace(self, classes=tuple(str(n) for n in classes), labels=merged[self.labels].astype(np.int64))

    def with_origin(self, origin: int | Ints) -> Samples:
        """The same samples with another origin: the base (0) or step t."""
        return replace(self, origin=np.broadcast_to(np.asarray(origin, dtype=np.int64), len(self)).copy())


def concatenate(tables: Sequence[Samples]) -> Samples:
    """One table after the other. Attributes that only some tables have are empty text elsewhere."""
    if len(tables) == 1:
        return tables[0]
    pixels = tables[0].pixels
    starts = [0] * len(tables)
    if any(table.pixels is not pixels for table in tables):
        pixels = JoinedPixels(tuple(table.pixels for table in tables))
        starts = pixels.starts[:-1].tolist()
    classes = sorted({name for table in tables for name in table.classes})
    place = {name: label for label, name in enumerate(classes)}
    columns = [np.array([place[name] for name in table.classes], dtype=np.int64) for table in tables]
    keys = sorted({key for table in tables for key in table.attributes})
    return Samples(
        pixels=pixels,
        rows=np.concatenate([table.rows + start for table, start in zip(tables, starts, strict=True)]),
        classes=tuple(classes),
        labels=np.concatenate([column[table.labels] for column, table in zip(columns, tables, strict=True)]),
        ids=np.concatenate([table.ids for table in tables]),
        origin=np.concatenate([table.origin for table in tables]),
        attributes={
            key: np.concatenate([t.attributes.get(key, np.full(len(t), "", dtype=TEXT)) for t in tables])
            for key in keys
        },
        content=_optional(tables, "content", content_hashes),
        image_hash=_optional(tables, "image_hash", lambda table: np.zeros((len(table), 2), dtype=np.uint64)),
    )


def _optional(tables: Sequence[Samples], name: str, missing: Callable[[Samples], Hashes]) -> Hashes | None:
    """A column that some tables may lack; None if all do."""
    columns: list[Hashes | None] = [getattr(table, name) for table in tables]
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [missing(table) if column is None else column for table, column in zip(tables, columns, strict=True)]
    )


def content_hashes(samples: Samples) -> Hashes:
    """A hash of every sample's content; 0 where it is not known, as of files that were listed and not read."""
    if samples.content is not None:
        return samples.content
    if isinstance(samples.pixels, ArrayPixels):
        return np.array(
            [content_hash(BytesIO(samples.read(n).tobytes())) for n in range(len(samples))], dtype=np.uint64
        )
    return np.zeros(len(samples), dtype=np.uint64)


def find_identical(first: Samples, second: Samples) -> list[tuple[int, int]]:
    """Images that are in both tables, byte for byte: a position in the first and one in the second for each."""
    wanted = content_hashes(first)
    values, places = np.unique(content_hashes(second), return_index=True)
    found = np.flatnonzero(np.isin(wanted, values) & (wanted != 0))
    return list(zip(found.tolist(), places[np.searchsorted(values, wanted[found])].tolist(), strict=True))


def content_hash(file: BinaryIO) -> int:
    """64 bits that identify the bytes of an open file; never 0."""
    return int.from_bytes(hashlib.file_digest(file, "sha1").digest()[:8], "little") or 1  # type: ignore[arg-type]


def digest(*parts: str | bytes) -> str:
    """A short hash of several texts, none of which can run into the next."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def as_samples(images: np.ndarray, names: Sequence[str]) -> Samples:
    """Samples from arrays: images (number × height × width × channels, uint8) and their class names."""
    if len(images) != len(names):
        raise BranchoutError(f"{len(images)} images were given with {len(names)} names; each image needs one name")
    return Samples.build(ArrayPixels(images), names, [f"{name}/{n}" for n, name in enumerate(names)])
