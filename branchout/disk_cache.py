"""The cache of arrays on disk: decoded images, features, exported networks. Least recently used arrays are removed.

It is optional: one that cannot be written is not used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from branchout.errors import BranchoutError
from branchout.files import atomic_write

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import numpy.typing as npt


def cache_folder() -> Path:
    """Where decoded images and features are kept: $BRANCHOUT_CACHE, or the user's cache folder."""
    chosen = os.environ.get("BRANCHOUT_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "branchout"


def cache_limit() -> int:
    """How many bytes of arrays the cache may hold: $BRANCHOUT_CACHE_LIMIT in gigabytes, 20 by default; 0 is none."""
    chosen = os.environ.get("BRANCHOUT_CACHE_LIMIT", "20")
    try:
        return max(0, int(float(chosen) * 10**9))
    except (ValueError, OverflowError):
        raise BranchoutError(f"BRANCHOUT_CACHE_LIMIT is {chosen!r}; expected gigabytes, such as 20 or 0.5") from None


def load_cached(
    cache: Path | None, name: str, shape: tuple[int, ...] | None, dtype: npt.DTypeLike
) -> npt.NDArray[Any] | None:
    """An array from the cache, of any shape if that is None; None if it is not there, is another, or was damaged."""
    import numpy as np

    if cache is None:
        return None
    file = cache / f"{name}.npy"
    try:
        stored: npt.NDArray[Any] = np.load(file, mmap_mode="c")
        if shape not in (None, stored.shape) or stored.dtype != dtype or _tail(file) != _crc(stored):
            return None
    except (OSError, ValueError, EOFError):
        return None
    with suppress(OSError):
        os.utime(file)  # the least recently used go first
    return stored


def store_cached(cache: Path | None, name: str, array: npt.NDArray[Any]) -> None:
    """Keep an array in the cache, and remove the least recently used ones beyond the limit."""
    import numpy as np

    limit = cache_limit()
    if cache is None or array.nbytes > limit:
        return
    array = np.ascontiguousarray(array)
    with suppress(BranchoutError), atomic_write(cache / f"{name}.npy") as partial, partial.open("wb") as file:
        np.save(file, array)
        file.write(_crc(array))
    evict(cache, limit)


def evict(cache: Path, limit: int) -> None:
    """Remove the least recently used arrays until the others fit the limit. Models that the bench keeps stay."""
    found = []
    for file in cache.glob("*/*.npy"):
        with suppress(OSError):
            status = file.stat()
            found.append((status.st_mtime_ns, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= limit:
            return
        with suppress(OSError):
            file.unlink()
            total -= size


def scratch_room() -> int:
    """How many bytes `scratch_array` may take: half of what is free on the cache's disk."""
    above = next(each for each in (cache_folder(), *cache_folder().absolute().parents) if each.exists())
    return shutil.disk_usage(above).free // 2


def scratch_array(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Bytes in a nameless file of the cache folder: the file goes with the array, or with a killed process."""
    import numpy as np

    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def _crc(array: npt.NDArray[Any]) -> bytes:
    return zlib.crc32(array.reshape(-1).view("uint8").data).to_bytes(4, "little")


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-4, os.SEEK_END)
        return opened.read()
