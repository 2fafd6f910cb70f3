"""The progress of a running training as a small JSON file in its work folder, for other processes to read."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from branchout.errors import BranchoutError
from branchout.files import write_json
from branchout.progress import Event, OnProgress, silent
from branchout.training import processes

NOTE = "progress.json"
EVERY = 0.5
"""Seconds between two versions of the file."""


@contextmanager
def recorded(work: Path | None, on_progress: OnProgress) -> Iterator[OnProgress]:
    """A callback that also writes the file; without a work folder, the same one; silent in other processes."""
    if work is None or not processes.is_main():
        yield on_progress if processes.is_main() else silent
        return
    file = work / NOTE
    about = {"pid": os.getpid(), "host": platform.node(), "started": time.time()}
    works: dict[str, dict[str, Any]] = {}
    written = 0.0

    def write(state: str) -> None:
        nonlocal written
        written = time.monotonic()
        content = {"state": state, **about, "updated": time.time(), "works": list(works.values())}
        with suppress(BranchoutError):  # a full disk must not end a training that only reports its progress
            write_json(file, content, indent=None)

    def recording(event: Event) -> None:
        on_progress(event)
        earlier = works.pop(event.work, None)  # and put back last: the latest work ends the list
        works[event.work] = {
            "work": event.work,
            "done": event.done,
            "total": event.total,
            "figures": event.figures,
            "losses": _losses(earlier, event),
            "since": earlier["since"] if earlier and event.done > earlier["done"] else time.time(),
        }
        if time.monotonic() - written >= EVERY:
            write("running")

    write("running")
    try:
        yield recording
    except BaseException:
        write("stopped")
        raise
    write("saving")


def _losses(earlier: dict[str, Any] | None, event: Event) -> list[float]:
    """The losses of a piece of work so far; one that starts over starts a new list."""
    if "loss" not in event.figures:
        return []
    before = earlier["losses"] if earlier and event.done > earlier["done"] else []
    return [*before, event.figures["loss"]]
