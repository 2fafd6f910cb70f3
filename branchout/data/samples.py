"""One table of samples, whatever the source: where the pixels are, class name, origin, attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from branchout.errors import BranchoutError

Image = npt.NDArray[np.uint8]
"""One decoded picture: height × width × channels, one channel (grey) or three (RGB)."""
Ints = npt.NDArray[np.int64]
Strings = npt.NDArray[np.str_]

UNASSIGNED = -1
"""Origin of a sample that no scenario has placed yet. Otherwise 0 is the base and t is step t."""


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

        A `portable` one is the same for every copy of the data, on whatever machine; it may miss a change that leaves
        the sizes of files as they were.
        """


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

    def _locate(self, row: int) -> tuple[int, int]:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return part, row - int(self.starts[part])

    def read(self, row: int) -> Image:
        part, inner = self._locate(row)
        return self.parts[part].read(inner)

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        part_of = np.searchsorted(self.starts, rows, side="right") - 1
        inner = rows - self.starts[part_of]
        of_parts = (part.fingerprint(inner[part_of == n], portable=portable) for n, part in enumerate(self.parts))
        return digest(*of_parts, part_of.tobytes())  # each part knows its own order, not how they alternate


@dataclass(frozen=True)
class Samples:
    """A table: row i is one picture. Tables are never changed in place; every method returns a new one."""

    pixels: Pixels
    rows: Ints
    """Where in `pixels` each sample is."""
    classes: tuple[str, ...]
    """The class names that `labels` refers to, sorted; each has at least one sample."""
    labels: Ints
    ids: Strings
    """A name for every sample that survives a move to another machine: a relative path, a character and a face."""
    origin: Ints
    attributes: Mapping[str, Strings] = field(default_factory=dict)
    """What else is known of each sample, such as `domain` and `style`."""

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
        classes, labels = np.unique(np.asarray(names, dtype=np.str_), return_inverse=True)
        return cls(
            pixels=pixels,
            rows=np.arange(len(labels)) if rows is None else rows,
            classes=tuple(str(name) for name in classes),
            labels=labels.astype(np.int64),
            ids=np.asarray(ids, dtype=np.str_),
            origin=np.full(len(labels), UNASSIGNED, dtype=np.int64),
            attributes={key: np.asarray(values, dtype=np.str_) for key, values in (attributes or {}).items()},
        )

    def __post_init__(self) -> None:
        lengths = {len(self.rows), len(self.labels), len(self.ids), len(self.origin)}
        lengths |= {len(values) for values in self.attributes.values()}
        if len(lengths) != 1:
            raise BranchoutError(f"the columns of a sample table differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> Strings:
        """The class name of every sample."""
        return np.asarray(self.classes, dtype=np.str_)[self.labels] if len(self) else np.array([], dtype=np.str_)

    def counts(self) -> dict[str, int]:
        """How many samples each class has."""
        return dict(zip(self.classes, np.bincount(self.labels, minlength=len(self.classes)).tolist(), strict=True))

    def read(self, index: int) -> Image:
        return self.pixels.read(int(self.rows[index]))

    def fingerprint(self, *, portable: bool = False) -> str:
        """Changes when the pixels, the order or the labels change; a `portable` one is that of every copy."""
        pixels = self.pixels.fingerprint(self.rows, portable=portable)
        return digest(pixels, "\n".join(self.classes), self.labels.tobytes())

    # New tables from old ones.

    def select(self, which: npt.NDArray[np.bool_] | Ints) -> Samples:
        """The samples that a mask or a list of positions names; classes left without samples go."""
        labels = self.labels[which]
        kept, relabelled = np.unique(labels, return_inverse=True)
        return Samples(
            pixels=self.pixels,
            rows=self.rows[which],
            classes=tuple(self.classes[label] for label in kept),
            labels=relabelled.astype(np.int64),
            ids=self.ids[which],
            origin=self.origin[which],
            attributes={key: values[which] for key, values in self.attributes.items()},
        )

    def of_classes(self, names: Sequence[str]) -> Samples:
        """The samples of the classes named, in table order."""
        wanted = set(names)
        return self.select(np.array([name in wanted for name in self.classes], dtype=bool)[self.labels])

    def rename(self, new_names: Mapping[str, str]) -> Samples:
        """Other names for some classes; two classes given one name become one class."""
        renamed = np.array([new_names.get(name, name) for name in self.classes], dtype=np.str_)
        classes, merged = np.unique(renamed, return_inverse=True)
        return replace(self, classes=tuple(str(n) for n in classes), labels=merged[self.labels].astype(np.int64))

    def placed(self, origin: int | Ints) -> Samples:
        """The same samples, coming from the base (0) or from step t."""
        return replace(self, origin=np.broadcast_to(np.asarray(origin, dtype=np.int64), len(self)).copy())


def concatenate(tables: Sequence[Samples]) -> Samples:
    """One table after the other. Attributes that only some tables have are empty text elsewhere."""
    if len(tables) == 1:
        return tables[0]
    keys = sorted({key for table in tables for key in table.attributes})
    shared = all(table.pixels is tables[0].pixels for table in tables)
    pixels = tables[0].pixels if shared else JoinedPixels(tuple(table.pixels for table in tables))
    starts = [0] * len(tables) if shared else pixels.starts  # type: ignore[attr-defined]
    joined = Samples.build(
        pixels,
        np.concatenate([table.names for table in tables]),
        np.concatenate([table.ids for table in tables]),
        rows=np.concatenate([table.rows + start for table, start in zip(tables, starts, strict=False)]),
        attributes={
            key: np.concatenate([t.attributes.get(key, np.full(len(t), "", dtype=np.str_)) for t in tables])
            for key in keys
        },
    )
    return replace(joined, origin=np.concatenate([table.origin for table in tables]))


def digest(*parts: str | bytes) -> str:
    """A short hash of several texts, none of which can run into the next."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
