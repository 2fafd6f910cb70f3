"""Time and memory of commands, measured from outside."""

import json
import sys
from pathlib import Path

import pytest
from helpers import BASE, NEW, class_folders

from benchmarks import commands
from branchout import api
from branchout.data.samples import Samples


def test_each_command_has_its_seconds_and_its_peak(
    base: api.Model, train: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = (class_folders(train, tmp_path / name, names, 6) for name, names in (("new", NEW), ("old", BASE)))
    words = [new, "--memory", old, "--test", new, "--base", base.folder, "--name", "small", "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", ["benchmarks/commands.py", *map(str, words)])
    commands.main()
    (path,) = tmp_path.glob("small-*.json")
    row = json.loads(path.read_text())
    for name in ("check", "extend", "evaluate"):
        assert row[name]["seconds"] > 0.2
        assert 5e7 < row[name]["peak_memory_bytes"] < 5e9
    assert "on this" in row["check"]["forecast"]
    assert row["accuracy"]["after"]["novel"] > 0
    assert row["commit"]
    assert row["hardware"]


def test_a_command_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="check"):
        commands.run(["check", str(tmp_path / "none"), "--base", "glyphs"], tmp_path, tmp_path / "shown.txt")
