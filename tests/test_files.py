"""Atomic writes, locks, checksums and the cache."""

import csv
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from branchout.errors import BranchoutError
from branchout.files import (
    atomic_write,
    check_output,
    checksum,
    copy_file,
    lock,
    open_regular,
    partial_path,
    read_json,
    sweep_partials,
    write_csv,
    write_json,
)


def test_a_file_gets_its_name_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "table.txt"
    with atomic_write(out) as partial:
        partial.write_text("half")
        assert not out.exists()
        partial.write_text("whole")
    assert out.read_text() == "whole"
    assert [path.name for path in out.parent.iterdir()] == ["table.txt"]


@pytest.mark.parametrize("failure", [RuntimeError("no"), BranchoutError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    out = tmp_path / "table.txt"
    out.write_text("old")

    def fail() -> None:
        with atomic_write(out) as partial:
            partial.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    below = tmp_path / "file" / "deeper" / "x.csv"
    long = tmp_path / ("n" * 300) / "x.csv"
    for path in (below, long):
        with pytest.raises(BranchoutError, match=r"x\.csv (cannot|could not) be written"):
            check_output(path)
        with pytest.raises(BranchoutError, match=r"x\.csv (cannot|could not) be written"):
            write_csv(path, [{"a": 1}])
    with pytest.raises(BranchoutError, match="is a folder; name a file"):
        check_output(tmp_path)
    with pytest.raises(BranchoutError, match="is a file; name a folder"):
        check_output(tmp_path / "file", folder=True)
    for name in ("file", "dangling"):
        with pytest.raises(BranchoutError, match="already exists"):
            check_output(tmp_path / name, free=True)
    before = sorted(tmp_path.rglob("*"))
    check_output(tmp_path / "file")
    check_output(tmp_path / "not" / "yet" / "there.csv")
    check_output(tmp_path / "not" / "yet", folder=True, free=True)
    check_output(tmp_path / ("n" * 240))
    assert sorted(tmp_path.rglob("*")) == before  # asking makes nothing

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BranchoutError, match=r"v2 could not be written: the disk is full"):
        check_output(tmp_path / "v2", folder=True, free=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_long_names_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 250, "鷽" * 80):
        write_json(tmp_path / name, 1)
        assert read_json(tmp_path / name) == 1


def test_partial_files_of_dead_processes_are_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine, other = partial_path(tmp_path / "v2"), tmp_path / f".v2.0.{dead.pid}@elsewhere.partial"
    user = tmp_path / "report.2024.partial"
    for kept in (mine, other, user):
        kept.write_text("")
    left = [
        tmp_path / mine.name.replace(str(os.getpid()), str(dead.pid)),
        tmp_path / f".t.json.{dead.pid}.partial",
    ]
    left[0].mkdir()
    (left[0] / "base.safetensors").write_text("")
    left[1].write_text("")
    sweep_partials(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, user])
    left[1].write_text("")
    write_json(tmp_path / "t.json", 1)  # a writer sweeps the folder it writes into
    assert not left[1].exists()
    sweep_partials(tmp_path / "nowhere")


def test_a_copy_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 5000)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert checksum(tmp_path / "a") == checksum(tmp_path / "b")
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino
    assert (tmp_path / "a").stat().st_nlink == 1


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
        with pytest.raises(BranchoutError, match="not a regular file"):
            read_json(path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[NaN]", b"[1e999]", b"-Infinity", b"1" * 5000])
def test_json_that_is_none_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(BranchoutError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_numbers_that_are_none_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match=r"t\.json was not written"):
        write_json(tmp_path / "t.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from branchout.files import lock
with lock(Path(sys.argv[1]), wait=False) as mine:
    print(mine, flush=True)
    time.sleep(60)
"""


def test_a_held_lock_is_reported_at_once_and_released_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "work" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        with lock(path, wait=False) as mine:
            assert not mine
        holder.kill()
        holder.wait()
        with lock(path, wait=False) as mine:
            assert mine
    with lock(path) as mine:
        assert mine


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BranchoutError, match=r"\.lock could not be written"), lock(tmp_path / "file" / ".lock"):
        pass


def test_tables_and_json_survive_commas_quotes_and_other_scripts(tmp_path: Path) -> None:
    rows = [{"class": 'an "owl", грач', "before": None, "after": 0.5}, {"class": "=1+1\nx", "before": 1.0, "after": 0}]
    write_csv(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [
            ["class", "before", "after"],
            ['an "owl", грач', "", "0.5"],
            ["=1+1\nx", "1.0", "0"],
        ]
    write_json(tmp_path / "t.json", rows)
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == rows
    assert "грач" in (tmp_path / "t.json").read_text(encoding="utf-8")
