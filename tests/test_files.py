"""Atomic writes, locks, checksums and the cache."""

import csv
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from branchout.errors import BranchoutError
from branchout.files import (
    atomic_write,
    cache_folder,
    cache_limit,
    check_output,
    checksum,
    copy_file,
    load_cached,
    lock,
    open_regular,
    partial_path,
    read_json,
    store_cached,
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


# The cache.


def stored(cache: Path, name: str, like: np.ndarray) -> np.ndarray | None:
    return load_cached(cache, name, like.shape, like.dtype)


def test_the_cache_gives_back_what_was_stored(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5).transpose(2, 1, 0)
    empty = np.zeros((0, 3), dtype=np.uint8)
    store_cached(tmp_path, "features/a", array)
    store_cached(tmp_path, "pixels/none", empty)
    store_cached(None, "features/a", array)
    again = stored(tmp_path, "features/a", array)
    assert again is not None
    np.testing.assert_array_equal(again, array)
    assert stored(tmp_path, "pixels/none", empty) is not None
    assert load_cached(None, "features/a", array.shape, array.dtype) is None
    assert load_cached(tmp_path, "features/b", array.shape, array.dtype) is None
    assert load_cached(tmp_path, "features/a", (60,), array.dtype) is None
    assert load_cached(tmp_path, "features/a", array.shape, np.int32) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "header"])
def test_a_damaged_cache_file_is_not_used(tmp_path: Path, damage: str) -> None:
    array = np.arange(1000, dtype=np.uint8)
    store_cached(tmp_path, "pixels/a", array)
    (file,) = tmp_path.glob("pixels/*.npy")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[600] ^= 1
    if damage == "header":
        data[3] ^= 255
    file.write_bytes({"cut": data[:700], "empty": b"", "longer": data + b"1234"}.get(damage, bytes(data)))
    assert stored(tmp_path, "pixels/a", array) is None
    store_cached(tmp_path, "pixels/a", array)
    assert stored(tmp_path, "pixels/a", array) is not None


def test_the_least_recently_used_arrays_are_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE_LIMIT", "0.000005")  # 5,000 bytes: four arrays
    array = np.zeros(1000, dtype=np.uint8)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "base.safetensors").write_bytes(bytes(9000))
    for age, name in enumerate("abcd"):
        store_cached(tmp_path, f"features/{name}", array)
        os.utime(tmp_path / f"features/{name}.npy", (age, age))
    assert stored(tmp_path, "features/a", array) is not None  # used again
    store_cached(tmp_path, "pixels/e", array)
    left = {file.stem for file in tmp_path.rglob("*.npy")}
    assert left == {"a", "c", "d", "e"}
    assert (tmp_path / "bench" / "base.safetensors").exists()
    store_cached(tmp_path, "pixels/huge", np.zeros(6000, dtype=np.uint8))
    assert left == {file.stem for file in tmp_path.rglob("*.npy")}


def test_a_cache_that_cannot_be_written_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    store_cached(tmp_path / "file", "pixels/a", np.zeros(3))
    assert stored(tmp_path / "file", "pixels/a", np.zeros(3)) is None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    store_cached(tmp_path, "pixels/a", np.zeros(3))
    assert not [*tmp_path.glob("pixels/*"), *tmp_path.glob("pixels/.*")]


def test_the_cache_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("BRANCHOUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "branchout"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "branchout"
    monkeypatch.delenv("BRANCHOUT_CACHE_LIMIT", raising=False)
    assert cache_limit() == 20 * 10**9
    monkeypatch.setenv("BRANCHOUT_CACHE_LIMIT", "0.5")
    assert cache_limit() == 5 * 10**8
    for wrong in ("plenty", "inf", ""):
        monkeypatch.setenv("BRANCHOUT_CACHE_LIMIT", wrong)
        with pytest.raises(BranchoutError, match="BRANCHOUT_CACHE_LIMIT"):
            cache_limit()


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
