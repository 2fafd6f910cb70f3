"""What a running extension leaves for others to watch: one small file in its work folder, never half written."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from branchout.files import partial_path
from branchout.training.loop import Event, Report

NOTE = "progress.json"
EVERY = 0.5
"""Seconds between two versions of the file: often enough to watch, too seldom to be felt."""


@contextmanager
def recorded(work: Path | None, report: Report) -> Iterator[Report]:
    """A report that also keeps the file up to date; without a work folder it is the same report."""
    if work is None:
        yield report
        return
    note = work / NOTE
    about = {"pid": os.getpid(), "host": platform.node(), "started": time.time()}
    works: dict[str, dict[str, Any]] = {}
    written = 0.0

    def write(state: str) -> None:
        nonlocal written
        written = time.monotonic()
        _replace(note, {"state": state, **about, "updated": time.time(), "works": list(works.values())})

    def told(event: Event) -> None:
        report(event)
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
        yield told
    except BaseException:
        write("stopped")
        raise
    write("saving")


def _losses(earlier: dict[str, Any] | None, event: Event) -> list[float]:
    """The losses of a work so far; one that begins anew begins a new curve."""
    if "loss" not in event.figures:
        return []
    before = earlier["losses"] if earlier and event.done > earlier["done"] else []
    return [*before, event.figures["loss"]]


def _replace(note: Path, about: dict[str, Any]) -> None:
    partial = partial_path(note)
    with suppress(OSError):  # a full disk must not end a training that only wanted to be watched
        partial.write_text(json.dumps(about), encoding="utf-8")
        partial.replace(note)
