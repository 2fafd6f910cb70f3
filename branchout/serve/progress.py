"""The progress of an extension in another process, read from the file that it keeps in its work folder."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from pydantic import BaseModel, ValidationError

from branchout.files import is_running
from branchout.model.manifest import is_saved_model
from branchout.serve.schema import Progress, Work
from branchout.training.progress_file import NOTE
from branchout.training.work_folder import work_folder

SILENT_FOR = 600.0
"""Seconds without an update after which a run on another machine counts as stopped."""


class _Note(BaseModel):
    """The progress file."""

    state: str
    works: list[Work]
    started: float | None = None
    updated: float | None = None
    pid: int | None = None
    host: str | None = None


def progress_of(out: Path | None) -> Progress:
    """The progress of a run that writes to `out`."""
    if out is None:
        return Progress(out=None, state="none")
    if is_saved_model(out):
        return Progress(out=str(out), state="finished")
    try:
        note = _Note.model_validate_json((work_folder(out) / NOTE).read_bytes())
    except (OSError, ValidationError):
        # A run that has just begun has a work folder without a progress file.
        return Progress(out=str(out), state="running" if work_folder(out).is_dir() else "waiting")
    stopped = note.state in ("running", "saving") and not _is_alive(note)
    return Progress(
        out=str(out),
        state="stopped" if stopped else note.state,
        works=note.works,
        started=note.started,
        updated=note.updated,
    )


def _is_alive(note: _Note) -> bool:
    """Whether the process that wrote the file still runs, as far as this machine can tell."""
    if note.host == platform.node() and os.name == "posix" and note.pid is not None and note.pid > 0:
        return is_running(note.pid)
    return time.time() - (note.updated or 0) < SILENT_FOR
