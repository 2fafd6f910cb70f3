"""Files on disk: atomic writes, locks and checksums. No other module does these by hand."""

from __future__ import annotations

import csv
import errno
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING

from branchout.errors import BranchoutError, explain_os_error

if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any


JSON_LIMIT = 256 * 2**20
"""Larger JSON files are refused: the largest we write, the test results of a large model, take a few megabytes."""

# Writing.


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A partial file to fill. It gets its final name when the block ends; after a failure it is removed."""
    from safetensors import SafetensorError

    partial = partial_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_once(path.parent.absolute())
        yield partial
        flush(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


_COUNT = itertools.count()


def partial_path(path: Path) -> Path:
    """A hidden name beside a file or folder for it while it is incomplete: with the process and the machine."""
    ending = f".{next(_COUNT)}.{os.getpid()}@{_host()}.partial"
    name = os.fsencode(path.name)[: 254 - len(ending)].decode("utf-8", "ignore")  # file systems allow 255 bytes
    return path.with_name(f".{name}{ending}")


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object, *, indent: int | None = 1) -> None:
    """Write JSON. A NaN or an infinity is refused: JSON cannot express them."""
    try:
        text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise BranchoutError(f"{path} was not written: {error}") from error
    write_text(path, text + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A table whose headings are the keys of its rows; None is an empty cell."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def copy_file(old: Path, new: Path) -> None:
    """Copy a file's content, sharing its blocks where the file system can (reflink). Never a hard link."""
    with open_regular(old) as source, new.open("wb") as target:
        try:
            import fcntl

            fcntl.ioctl(target.fileno(), 0x40049409, source.fileno())  # FICLONE
        except (ImportError, OSError):  # not Linux, two file systems, or one without reflinks
            shutil.copyfileobj(source, target, 2**20)


def check_output(path: Path, *, folder: bool = False, free: bool = False, such_as: str = "v2") -> None:
    """Raise, before any work is done, if a file (or a `folder`) cannot be written here.

    `free` asks that nothing exists there yet. A small file is written and removed to find out; nothing stays.
    """
    try:
        exists = _exists(path)
        if exists and free:
            raise BranchoutError(f"{path} already exists. Choose another name or delete it.")
        if path.is_dir() and not folder:
            raise BranchoutError(f"{path} is a folder; name a file, such as {path / such_as}")
        if exists and folder and not path.is_dir():
            raise BranchoutError(f"{path} is a file; name a folder")
        above = path.absolute().parent
        while not _exists(above) and above != above.parent:
            above = above.parent
        if not above.is_dir():
            raise BranchoutError(f"{path} cannot be written: {above} is a file, not a folder")
        trial = partial_path(above / path.name)
        try:
            trial.write_bytes(bytes(4096))
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise _not_written(path, error) from error


def _exists(path: Path) -> bool:
    """Whether there is anything of this name, a dangling link too. Unlike `Path.exists` it refuses impossible names."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _not_written(path: Path, error: Exception) -> BranchoutError:
    reason = OSError(error.errno, error.strerror) if isinstance(error, OSError) else error  # without its partial name
    return BranchoutError(f"{path} could not be written: {explain_os_error(reason)}")


# Partial files that killed processes left.


def sweep_partials(folder: Path) -> None:
    """Remove partial files and folders whose process on this machine has ended."""
    with suppress(OSError):
        for left in list(folder.iterdir()):
            found = _PARTIAL.fullmatch(left.name)
            if not found or found["host"] not in {None, _host()} or is_running(int(found["process"])):
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                with suppress(OSError):
                    left.unlink()


_PARTIAL = re.compile(r"\..+\.(?P<process>\d{1,9})(@(?P<host>[^.@]+))?\.partial", re.DOTALL)

_sweep_once = once(sweep_partials)


def _host() -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in platform.node())[:64] or "here"


def is_running(process: int) -> bool:
    if os.name == "nt":  # where os.kill ends the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


# Reading files of unknown origin.


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. A named pipe or a device, which could block or never end, is an OSError."""
    if stat.S_ISREG(path.stat().st_mode):
        # What was a file a moment ago may be a pipe now; without O_NONBLOCK opening it would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file of at most `limit` bytes, or an error that names the file and what is wrong."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise BranchoutError(f"{path} is too large: {size:,} bytes, at most {limit:,} are read")
            data = file.read(size)
        return json.loads(data.decode("utf-8"), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        reason = explain_os_error(OSError(error.errno, error.strerror))
        raise BranchoutError(f"{path} cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise BranchoutError(f"{path} is not valid JSON: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock; without `wait`, False at once if another process holds it. It is released when its process dies."""
    import filelock

    held = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        yield False
        return
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        yield True
    finally:
        held.release()
