"""The cache of arrays: what was stored comes back, what was damaged does not, and old arrays go first."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from branchout.disk_cache import (
    cache_folder,
    cache_limit,
    forget_pages,
    load_cached,
    scratch_array,
    scratch_room,
    store_cached,
)
from branchout.errors import BranchoutError


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


def test_a_full_disk_is_said_before_a_scratch_array_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a memory-mapped file on a full disk would end the process with SIGBUS."""
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    array = scratch_array((3, 5))
    array[:] = 7
    assert int(array.sum()) == 105
    assert not list(tmp_path.iterdir())

    def full(descriptor: int, offset: int, count: int) -> None:
        assert (offset, count) == (0, 2_500_000_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BranchoutError, match=r"2\.5 GB.*full.*BRANCHOUT_CACHE=") as raised:
        scratch_array((2_500_000, 1000))
    assert str(tmp_path) in str(raised.value)
    assert "--memory-limit" not in str(raised.value)  # a run that resumes must keep its own


def test_forgotten_pages_take_no_memory_and_keep_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    array = scratch_array((1000, 32_000))
    array[:] = np.arange(1000)[:, None] % 251
    before = resident()
    forget_pages(array, np.zeros(3))  # an array that is in no file stays as it is
    if before is not None:
        assert before - resident() > 30_000_000
    np.testing.assert_array_equal(array[:, 7], np.arange(1000) % 251)


def resident() -> int | None:
    """Bytes of this process in memory; None where the system does not say it this way."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def test_space_is_checked_where_the_system_cannot_reserve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    monkeypatch.delattr(os, "posix_fallocate")
    assert scratch_array((2, 3)).shape == (2, 3)
    with pytest.raises(BranchoutError, match="full"):
        scratch_array((2**60,))


def test_a_cache_folder_that_cannot_be_made_leaves_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scratch_room() > 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "file" / "cache"))
    assert scratch_room() == 0
    with pytest.raises(BranchoutError, match=r"file/cache.*BRANCHOUT_CACHE="):
        scratch_array((2, 3))


def test_a_read_only_cache_folder_leaves_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    assert scratch_room() > 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert scratch_room() == 0
