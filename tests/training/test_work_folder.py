"""The work folder of a run: locked, resumed with the same settings only, and removed at the end."""

import subprocess
import sys
from pathlib import Path

import pytest

from branchout.errors import BranchoutError
from branchout.model.manifest import MANIFEST
from branchout.training.work_folder import check_out, work_folder, working_on


def test_a_run_that_ends_leaves_nothing_and_one_that_fails_can_resume(tmp_path: Path) -> None:
    out = tmp_path / "m"
    assert work_folder(out) == tmp_path / ".m.work"
    with pytest.raises(NotADirectoryError), working_on(out, {"seed": 1}) as work:
        ((work / "checkpoint").write_text("half"), (work / "checkpoint" / "deeper").read_text())
    with (
        pytest.raises(BranchoutError, match=r"seed: 1 before, 2 now(.|\n)*delete .*\.m\.work"),
        working_on(out, {"seed": 2}),
    ):
        pytest.fail("another run began")
    with working_on(out, {"seed": 1}) as work:
        assert (work / "checkpoint").read_text() == "half"
    assert not list(tmp_path.iterdir())
    with working_on(None, {"seed": 1}) as work:
        assert work is None


def test_another_seed_is_not_blamed_on_the_images(tmp_path: Path) -> None:
    """With another seed other images are held out, so that those that train differ, too."""
    before = {"seed": 0, "epochs": 1, "new images": "a" * 32}
    with pytest.raises(NotADirectoryError), working_on(tmp_path / "v2", before) as work:
        ((work / "checkpoint").write_text("half"), (work / "checkpoint" / "deeper").read_text())
    with (
        pytest.raises(BranchoutError, match="seed: 0 before, 3 now") as seeded,
        working_on(tmp_path / "v2", {**before, "seed": 3, "new images": "b" * 32}),
    ):
        pass
    assert "checksum" not in str(seeded.value)
    with (
        pytest.raises(BranchoutError, match="new images: checksum aaaaaaaa before"),
        working_on(tmp_path / "v2", {**before, "new images": "b" * 32}),
    ):
        pass


def test_settings_cut_short_by_a_kill_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_text

    def halfway(path: Path, text: str, **how: str) -> None:
        whole(path, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", halfway)
    with pytest.raises(KeyboardInterrupt), working_on(tmp_path / "m", {"seed": 1}):
        pytest.fail("the run began")
    monkeypatch.undo()
    with working_on(tmp_path / "m", {"seed": 2}):
        pass


@pytest.mark.parametrize("text", ["{", "[1]", "null", '{"seed": NaN}', "\x00", "\udcff"])
def test_settings_that_are_not_valid_are_a_sentence(text: str, tmp_path: Path) -> None:
    work = work_folder(tmp_path / "m")
    work.mkdir()
    (work / "request.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BranchoutError, match=r"request\.json(.|\n)*delete .*\.m\.work"), working_on(tmp_path / "m", {}):
        pytest.fail("the run began")


def test_a_second_process_learns_of_the_first_at_once(tmp_path: Path) -> None:
    code = "import sys, pathlib; from branchout.training.work_folder import working_on\n" \
           "with working_on(pathlib.Path(sys.argv[1]), {}): print('held', flush=True); sys.stdin.read()"  # fmt: skip
    command = [sys.executable, "-c", code, str(tmp_path / "m")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BranchoutError, match=r"Another process is writing .*m"), working_on(tmp_path / "m", {}):
            pytest.fail("both run")
        other.kill()  # a lock dies with its process
    with working_on(tmp_path / "m", {}):
        pass


def test_work_folders_of_finished_runs_are_removed(tmp_path: Path) -> None:
    for name in ("done", "stopped"):
        work_folder(tmp_path / name).mkdir()
        (work_folder(tmp_path / name) / "request.json").write_text("{}")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / MANIFEST).write_text("{}")
    (tmp_path / ".other.work").mkdir()  # not of ours
    check_out(tmp_path / "next")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.work", ".stopped.work", "done"]


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "old").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, words in (
        ("file/m", "is a file"),
        ("file", "already exists"),
        ("old", "already exists"),
        ("dangling", "already exists"),
        ("m" * 252, "name is too long"),
        ("m" * 300, "name is too long"),
    ):
        with pytest.raises(BranchoutError, match=words):
            check_out(tmp_path / name)
    with pytest.raises(BranchoutError, match="not a name"):
        check_out(Path("/"))
    check_out(tmp_path / "deep" / "new")
    check_out(tmp_path / ("m" * 240))
    assert sorted(tmp_path.iterdir()) == before

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BranchoutError, match="the disk is full"):
        check_out(tmp_path / "new")


def test_a_model_is_not_saved_among_images(tmp_path: Path) -> None:
    images = tmp_path / "new"
    images.mkdir()
    (tmp_path / "link").symlink_to(images)
    for out in (images / "v2", images, tmp_path / "link" / "robin" / "v2"):
        with pytest.raises(BranchoutError, match="read as a class"):
            check_out(out, (None, images))
    assert check_out(tmp_path / "new2", (images, "glyphs", None)) == tmp_path / "new2"
