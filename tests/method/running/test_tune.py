"""Choosing another operating point of a model folder, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from branchout import api
from branchout.errors import BranchoutError
from branchout.method.running.tune import tune
from branchout.model import checkpoint

CODE = """
import sys
from branchout.cli import main
sys.argv = ["branchout", "tune", *sys.argv[1:]]
try: main()
finally: print("imported", [name for name in ("torch", "timm", "sklearn", "scipy") if name in sys.modules])
"""


@pytest.mark.parametrize("goal", ["novel", "base", "all"])
def test_it_writes_what_saving_the_tuned_model_writes(extended: api.Model, goal: str, tmp_path: Path) -> None:
    assert extended.folder is not None
    shutil.copytree(extended.folder, tmp_path / "m")
    frontier, point = tune(tmp_path / "m", goal)
    *earlier, last = checkpoint.load(extended.folder).step_points
    assert (frontier.to_dict(), point) == (extended.frontier.to_dict(), extended.frontier.choose(goal))
    chosen = (*earlier, replace(last, point=point, goal=goal))
    checkpoint.save(replace(extended.saved, step_points=chosen), tmp_path / "saved")
    for name in ("branchout.json", "README.md"):
        assert (tmp_path / "m" / name).read_text() == (tmp_path / "saved" / name).read_text()
    assert api.load(tmp_path / "m").saved.step_points[-1].goal == goal


def test_the_command_imports_nothing_slow(extended: api.Model, tmp_path: Path) -> None:
    assert extended.folder is not None
    shutil.copytree(extended.folder, tmp_path / "m")
    words = [sys.executable, "-c", CODE, str(tmp_path / "m"), "--goal", "base"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "imported []"
    assert done.stdout.startswith("base: all ")
    assert json.loads((tmp_path / "m" / "branchout.json").read_text())["fusions"][-1]["goal"] == "base"


def test_a_base_has_nothing_to_tune(base: api.Model, tmp_path: Path) -> None:
    """The command in the answer names the folder, and says MODEL for a model that is in none."""
    assert base.folder is not None
    place = tmp_path / "my base"
    shutil.copytree(base.folder, place)
    for refused in (lambda: tune(place, "base"), lambda: api.load(place).tune("base")):
        with pytest.raises(BranchoutError, match=f"no operating points.* --base '{place}' --memory"):
            refused()
    with pytest.raises(BranchoutError, match="--base MODEL --memory"):
        api.Model(base.saved, None, base.device).tune("base")
