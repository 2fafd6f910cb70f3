"""The cache of arrays on disk: decoded images, features, exported networks. Least recently used arrays are removed.

It is optional: one that cannot be written is not used.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from branchout.errors import BranchoutError, explain_os_error
from branchout.files import atomic_write
from branchout.units import size

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
    total = sum(taken for _, taken, _ in found)
    for _, taken, file in sorted(found):
        if total <= limit:
            return
        with suppress(OSError):
            file.unlink()
            total -= taken


def scratch_room() -> int:
    """How many bytes `scratch_array` may take: half of what is free on the cache's disk; 0 if it cannot be written."""
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder()):  # the folder may be read-only
            return shutil.disk_usage(cache_folder()).free // 2
    return 0


def scratch_array(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Bytes in a nameless file of the cache folder: the file goes with the array, or with a killed process.

    Its space is reserved first: a disk that fills up later would end the process with SIGBUS.
    """
    import numpy as np

    folder, needed = cache_folder(), max(1, math.prod(shape))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, needed)
            elif shutil.disk_usage(folder).free < needed:  # macOS, Windows
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            else:
                file.truncate(needed)
            return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        raise BranchoutError(
            f"{folder} cannot hold {size(needed)} of data that should stay out of memory: "
            f"{explain_os_error(OSError(error.errno, error.strerror))}. Or name a folder on a larger disk: "
            "BRANCHOUT_CACHE=/path/to/folder branchout …"
        ) from None


def forget_pages(*arrays: npt.NDArray[Any]) -> None:
    """Take scratch arrays out of this process's memory. Their values stay in the files, which the system caches."""
    for array in arrays:
        mapped, shared = array.base, getattr(array, "mode", "") == "r+"  # a private mapping would lose its values
        if isinstance(mapped, mmap.mmap) and shared and hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):  # a process that locks its memory keeps it
                mapped.madvise(mmap.MADV_DONTNEED)


def _crc(array: npt.NDArray[Any]) -> bytes:
    return zlib.crc32(array.reshape(-1).view("uint8").data).to_bytes(4, "little")


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-4, os.SEEK_END)
        return opened.read()
