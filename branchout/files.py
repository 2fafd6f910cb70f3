"""Files that bear their name only when they are whole."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from branchout.errors import BranchoutError


def check_place(path: Path, *, free: bool = False, such_as: str = "v2") -> None:
    """Whether a file can be written here, and with `free` that none is; asked before the work, and nothing is made."""
    if path.is_dir():
        raise BranchoutError(f"{path} is a folder; name a file, such as {path / such_as}")
    if free and path.exists():
        raise BranchoutError(f"{path} is there already; choose another name, or remove it first")
    above = path.absolute().parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise BranchoutError(f"{path} cannot be written: {above} is a file, not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise BranchoutError(f"{path} cannot be written: {above} is not yours to write in")


@contextmanager
def in_one_move(path: Path) -> Iterator[Path]:
    """A partial file to fill; it gets its name at the end, and after a failure nothing is left of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise BranchoutError(f"{path} could not be written: {error}") from None
    finally:
        # Where its folder could not be made, there is nothing to remove, and asking for it may be refused as well.
        if partial.parent.is_dir():
            partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock, or without `wait` learn that somebody else does. It dies with its process, so none is ever stale."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table whose headings are the keys of its rows; None is an empty cell."""
    with in_one_move(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, content: Any) -> None:
    with in_one_move(path) as partial:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
