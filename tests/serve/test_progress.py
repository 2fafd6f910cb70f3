"""Reading how far a run is, from whatever it has left so far."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from branchout import api
from branchout.serve.progress import progress_of

WORK = {"work": "branch", "done": 3, "total": 40, "figures": {"loss": 0.5}, "since": 1.0}


def leave(out: Path, **about: Any) -> None:
    note = api.work_folder(out) / "progress.json"
    note.parent.mkdir(exist_ok=True)
    here = {"pid": os.getpid(), "host": platform.node(), "started": 1.0, "updated": time.time()}
    note.write_text(json.dumps({"state": "running", **here, "works": [WORK], **about}), encoding="utf-8")


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_before_a_run_there_is_nothing(tmp_path: Path) -> None:
    told = progress_of(tmp_path / "v2")
    assert told.state == "waiting"
    assert told.works == []


def test_a_run_that_lives_is_running(tmp_path: Path) -> None:
    leave(tmp_path / "v2")
    told = progress_of(tmp_path / "v2")
    assert told.state == "running"
    assert [work.model_dump(exclude_unset=True) for work in told.works] == [WORK]
    assert told.started == 1.0


def test_a_run_that_was_killed_is_stopped(tmp_path: Path) -> None:
    leave(tmp_path / "v2", pid=gone())
    assert progress_of(tmp_path / "v2").state == "stopped"
    leave(tmp_path / "v2", state="stopped")
    assert progress_of(tmp_path / "v2").state == "stopped"


@pytest.mark.parametrize(("age", "state"), [(10, "running"), (100_000, "stopped")])
def test_a_run_elsewhere_is_judged_by_when_it_was_last_heard_of(tmp_path: Path, age: float, state: str) -> None:
    leave(tmp_path / "v2", host="another machine", pid=gone(), updated=time.time() - age)
    assert progress_of(tmp_path / "v2").state == state


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"works": 3}', '{"state": "", "works": [{"work": 3}]}'])
def test_a_run_that_has_told_nothing_readable_yet_is_running(tmp_path: Path, text: str) -> None:
    leave(tmp_path / "v2")
    (api.work_folder(tmp_path / "v2") / "progress.json").write_text(text, encoding="utf-8")
    assert progress_of(tmp_path / "v2").state == "running"


def test_a_model_that_is_there_is_finished(base: api.Model) -> None:
    assert base.folder is not None
    assert progress_of(base.folder).state == "finished"
