"""How far an extension is that runs elsewhere, from what it leaves in its work folder."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from branchout.model.checkpoint import is_saved_model
from branchout.training.progress_file import NOTE
from branchout.training.work import work_folder

SILENT_FOR = 600.0
"""Seconds after which a run on another machine, of which nothing more is heard, counts as stopped."""


def progress_of(out: Path | None) -> dict[str, Any]:
    """The state of a run into `out`: none, waiting, running, saving, stopped or finished, and each work's progress."""
    told: dict[str, Any] = {"out": None, "state": "none", "works": [], "updated": None, "started": None}
    if out is None:
        return told
    told["out"] = str(out)
    note = _note(work_folder(out) / NOTE)
    if is_saved_model(out):
        return {**told, "state": "finished"}
    if note is None:
        # A run that has only just begun has a folder, and nothing in it yet.
        return {**told, "state": "running" if work_folder(out).is_dir() else "waiting"}
    told |= {key: note.get(key) for key in ("state", "works", "updated", "started")}
    if told["state"] in ("running", "saving") and not _lives(note):
        told["state"] = "stopped"
    return told


def _note(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and isinstance(note.get("works"), list) else None


def _lives(note: dict[str, Any]) -> bool:
    """Whether the process that wrote the note still runs, as far as can be told from here."""
    pid = note.get("pid")
    if note.get("host") == platform.node() and os.name == "posix" and isinstance(pid, int) and pid > 0:
        try:
            os.kill(pid, 0)  # asks, and sends nothing
        except ProcessLookupError:
            return False
        except OSError:
            return True  # someone else's
        return True
    return time.time() - float(note.get("updated") or 0) < SILENT_FOR
